"""The engine of `python -m bench vllm` on CPU tensors, whatever the machine has. Its process has
tests/helpers and the checkout among its paths."""

from __future__ import annotations

import sys

import vllm_engine

from bench.serving import vllm_engine as served

if __name__ == "__main__":
    vllm_engine.prepare()
    sys.exit(served.main())
