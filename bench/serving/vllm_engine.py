"""vLLM in a process of its own: `python -m bench.serving.vllm_engine`, which reads `orders`.

Everything of the engine runs in this process. Its arguments are those of vLLM's `LLM`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench.serving import orders

#: vLLM's settings: the engine in this process; the sampler that needs no other package.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def main() -> int:
    """Serve orders until stdin ends."""
    return orders.main(ENVIRONMENT, Engine)


class Engine:
    """vLLM's `LLM`. Raises what vLLM raises for arguments that it does not accept."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from fa4_hd256.integrations.vllm import plugin

        plugin.register()
        from vllm import LLM

        self._llm: Any = LLM(**arguments)

    def backends(self) -> list[str]:
        from vllm.model_executor.layers.attention import Attention

        config = self._llm.llm_engine.vllm_config.compilation_config
        return sorted(
            {
                layer.attn_backend.get_name()
                for layer in config.static_forward_context.values()
                if isinstance(layer, Attention)
            }
        )

    def readied(self) -> int:
        return orders.readied()

    def time(self, texts: orders.Texts, tokens: int) -> dict[str, Any]:
        begin = time.perf_counter()
        with _timed_steps(self._llm.llm_engine, len(texts)) as steps:
            found = self._generate(texts, tokens)
        seconds = time.perf_counter() - begin
        answers = [list(one.outputs[0].token_ids) for one in found]
        return {"seconds": seconds, "steps": steps, "tokens": answers}

    def profile(self, texts: orders.Texts, tokens: int) -> dict[str, Any]:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if not torch.cuda.is_available():
            return {"kernels": {}}
        inner, profiler, steps = (
            self._llm.llm_engine,
            profile(activities=[ProfilerActivity.CUDA]),
            0,
        )
        step = inner.step

        def profiled() -> Any:
            nonlocal steps
            if steps == 0 and _all_decode(inner, len(texts)):
                torch.cuda.synchronize()
                profiler.start()
                steps = 1
            elif 0 < steps < orders.PROFILED:
                steps += 1
            elif steps == orders.PROFILED:
                torch.cuda.synchronize()
                profiler.stop()
                steps += 1
            return step()

        with _stepping(inner, profiled):
            self._generate(texts, tokens)
        return {"kernels": orders.of_a_step(profiler) if steps > orders.PROFILED else {}}

    def decode(self, texts: orders.Texts, tokens: int) -> dict[str, Any]:
        answers = [one.outputs[0] for one in self._generate(texts, tokens, logprobs=0)]
        return {
            "tokens": [list(one.token_ids) for one in answers],
            "logprobs": [
                [of[token].logprob for token, of in zip(one.token_ids, one.logprobs, strict=True)]
                for one in answers
            ],
        }

    def score(self, texts: orders.Texts) -> dict[str, Any]:
        found = self._generate(texts, 1, prompt_logprobs=1)
        logprobs, best = [], []
        for text, one in zip(texts, found, strict=True):
            places = list(zip(text, one.prompt_logprobs, strict=True))[1:]
            logprobs.append([of[token].logprob for token, of in places])
            best.append([next(t for t, p in of.items() if p.rank == 1) for _, of in places])
        return {"logprobs": logprobs, "best": best}

    def _generate(self, texts: orders.Texts, tokens: int, **options: Any) -> list[Any]:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options
        )
        found: list[Any] = self._llm.generate(
            [{"prompt_token_ids": text} for text in texts], parameters, use_tqdm=False
        )
        return found


@contextmanager
def _timed_steps(engine: Any, requests: int) -> Iterator[list[float]]:
    """Collect the seconds of vLLM's steps that begin and end with so many requests, all of which
    have their prompt behind them."""
    step, steps = engine.step, list[float]()

    def timed() -> Any:
        decoding, begin = _all_decode(engine, requests), time.perf_counter()
        outputs = step()
        seconds = time.perf_counter() - begin
        if decoding and _all_decode(engine, requests):
            steps.append(seconds)
        return outputs

    with _stepping(engine, timed):
        yield steps


@contextmanager
def _stepping(engine: Any, step: Callable[[], Any]) -> Iterator[None]:
    """Put a function in the place of an engine's step."""
    engine.step = step
    try:
        yield
    finally:
        del engine.step


def _all_decode(engine: Any, requests: int) -> bool:
    """Return whether so many requests are served, with their prompts behind them."""
    states = engine.output_processor.request_states.values()
    return len(states) == requests and not any(state.is_prefilling for state in states)


if __name__ == "__main__":
    sys.exit(main())
