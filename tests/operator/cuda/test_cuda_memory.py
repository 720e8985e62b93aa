"""Memory of the GPU and of the host after many calls."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from cuda_cases import Case

pytestmark = pytest.mark.cuda

CALLS = 1000
#: Bytes by which the host's memory may grow, of what Python and PyTorch keep: 8 KiB per call would
#: be twice as much.
HOST_BYTES = 4 << 20

CASES = {
    "dense": Case(((300, 300),), (4, 2)),
    "packed": Case(((100, 100), (200, 200)), (4, 2), is_packed=True),
    "split": Case(((1, 1000),), (8, 1), num_splits=4, has_gradients=False),
}


def resident() -> int:
    """Bytes of this process in the host's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_kept(name, use_clc, device):
    """Neither PyTorch's allocator nor the driver has more in use after the last call than early
    on, and the host keeps next to nothing."""
    tensors = CASES[name].tensors(device)

    def state():
        torch.cuda.synchronize()
        gc.collect()
        memory = {"allocated": torch.cuda.memory_allocated(), "host": resident(),
                  "reserved": torch.cuda.memory_reserved()}  # fmt: skip
        # The driver's free memory is one process's only where there is one process.
        if "PYTEST_XDIST_WORKER" not in os.environ:
            memory["used"] = -torch.cuda.mem_get_info()[0]
        return memory

    for _ in range(200):
        CASES[name].run(tensors, use_clc)
    early = state()
    for _ in range(CALLS):
        CASES[name].run(tensors, use_clc)
    late = state()
    grown = {key: late[key] - early[key] for key in early}
    assert grown.pop("host") < HOST_BYTES, grown
    # Less: of what tests before this one left.
    assert max(grown.values()) <= 0, grown
