"""An engine that answers orders of `bench.serving` at once, with tokens made of the prompt."""

from __future__ import annotations

import sys

from bench.serving import orders


class Engine:
    """The backend `dies` ends before its first answer, `breaks` at the first profile."""

    def __init__(self, arguments):
        self.backend = arguments["backend"]
        if self.backend == "dies":
            raise ValueError("Error: no such backend")
        print("a line of the engine itself")

    def backends(self):
        return [self.backend]

    def readied(self):
        return 3

    def time(self, texts, tokens):
        return {"seconds": 0.5, "steps": [0.001] * (tokens - 1), "tokens": []}

    def profile(self, texts, tokens):
        if self.backend == "breaks":
            raise RuntimeError("an Error of the GPU")
        return {"kernels": {"one": 40.0, "two": 2.0}}

    def decode(self, texts, tokens):
        found = [[text[0] + n for n in range(tokens)] for text in texts]
        return {"tokens": found, "logprobs": [[-1.0] * tokens] * len(texts)}

    def score(self, texts):
        return {"logprobs": [[-2.0] * (len(text) - 1) for text in texts], "best": texts}


if __name__ == "__main__":
    sys.exit(orders.main({}, Engine))
