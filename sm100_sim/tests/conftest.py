"""Fixtures of the simulator's tests; `helpers/suite.py` has those that other tests share."""

from __future__ import annotations

import held_memory
import pytest

pytest_plugins = ["suite"]


@pytest.fixture(autouse=True, scope="module")
def _memory_is_given_back():
    """Keep a worker small: above a limit cached kernels go, and their memory is returned."""
    yield
    held_memory.release_above(held_memory.LIMIT)
