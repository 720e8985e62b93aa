"""Loops of small listings."""

from sass_listing import function

from sm100_sim.timing.machine_code.loops import LoopNest


def listing(text: str) -> LoopNest:
    """The loops of a function from lines `label:` or instructions."""
    return LoopNest(function(*[line.strip() for line in text.strip().splitlines()]))


# The blocks stand out of order on purpose: the loop's middle is after its end, and the slow path
# of the wait is after EXIT.
LOOP = """
    MOV R1, R2
    .head:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R4+URZ], R5
    @!P0 BRA `(.slow)
    .taken:
    LDTM.x32 R4, tmem[UR4]
    BRA `(.middle)
    .latch:
    STTM.x16 tmem[UR4], R8
    BRA.U !UP1, `(.head)
    EXIT
    .middle:
    @P1 BRA `(.latch)
    FFMA2 R4, R4, R6, R8
    FFMA2 R4, R4, R6, R8
    BRA `(.latch)
    .slow:
    MOV R5, R4
    .poll:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R4+URZ], R5
    @!P0 BRA `(.poll)
    BRA `(.taken)
"""


def test_a_loop_is_found_by_its_back_edge():
    loops = listing(LOOP)
    assert len(loops.loops) == 2, "the loop and the polling inside it"
    (loop,) = loops.working_loops
    path = [instruction.base for instruction in loops.straight_path(loop)]
    # The polling is left out, the skippable FFMA2 are not.
    assert path == [
        "SYNCS", "BRA", "LDTM", "BRA", "BRA", "FFMA2", "FFMA2", "BRA", "STTM", "BRA",
    ]  # fmt: skip
    inside = {i.base for index in loop.blocks for i in loops.instructions_of(index)}
    assert "EXIT" not in inside


def test_an_outer_loop_is_not_innermost():
    loops = listing(
        """
        .outer:
        LDTM.x32 R4, tmem[UR4]
        .inner:
        MUFU.EX2 R4, R4
        @P0 BRA `(.inner)
        @P1 BRA `(.outer)
        EXIT
        """
    )
    assert len(loops.loops) == 2
    (loop,) = loops.working_loops
    assert [i.base for i in loops.straight_path(loop)] == ["MUFU", "BRA"]
