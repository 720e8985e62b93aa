"""Test the timing model of attention on an H200: tiles, clocks, rows and a replay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.suite import FORWARD, Case
from lab.model.calls import Kind, default_splits
from lab.model.hopper import attention as model
from lab.model.hopper import rows as hopper_rows
from lab.model.hopper.clocks import MOST_GHZ, Clocks
from lab.model.machines import gpu_of
from lab.model.tiles import forward_tiles
from lab.whole.conditions import Call
from lab.whole.problem import TileCosts

MACHINE = model.hopper()


def case(seqlen, causal=False, heads=(16, 16), **others):
    lengths = ((seqlen, seqlen),) * max(1, 16384 // seqlen)
    return Case("test", lengths, *heads, causal, **others)


def work(case):
    variant = model.forward_variant(case, MACHINE)
    return sum(tile.work for tile in forward_tiles(case, variant.tiling(MACHINE)))


@pytest.mark.parametrize(("seqlen", "keys"), [(512, 64), (4096, 80), (2560, 80)])
def test_tiles_of_full_attention_do_its_flop(seqlen, keys):
    """The tiles' FLOP are the call's, plus those of keys beyond the end in the last step."""
    variant = model.forward_variant(case(seqlen), MACHINE)
    assert variant.keys == keys
    rounded = -(-seqlen // keys) * keys
    flop = case(seqlen).flop(FORWARD) * rounded / seqlen
    assert work(case(seqlen)) * model.WORK_FLOP == pytest.approx(flop)


def test_a_warpgroup_leaves_out_what_its_own_rows_do_not_see():
    """The first warpgroup has one step and the second has two, of 64 keys each, where 128 causal
    rows see 128 keys."""
    (tile,) = forward_tiles(
        Case("test", ((128, 128),), 1, 1, True),
        model.forward_variant(case(512, True), MACHINE).tiling(MACHINE),
    )
    step = 4 * 64 * 64 * 256 / model.WORK_FLOP
    assert tile.work == 3 * step
    both = replace(model.forward_variant(case(512, True), MACHINE).tiling(MACHINE), warpgroups=1)
    (tile,) = forward_tiles(Case("test", ((128, 128),), 1, 1, True), both)
    assert tile.work == 4 * step


def test_packed_heads_and_parts_of_decoding_steps():
    decode = Case("test", ((1, 131072),), 32, 2, False)
    parts = default_splits(decode, gpu_of(MACHINE))
    variant = model.forward_variant(decode, MACHINE, parts)
    assert variant.decodes and variant.splits and parts > 16
    tiles = forward_tiles(decode, replace(variant.tiling(MACHINE), num_splits=parts))
    assert len(tiles) == 2 * parts


def test_the_clock_of_first_launches():
    first = Clocks().first
    assert first(0.69) == 1.705 and first(0.95) == pytest.approx(1.60)
    assert first(0.2) == MOST_GHZ
    assert 1.60 < first(0.9) < 1.705


#: A product and cuDNN's attention, [us, MHz of an SM], of lab/micro/whole_gpu_measured.json.
PRODUCT = {"first": [1387.0, 1600.4], "late": [1658.9, 1331.9]}
ATTENTION = {"first": [5820.65, 1712.85], "late": [6692.9, 1484.4]}


def test_a_product_tells_what_a_flop_costs_a_gpu():
    """The energy of a FLOP is the machine's where the product runs at the machine's sustained
    clock. A GPU with a higher clock in the product has a higher one in attention."""
    product, attention = PRODUCT, ATTENTION
    values, call = MACHINE.values(), times_of(2.0, alone=True)
    own = Clocks.of(product, attention, values)
    assert own.picojoules == pytest.approx(values.mma_picojoules, rel=0.04)
    assert own.product_ghz == pytest.approx(1.60, rel=0.01)
    assert own.attention_ghz == pytest.approx(1.705, rel=0.01)
    us, mhz = product["late"]
    better = Clocks.of(product | {"late": [us / 1.1, mhz * 1.1]}, attention, values)
    ghz = [clocks.for_good(1.6, call, values) for clocks in (own, better)]
    assert ghz[0] < ghz[1] < 1.6


def test_the_clock_for_good_follows_no_clock_of_a_replay():
    clocks = Clocks.of(PRODUCT, ATTENTION, MACHINE.values())
    at = []
    for ghz in (1.4, 1.65):
        machine = model.hopper(ghz=ghz)
        at.append(clocks.for_good(1.6, times_of(2.0, machine, alone=True), machine.values()))
    assert at[0] == pytest.approx(at[1], rel=0.01)


def times_of(rate, machine=MACHINE, alone=False):
    """Return the times of full attention over 16k keys at `rate` clocks per unit of a tile's work.
    alone: return the call itself."""
    problem = case(16384)
    tiling = model.forward_variant(problem, machine).tiling(machine)
    costs = TileCosts(0.0, 0.0, rate)
    calls = model.Kernel("test", tiling, machine.sampled(0), [costs]).calls(problem)
    return calls[0] if alone else model.times(calls, machine)


def test_times_of_a_call():
    """A tile takes two clocks per unit of work, and the power budget lengthens long calls."""
    ideal, slower = times_of(2.0), times_of(2.5)
    # 2,048 tiles on 132 SMs, 16 waves.
    assert ideal.busy == pytest.approx(2048 / (16 * 132), abs=0.01)
    assert slower.busy == pytest.approx(ideal.busy * 0.8, rel=0.01)
    assert ideal.for_good > 1.1 * ideal.seconds
    # A kernel that wastes clocks keeps more of them.
    assert slower.for_good / slower.seconds < ideal.for_good / ideal.seconds
    # A kernel within the power budget keeps its first clock.
    idle = times_of(8.0)
    assert idle.for_good == idle.seconds


def test_q_of_the_next_tile_has_no_buffer_of_its_own():
    """A tile takes a thousand clocks less with Q loaded a tile ahead, which Hopper does not do."""
    problem, costs = case(512), [TileCosts(5000.0, 2000.0, 2.0)]
    tiling = model.forward_variant(problem, MACHINE).tiling(MACHINE)
    clocks = []
    for ahead in (tiling.prefetches, True):
        kernel = model.Kernel("test", replace(tiling, prefetches=ahead), MACHINE.sampled(0), costs)
        clocks.append(model.times(kernel.calls(problem), MACHINE).clocks)
    tiles = 32 * 16 * 4 / 132
    assert (clocks[0] - clocks[1]) / tiles > 1000


def test_flop_of_a_call_are_those_that_the_power_budget_counts():
    problem = case(4096)
    tiling = model.forward_variant(problem, MACHINE).tiling(MACHINE)
    kernel = model.Kernel("test", tiling, MACHINE.sampled(0), [TileCosts(0.0, 0.0, 2.0)])
    call: Call = kernel.calls(problem)[0]
    assert call.flop == pytest.approx(problem.flop(FORWARD) * 4160 / 4096)


def test_rows_have_names_of_their_own_and_all_of_an_h100_are_timed():
    names = [row.name for row in hopper_rows.rows()]
    assert len(set(names)) == len(names)
    measured = hopper_rows.measured()
    assert set(measured) <= set(names)
    timed = {row.name for row in hopper_rows.rows() if row.gpu == "h100" or row.decodes}
    assert timed == {name for name, one in measured.items() if {"us", "first"} & set(one)}


def test_an_unknown_kernel_of_the_backward_is_refused():
    found = model.backward(Kind(False), False, MACHINE, 4096)
    with pytest.raises(ValueError, match="no replay of the Hopper kernel 'dq'"):
        found.costs("dq")


@pytest.mark.simulator
@pytest.mark.sampled
def test_a_step_takes_the_clocks_of_its_products():
    """A step of 80 keys takes two warpgroups 2,560 clocks of the tensor core, and 3 % more between
    products. Calls of 16,384 queries are counted 1 % below the model (lab/docs/timing.md)."""
    variant = model.forward_variant(case(4096), MACHINE)
    (costs,) = model.forward(variant, MACHINE).costs
    assert costs.rate == pytest.approx(2.06, rel=0.01)
    assert 1000 < costs.each < 4000
