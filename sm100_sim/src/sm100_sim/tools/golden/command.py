"""`python -m sm100_sim record`: what only a Hopper GPU can say."""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path

_RECORD = """run small PTX kernels on a GPU of compute capability 9.0 and store their results, which
the tests replay in the simulator; needs a CUDA driver, cuda-bindings and numpy"""


def record_vectors(arguments: list[str]) -> int:
    """Record; 1 if a case could not be."""
    from . import DIRECTORY, all_cases, groups
    from .record import record

    parser = argparse.ArgumentParser(prog="python -m sm100_sim record", description=_RECORD)
    parser.add_argument(
        "--out",
        type=Path,
        default=DIRECTORY,
        help="directory of the vectors (default: %(default)s)",
    )
    parser.add_argument(
        "--groups",
        default="",
        help="record these groups alone, with commas; the others stay as they are",
    )
    choice = parser.parse_args(arguments)
    chosen, known = tuple(filter(None, choice.groups.split(","))), groups(all_cases())
    if not known.keys() >= set(chosen):
        parser.error(f"--groups {choice.groups}; accepted are {', '.join(known)}")
    if _lacks_driver():
        return 2
    return 1 if record(choice.out, chosen) else 0


def _lacks_driver() -> bool:
    """Return True, with a line on stderr, where no driver of NVIDIA's is installed. Without
    cuda-bindings the command itself says what to install."""
    try:
        import cuda.bindings  # noqa: F401
    except ImportError:
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        print(
            "sm100_sim: record needs a GPU of compute capability 9.0 (H200, H100), and this "
            "machine has no driver of NVIDIA's",
            file=sys.stderr,
        )
        return True
    return False
