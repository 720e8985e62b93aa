"""Wavefronts of shared-memory accesses: from addresses, in a traced run, and by SASS access."""

from types import SimpleNamespace

import numpy as np
import pytest

from sm100_sim import LaunchConfig
from sm100_sim.launcher import Options, parameter_buffer, parsed_kernel, run_kernel
from sm100_sim.timing.machine_code.conflicts import (
    KINDS,
    Wavefronts,
    accesses_before,
    sass_access_kind,
)
from sm100_sim.trace.observer import wavefronts

LANES = np.arange(32, dtype=np.uint64)


@pytest.mark.parametrize(
    ("addresses", "width", "clocks"),
    # All but the last as an H200 measures them: lab/micro/hopper_measured.json, "shared loads".
    [
        (4 * LANES, 4, 1),
        (0 * LANES, 4, 1),
        (8 * LANES, 4, 2),
        (128 * LANES, 4, 32),
        (8 * LANES, 8, 2),
        (0 * LANES, 8, 1),
        (8 * (LANES // 2), 8, 1),
        (8 * (LANES % 16), 8, 2),
        (16 * LANES, 16, 4),
        (0 * LANES, 16, 2),
        (16 * (LANES // 2), 16, 2),
        (16 * (LANES // 8), 16, 2),
        (16 * (LANES % 8), 16, 4),
        (32 * LANES, 16, 8),
        (128 * LANES, 16, 32),
        # Rows under TMA's 128-byte swizzle.
        (128 * LANES + 16 * (LANES % 8), 16, 4),
        (LANES // 4, 1, 1),
    ],
)
def test_wavefronts(addresses, width, clocks):
    masks = np.full(1, 0xFFFFFFFF, np.uint32)
    assert wavefronts(addresses[None], masks, width).tolist() == [clocks]
    # The start of the data makes no difference.
    assert wavefronts(addresses[None] + 64, masks, width).tolist() == [clocks]


def test_lanes_that_take_no_part_do_not_count():
    found = wavefronts(np.stack([128 * LANES] * 2), np.array([0b11, 1 << 31], np.uint32), 4)
    assert found.tolist() == [2, 1]


def test_traced_run_counts_wavefronts():
    ptx = """.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 pool[];
.visible .entry measure()
{
.reg .b32 %tid, %a, %b, %w<4>;
mov.u32 %tid, %tid.x;
mov.u32 %b, pool;
shl.b32 %a, %tid, 4;
add.u32 %a, %a, %b;
st.shared.v4.b32 [%a], {%tid, %tid, %tid, %tid};
bar.sync 0;
ld.shared.v4.b32 {%w0, %w1, %w2, %w3}, [%b+16];
ld.shared.b32 %w1, [%b];
ret;
}
"""
    config = LaunchConfig("measure", (1, 1, 1), (64, 1, 1), (1, 1, 1), 2048, (), ptx=ptx)
    kernel = parsed_kernel(ptx, "measure")
    report = run_kernel(config, parameter_buffer(kernel, []), [], Options(trace=True))
    # (bytes per lane, executions by two warps, their wavefronts)
    assert list(report.shared_accesses.values()) == [(16, 2, 8), (16, 2, 4), (4, 2, 2)]
    assert "shared_accesses" not in report.to_json()


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [("LDS", "load 4"), ("LDS.U.128", "load 16"), ("STS.64", "store 8"), ("STS.U8", "store 4"),
     ("LDSM.16.M88.4", "ldmatrix"), ("STSM.16.MT88.2", "stmatrix")],
)  # fmt: skip
def test_kinds(opcode, kind):
    assert KINDS[sass_access_kind(opcode)] == kind
    assert sass_access_kind("LDG.E.128") == -1


def test_charged_by_what_runs_between_the_same_events():
    """A uniform load before the first event, one without broadcast after it, and one not run."""
    opcodes = ["LDS.128", "SYNCS.ARRIVE", "LDS.128", "BAR.SYNC", "LDS.128"]
    function = SimpleNamespace(instructions=[SimpleNamespace(opcode=o) for o in opcodes])
    counted = np.zeros((2, 2, len(KINDS)))
    counted[0, :, KINDS.index("load 16")] = 1, 1
    counted[1, :, KINDS.index("load 16")] = 1, 4
    entries = [SimpleNamespace(blocks=((0, 3),)), SimpleNamespace(blocks=((1, 2),))]
    before = accesses_before(entries, counted, entries)
    found = Wavefronts(function, np.full(5, 7))
    found.add(np.arange(4), np.array([-1, 0, -1, 1]), before)
    assert found.found()[[0, 2, 4]].tolist() == [1, 4, 7]
