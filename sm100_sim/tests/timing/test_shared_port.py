"""Use of the port of shared memory in a replay."""

from __future__ import annotations

import numpy as np
from sass_listing import function

from sm100_sim.timing import Replay, load, replay_program
from sm100_sim.timing.machine_code.paths import WarpPath
from sm100_sim.timing.machine_code.resources import Action, instruction_arrays
from sm100_sim.timing.program import Compiled, Program
from sm100_sim.timing.replaying.state import BUSY

VALUES = load("b200").values()
#: A warp's loads, 512 bytes each; what TMA copies and how often.
LOADS, COPY, COPIES = 400, 4096, 20
LOAD, COPY_IN, COPY_OUT, PRODUCT = "LDS.128 R4, [R2]", "UTMALDG.2D", "UTMASTG.2D", "UTCHMMA"


def replay(warps: dict[str, tuple[tuple[int, ...], int]]) -> Replay:
    """One warp of a CTA executes each instruction. warps: instruction -> (what it does as a row of
    `Program.action`, () for none; how often)."""
    lines, action, paths, events = [], [], [], []
    for text, (does, times) in warps.items():
        number = len(lines)
        lines.append(text)
        paths.append([number] * times)
        events.append([len(action) + n if does else -1 for n in range(times)])
        action += [(*does, *[0] * (5 - len(does)))] * (times if does else 0)
    code = function(*lines, "EXIT")
    arrays = instruction_arrays(code)
    last = np.cumsum([len(path) for path in paths]).astype(np.int32)
    first = last - np.array([len(path) for path in paths], np.int32)
    numbers, event = (np.array(sum(of, []), np.int32) for of in (paths, events))
    program = Program(
        numbers, event, first, last, np.zeros(len(paths), np.int32),
        np.array(action or [(0,) * 5], np.int64), np.array([(0, 0, COPY, 0, 0)], np.int64), 1, 1,
    )  # fmt: skip
    names = [(0, warp) for warp in range(len(paths))]
    found = [WarpPath(np.array(p, np.int32), np.array(e, np.int32)) for p, e in zip(paths, events)]
    return replay_program(Compiled(code, arrays, program, names, found, [], {}, []), VALUES)


LOADING = {LOAD: ((), LOADS)}
COPYING = {
    COPY_IN: ((int(Action.TMA_LOAD), 0, 1, COPY), COPIES),
    COPY_OUT: ((int(Action.TMA_STORE), COPY), COPIES),
}


def port(run: Replay) -> int:
    """Clocks that the port was taken for."""
    return int(run.busy[0, BUSY.index("shared memory port")])


def test_loads_of_warps_take_the_port():
    run = replay(LOADING)
    assert port(run) == 4 * LOADS


def test_copies_of_tma_take_nothing_of_the_port():
    """Loads of warps go on at their pace beside copies in and out, as on an H200."""
    alone, beside = replay(LOADING), replay(LOADING | COPYING)
    assert port(beside) == port(alone)
    assert (beside.issued[:LOADS] == alone.issued).all()


def test_a_product_waits_for_the_loads_of_warps_not_for_copies():
    """The port's clocks of its operands are more than its own, so what delays them delays it."""
    product = {PRODUCT: ((int(Action.MMA), 128, 2 * LOADS, 200, 1), 4)}
    alone = replay(product).done.max()
    loading = replay(LOADING | product).done[:4].max()
    assert loading >= alone + 4 * LOADS // 2
    assert replay(LOADING | product | COPYING).done[:4].max() == loading
    assert replay(product | COPYING).done[:4].max() == alone
