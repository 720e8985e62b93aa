"""The engine of `python -m bench vllm` on CPU tensors, whatever the machine has."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "helpers"))

import vllm_engine

from bench.serving import engine

if __name__ == "__main__":
    vllm_engine.prepare()
    sys.exit(engine.main())
