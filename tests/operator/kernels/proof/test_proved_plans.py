"""Plans of default configurations are proved here; any plan is proved before it is compiled."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from fa4_hd256.architectures import ARCHITECTURES
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.problem_class import GradientClass, ProblemClass
from fa4_hd256.kernels.proof import plans
from fa4_hd256.run import building, catalogue

#: Lengths of keys; at least one takes each default of a forward.
LENGTHS = (64, 80, 4096, 32768)


def default_plans(architecture):
    """All plans of configurations that calls get by default, each once."""
    kernels = kernels_of(architecture)
    configs = [
        config() for way in ("forward", "backward") for config in kernels.configs(way)
    ]  # fmt: skip
    for tiles, causal, length, paged in itertools.product(
        kernels.forwards, (False, True), LENGTHS, (False, True)
    ):
        configs.append(config := kernels.tuned(tiles, causal, length, "", paged))
        if paged and kernels.gathering is not None:
            # Hopper's kernel of queries in e4m3 gathers no rows, and says so.
            with contextlib.suppress(NotImplementedError):
                configs.append(kernels.gathering(config))
    return dict.fromkeys(plan for config in configs for plan in kernels.plans_of(config))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, id=f"{architecture.name}-{number}")
        for architecture in ARCHITECTURES
        for number, plan in enumerate(default_plans(architecture))
    ],
)
def test_a_default_plan_drains(plan):
    plan.prove()


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_every_kernel_with_tensor_cores_is_proved(architecture, monkeypatch):
    """`build` proves its configuration before it makes it."""

    def prove(kernels, config):
        raise ValueError(f"proved {config}")

    monkeypatch.setattr(plans, "prove", prove)
    kernels = kernels_of(architecture)
    for kind in kernels.classes:
        gradients, config = kind.startswith("backward"), ForwardConfig()
        problem_class = ProblemClass(torch.bfloat16)
        if gradients:
            problem_class = GradientClass(problem_class)
        with pytest.raises(ValueError, match=r"proved ForwardConfig"):
            building.build(catalogue.KernelSpec(kind, config, problem_class, architecture))
