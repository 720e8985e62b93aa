"""Shipped plans are proved here and nowhere else; a user's configuration is proved when made."""

from __future__ import annotations

import subprocess
import sys

import pytest
import shipped_plans

from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.plan import drain
from fa4_hd256.kernels.plan.edges import EdgeTable

PLANS = shipped_plans.shipped_plans()

#: A process that makes every default configuration, and what it proved.
DEFAULTS = """
import fa4_hd256
from fa4_hd256.architectures import ARCHITECTURES
from fa4_hd256.kernels import drain
from fa4_hd256.kernels.kernel_set import kernels_of

fa4_hd256.flash_attn_func, fa4_hd256.flash_attn_varlen_func, fa4_hd256.flash_attn_with_kvcache
for architecture in ARCHITECTURES:
    kernels = kernels_of(architecture)
    for config in (*kernels.configs("forward"), *kernels.configs("backward")):
        config().describe()
print(drain.counters["proved"], drain.counters["shipped"])
"""


@pytest.mark.parametrize("key", PLANS)
def test_a_shipped_plan_drains(key):
    drain.prove_drains.__wrapped__(*PLANS[key])


def test_the_fingerprints_are_those_of_the_shipped_plans():
    assert drain.PROVED.read_text("utf-8") == shipped_plans.text(PLANS), (
        "run `python tests/helpers/shipped_plans.py`"
    )


@pytest.mark.sampled
def test_defaults_are_not_proved_again():
    done = subprocess.run([sys.executable, "-c", DEFAULTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    proved, shipped = map(int, done.stdout.split())
    assert proved == 0 and shipped >= len(PLANS) - 5  # 5 tables: of a backward with slopes


def test_a_users_plan_is_proved_when_it_is_made():
    drain.prove_drains.cache_clear()
    before = drain.counters["proved"]
    ForwardConfig(s_stages=1)
    assert drain.counters["proved"] == before + 1


def test_what_a_fingerprint_holds():
    edges, steps = ForwardConfig().edges, ForwardConfig().steps
    one = drain.fingerprint(edges, steps)
    first, *others = edges.edges
    for change, same in (({"guards": "other words"}, True), ({"producer_warps": 2}, False)):
        changed = EdgeTable((shipped_plans.replace(first, **change), *others))
        assert (drain.fingerprint(changed, steps) == one) is same
    without = shipped_plans.replace(steps, rings=steps.rings[1:])
    assert drain.fingerprint(edges, without) != one
