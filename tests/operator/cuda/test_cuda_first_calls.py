"""The first calls of a process, inside a memory pool: of what they make for all later calls,
nothing is the pool's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import first_calls
import pytest

pytestmark = pytest.mark.cuda

COMPILED = Path(__file__).with_name("test_cuda_compile.py")


def in_a_fresh_process(*arguments: str, **environment: str) -> str:
    """Return what Python prints in a new process."""
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def in_use(*arguments: str) -> dict[str, int]:
    """Blocks by call."""
    printed = in_a_fresh_process(first_calls.__file__, *arguments).splitlines()
    return {call: int(blocks) for call, blocks in (line.rsplit(maxsplit=1) for line in printed)}


def test_of_a_pool_nothing_is_kept():
    found = in_use()
    assert len(found) == 2 * len(first_calls.calls()) and not any(found.values()), found


def test_what_would_be_is_found():
    found = in_use("planted")
    assert found["dense static"] > 0 and found["dense dynamic"] > 0, found


@pytest.mark.parametrize("use_clc", ["0", "1"], ids=["static", "dynamic"])
@pytest.mark.parametrize("test", [
    "test_a_layer", "test_packed_sequences", "test_divided_keys", "test_a_block_mask",
])  # fmt: skip
def test_compiled_first(test, use_clc):
    """PyTorch's graphs refuse what stays alive in their pool."""
    node = f"{COMPILED}::{test}[reduce-overhead]"
    options = "--device=cuda", "-p", "no:cacheprovider", "--tb=short"
    assert "1 passed" in in_a_fresh_process("-m", "pytest", node, *options, FA_CLC=use_clc)
