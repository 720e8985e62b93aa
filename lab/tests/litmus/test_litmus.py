"""The messages of `lab.litmus` in the simulator, whose memory has one order."""

from __future__ import annotations

import numpy as np
import pytest

from lab.litmus.messages import BLOCK, MESSAGES, NOISE_BYTES, SCRATCH, message_ptx
from sm100_sim import LaunchConfig
from sm100_sim.launcher import Options, parameter_buffer, parsed_kernel, run_kernel
from sm100_sim.state.warp import aligned_zeros
from sm100_sim.tools.golden import KERNEL

pytestmark = pytest.mark.simulator

CLUSTERS, TRIES = 2, 12


def stale_words(ptx: str, tries: int = TRIES, **options) -> int:
    """Stale words that all readers of a message kernel have counted."""
    counts = aligned_zeros((CLUSTERS,), np.uint32)
    scratch = aligned_zeros((CLUSTERS * SCRATCH + NOISE_BYTES,), np.uint8)
    addresses = [array.__array_interface__["data"][0] for array in (counts, scratch)]
    values = [np.uint64(word).tobytes() for word in (*addresses, tries)]
    config = LaunchConfig(KERNEL, (2 * CLUSTERS, 1, 1), (BLOCK, 1, 1), (2, 1, 1), 0, (), {}, 0, ptx)
    ranges = [
        (start, start + array.nbytes, name)
        for start, array, name in zip(
            addresses, (counts, scratch), ("counts", "scratch"), strict=True
        )
    ]
    run_kernel(
        config,
        parameter_buffer(parsed_kernel(ptx, KERNEL), values),
        sorted(ranges),
        Options(**options),
    )
    return int(counts.sum())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.name)
def test_no_message_is_stale(message):
    assert stale_words(message_ptx(message)) == 0


@pytest.mark.parametrize("message", MESSAGES[:8:3], ids=lambda message: message.name)
def test_no_message_is_stale_in_a_random_order(message):
    assert stale_words(message_ptx(message), 4, seed=3) == 0


def test_a_stale_message_is_counted():
    """Data written behind the signal: the kernel's own counting finds them."""
    ptx = message_ptx(MESSAGES[0])
    write = next(line for line in ptx.splitlines() if line.startswith("st.shared::cluster"))
    late = ptx.replace(f"{write}\n", "").replace("WRITER_WAIT:", f"{write}\nWRITER_WAIT:")
    late = late.replace(
        "mov.u32 %far, full;",
        "mapa.shared::cluster.u32 %far, %place, %peer;\nmov.u32 %r14, %far;\nmov.u32 %far, full;",
    ).replace(f"{write}\nWRITER_WAIT:", "st.shared::cluster.u32 [%r14], %value;\nWRITER_WAIT:")
    assert stale_words(late, seed=1) > 0
