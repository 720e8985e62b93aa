"""Configuration, plans and edges: budgets are derived and checked."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from fa4_hd256.call import named_configs
from fa4_hd256.kernels.blackwell.architecture import KERNELS
from fa4_hd256.kernels.blackwell.backward.config import BackwardConfig, DkdvPlan, DvPlan
from fa4_hd256.kernels.blackwell.forward.config import (
    TWO_GROUPS,
    E4m3ForwardConfig,
    ForwardConfig,
    ForwardWarpPlan,
)
from fa4_hd256.kernels.blackwell.forward.context import LoadRings
from fa4_hd256.kernels.limits import SMEM_CAPACITY
from fa4_hd256.kernels.plan.budgets import SmemPlan, SmemRegion, TmemPlan, TmemRegion
from fa4_hd256.kernels.plan.edges import Edge, EdgeTable, RingRecord, Signal
from fa4_hd256.softmax_emu.pattern import Ex2Pattern


def test_smem_fits_and_regions_follow_each_other():
    plan = ForwardConfig().smem
    end = 0
    for region in plan.regions:
        offset = plan.offsets()[region.name]
        assert offset >= end and offset % region.alignment == 0
        end = offset + region.num_bytes
    assert plan.num_bytes == end <= SMEM_CAPACITY


def test_tmem_is_used_completely():
    plan = ForwardConfig().tmem
    owned = [r for r in plan.regions if r.alias_of is None]
    assert sum(r.columns for r in owned) == plan.allocated_columns == 512


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"q_stages": 1}, "needs 2"),
        ({"kv_stages": 2}, "at least 3"),
        ({"kv_stages": 4}, "shared memory"),
        ({"rescale_threshold": 16.0}, "0 to 15"),
        ({"rescale_threshold": -1.0}, "0 to 15"),
        ({"warps": TWO_GROUPS}, "has 8 warps; accepted are 4 in 16 bits, and 8 in e4m3"),
    ],
)
def test_what_the_configuration_refuses(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        ForwardConfig(**options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"ex2_pattern": Ex2Pattern(32, 4)}, "ex2_emu_freq 32; accepted in e4m3 are 0 to 16"),
        ({"warps": ForwardWarpPlan()}, "has 4 warps; accepted are 4 in 16 bits, and 8 in e4m3"),
        ({"rescale_threshold": 5.0}, "0 to 4"),
    ],
)
def test_what_the_configuration_of_e4m3_refuses(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        E4m3ForwardConfig(**options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"registers_softmax": 236}, "multiples of 8"),
        ({"registers_softmax": 256, "registers_correction": 256}, "launched with 64512"),
    ],
)
def test_what_the_warp_plan_refuses(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        ForwardWarpPlan(**options)


@pytest.mark.parametrize(
    "config",
    [
        ForwardConfig(
            ex2_pattern=Ex2Pattern(16, 4, degree=4), warps=ForwardWarpPlan(registers_other=96)
        ),
        BackwardConfig(ex2_pattern=Ex2Pattern(4, 2), dkdv=DkdvPlan(ring_stages=3), ds_bytes=0),
    ],
)
def test_names_say_everything(config):
    """A graph that holds a name may run in a process that never saw the configuration."""
    kind = type(config)
    named_configs.decode.cache_clear()
    assert named_configs.decode(named_configs.encode(config, kind), kind) == config


def test_names_say_of_which_class_a_configuration_is():
    kinds = KERNELS.configs("forward")
    for kind in kinds:
        assert named_configs.decode(named_configs.encode(kind(), *kinds), *kinds) == kind()


@pytest.mark.parametrize("equal", [
    {"ring_stages": 6.0}, {"ring_stages": np.int64(6)},
    {"warps": replace(DvPlan().warps, gradient=(0.0, *range(1, 8)))},
], ids=["float", "numpy", "tuple"])  # fmt: skip
def test_equal_configurations_have_one_name(equal):
    """Whichever came first: caches take one for the other, and kernels are made of ints."""
    named_configs._encode.cache_clear()
    config = BackwardConfig(dv=replace(DvPlan(), **equal), ds_bytes=8e9)
    plain = BackwardConfig(ds_bytes=8_000_000_000)
    assert config == plain
    names = [named_configs.encode(given, BackwardConfig) for given in (config, plain)]
    assert names[0] == names[1]
    assert repr(named_configs.decode(names[0], BackwardConfig)) == repr(plain)


@pytest.mark.parametrize("number", [0.5, math.inf, math.nan, True, "8"])
def test_numbers_of_another_kind_are_refused(number):
    with pytest.raises(TypeError, match="ds_bytes is .*; accepted: an int"):
        BackwardConfig(ds_bytes=number)


@pytest.mark.parametrize(
    "name", ["default", "[]", '["ForwardConfig", {"q_stages": 3}]', '["Other", {}]']
)
def test_names_that_name_nothing(name):
    with pytest.raises(ValueError, match="names no ForwardConfig; accepted: the JSON of its"):
        named_configs.decode(name, ForwardConfig)


def test_arrive_counts_are_derived():
    """Commit and TMA signal once; warps of one or both CTAs once each."""
    edges = ForwardConfig().edges
    assert edges["kv_loaded"].arrive_count == edges["s_done"].arrive_count == 1
    assert edges["p_first_done"].arrive_count == edges["o_free"].arrive_count == 8
    assert edges["scale_done"].arrive_count == 4 and edges["q_free"].arrive_count == 1
    # Both CTAs' bytes land on the leader's barrier.
    assert edges["q_loaded"].transaction_bytes == 256 * 256 * 2
    assert edges["kv_loaded"].transaction_bytes == 128 * 256 * 2


def test_plans_refuse_overlap_and_overflow():
    with pytest.raises(ValueError, match="overlaps"):
        TmemPlan((TmemRegion("a", 0, 64), TmemRegion("b", 32, 64)))
    with pytest.raises(ValueError, match="does not lie within"):
        TmemPlan((TmemRegion("a", 0, 64), TmemRegion("p", 32, 64, "a")))
    with pytest.raises(ValueError, match="512"):
        TmemPlan((TmemRegion("a", 480, 64),))
    with pytest.raises(ValueError, match="shared memory"):
        SmemPlan((SmemRegion("a", 1, SMEM_CAPACITY + 1, 16),))


def test_edge_tables_refuse_nonsense():
    edge = Edge("a", 1, Signal.WARPS_CTA, "x", 1, "y", "z")
    with pytest.raises(ValueError, match="unique"):
        EdgeTable((edge, edge))
    with pytest.raises(ValueError, match="transaction bytes"):
        EdgeTable((Edge("b", 1, Signal.TMA_PAIR, "x", 1, "y", "z"),))


def test_rings_of_a_role_take_their_edges_by_name_in_any_order():
    edges = ForwardConfig().edges
    rings = LoadRings.waiting(edges, q="q_free", kv="kv_free")
    assert (rings.kv.stages, rings["q"].stages) == (edges["kv_free"].stages, edges["q_free"].stages)
    with pytest.raises(TypeError, match="kv_free"):
        LoadRings.waiting(edges, "kv_free", "q_free")
    with pytest.raises(TypeError, match="kv"):
        LoadRings.waiting(edges, q="q_free")


def test_no_ring_record_takes_states_by_position():
    for kind in KERNELS.classes:
        KERNELS.kernel(kind)
    records = _subclasses(RingRecord)
    assert LoadRings in records and len(records) > 10
    by_position = [record for record in records if not all(f.kw_only for f in fields(record))]
    assert not by_position


def _subclasses(base: type) -> list[type]:
    own = base.__subclasses__()
    return [*own, *(below for one in own for below in _subclasses(one))]
