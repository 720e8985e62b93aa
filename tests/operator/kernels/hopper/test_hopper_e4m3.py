"""Hopper's decode kernel for keys and values in e4m3: its machine code and its plans.

What calls get from it is in tests/operator/cache/test_e4m3.py.
"""

from __future__ import annotations

import pytest

from fa4_hd256.kernels.hopper.decode.config import E4m3WarpPlan

pytestmark = pytest.mark.simulator


@pytest.mark.parametrize(
    ("plan", "named"),
    [({"consumers": (0, 1, 2, 3)}, "consumers is"), ({"queries": 8}, "queries 8; accepted"),
     ({"load": 12}, "load 12"), ({"scheduler": 3}, "scheduler 3")],
    ids=str,
)  # fmt: skip
def test_plans_whose_warps_could_not_do_it_are_refused(plan, named):
    with pytest.raises(ValueError, match=named):
        E4m3WarpPlan(**plan)
    assert E4m3WarpPlan(load=10, queries=8).scheduled_warps == 11
