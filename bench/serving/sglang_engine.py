"""SGLang in processes of its own: `python -m bench.serving.sglang_engine`, which reads `orders`.

Arguments are those of SGLang's `Engine`. The model runs in a process that SGLang starts; what
happens there is asked of `sglang_scheduler`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.serving import orders, sglang_scheduler

#: SGLang's settings: versions of packages are the user's affair.
ENVIRONMENT = {"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"}


def main() -> int:
    """Serve orders until stdin ends."""
    return orders.main(ENVIRONMENT, Engine)


class Engine:
    """SGLang's `Engine`. Raises what SGLang raises for arguments that it does not accept."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from fa4_hd256.integrations.sglang import plugin

        plugin.register()
        from sglang.srt.entrypoints.engine import Engine as Original

        class Watched(Original):  # type: ignore[misc, unused-ignore]
            run_scheduler_process_func = staticmethod(sglang_scheduler.run)

        self._engine: Any = Watched(**arguments)
        self._folder = tempfile.TemporaryDirectory()

    def backends(self) -> list[str]:
        found: list[str] = self._told()["backends"]
        return found

    def readied(self) -> int:
        found: int = self._told()["readied"]
        return found

    def time(self, texts: orders.Texts, tokens: int) -> dict[str, Any]:
        self._call("watch", requests=len(texts), profiled=0)
        begin = time.perf_counter()
        found = self._generate(texts, tokens)
        seconds = time.perf_counter() - begin
        answers = [one["output_ids"] for one in found]
        return {"seconds": seconds, "steps": self._told()["steps"], "tokens": answers}

    def profile(self, texts: orders.Texts, tokens: int) -> dict[str, Any]:
        self._call("watch", requests=len(texts), profiled=orders.PROFILED)
        self._generate(texts, tokens)
        return {"kernels": self._told()["kernels"]}

    def decode(self, texts: orders.Texts, tokens: int) -> dict[str, Any]:
        found = self._generate(texts, tokens, return_logprob=True)
        return {
            "tokens": [one["output_ids"] for one in found],
            "logprobs": [
                [logprob for logprob, *_ in one["meta_info"]["output_token_logprobs"]]
                for one in found
            ],
        }

    def score(self, texts: orders.Texts) -> dict[str, Any]:
        found = self._generate(
            texts, 1, return_logprob=True, logprob_start_len=0, top_logprobs_num=1
        )
        logprobs, best = [], []
        for text, one in zip(texts, found, strict=True):
            # Nothing stands for the first token.
            of = one["meta_info"]["input_token_logprobs"][1:]
            top = one["meta_info"]["input_top_logprobs"][1:]
            if [token for _, token, *_ in of] != text[1:]:
                raise ValueError("SGLang's log-probabilities are of other tokens than were given")
            logprobs.append([logprob for logprob, *_ in of])
            best.append([place[0][1] for place in top])
        return {"logprobs": logprobs, "best": best}

    def _generate(self, texts: orders.Texts, tokens: int, **options: Any) -> list[dict[str, Any]]:
        parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        found: list[dict[str, Any]] = self._engine.generate(
            input_ids=texts, sampling_params=parameters, **options
        )
        return found

    def _told(self) -> dict[str, Any]:
        """Return what the scheduler has seen since it was last told to watch."""
        path = Path(self._folder.name) / "told.json"
        self._call("tell", path=str(path))
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def _call(self, name: str, **arguments: Any) -> None:
        self._engine.collective_rpc(f"{sglang_scheduler.PREFIX}{name}", **arguments)


if __name__ == "__main__":
    sys.exit(main())
