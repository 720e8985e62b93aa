"""Processes that compile kernels beside the one that asks for them: `run.ahead.processes`."""

from __future__ import annotations

import pytest
import torch

from fa4_hd256.kernels.small.backward_sum import SumConfig
from fa4_hd256.run.ahead import processes
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import forget, is_ready

pytestmark = pytest.mark.simulator

#: Kernels that take a second each.
SPECS = [
    KernelSpec("backward_sum", SumConfig(num_warps=warps), dtype)
    for warps, dtype in ((8, torch.bfloat16), (8, torch.float16), (4, torch.bfloat16))
]


@pytest.fixture(autouse=True)
def _of_its_own(monkeypatch, tmp_path):
    """A cache of its own, and two processes."""
    monkeypatch.setenv("FA4_HD256_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FA4_HD256_JOBS", "2")
    forget()
    yield
    forget()


@pytest.fixture
def started(monkeypatch):
    """The kernels of each process that is started; none is."""
    found = []

    class Ended:
        def wait(self):
            return 0

    monkeypatch.setattr(processes, "_start", lambda specs, errors: found.append(specs) or Ended())
    return found


def test_another_process_compiles_what_is_missing():
    """Kernels are on disk at the end, for whoever asks for them then."""
    with processes.compiling_beside(SPECS) as missing:
        assert missing == len(SPECS)
    assert all(map(is_ready, SPECS))
    with processes.compiling_beside(SPECS) as missing:
        assert missing == 0


def test_a_process_that_fails_is_a_warning(monkeypatch):
    """The last line of its errors is in it, and how to start none."""
    monkeypatch.setattr(processes, "_START", "raise SystemExit('no room on the disk')")
    with pytest.warns(RuntimeWarning, match="1 of 1 .* no room on the disk. FA4_HD256_JOBS=1"):
        with processes.compiling_beside(SPECS):
            pass


def test_an_error_of_the_block_ends_the_processes(monkeypatch):
    """Nobody waits for a process that sleeps."""
    monkeypatch.setattr(processes, "_START", "import time; time.sleep(1000)")
    with pytest.raises(KeyError), processes.compiling_beside(SPECS):
        raise KeyError


@pytest.mark.parametrize(
    ("variable", "value", "count"),
    [("FA4_HD256_JOBS", "2", 1), ("FA4_HD256_JOBS", "9", 1), ("FA4_HD256_JOBS", "1", 0),
     ("FA4_HD256_JIT", "0", 0)],
)  # fmt: skip
def test_how_many_are_started(monkeypatch, started, variable, value, count):
    """Start as many as there are kernels for; none where nothing may be compiled."""
    monkeypatch.setenv(variable, value)
    with processes.compiling_beside(SPECS):
        pass
    assert len(started) == count


def test_processes_begin_at_places_of_their_own(monkeypatch):
    """Spread those of all ranks, each with all kernels."""
    kernels = list(range(12))
    places = []
    for rank in range(2):
        monkeypatch.setattr(processes, "_rank", lambda rank=rank: (rank, 2))
        places += [processes.in_own_order(kernels, number, 3) for number in range(3)]
    assert [place[0] for place in places] == [0, 2, 4, 6, 8, 10]
    assert all(sorted(place) == kernels for place in places)


def test_a_package_of_another_name_starts_none(monkeypatch, started):
    """A Hugging Face kernel's loader makes a name up, which another process does not find."""
    monkeypatch.setattr(processes, "__name__", "made_up.run.ahead.processes")
    with processes.compiling_beside(SPECS):
        pass
    assert not started
