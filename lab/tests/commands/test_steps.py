"""`lab steps`: clocks of a step and a tile from costs that are known."""

from types import SimpleNamespace

import pytest

from bench.suite import FORWARD
from lab.__main__ import main
from lab.commands import steps
from lab.whole.problem import TileCosts
from sm100_sim.timing import load

#: Central, then of two sets: a step of 2048 takes 2048, 2560 and 2304 clocks.
COSTS = [TileCosts(9.0, 1000.0, 1.0), TileCosts(9.0, 1e-9, 1.25), TileCosts(9.0, 1500.0, 1.125)]


def test_a_row_is_central_least_and_most():
    assert steps.row(COSTS, 2048.0) == {
        "tensor_core": 2048, "step": 2048, "step_low": 2048, "step_high": 2560,
        "boundary": 1000, "boundary_low": 0, "boundary_high": 1500,
    }  # fmt: skip


def test_every_kernel_of_every_provider_has_a_row():
    asked = []

    def backward(provider, case, clc):
        return SimpleNamespace(
            costs=lambda kernel: asked.append((provider, case.causal, clc, kernel)) or COSTS
        )

    predictor = SimpleNamespace(
        machine=load("b200"),
        refuses=lambda *given: None,
        backward=backward,
        forward=lambda provider, case, clc: SimpleNamespace(costs=COSTS),
    )
    found = steps.rows(predictor, ("ours", "FROST"))
    assert [row["provider"] for row in found] == 2 * ["ours"] + 2 * ["FROST"] + 8 * ["ours"] + [
        "FROST"
    ] * 6
    # The scheduler is that of a call, the dynamic one.
    assert [("ours", causal, True, kernel) for kernel in ("dv", "products")
            for causal in (False, True)] == asked[:4]  # fmt: skip
    forward = [row for row in found if row["direction"] == FORWARD]
    assert {row["step_high"] for row in forward} == {2560}
    text = steps.table(found, 2).as_markdown()
    assert "256 keys x 128 queries" in text and "under 2 sets" in text


def test_a_hopper_machine_is_refused(capsys):
    assert main(["steps", "--machine", "h200"]) == 2
    assert "accepted are machines of compute capability 10.x" in capsys.readouterr().err


@pytest.mark.parametrize("provider", ["ours", "flash-attn-4", "FROST"])
def test_units_add_up_to_five_or_seven_products(provider):
    """Tensor-core clocks of 256 queries x 128 keys: 1024 a product."""
    times = {"ours": {"dv": 1, "products": 2, "dkdv": 0, "dq": 0},
             "flash-attn-4": {"dkdv": 1, "dq": 1},
             "FROST": {"main": 2, "dk": 2, "dq": 2}}[provider]  # fmt: skip
    of_pair = sum(
        times[kernel] * clocks for kernel, _, _, clocks in steps.KERNELS[provider, "backward"]
    )
    assert of_pair == (7 if provider == "flash-attn-4" else 5) * 1024
