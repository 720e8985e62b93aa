"""What `python -m bench mutation` scores: each target launches the kernel that it names."""

from dataclasses import replace

import pytest

from bench.measure import mutation_targets
from bench.measure.mutation_targets import Shape, targets
from sm100_sim.tools import mutants

pytest.importorskip("cutlass")


@pytest.mark.parametrize("wanted", ["DvKernel", "ProductsKernel", "DkdvKernel", "DqKernel"])
def test_kernels_of_the_backward_are_named_as_their_classes(wanted):
    from fa4_hd256.kernels.blackwell.backward import dkdv, dq, dv, products

    known = {name for module in (dkdv, dq, dv, products) for name in vars(module)}
    assert wanted in known
    assert {target.kernels for target in targets().values() if "varlen, causal" in target.name} == {
        "", "DvKernel", "ProductsKernel", "DkdvKernel", "DqKernel"
    }


@pytest.mark.simulator
def test_a_target_that_launches_no_such_kernel_is_an_error(monkeypatch):
    """Both ways, with nothing left out: the collector takes no launch of another name."""
    taken = []
    monkeypatch.setattr(
        mutants.Collector, "take", lambda self, launch: taken.append(launch.config.kernel_name)
    )
    target = replace(targets()["forward, full, static"], shapes=(Shape(300, 256),))
    with pytest.raises(RuntimeError, match="'forward, full, static' launched no kernel"):
        mutation_targets.measure(target)
    assert "ForwardKernel" in taken[0]
