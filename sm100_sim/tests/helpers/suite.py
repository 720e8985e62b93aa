"""Options and fixtures of every test run: a plugin of pytest that conftests name."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import held_memory
import hypothesis
import isolated  # noqa: F401
import pytest
from hypothesis.internal.conjecture import providers
from project import PROJECT

# Examples are equal in every run: a failure must be reproducible from the log alone.
hypothesis.settings.register_profile("reproducible", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("reproducible")
# Hypothesis draws constants of all local modules that the process has imported: examples would
# differ with the tests that are collected, and reading the modules takes 3 s of CPU per worker.
if hasattr(providers, "is_local_module_file"):
    providers.is_local_module_file = lambda path: False

# Collecting tests makes objects that stay. Garbage is collected again from its end on.
gc.disable()


def pytest_addoption(parser):
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="all cases of tests marked sampled, as on a GPU and where a test is named by ::",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if not takes_all_cases(config):
        items[:], left_out = sampled_cases(items)
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Freeze what conftests have imported, PyTorch above all: it stays, and a collection would look
    through it. No tensor of a test is among it: `gc.get_objects`, by which the simulator finds live
    tensors, leaves out what is frozen."""
    gc.freeze()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with first_alone(PROJECT / ".cache" / "collected"):
        return (yield)


@contextlib.contextmanager
def first_alone(marker: Path) -> Iterator[None]:
    """Let other processes wait for the first one that comes here; `marker` says that it is done.

    A worker that collects tests in a fresh checkout compiles some 900 modules, 12 s of CPU, and
    keeps their bytecode. Workers that collect at the same time would each compile all of them.
    """
    if marker.exists():
        yield
        return
    marker.parent.mkdir(parents=True, exist_ok=True)
    with marker.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not marker.exists():
            yield
            marker.touch()
            return
    yield


def pytest_collection_finish():
    """Collect garbage, but less often, since tracing a kernel makes millions of objects."""
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def takes_all_cases(config) -> bool:
    """Return True if no case is left out: where that is requested, or tests are named, and on a
    GPU."""
    named = any("::" in argument for argument in config.args)
    return named or config.getoption("--all-cases") or config.getoption("--device", "") == "cuda"


def sampled_cases(items):
    """Return (items that run, those left out): of a test with the mark `sampled` the cases whose
    ids match one of its patterns.

    Raises pytest.UsageError where no case of a test matches a pattern.
    """
    kept, left_out = [], []
    unseen: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None:
            kept.append(item)
            continue
        case = item.callspec.id if hasattr(item, "callspec") else ""
        named = {pattern for pattern in mark.args if fnmatchcase(case, pattern)}
        unseen.setdefault(item.nodeid.split("[")[0], set(mark.args)).difference_update(named)
        (kept if named else left_out).append(item)
    for test, patterns in unseen.items():
        if patterns:
            raise pytest.UsageError(f"{test} has no case like {patterns}, which its mark samples")
    return kept, left_out


@pytest.fixture(autouse=True)
def _freed_memory_is_returned():
    yield
    held_memory.trim_if_grown()


@pytest.fixture(autouse=True)
def _seeded():
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1234)


@pytest.fixture
def sanitize(monkeypatch):
    """Puts calls in the simulator under the sanitizer. seed: of the order of warps and completions,
    None for the plain one; clusters: that run at once; device: that it passes for."""

    def start(seed, *, clusters=None, device=None):
        monkeypatch.setenv("SM100_SIM_SANITIZE", "1")
        for name, value in (("SEED", seed), ("CLUSTERS", clusters), ("DEVICE", device)):
            if value is not None:
                monkeypatch.setenv(f"SM100_SIM_{name}", str(value))

    return start
