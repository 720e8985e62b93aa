"""Products of warpgroups in a replay, against what an H200 was measured to take (docs/facts.md)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sass_listing import function

from sm100_sim.timing import ReplayError, load, replay_program
from sm100_sim.timing.machine_code.paths import WarpPath
from sm100_sim.timing.machine_code.resources import Action, instruction_arrays
from sm100_sim.timing.machine_code.warpgroups import LATENCY, product_cost, with_products
from sm100_sim.timing.program import Compiled, Program

VALUES = load("h200").values()
FROM_MEMORY = "HGMMA.64x{n}x16.F32.BF16 R24, gdesc[UR4], R24{group}"
FROM_REGISTERS = "HGMMA.64x{n}x16.F32.BF16 R24, R88, gdesc[UR4], R24{group}"


def program(lines: tuple[str, ...], warps: int = 4, late: int = 0) -> Compiled:
    """All warps of a CTA execute these lines. late: instructions that the last warp has before."""
    code = function(*(["NOP"] * late), *lines, "EXIT")
    every = np.arange(len(code.instructions), dtype=np.int32)
    paths = [every if warp == warps - 1 else every[late:] for warp in range(warps)]
    last = np.cumsum([len(path) for path in paths]).astype(np.int32)
    first = last - np.array([len(path) for path in paths], np.int32)
    nothing = np.full(int(last[-1]), -1, np.int32)
    empty = Program(
        np.concatenate(paths),
        nothing,
        first,
        last,
        np.zeros(warps, np.int32),
        np.zeros((0, 5), np.int64),
        np.zeros((1, 5), np.int64),
        0,
        1,
    )
    found = [WarpPath(path, np.full(len(path), -1, np.int32)) for path in paths]
    names = [(0, warp) for warp in range(warps)]
    return Compiled(
        code, instruction_arrays(code), empty, names, found, [None], {}, []
    )  # fmt: skip


def chain(form: str, n: int, count: int) -> tuple[str, ...]:
    """Return so many MMAs in one group, and a wait for it."""
    inside = [form.format(n=n, group="")] * (count - 1)
    return (*inside, form.format(n=n, group=", gsb0"), "WARPGROUP.DEPBAR.LE gsb0, 0x0")


def clocks(lines: tuple[str, ...], **how: int) -> int:
    return replay_program(with_products(program(lines, **how)), VALUES).clocks


@pytest.mark.parametrize("n, measured", [(64, 96), (128, 128), (192, 160), (256, 192)])
def test_one_product_and_its_wait(n, measured):
    assert clocks(chain(FROM_MEMORY, n, 1)) == pytest.approx(measured, abs=4)


@pytest.mark.parametrize(
    "form, n, warpgroups, measured",
    [
        (FROM_MEMORY, 128, 1, 65.9), (FROM_MEMORY, 256, 1, 130.0), (FROM_MEMORY, 128, 2, 129.8),
        (FROM_MEMORY, 256, 2, 258.3), (FROM_MEMORY, 128, 3, 193.9), (FROM_REGISTERS, 32, 1, 16.2),
        (FROM_REGISTERS, 64, 1, 32.0), (FROM_MEMORY, 64, 1, 32.0),
    ],
)  # fmt: skip
def test_a_group_of_32(form, n, warpgroups, measured):
    """Clocks a product, start and wait included; those of narrow ones were given without."""
    found = clocks(chain(form, n, 32), warps=4 * warpgroups) / 32
    assert found == pytest.approx(measured, abs=0.8 if n > 64 else 2.2)


def test_narrow_products_from_memory_are_bound_by_its_port():
    found = clocks(chain(FROM_MEMORY, 32, 64)) - clocks(chain(FROM_MEMORY, 32, 32))
    assert found / 32 == pytest.approx(22.6, rel=0.07)
    registers = clocks(chain(FROM_REGISTERS, 32, 64)) - clocks(chain(FROM_REGISTERS, 32, 32))
    assert registers == 32 * 16


def test_a_product_begins_with_the_last_of_its_warps():
    together, late = clocks(chain(FROM_MEMORY, 64, 1)), clocks(chain(FROM_MEMORY, 64, 1), late=500)
    assert late - together == 500


def test_a_wait_lets_so_many_groups_be():
    """The first of a group of 14 and one of two is done two products before the second."""
    first, second = (chain(FROM_REGISTERS, 128, count)[:-1] for count in (14, 2))
    ends = []
    for pending in (2, 1, 0):
        compiled = with_products(program((*first, *second, f"WARPGROUP.DEPBAR.LE gsb0, {pending}")))
        ends.append(replay_program(compiled, VALUES).clocks)
    # The last of 16 is issued when the one before it begins.
    assert ends[0] == pytest.approx(14 * 64, abs=6)
    assert ends[1:] == pytest.approx([14 * 64 + LATENCY, 16 * 64 + LATENCY], abs=6)


def step_clocks(instructions: int) -> float:
    """Return the clocks of one warpgroup's step of Hopper's kernel of dV: 16 MMAs of n64 twice,
    four of n256, and instructions behind them that wait for the first group alone."""
    score = [FROM_MEMORY.format(n=64, group=", gsb0" if i == 15 else "") for i in range(16)]
    total = [FROM_REGISTERS.format(n=256, group=", gsb0" if i == 3 else "") for i in range(4)]
    step = (
        *score, *score, *total, "WARPGROUP.DEPBAR.LE gsb0, 0x2", *["NOP"] * instructions,
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    )  # fmt: skip
    return (clocks(step * 12) - clocks(step * 4)) / 8


def test_a_warp_is_one_product_ahead_and_no_further():
    """Instructions behind a step's MMAs overlap with the last two of them alone: 500 instructions
    behind 1,536 clocks of MMAs take 1,536 + 500 - 256 and the start; with MMAs that are queued
    without a limit they would take none (measured: 1,808 clocks per step with few instructions,
    2,100 with more, docs/facts.md)."""
    few, many = step_clocks(10), step_clocks(500)
    assert few == pytest.approx(1536 + LATENCY, abs=20)
    assert many == pytest.approx(1536 + 500 - 256, abs=40)


def test_two_warpgroups_take_turns_in_the_order_in_which_they_are_complete():
    compiled = with_products(program(chain(FROM_REGISTERS, 256, 2), warps=8))
    run = replay_program(compiled, VALUES)
    assert run.busy[0, 0] == 4 * 128
    assert compiled.work == 4 * 128


def test_planted_products_that_are_not_there():
    """A group that nobody closes is not waited for; what a warp never issues is, for ever."""
    compiled = with_products(program(chain(FROM_MEMORY, 64, 3)))
    action = compiled.program.action.copy()
    action[action[:, 0] == Action.PRODUCT, 3] = 0
    open_group = replace(compiled, program=compiled.program._replace(action=action))
    assert replay_program(open_group, VALUES).clocks < LATENCY
    event = compiled.program.event.copy()
    event[np.flatnonzero(compiled.program.numbers == 2)[-1]] = -1
    lost = replace(compiled, program=compiled.program._replace(event=event))
    with pytest.raises(ReplayError, match="hangs; not finished: CTA 0 warp 0 at `EXIT`"):
        replay_program(lost, VALUES)


def test_warps_that_issue_different_products_are_refused():
    compiled = program(chain(FROM_MEMORY, 64, 2))
    short = compiled.paths[3]
    compiled.paths[3] = WarpPath(short.numbers[1:], short.event_of[1:])
    with pytest.raises(ValueError, match=r"warpgroup 0 of CTA 0 issue \[1, 2\] products"):
        with_products(compiled)


@pytest.mark.parametrize("opcode", ["HGMMA.SP.64x128x32.F32.BF16", "HGMMA.32x128x16.F32.BF16"])
def test_products_that_the_model_does_not_know(opcode):
    (one,) = function(f"{opcode} R24, gdesc[UR4], R24").instructions
    with pytest.raises(ValueError, match="dense products of 64 rows"):
        product_cost(one)


def test_a_program_without_products_is_left_alone():
    compiled = program(("NOP", "NOP"))
    assert with_products(compiled) is compiled
