"""Targets of `python -m lab mutation`: each launches the kernel that it names."""

import importlib
from dataclasses import replace

import pytest

from lab.measure import mutation_targets
from lab.measure.mutation_targets import Shape, targets
from sm100_sim.tools import mutants

pytest.importorskip("cutlass")


KERNELS = {
    "": ("blackwell.backward", {"DvKernel", "ProductsKernel", "DkdvKernel", "DqKernel"}),
    "Hopper ": (
        "hopper.backward",
        {"DvKernel", "ProductsKernel", "DkKernel", "SingleDvKernel", "DqKernel"},
    ),
}


@pytest.mark.parametrize("architecture", KERNELS)
def test_kernels_of_the_backward_are_named_as_their_classes(architecture):
    folder, wanted = KERNELS[architecture]
    modules = {"DvKernel": "dv", "ProductsKernel": "products", "DkdvKernel": "dkdv"}
    single = "single" if architecture else "dq"
    for name in wanted:
        module = f"fa4_hd256.kernels.{folder}.{modules.get(name, single)}"
        assert hasattr(importlib.import_module(module), name)
    named = {
        target.kernels for target in targets().values()
        if target.name.startswith("Hopper ") == bool(architecture)
        and "forward" not in target.name
    }  # fmt: skip
    assert named == wanted


@pytest.mark.simulator
@pytest.mark.parametrize("name", ["forward, full, static", "Hopper forward, full, static"])
@pytest.mark.sampled("forward, full, static")
def test_a_target_that_launches_no_such_kernel_is_an_error(name, monkeypatch):
    """Both ways, with nothing left out: the collector takes no launch of another name."""
    taken = []
    monkeypatch.setattr(
        mutants.Collector, "take", lambda self, launch: taken.append(launch.config.kernel_name)
    )
    target = replace(targets()[name], shapes=(Shape(300, 256),))
    with pytest.raises(RuntimeError, match=f"'{name}' launched no kernel"):
        mutation_targets.measure(target)
    assert "ForwardKernel" in taken[0] and ("hopper" in taken[0]) == ("Hopper" in name)
