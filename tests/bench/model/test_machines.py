"""Modelled machines as the simulator passes for them."""

from dataclasses import replace

import pytest

from bench.model.machines import simulating, target_of
from sm100_sim import device
from sm100_sim.timing import load, machines


@pytest.mark.parametrize("name", machines())
def test_kernels_are_compiled_for_what_the_machine_says(name):
    if name == "h200":
        with pytest.raises(ValueError, match="sm_90a cannot be run here; accepted are"):
            target_of(load(name))
        return
    # A machine of a file has a name of its own.
    for machine in (load(name), replace(load(name), name="measured")):
        assert target_of(machine) == machine.architecture
        with simulating(machine):
            assert device().target == machine.architecture
