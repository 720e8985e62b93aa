"""Modelled machines as the simulator passes for them."""

from dataclasses import replace

import pytest

from fa4_hd256.architectures import ARCHITECTURES
from fa4_hd256.gpus import family
from fa4_hd256.kernels.limits import ELEMENT_BYTES, HEAD_DIM
from lab.model import ours
from lab.model.calls import Kind
from lab.model.machines import held_at, simulating, target_of
from lab.published.nvidia import DECODE, FROST_BACKWARD, TRAINING
from lab.validation import validation
from sm100_sim import device
from sm100_sim.timing import load, machines


@pytest.mark.parametrize("name", machines())
def test_kernels_are_compiled_for_what_the_machine_says(name):
    # A machine of a file has a name of its own.
    for machine in (load(name), replace(load(name), name="measured")):
        assert target_of(machine) == machine.architecture
        with simulating(machine):
            assert device().target == machine.architecture


@pytest.mark.simulator
@pytest.mark.sampled
def test_ours_is_replayed_as_gpus_of_the_machine_compile_it(monkeypatch):
    """Programs of a 10.3 are those of sm_103a, also where the other ones have been compiled in the
    same process; they are kept apart, and twice the exponentials per clock end the tile sooner."""
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


def test_l2_follows_a_held_clock_in_part():
    """An H200's 377 clocks a hop at 1.98 GHz are 333 at 1.649; what is not L2's keeps its clocks,
    HBM its rate."""
    free = load("b200")
    share = 1.649 / 1.98
    held = held_at(free, free.values().clock_ghz * share)
    before, after = free.values(), held.values()
    assert after.clock_ghz == pytest.approx(before.clock_ghz * share)
    assert after.tma_load_l2 / before.tma_load_l2 == pytest.approx(333 / 377, rel=0.005)
    assert after.l2_bytes_per_clock_sm / before.l2_bytes_per_clock_sm == pytest.approx(
        377 / 333, rel=0.005
    )
    # All of L2 in bytes per second: 8.16 TB/s at 1.814 GHz, 8.38 at 1.979.
    held = held_at(free, before.clock_ghz * 1.8144 / 1.9794).values()
    assert held.l2_terabytes / before.l2_terabytes == pytest.approx(8.163 / 8.383, rel=0.005)
    for name in ("hbm_terabytes", "launch_us", "tmem_load", "barrier_wake", "sms"):
        assert getattr(after, name) == getattr(before, name)
    assert len(held_at(free, 1.2).sampled(8)) == 9
    assert {one.clock_ghz for one in held_at(free, 1.2).sampled(8)} == {1.2}
    assert held_at(free, before.clock_ghz).values() == pytest.approx(before)


def test_an_interface_is_no_wider_at_a_lower_clock():
    widest = load("b200").constants["l2_bytes_per_clock_sm"].high
    assert held_at(load("b200"), 0.3).values().l2_bytes_per_clock_sm == widest


@pytest.mark.parametrize("gpu", ("B200", "GB200", "GB300"))
def test_no_published_decoding_takes_more_from_hbm_than_a_machine_has(gpu):
    """Keys and values are read at least once, and do not lie in L2."""
    rows = [row for row in DECODE if row.gpu == gpu and row.batch == 128]
    assert len({row.machine for row in rows}) == 1
    nbytes = 2 * 128 * 131072 * 2 * HEAD_DIM * ELEMENT_BYTES
    fastest = max(nbytes / row.seconds for row in rows) / 1e12
    hbm = load(rows[0].machine).constants["hbm_terabytes"]
    assert fastest <= hbm.high
    assert fastest == pytest.approx(hbm.value, rel=0.02)


@pytest.mark.parametrize("ghz", (0, -1.0))
def test_no_clock_below_zero(ghz):
    with pytest.raises(ValueError, match="accepted is any clock above 0"):
        held_at(load("b200"), ghz)


def test_a_row_of_a_held_gpu_is_replayed_at_its_clock(monkeypatch):
    """cuDNN's backward at 1155 MHz; other rows of the same GPU at the machine's clock."""
    asked = []

    class Provider:
        name = "recorded"

        def backward(self, variant, machine, draws):
            asked.append(machine.values())

        forward = backward

    monkeypatch.setattr(validation, "_kernels", {})
    free = next(row for row in TRAINING if row.gpu == "GB200")
    for row in (FROST_BACKWARD[0], replace(FROST_BACKWARD[0], clock=free.clock), free):
        validation._replayed(Provider(), row, "variant", 0)
    free_clocks = [load(name).values().clock_ghz for name in ("b200", "gb200")]
    assert [one.clock_ghz for one in asked] == [1.155, *free_clocks]
    assert asked[0].tma_load_l2 == held_at(load("b200"), 1.155).values().tma_load_l2
