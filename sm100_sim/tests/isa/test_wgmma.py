"""wgmma: products of every shape, type and layout against numpy; when they happen; refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sm100_sim.errors import SimulationError, UnknownInstruction
from sm100_sim.tools import golden
from sm100_sim.tools.golden.instructions import wgmma
from sm100_sim.tools.golden.replay import replay

pytestmark = pytest.mark.simulator

EXACT = [p for p in wgmma.PRODUCTS if p.is_exact]


@pytest.mark.parametrize(
    ("options", "products"),
    [({}, EXACT), ({"schedule": "lazy"}, EXACT[::5]), ({"seed": 3}, EXACT[2::5])],
    ids=["eager", "lazy", "seed"],
)
def test_products(options, products):
    wrong = []
    for product in products:
        (found,) = replay(wgmma.case_of(product), **options)
        if not np.array_equal(found, wgmma.expected(product)):
            wrong.append(product.name)
    assert not wrong


def named(a: str) -> wgmma.Product:
    """m64n64k16 of bf16 with A in registers or in shared memory, K-major, four instructions."""
    return next(p for p in EXACT if (p.types[0], p.a, p.n, p.steps) == ("bf16", a, 64, 4))


def edited(product: wgmma.Product, old: str, new: str) -> golden.Case:
    case = wgmma.case_of(product)
    assert case.ptx.count(old) >= 1
    return replace(case, ptx=case.ptx.replace(old, new))


COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"


def test_nothing_is_known_to_have_happened_before_the_wait():
    """Accumulators are stored unchanged without the wait, at best but for the warp that is the last
    to issue."""
    product = named("k")
    case = edited(product, WAIT, "")
    (early,), (late,) = replay(case), replay(case, schedule="lazy")
    before, after = wgmma.start(product), wgmma.expected(product)
    done = [np.array_equal(*pair) for pair in zip(np.split(early, 4), np.split(after, 4))]
    untouched = [np.array_equal(*pair) for pair in zip(np.split(early, 4), np.split(before, 4))]
    assert (sum(done), sum(untouched)) == (1, 3)
    assert np.array_equal(late, before)


@pytest.mark.parametrize(
    ("a", "line"),
    [("registers", "mov.b32 %a1, 0;"), ("k", "mov.u32 %s, a;\nst.shared.u32 [%s], 0;"),
     ("k", "mov.u32 %s, b;\nst.shared.u32 [%s+16], 0;")],
    ids=["A in registers", "A in shared memory", "B"],
)  # fmt: skip
def test_operands_are_read_until_the_wait(a, line):
    product = named(a)
    case = edited(product, COMMIT, f"{COMMIT}\n{line}")
    # A register that nobody reads again need not be written.
    later = f"{WAIT}\nmov.u32 %s, b;\nst.shared.u32 [%s], {'%a1' if a == 'registers' else '%s'};"
    (found,) = replay(replace(case, ptx=case.ptx.replace(WAIT, later)), schedule="lazy")
    assert not np.array_equal(found, wgmma.expected(product))
    after = edited(product, WAIT, f"{WAIT}\n{line}")
    for options in ({}, {"schedule": "lazy"}, {"seed": 1}):
        assert np.array_equal(replay(after, **options)[0], wgmma.expected(product))


def test_a_wait_may_leave_later_groups_at_work():
    """Two groups on one accumulator; behind `wait_group 1` the first is in it, or both."""
    product = named("k")
    again = "wgmma.mma_async" + wgmma.case_of(product).ptx.split("wgmma.mma_async")[-1]
    again = again.split(";")[0] + ";\n"
    twice = edited(product, COMMIT, f"{COMMIT}\n{again}{COMMIT}")
    once = replace(twice, ptx=twice.ptx.replace(WAIT, "wgmma.wait_group.sync.aligned 1;"))
    both, (first,) = replay(twice)[0], replay(once, schedule="lazy")
    assert np.array_equal(first, wgmma.expected(product))
    assert not np.array_equal(both, first)
    assert np.array_equal(replay(twice, schedule="lazy")[0], both)
    assert np.array_equal(replay(twice, seed=4)[0], both)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("m64n64k16", "m64n60k16", "found .m64n60k16|shape m64n60k16"),
        ("m64n64k16", "m64n64k8", "shape m64n64k8.*m64nNk16"),
        ("f32.bf16.bf16", "f16.bf16.bf16", "types f16, bf16, bf16.*D f32"),
        ("f32.bf16.bf16", "f32.bf16.f16", "types f32, bf16, f16.*B is bf16"),
        ("wgmma.mma_async.sync", "wgmma.mma_async.sp.sync", "sparse"),
        ("f32.bf16.bf16", "s32.b1.b1.xor.popc", "wgmma.mma_async"),
        (", %sum, 1, 1,", ", %sum, 1, 2,", "imm-scale 2; accepted: 1, -1"),
        ("{%d0, ", "{%d1, ", "a register stands twice in D"),
        ("{%d0, %d1, ", "{%d0, ", "D has 31 registers; n64 of type f32 takes 32"),
        ("wgmma.wait_group.sync.aligned 0", "wgmma.wait_group.sync.aligned %s", "immediate"),
        (COMMIT, "wgmma.commit_group.sync;", "found the end of the opcode|aligned"),
    ],
)  # fmt: skip
def test_forms_that_do_not_exist(old, new, message):
    with pytest.raises(UnknownInstruction, match=message):
        replay(edited(named("k"), old, new))


def test_lanes_that_stay_away():
    """All lanes of a warp, and all warps, execute a wgmma; one alone has no warpgroup."""
    with pytest.raises(SimulationError, match="all threads of a warpgroup|aligned"):
        replay(
            edited(
                named("k"),
                "wgmma.commit_group",
                "setp.lt.u32 %sum, %thread, 100;\n@%sum wgmma.commit_group",
            )
        )
    short = replace(edited(named("k"), ".reqntid 128", ".reqntid 64"), block=64)
    with pytest.raises(SimulationError, match="warps 0 to 3, and the CTA has 2 warps"):
        replay(short)


def test_more_in_a_group_than_native_code_notes():
    """Native code issues in a fixed order of warps, up to 64 at a time; with a seed Python does."""
    product = named("k")
    last = "wgmma.mma_async" + wgmma.case_of(product).ptx.split("wgmma.mma_async")[-1]
    many = edited(product, COMMIT, 70 * (last.split(";")[0] + ";\n") + COMMIT)
    (found,) = replay(many)
    assert np.array_equal(found, replay(many, seed=1)[0])
    assert not np.array_equal(found, wgmma.expected(product))
