"""st.async in a replay: bytes on the mbarriers of several CTAs, as the counting scheduler's."""

from types import SimpleNamespace

import numpy as np
import pytest
from sass_listing import function

from sm100_sim.timing import ReplayError, load, replay_program
from sm100_sim.timing.machine_code.paths import WarpPath
from sm100_sim.timing.machine_code.resources import Action, instruction_arrays
from sm100_sim.timing.program import Compiled, Program, _Builder

VALUES = load("h200").values()
CODE = function(
    "SYNCS.EXCH.64 URZ, [UR4], UR6", "SYNCS.ARRIVE.TRANS64.RED RZ, [R2], R4", "STAS [R2], R4",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2", "EXIT",
)  # fmt: skip


def stored(opcode, addresses=(0x400, 0x1000400)):
    """Targets of a store of two lanes of CTA 0, each to a CTA of its own."""
    builder = _Builder(CODE, [0, 1])
    entry = SimpleNamespace(opcode=opcode, operands=(0x400, 7, 0x8), addresses=addresses)
    begin, end = builder._stores(entry, 0)
    return [target[1:4] for target in builder.targets[begin:end]]


@pytest.mark.parametrize(
    ("kind", "nbytes"), [("b32", 4), ("v2.b32", 8), ("v4.f32", 16), ("u64", 8), ("v2.b64", 16)]
)
def test_bytes_of_each_lane(kind, nbytes):
    opcode = f"st.async.shared::cluster.mbarrier::complete_tx::bytes.{kind}"
    assert stored(opcode) == [(0, nbytes, False), (0, nbytes, True)]
    assert stored(opcode, ()) == [(0, nbytes, False)]


def clocks(nbytes):
    """Return the clocks of two CTAs that wait until CTA 0 has stored so many of four bytes to
    each."""
    numbers = np.array([0, 1, 2, 3, 4, 0, 3, 4], np.int32)
    event = np.array([0, 1, 2, 3, -1, 4, 5, -1], np.int32)
    rows = (
        (Action.INIT, 0, 1), (Action.ARRIVE, 0, 2), (Action.STORE_ASYNC, 2, 4),
        (Action.WAIT, 0, 0, 1), (Action.INIT, 1, 1), (Action.WAIT, 1, 0, 1),
    )  # fmt: skip
    action = np.array([(*map(int, row), 0, 0)[:5] for row in rows], np.int64)
    targets = np.array(
        [(0, 1, 4, 0, 0), (1, 1, 4, 1, 0), (0, 0, nbytes, 0, 0), (1, 0, nbytes, 1, 1)], np.int64
    )
    first, last = np.array([0, 5], np.int32), np.array([5, 8], np.int32)
    program = Program(
        numbers, event, first, last, np.array([0, 1], np.int32), action, targets, 2, 2
    )
    paths = [WarpPath(numbers[a:b], event[a:b]) for a, b in zip(first, last)]
    # A scoreboard of the test's own holds the waiting warp; the exit waits for it.
    code = instruction_arrays(CODE)
    code.sets[3], code.waits[4] = 0, 1
    compiled = Compiled(CODE, code, program, [(0, 0), (1, 0)], paths, [None] * 6, {}, [])
    return replay_program(compiled, VALUES).clocks


def test_who_waits_goes_on_when_the_bytes_are_there():
    assert VALUES.remote_arrive < clocks(4) < VALUES.remote_arrive + 100
    with pytest.raises(ReplayError, match="hangs"):
        clocks(2)
