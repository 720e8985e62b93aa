"""One binary for every GPU of the family, and one for those with twice the exponentials."""

from __future__ import annotations

import struct

import pytest
import torch
from gpus import gpu

import sm100_sim
from fa4_hd256 import ForwardConfig
from fa4_hd256.architectures import named
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.check.single_kernels import empty_results, launch_values
from fa4_hd256.gpus import family
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.kernels.small.combine_config import CombineClass, CombineConfig
from fa4_hd256.run import compile
from fa4_hd256.run.arguments import CallTensors, call_arguments
from fa4_hd256.run.catalogue import KernelSpec

pytestmark = pytest.mark.architecture("sm_100a")

BLACKWELL = named("sm_100a")


def machine_code(cubin: bytes) -> bytes:
    """The sections .text.* of a 64-bit ELF file, one after the other."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    base = sections[names][4]
    return b"".join(
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in sections
        if cubin[base + name :].startswith(b".text.")
    )


def elf_flags(cubin: bytes) -> int:
    return struct.unpack_from("<I", cubin, 48)[0]


def compiled_for(target: str, spec: KernelSpec, monkeypatch) -> bytes:
    monkeypatch.setattr(family, "target", lambda architecture: target)
    return compile.trace_and_compile(spec).artifacts.CUBIN


@pytest.mark.sampled
def test_the_familys_code_is_that_of_a_b200_alone(monkeypatch):
    """Checks and models of sm_100a hold for the shipped code."""
    spec = KernelSpec("forward", ForwardConfig(), ProblemClass(torch.bfloat16))
    shipped = compile.compile_kernel(spec).cubin
    alone = compiled_for("sm_100a", spec, monkeypatch)
    assert machine_code(shipped) == machine_code(alone)
    assert len(machine_code(shipped)) > 50_000


def test_the_shipped_binary_names_no_single_gpu(monkeypatch):
    """The bit of the ELF header that ties a cubin to one compute capability is not set."""
    one_gpu, shipped = 8, BLACKWELL.targets[0]
    spec = KernelSpec("forward_combine", CombineConfig(), CombineClass(torch.bfloat16))
    flags = {
        target: elf_flags(compiled_for(target, spec, monkeypatch))
        for target in ("sm_100a", "sm_103a", shipped)
    }
    assert flags["sm_100a"] & one_gpu and flags["sm_103a"] & one_gpu
    assert flags[shipped] == flags["sm_100a"] & ~one_gpu


@pytest.mark.parametrize(
    ("seen", "expected"),
    [((), "sm_100f"), (((10, 0),), "sm_100f"), (((10, 3), (10, 3)), "sm_103a"),
     (((10, 0), (10, 3)), "sm_100f")],
)  # fmt: skip
@pytest.mark.sampled("seen0-*", "seen2-*")
def test_the_target_follows_the_gpus_of_the_process(monkeypatch, seen, expected):
    """The cache key follows, too: binaries of one are not taken for those of the other."""
    spec = KernelSpec("forward_combine", CombineConfig(), CombineClass(torch.bfloat16))
    before = compile.cache_key(spec)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: seen[index])
    assert family.target(BLACKWELL) == expected
    assert (compile.cache_key(spec) == before) == (expected == "sm_100f")
    assert f".target {expected}" in str(compile.trace_and_compile(spec).artifacts.PTX)


@pytest.mark.sampled
@pytest.mark.simulator
def test_binaries_for_one_gpu_run_in_the_simulator(monkeypatch):
    """PTX for sm_103a, which ptxas schedules in another way, gives the same bits."""
    q, k, v = (torch.randn(1, n, 1, 256).bfloat16() for n in (200, 130, 130))
    problem = Problem.describe((q, k, v), Options.check(None, True, (None, None), 0.0))
    spec = KernelSpec("forward", ForwardConfig(), problem.problem_class)
    shipped = compile.compile_kernel(spec)
    monkeypatch.setattr(family, "target", lambda architecture: "sm_103a")
    alone = compile.trace_and_compile(spec)
    results = []
    for compiled in (shipped, alone):
        out, lse = empty_results(problem)
        arguments = call_arguments(CallTensors(q, k, v, out, lse), problem, gpu())
        sm100_sim.launch(compiled, *launch_values(arguments))
        results.append((out, lse))
    assert ".target sm_103a" in str(alone.artifacts.PTX)
    assert all(torch.equal(*pair) for pair in zip(*results))
    assert not results[0][0].isnan().any()


@pytest.mark.parametrize("target", BLACKWELL.targets)
@pytest.mark.sampled("sm_100a")
def test_targets_of_the_family_may_be_set(monkeypatch, target):
    monkeypatch.setenv("CUTE_DSL_ARCH", target)
    spec = KernelSpec("forward_combine", CombineConfig(), CombineClass(torch.bfloat16))
    assert f".target {BLACKWELL.targets[0]}" in str(compile.trace_and_compile(spec).artifacts.PTX)
