"""Compare the timing model with an H200's measurements (lab/micro/hopper_measured.json)."""

import json

import pytest

pytest.importorskip("numba")
pytest.importorskip("triton", reason="its ptxas compiles the kernels for sm_90a")

from lab.micro import hopper_cubins, hopper_kernels
from lab.model.hopper import single_kernels as modelled
from sm100_sim.timing import load, replay_program

MEASURED = json.loads(hopper_cubins.MEASUREMENTS.read_text())
VALUES = load(modelled.GPU).values()._replace(sms=1.0)


def test_every_kernel_has_been_measured():
    names = [kernel.name for kernel in hopper_cubins.kernels()]
    assert len(set(names)) == len(names) and set(names) == set(MEASURED["rounds"])


@pytest.mark.parametrize(
    "name",
    ["exp2, 4 warps", "softmax mix, 4 warps", "shared loads, 16 bytes, one address",
     "shared loads, 8 bytes, lanes 16 apart share", "bulk load of 131072 bytes", "CuTe DSL",
     "release arrive, peer; 8 own stores", "release arrive, peer; bulk loads, 4 KB in flight",
     "relaxed arrive, peer; bulk loads, 4 KB in flight", "fence.acq_rel.cluster; idle",
     "async fence and relaxed arrive, peer; 8 own stores"],
)  # fmt: skip
@pytest.mark.sampled("CuTe DSL")
def test_modelled_within_a_tenth_of_measured(name):
    kernel = next(k for k in hopper_cubins.kernels() if k.name.startswith(name))
    assert kernel.sets == ""
    compiled = modelled.program_of(kernel)
    assert compiled.unmatched == 0
    clocks = modelled.round_clocks(compiled, replay_program(compiled, VALUES))
    assert clocks == pytest.approx(MEASURED["rounds"][kernel.name], rel=0.1)


def test_a_release_without_its_fence_costs_as_much_as_a_relaxed_arrival():
    release, relaxed = (
        next(k for k in hopper_cubins.kernels() if k.name == f"{kind} arrive, peer; 8 own stores")
        for kind in ("release", "relaxed")
    )
    compiled, other = modelled.program_of(release), modelled.program_of(relaxed)
    fenceless = compiled.without_fences()
    # One a round, and those of the two cluster barriers in each warp.
    assert compiled.fences.sum() == hopper_kernels.ROUNDS + 4 and not fenceless.fences.any()
    found, expected = (
        modelled.round_clocks(one, replay_program(one, VALUES)) for one in (fenceless, other)
    )
    assert found == pytest.approx(expected, rel=0.1)


def _round_clocks(stored, values):
    """Return the clocks of a bulk load of 64 KiB behind so many bytes of bulk stores on one SM."""
    copy = "cp.async.bulk.global.shared::cta.bulk_group"
    stores = "".join(
        f"@%leader {copy} [%buf+{131072 + i}], [%addr+{65536 + i}], 16384;\n"
        for i in range(0, stored, 16384)
    )
    stores += "@%leader cp.async.bulk.commit_group;\n" if stored else ""
    kernel = hopper_kernels._bulk_load(65536)
    body = kernel.ptx.replace("LOOP:\n", f"LOOP:\n{stores}")
    end = "\nmov.u64 %end, %clock64;"
    body = body.replace(end, f"\n@%leader cp.async.bulk.wait_group 0;{end}")
    kernel = hopper_kernels.Kernel("behind a store", 1, body, 1, "load")
    compiled = modelled.program_of(kernel)
    assert compiled.unmatched == 0
    return modelled.round_clocks(compiled, replay_program(compiled, values))


def test_a_load_waits_for_the_stores_before_it():
    """Behind 16 and 64 KiB of stores a load comes 582 and 2,047 clocks later
    (lab/micro/whole_gpu_measured.json)."""
    alone = _round_clocks(0, VALUES)
    for stored, later in ((16, 582), (64, 2047)):
        found = _round_clocks(stored << 10, VALUES) - alone
        assert found == pytest.approx(later, abs=100)
    # Out of order the store alone, 2,048 clocks, is what a round takes.
    free = _round_clocks(64 << 10, VALUES._replace(tma_in_order=0.0))
    assert free == pytest.approx(2048, rel=0.01) and free < alone + found - 900
