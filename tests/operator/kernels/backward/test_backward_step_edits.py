"""Mistakes planted into the code of the backward's load and MMA roles: kernels that still give the
same bits, and whose traces no longer agree with the table of steps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from step_traces import assert_as_declared, attend_backward, edited, steps_of, traced_launches

from fa4_hd256 import BackwardConfig
from fa4_hd256.kernels.blackwell.backward import dkdv, dq, dv, products
from fa4_hd256.kernels.blackwell.backward.config import BackwardWarpPlan
from fa4_hd256.run import building, compile
from fa4_hd256.schedulers import scheduler_class

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

LENGTHS = 600, 300  # of queries and keys
CONFIGS = {"stored": BackwardConfig(), "recomputed": BackwardConfig(ds_bytes=0)}
#: Kernel -> (its module, configuration that takes it, which launch of the backward's two).
KERNELS = {
    "dv": (dv, "stored", 0),
    "products": (products, "stored", 1),
    "dkdv": (dkdv, "recomputed", 0),
    "dq": (dq, "recomputed", 1),
}
#: Registers that no other kernel has, so that none compiled before is taken.
WARPS = BackwardWarpPlan(registers_gradient=208, registers_other=88)
#: Lines of the source -> the same in another order, or without one of them.
EDITS = {
    "dq: dQ before S": {
        """\
                rings = self._s(context, is_last, rings)
                rings = self._dq(context, step, False, rings)
""": """\
                rings = self._dq(context, step, False, rings)
                rings = self._s(context, is_last, rings)
""",
        """\
                rings = self._load_keys(tile_context, work, "k", following_kv_tile, rings)
                rings = self._load_k_columns(tile_context, work, kv_tile, rings)
""": """\
                rings = self._load_k_columns(tile_context, work, kv_tile, rings)
                rings = self._load_keys(tile_context, work, "k", following_kv_tile, rings)
""",
    },
    "dv: statistics before Q": {
        """\
        rings = self._load_rows(context, work, "q", step, rings)
        return self._load_row_stats(context, work, step, rings)
""": """\
        rings = self._load_row_stats(context, work, step, rings)
        return self._load_rows(context, work, "q", step, rings)
""",
    },
    "dkdv: dK before dP": {
        """\
                rings = self._dp(context, is_last, rings)
                rings = self._dk(context, step, False, rings)
""": """\
                rings = self._dk(context, step, False, rings)
                rings = self._dp(context, is_last, rings)
""",
        """\
                rings = self._load_dout(tile_context, work, following_unit, rings)
                rings = self._load_q_columns(tile_context, work, unit, rings)
""": """\
                rings = self._load_q_columns(tile_context, work, unit, rings)
                rings = self._load_dout(tile_context, work, following_unit, rings)
""",
    },
    "products: no wait at the end": {"        sum_free.wait_for_all(rings.sum)\n": ""},
}


def assert_agrees(kernel, report, config, seen):
    """Compare the trace of a kernel with its table.  seen: see `attend`."""
    plan = getattr(config, kernel)
    of_queries = steps_of(seen, 256, 128)[::-1]  # the longest first
    if kernel == "products":
        pairs = itertools.zip_longest(steps_of(seen.T, 256, 128), of_queries)
        tiles = tuple(tile for pair in pairs for tile in pair if tile is not None)
    else:
        of_keys = {"dv": (256, 128), "dkdv": (128, 256)}
        tiles = of_queries if kernel == "dq" else steps_of(seen.T, *of_keys[kernel])
    assert_as_declared(report, plan, tiles)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.sampled
def test_another_order_gives_the_same_bits_and_is_noticed(edit, tmp_path, monkeypatch):
    kernel = edit.partition(":")[0]
    module, name, number = KERNELS[kernel]
    config, kind = CONFIGS[name], f"backward_{kernel}"
    reports = traced_launches(monkeypatch, "b200:2")
    expected, seen = attend_backward(LENGTHS, True, config)
    assert_agrees(kernel, reports[2 + number], config, seen)

    plain, (name,) = building.BUILDERS[kind], module.__all__
    edited_kernel = getattr(edited(module, EDITS[edit], tmp_path, monkeypatch), name)
    monkeypatch.setitem(
        building.BUILDERS,
        kind,
        lambda spec: (
            edited_kernel(
                spec.config,
                spec.problem_class,
                scheduler_class(spec.problem_class.problem.use_clc),
            ),
            plain(spec)[1],
        ),
    )
    monkeypatch.setattr(compile, "lasts", lambda spec: spec.kind != kind)
    reports.clear()
    plan = replace(getattr(config, kernel), warps=WARPS)
    found, _ = attend_backward(LENGTHS, True, replace(config, **{kernel: plan}))
    compile.forget()
    assert all(map(lambda a, b: a.equal(b), found, expected))
    with pytest.raises(AssertionError):
        assert_agrees(kernel, reports[2 + number], config, seen)
