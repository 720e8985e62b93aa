"""vLLM in a process of its own: `python -m bench.serving.vllm_engine`, which reads `orders`.

Everything of the engine runs in this process. Its arguments are those of vLLM's `LLM`.
"""

from __future__ import annotations

import sys
import time
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
        found, record = self._watched(texts, tokens)
        seconds = time.perf_counter() - begin
        answers = [list(one.outputs[0].token_ids) for one in found]
        return {"seconds": seconds, "steps": record.steps, "tokens": answers}

    def profile(self, texts: orders.Texts, tokens: int) -> dict[str, Any]:
        _, record = self._watched(texts, tokens, orders.PROFILED)
        return {"kernels": record.kernels}

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

    def _watched(
        self, texts: orders.Texts, tokens: int, profiled: int = 0
    ) -> tuple[list[Any], orders.Record]:
        """Generate, with a record of the steps that begin and end with all requests served and
        their prompts behind them."""
        engine, record = self._llm.llm_engine, orders.Record(profiled)
        step = engine.step

        def watched() -> Any:
            outputs = step()
            states = engine.output_processor.request_states
            decoding = not any(state.is_prefilling for state in states.values())
            record.add(decoding and len(states) == len(texts))
            return outputs

        engine.step = watched
        try:
            return self._generate(texts, tokens), record
        finally:
            del engine.step

    def _generate(self, texts: orders.Texts, tokens: int, **options: Any) -> list[Any]:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options
        )
        found: list[Any] = self._llm.generate(
            [{"prompt_token_ids": text} for text in texts], parameters, use_tqdm=False
        )
        return found


if __name__ == "__main__":
    sys.exit(main())
