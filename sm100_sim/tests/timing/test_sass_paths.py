"""Control codes, control flow, and the path that a warp's events pick through it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from sass_listing import control, function

from sm100_sim.timing.machine_code.events import ptx_kind, retries, sites
from sm100_sim.timing.machine_code.mixes import FEATURES
from sm100_sim.timing.machine_code.paths import Event, PathFinder
from sm100_sim.timing.machine_code.resources import Latency, Pipe, describe, instruction_arrays
from sm100_sim.timing.machine_code.sass import Control, SassFunction
from sm100_sim.timing.program import executed_fences


def events(*opcodes, mixes=None):
    """Events of a warp; mixes: number -> {feature: count} of the PTX before that event."""
    names = [name for name, *_ in FEATURES]
    found = []
    for number, opcode in enumerate(opcodes):
        mix = np.zeros(len(FEATURES))
        for feature, count in (mixes or {}).get(number, {}).items():
            mix[names.index(feature)] = count
        found.append(Event(ptx_kind(opcode), SimpleNamespace(text=opcode), mix))
    return found


def test_control_code_of_a_known_encoding():
    """LDC R1, c[0x0][0x37c] at the head of every kernel, and a branch that waits for it."""
    load = Control.decode(0x000E620000000800)
    assert (load.stall, load.yields, load.sets, load.frees, load.waits) == (1, False, 1, None, 0)
    branch = Control.decode(0x002FEE0003800000)
    assert (branch.stall, branch.sets, branch.waits) == (7, None, 0b000010)


@pytest.mark.parametrize("stall", [0, 15])
@pytest.mark.parametrize(("sets", "frees", "waits"), [(0, 5, 63), (7, 7, 0)])
def test_control_code_round_trip(stall, sets, frees, waits):
    found = Control.decode(control(stall, sets, frees, waits, True))
    assert found == Control(
        stall, True, None if sets == 7 else sets, None if frees == 7 else frees, waits
    )


def test_a_listing_without_instructions_is_an_error():
    with pytest.raises(ValueError, match="'empty' holds no instruction"):
        SassFunction("empty", [".L_x_0:", "// nothing"])


LOOPS = (
    "UCGABAR_ARV",
    "ISETP.NE.AND P1, PT, R0, RZ, PT",
    "@P1 BRA `(.L_x_2)",
    ".L_x_1:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2",
    "@!P0 BRA `(.L_x_8)",
    ".L_x_3:",
    "LDTM.x32 R4, tmem[UR4]",
    *["SEL R4, R4, R5, P2"] * 4,
    "MUFU.EX2 R4, R4",
    "@P3 BRA `(.L_x_1)",
    ".L_x_2:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2",
    "@!P0 BRA `(.L_x_9)",
    ".L_x_4:",
    "LDTM.x32 R4, tmem[UR4]",
    "MUFU.EX2 R4, R4",
    "@P4 SYNCS.ARRIVE.TRANS64 RZ, [R3], R7",
    "@P3 BRA `(.L_x_2)",
    "EXIT",
    ".L_x_8:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2",
    "@!P0 NANOSLEEP.SYNCS 0x989680",
    "@!P0 SYNCS.PHASECHK.TRANS64 P0, [R1], R2",
    "@!P0 BRA `(.L_x_8)",
    "BRA `(.L_x_3)",
    ".L_x_9:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2",
    "@!P0 NANOSLEEP.SYNCS 0x989680",
    "@!P0 SYNCS.PHASECHK.TRANS64 P0, [R1], R2",
    "@!P0 BRA `(.L_x_9)",
    "BRA `(.L_x_4)",
)
WAIT, LOAD = "mbarrier.try_wait.parity.shared.b64", "tcgen05.ld.sync.aligned.32x32b.x32.b32"
ARRIVE = "mbarrier.arrive.shared.b64"


def executed(path, code):
    return [code.instructions[number].opcode.split(".")[0] for number in path.numbers]


def test_waits_tried_again_are_no_places_to_be():
    code = function(*LOOPS)
    out_of_line = retries(code, sites(code))
    assert len(out_of_line) == 2
    for index in out_of_line:
        block = code.blocks[index]
        opcodes = [i.opcode for i in code.instructions[block.start : block.stop]]
        assert "NANOSLEEP.SYNCS" in opcodes


def test_loop_counts_follow_from_the_events():
    """Masked loop twice, then the other three times: told apart by their selections."""
    code = function(*LOOPS)
    taken = events(
        "barrier.cluster.arrive", *[WAIT, LOAD] * 5,
        mixes={3: {"select": 4, "exp2": 1}, 5: {"select": 4, "exp2": 1}, 7: {"exp2": 1},
               9: {"exp2": 1}},
    )  # fmt: skip
    path = PathFinder(code).find(taken)
    opcodes = executed(path, code)
    assert opcodes.count("SEL") == 8 and opcodes.count("MUFU") == 5
    assert opcodes.count("LDTM") == 5 and opcodes[-1] == "EXIT"
    assert path.unmatched == 0 and path.ambiguous == 0
    assert [int(e) for e in path.event_of if e >= 0] == list(range(11))


def test_same_events_and_no_mix_are_ambiguous():
    """One pass could be either loop, if nothing is known of the arithmetic."""
    code = function(*[line for line in LOOPS if not line.startswith("SEL")])
    finder = PathFinder(code)
    assert finder.find(events("barrier.cluster.arrive", *[WAIT, LOAD] * 2)).ambiguous > 0


def test_arithmetic_moved_in_front_of_an_event_costs_the_path_nothing():
    """ptxas sinks an arrival behind the arithmetic that follows it in the PTX: between the two
    events the right path is ahead of the PTX by all of it."""
    code = function(
        "UCGABAR_ARV",
        "LDTM.x32 R4, tmem[UR4]",
        *["FFMA2 R4, R4, R6, R8"] * 600,
        "BAR.ARV R4, 0x40",
        "STTM.x16 tmem[UR4], R4",
        "EXIT",
    )
    store = "tcgen05.st.sync.aligned.32x32b.x16.b32"
    taken = events(
        "barrier.cluster.arrive", LOAD, "bar.arrive", store, mixes={3: {"packed float": 600}}
    )
    path = PathFinder(code).find(taken)
    assert path.missing_events == {} and path.extra_sites == {}
    assert [int(e) for e in path.event_of if e >= 0] == [0, 1, 2, 3]


STORE = "tcgen05.st.sync.aligned.32x32b.x16.b32"
STORE_WAIT = "tcgen05.wait::st.sync.aligned"
#: Two loops with the same stores and arrivals, the second with a mask: in the first ptxas has moved
#: the second store up over the first arrival.
EXCHANGED = (
    "UCGABAR_ARV",
    "@P1 BRA `(.L_x_2)",
    "LDTM.x32 R4, tmem[UR4]",
    "STTM.x16 tmem[UR4], R4",
    "FENCE.VIEW.ASYNC.T",
    "STTM.x16 tmem[UR4+0x10], R4",
    "SYNCS.ARRIVE.TRANS64 RZ, [R3], R7",
    "FENCE.VIEW.ASYNC.T",
    "SYNCS.ARRIVE.TRANS64 RZ, [R3], R7",
    "EXIT",
    ".L_x_2:",
    "LDTM.x32 R4, tmem[UR4]",
    *["SEL R4, R4, R5, P2"] * 128,
    *["STTM.x16 tmem[UR4], R4", "FENCE.VIEW.ASYNC.T", "SYNCS.ARRIVE.TRANS64 RZ, [R3], R7"] * 2,
    "EXIT",
)


@pytest.mark.parametrize("masked", [False, True])
def test_a_store_that_ptxas_moved_over_an_arrival_is_found(masked):
    """The unmasked loop is not taken for the masked one because its sites stand in another
    order, and nothing of either is left over."""
    code = function(*EXCHANGED)
    mixes = {2: {"select": 128}} if masked else {}
    chunks = [STORE, STORE_WAIT, ARRIVE] * 2
    path = PathFinder(code).find(events("barrier.cluster.arrive", LOAD, *chunks, mixes=mixes))
    assert path.missing_events == {} and path.extra_sites == {}
    assert executed(path, code).count("SEL") == 128 * masked
    order = [0, 1, 2, 3, 4, 5, 6, 7] if masked else [0, 1, 2, 3, 5, 4, 6, 7]
    assert [int(e) for e in path.event_of if e >= 0] == order


def test_events_are_not_exchanged_otherwise():
    """An arrival never stands in front of the wait before it."""
    code = function(
        "UCGABAR_ARV", "SYNCS.ARRIVE.TRANS64 RZ, [R3], R7", "FENCE.VIEW.ASYNC.T", "EXIT"
    )
    path = PathFinder(code).find(events("barrier.cluster.arrive", STORE_WAIT, ARRIVE))
    assert path.unmatched == 2


def test_predicated_site_is_executed_only_with_its_event():
    code = function(*LOOPS)
    path = PathFinder(code).find(events("barrier.cluster.arrive", WAIT, LOAD, ARRIVE))
    assert path.unmatched == 0
    assert [int(e) for e in path.event_of if e >= 0] == [0, 1, 2, 3]


RELEASE = (
    "UCGABAR_ARV",
    "@P1 MEMBAR.ALL.CTA",
    "@P1 MEMBAR.ALL.GPU",
    "@P1 ERRBAR",
    "@P1 SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [UR5], RZ",
    "LDTM.x32 R4, tmem[UR4]",
    "EXIT",
)


@pytest.mark.parametrize("arrives", [True, False])
def test_fence_of_a_release_is_executed_with_its_arrival(arrives):
    code = function(*RELEASE)
    arrival = ["mbarrier.arrive.release.cluster.shared::cluster.b64"] * arrives
    path = PathFinder(code).find(events("barrier.cluster.arrive", *arrival, LOAD))
    assert path.unmatched == 0
    found = executed_fences(path, instruction_arrays(code).action, code)
    assert [code.instructions[path.numbers[place]].opcode for place in found] == (
        ["MEMBAR.ALL.GPU"] * arrives
    )


def test_fence_without_a_predicate_is_executed():
    code = function("UCGABAR_ARV", "MEMBAR.SC.SYS", "MEMBAR.ALL.CTA", "EXIT")
    path = PathFinder(code).find(events("barrier.cluster.arrive"))
    assert executed_fences(path, instruction_arrays(code).action, code) == [1]


def test_event_without_a_site_is_counted():
    code = function(*LOOPS)
    taken = events("barrier.cluster.arrive", "tcgen05.commit.cta_group::1", WAIT, LOAD)
    path = PathFinder(code).find(taken)
    assert path.missing_events == {"commit": 1} and path.unmatched == 1


@pytest.mark.parametrize(
    ("text", "pipe", "interval"),
    [
        ("F2FP.BF16.F32.PACK_AB R0, R1, R2", Pipe.ALU, 2),
        ("MUFU.EX2 R0, R1", Pipe.MUFU, -1),
        ("FFMA2 R0, R2, R4, R6", Pipe.FMA, 2),
        ("FMNMX3 R0, R1, R2, R3, !PT", Pipe.ALU, 2),
        ("IMAD R0, R1, R2, R3", Pipe.FMA, 2),
        ("F2I.U32.TRUNC.NTZ R0, R1", Pipe.MUFU, -1),
    ],
)
def test_pipes(text, pipe, interval):
    found = describe(function(text).instructions[0])
    assert found[:2] == (pipe, interval)


def test_latency_classes():
    assert describe(function("LDTM.x32 R0, tmem[UR4]").instructions[0])[2] == Latency.TMEM_LOAD
    assert describe(function("LDS.128 R0, [R1]").instructions[0])[2] == Latency.SHARED


def test_slow_wait_behind_a_first_try_is_a_place_to_be():
    """A wait whose only try is in the form with pauses: ptxas leaves it so where it is cold."""
    code = function(
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2",
        "@!P0 BRA `(.L_x_9)",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4",
        "@!P0 NANOSLEEP.SYNCS 0x989680",
        "@!P0 SYNCS.PHASECHK.TRANS64 P0, [R3], R4",
        "@P0 BRA `(.L_x_7)",
        ".L_x_8:",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4",
        "@!P0 NANOSLEEP.SYNCS 0x989680",
        "@!P0 BRA `(.L_x_8)",
        ".L_x_7:",
        "EXIT",
        ".L_x_9:",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2",
        "@!P0 NANOSLEEP.SYNCS 0x989680",
        "@!P0 BRA `(.L_x_9)",
        "EXIT",
    )
    path = PathFinder(code).find(events(WAIT, WAIT))
    assert path.unmatched == 0 and executed(path, code).count("SYNCS") == 3


ROUNDS_WITHOUT_SITE = (
    "UCGABAR_ARV",
    ".L_x_1:",
    *["MUFU.EX2 R4, R4"] * 8,
    "@P1 BRA `(.L_x_1)",
    "UCGABAR_WAIT",
    "EXIT",
)


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_rounds_of_a_loop_without_a_site_follow_from_the_mix(rounds):
    """No event tells how often such a loop was gone round; the arithmetic executed does."""
    code = function(*ROUNDS_WITHOUT_SITE)
    first, second = events(
        "barrier.cluster.arrive", "barrier.cluster.wait", mixes={1: {"exp2": 8 * rounds}}
    )
    path = PathFinder(code).find([first, replace(second, repeats=rounds)])
    assert executed(path, code).count("MUFU") == 8 * rounds
    assert path.unmatched == 0


def test_no_round_of_a_loop_where_the_ptx_has_none():
    """Instructions that ptxas has turned into others are no reason to go round a loop."""
    code = function(*ROUNDS_WITHOUT_SITE)
    taken = events("barrier.cluster.arrive", "barrier.cluster.wait", mixes={1: {"exp2": 80}})
    assert executed(PathFinder(code).find(taken), code).count("MUFU") == 8


_PRODUCT = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
_WAIT_GROUP, _WGMMA_FENCE = "wgmma.wait_group.sync.aligned", "wgmma.fence.sync.aligned"


def test_products_of_a_warpgroup():
    """A commit has no instruction of its own; the fence that ptxas adds before the second product,
    and the wait that it drops, leave the path as it is."""
    code = function(
        "WARPGROUP.ARRIVE", "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2", "WARPGROUP.ARRIVE",
        "QGMMA.64x128x32.F32.E4M3.E4M3 R24, R88, gdesc[UR4], R24, gsb0",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0", "EXIT",
    )  # fmt: skip
    assert ptx_kind("wgmma.commit_group.sync.aligned") is None
    ran = events(_WGMMA_FENCE, _PRODUCT, _WAIT_GROUP, WAIT, _PRODUCT, _WAIT_GROUP)
    path = PathFinder(code).find(ran)
    assert path.numbers.tolist() == list(range(7))
    assert path.event_of.tolist() == [0, 1, 3, -1, 4, 5, -1]
