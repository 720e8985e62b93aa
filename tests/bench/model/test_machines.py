"""Modelled machines as the simulator passes for them."""

from dataclasses import replace

import pytest

from bench.model import ours
from bench.model.calls import Kind
from bench.model.machines import simulating, target_of
from fa4_hd256.architectures import ARCHITECTURES
from fa4_hd256.gpus import family
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


@pytest.mark.simulator
def test_ours_is_replayed_as_gpus_of_the_machine_compile_it(monkeypatch):
    """Programs of a 10.3 are those of sm_103a, also where the other ones have been compiled in the
    same process; they are kept apart, and twice the exponentials a clock end the tile sooner."""
    asked = []
    monkeypatch.setattr(ours, "kept", lambda *given: asked.append(given) or [])
    variant = ours.Variant(Kind(True), samples=((256, 1),))
    ptx, programs = {}, {}
    for name in ("b200", "gb300", "gb200", "b300"):
        compiled, _ = ours.call_on(load(name), variant, (256, 1))
        (ptx[name],) = {line for line in compiled.ptx.splitlines() if line.startswith(".target")}
        ours.replays(variant, load(name), 0)
        programs[name] = asked.pop()[0]
    assert ptx["gb300"] == ptx["b300"] and "sm_103a" in ptx["gb300"]
    assert ptx["gb200"] == ptx["b200"] and "sm_100f" in ptx["b200"]
    assert programs["gb300"] == programs["b300"] != programs["b200"] == programs["gb200"]
    b300 = load("b300")
    (there,) = ours.traced(variant, b300)
    (here,) = ours.traced(variant, load("b200"))
    values = [b300.values()]
    assert there.replayed(values).clocks < here.replayed(values).clocks
    # Nothing of it is left for other calls.
    assert family.target(ARCHITECTURES[0]) == ARCHITECTURES[0].targets[0]
