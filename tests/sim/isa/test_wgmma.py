"""wgmma: products of every shape, type and layout against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from sm100_sim.tools.golden import wgmma
from sm100_sim.tools.golden.replay import replay

pytestmark = pytest.mark.simulator

EXACT = [p for p in wgmma.PRODUCTS if p.values in ("small", "large")]


@pytest.mark.parametrize("options", [{}, {"schedule": "lazy"}, {"seed": 3}], ids=str)
def test_products(options):
    wrong = []
    for product in EXACT:
        (found,) = replay(wgmma.case_of(product), **options)
        if not np.array_equal(found, wgmma.expected(product)):
            wrong.append(product.name)
    assert not wrong
