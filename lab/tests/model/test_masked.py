"""Forwards under a block mask on the timing model: their tiles, and what making a mask takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bench.measure.masks import CASES, Documents, Images, MaskedCase, PrefixLm, Window
from fa4_hd256.integrations.flex_attention import mask_mod_of
from lab.model import masked
from lab.model.machines import B200
from lab.model.tiles import KEYS, ROWS, STEP_WORK, ForwardTiling, Order
from sm100_sim import timing
from sm100_sim.timing import load

PATTERNS = PrefixLm(), Documents(100), Images(), Images(60), Window(100, 4)
TILING = ForwardTiling("dynamic", gpu=B200, order=Order(equal_too=True))
TABLE = Path(__file__).parents[3] / "docs" / "tables" / "masks_h200.md"


def case(pattern, seqlen=1000, heads=(2, 1)):
    return MaskedCase("masks", ((seqlen, seqlen),) * 2, *heads, False, pattern=pattern)


def blocks(seen, rows):
    """seen: (queries, keys) bool. Of each block of rows and of 128 keys its part of `seen`."""
    for begin in range(0, seen.shape[0], rows):
        block = seen[begin : begin + rows]
        yield [block[:, key : key + KEYS] for key in range(0, seen.shape[1], KEYS)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.text)
def test_tiles_are_those_that_somebody_sees(pattern):
    """The dense mask decides: a step of 128 keys for each 256 queries of which one sees one; bits
    where a half of them sees some, or where keys end."""
    one = case(pattern)
    dense = one.dense(torch.device("cpu")).expand(2, -1, -1, -1)[:, 0]
    listed = partial = 0
    for seen in dense:
        for block in blocks(seen, ROWS):
            met = [part for part in block if part.any()]
            listed += len(met)
            partial += sum(
                any(not half.all() or half.shape[1] < KEYS for half in part.split(ROWS // 2))
                for part in met
            )
    found = masked.tiles(one, TILING)
    assert len(found) == 2 * 2 * -(-1000 // ROWS)
    assert sum(tile.work for tile in found) == 2 * listed * STEP_WORK
    assert sum(tile.masked for tile in found) == pytest.approx(2 * partial * STEP_WORK)
    shares = masked.shares(one)
    assert shares == pytest.approx((listed / (2 * 4 * 8), partial / listed))


def measured(direction):
    """Microseconds that making each mask took on an H200, by shape and mask."""
    text = TABLE.read_text()
    (heading,) = re.findall(r"^\| direction.*$", text, re.M)
    column = [cell.strip() for cell in heading.split("|")].index("making the mask (us)")
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > column and cells[1] == direction:
            found[cells[2], cells[4]] = float(cells[column])
    return found


# Forwards are what the constant is the mean of. With gradients long rows take a quarter longer.
@pytest.mark.parametrize(
    ("direction", "least", "most"), [("forward", 0.9, 1.1), ("backward", 0.75, 1.1)]
)
def test_making_a_mask_beside_an_h200s(direction, least, most):
    expected = measured(direction)
    assert len(expected) == len(CASES)
    for one in CASES:
        found = masked.making(one, direction == "backward")
        ratio = found.operations * masked.OPERATION_US / expected[one.shape, one.mask]
        assert least < ratio < most, (one, ratio)


@pytest.mark.sampled
def test_steps_that_see_all_take_no_bits():
    """The kernel does nothing for the bits of a step without any, and waits for none in a step with
    some: numbers and bits are there a step ahead."""
    machine = load("b200")
    found = {}
    for partial in (False, True):
        sample = masked.MaskSample(512, 2048, partial)
        compiled, arguments = masked.call_on(machine, sample, use_clc=True)
        found[partial] = timing.predict(compiled, *arguments, draws=0)[-1]
    assert found[False].clocks < 0.92 * found[True].clocks
    for prediction in found.values():
        assert "global_load" not in prediction.as_text().split("critical path of the whole")[0]


@pytest.mark.sampled
def test_steps_that_see_all_ask_no_function():
    """Full steps take as long as with bits, where a function would take more than a step's MMAs:
    docs/masks.md has what a step with each takes."""
    machine, clocks = load("b200"), {}
    mask_mod = mask_mod_of(CASES[0].mask_mod(torch.device("cpu")))
    for partial in (False, True):
        sample = masked.MaskSample(512, 1024, partial)
        for name, function in (("bits", None), ("function", mask_mod)):
            compiled, arguments = masked.call_on(machine, sample, True, function)
            clocks[name, partial] = timing.predict(compiled, *arguments, draws=0)[-1].clocks
    assert clocks["function", False] < 1.05 * clocks["bits", False]
    assert clocks["function", True] > 1.5 * clocks["bits", True]
