"""wgmma: products of every shape, type and layout against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from sm100_sim.tools.golden import wgmma
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
