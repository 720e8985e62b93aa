"""The engine of `python -m bench sglang` on CPU tensors, whatever the machine has. Its process has
tests/helpers and the checkout among its paths, and so has the scheduler's, which imports this
module again."""

from __future__ import annotations

import os
import sys

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import absent_packages  # noqa: F401

from bench.serving import sglang_engine

if __name__ == "__main__":
    sys.exit(sglang_engine.main())
