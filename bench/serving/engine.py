"""One engine in a process of its own: `python -m bench.serving.engine`.

It reads orders from stdin, a line of JSON each, and answers each with a line on stdout. The first
order has the arguments of vLLM's `LLM`. An answer has `readied`, the number of our kernels that
became ready meanwhile: compiled, or loaded from a cache or a folder.

Everything of the engine runs in this process. vLLM's own output goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

__all__ = ["main"]

#: vLLM's settings: the engine in this process; the sampler that needs no other package.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
#: Steps of a profile.
PROFILED = 16


def main() -> int:
    """Serve orders until stdin ends."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else writes to stdout, from C too
    serve(sys.stdin, answers)
    # Threads of the engine would keep the process.
    os._exit(0)


def serve(orders: TextIO, answers: TextIO) -> None:
    """Answer each order, in turn."""
    engine: Any = None
    for line in orders:
        order, before, begin = json.loads(line), _readied(), time.perf_counter()
        if engine is None:
            engine = _engine(order)
            answer: dict[str, Any] = {"backends": _backends(engine)}
        else:
            answer = _ORDERS[order.pop("do")](engine, **order)
        answer.setdefault("seconds", time.perf_counter() - begin)
        answers.write(json.dumps({**answer, "readied": _readied() - before}) + "\n")
        answers.flush()


def _engine(arguments: dict[str, Any]) -> Any:
    from fa4_hd256.integrations.vllm import plugin

    plugin.register()
    from vllm import LLM

    return LLM(**arguments)


def _backends(engine: Any) -> list[str]:
    """Return the names of the backends that layers of attention have."""
    from vllm.model_executor.layers.attention import Attention

    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return sorted(
        {layer.attn_backend.get_name() for layer in layers if isinstance(layer, Attention)}
    )


def _generate(engine: Any, texts: list[list[int]], tokens: int, **options: Any) -> list[Any]:
    """Return vLLM's outputs of greedy generation. texts: tokens of each."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options
    )
    found: list[Any] = engine.generate(
        [{"prompt_token_ids": text} for text in texts], parameters, use_tqdm=False
    )
    return found


def _time(engine: Any, texts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Generate. steps: seconds of each step in which all requests decoded."""
    begin = time.perf_counter()
    with _timed_steps(engine.llm_engine, len(texts)) as steps:
        found = _generate(engine, texts, tokens)
    seconds = time.perf_counter() - begin
    answers = [list(one.outputs[0].token_ids) for one in found]
    return {"seconds": seconds, "steps": steps, "tokens": answers}


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


def _profile(engine: Any, texts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Return what a step of decoding takes the GPU. kernels: microseconds of a step, by name; none
    without a GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return {"kernels": {}}
    inner, profiler, steps = engine.llm_engine, profile(activities=[ProfilerActivity.CUDA]), 0
    step = inner.step

    def profiled() -> Any:
        nonlocal steps
        if steps == 0 and _all_decode(inner, len(texts)):
            torch.cuda.synchronize()
            profiler.start()
            steps = 1
        elif 0 < steps < PROFILED:
            steps += 1
        elif steps == PROFILED:
            torch.cuda.synchronize()
            profiler.stop()
            steps += 1
        return step()

    with _stepping(inner, profiled):
        _generate(engine, texts, tokens)
    if steps <= PROFILED:
        return {"kernels": {}}
    return {
        "kernels": {
            event.key: event.self_device_time_total / PROFILED
            for event in profiler.key_averages()
            if event.self_device_time_total
        }
    }


def _decode(engine: Any, texts: list[list[int]], tokens: int) -> dict[str, Any]:
    answers = [one.outputs[0] for one in _generate(engine, texts, tokens, logprobs=0)]
    return {
        "tokens": [list(one.token_ids) for one in answers],
        "logprobs": [
            [of[token].logprob for token, of in zip(one.token_ids, one.logprobs, strict=True)]
            for one in answers
        ],
    }


def _score(engine: Any, texts: list[list[int]]) -> dict[str, Any]:
    """Return the log-probability of each token behind the first, and the likeliest one there."""
    found = _generate(engine, texts, 1, prompt_logprobs=1)
    logprobs, best = [], []
    for text, one in zip(texts, found, strict=True):
        places = list(zip(text, one.prompt_logprobs, strict=True))[1:]
        logprobs.append([of[token].logprob for token, of in places])
        best.append([next(t for t, p in of.items() if p.rank == 1) for _, of in places])
    return {"logprobs": logprobs, "best": best}


_ORDERS: dict[str, Callable[..., dict[str, Any]]] = {
    "time": _time, "decode": _decode, "score": _score, "profile": _profile,
}  # fmt: skip


def _readied() -> int:
    from fa4_hd256.run.compile import counters

    return sum(count for how, count in counters.items() if how != "memory")


if __name__ == "__main__":
    sys.exit(main())
