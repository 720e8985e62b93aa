"""wgmma as an H200 computes it: exact sums, the rule of all others, the simulator beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sm100_sim.tools import golden
from sm100_sim.tools.golden.instructions import tensor_sums, wgmma
from sm100_sim.tools.golden.replay import replay

pytestmark = pytest.mark.simulator

VECTORS = golden.Vectors()
CASES = {case.name: case for case in golden.all_cases()}
EXACT = [p for p in wgmma.PRODUCTS if p.is_exact]
SUMS = [p for p in wgmma.PRODUCTS if not p.is_exact]
_FLOAT = {"f32": np.float32, "f16": np.float16}


def named(product: wgmma.Product) -> golden.Case:
    return CASES[f"wgmma/{product.name}"]


def matrix(product: wgmma.Product, words: np.ndarray) -> np.ndarray:
    """D (64, N) of its registers."""
    found = np.empty((wgmma.ROWS, product.n), _FLOAT[product.d])
    found[wgmma.places_of_d(product)] = words.view(_FLOAT[product.d])
    return found


def by_rule(product: wgmma.Product) -> np.ndarray:
    """Registers of D by the rule."""
    a, b = wgmma.operands(product)
    before = matrix(product, wgmma.start(product)) if product.accumulate else None
    found = tensor_sums.chain(a, b, product.types, product.d, before)
    return np.ascontiguousarray(found[wgmma.places_of_d(product)]).view(np.uint32)


def test_exact_sums_are_those_of_numpy():
    """The simulator equals numpy, too: sm100_sim/tests/isa/test_wgmma.py holds it to the same."""
    wrong = [p.name for p in EXACT if not VECTORS.agrees(named(p), [wgmma.expected(p)])]
    assert len(EXACT) > 120 and not wrong


def test_all_others_follow_the_rule_bit_for_bit():
    wrong = [p.name for p in SUMS if not np.array_equal(by_rule(p), *VECTORS.outputs(named(p)))]
    assert len(SUMS) > 70 and not wrong


@pytest.mark.parametrize("changed", ["_aligned", "_cut"])
def test_another_rule_is_noticed(monkeypatch, changed):
    """One bit more or less where numbers are aligned, or where the sum is cut off."""
    original = getattr(tensor_sums, changed)
    if changed == "_aligned":
        monkeypatch.setattr(
            tensor_sums, changed, lambda number, unit, least: 2 * original(number, unit, least + 1)
        )
    else:
        monkeypatch.setattr(
            tensor_sums,
            changed,
            lambda total, least, bits: original(total, least, bits and bits - 1),
        )
    product = next(p for p in SUMS if p.values == "near" and p.types[0] == "bf16")
    assert not np.array_equal(by_rule(product), *VECTORS.outputs(named(product)))


def scale(product: wgmma.Product) -> np.ndarray:
    """Sum of the sizes of all terms, (64, N)."""
    a, b = (
        np.abs(wgmma.values_of(raw, name))
        for raw, name in zip(wgmma.operands(product), product.types, strict=True)
    )
    found = a @ b.T
    return found + np.abs(matrix(product, wgmma.start(product))) if product.accumulate else found


@pytest.mark.parametrize(
    "product", [p for p in SUMS if p.values == "near"], ids=lambda product: product.name
)
def test_how_far_the_simulator_is(product):
    """The simulator adds in float32; the H200 cuts each term off, at 2^-25 or 2^-13 of the
    largest."""
    (mine,), (recorded,) = replay(named(product)), VECTORS.outputs(named(product))
    difference = np.abs(matrix(product, mine).astype(np.float64) - matrix(product, recorded))
    unit = 2.0**-13 if product.width == 1 else 2.0**-25
    allowed = product.steps * (product.k_of_a_step + 4) * unit * scale(product)
    if product.d == "f16":
        allowed = allowed + product.steps * 2.0**-11 * scale(product)
    assert (difference <= allowed).all()


def test_a_swizzle_goes_by_the_address():
    """Rows that do not start on the pattern: as on the H200, as far as they lie in the CTA."""
    product = wgmma.Product("f32", ("bf16", "bf16"), 16, 1)
    for rows in (1, 2, 4):
        case = CASES[f"wgmma/rules/start {rows} rows on"]
        (mine,), (recorded,) = replay(replace(case, dynamic_smem=4096)), VECTORS.outputs(case)
        same = (matrix(product, mine) == matrix(product, recorded)).all(axis=1)
        assert same[:-rows].all() and not same[-rows:].any()
