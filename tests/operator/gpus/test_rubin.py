"""Kernels for Rubin (sm_107a): B200's plans, compiled by CuTe DSL's libraries of CUDA 13.

`make test-rubin` installs these libraries and runs the cases that need them.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass")

from cutlass.base_dsl import version_info

import sm100_sim
from fa4_hd256 import ForwardConfig, flash_attn_func
from fa4_hd256.__main__ import main
from fa4_hd256.architectures import named
from fa4_hd256.check import reference
from fa4_hd256.gpus import family
from fa4_hd256.gpus.simulated import simulated_gpu
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.kernels.small.combine_config import CombineClass, CombineConfig
from fa4_hd256.models import MODELS
from fa4_hd256.run import compile, keys, toolkit
from fa4_hd256.run.ahead.needs import Needs, specs_of
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.kernel_names import name_of
from sm100_sim import devices

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

BLACKWELL = named("sm_100a")
MODEL = MODELS["gemma-1-2b"]
RUBIN = 10, 7
OLDEST = BLACKWELL.toolkits["sm_107a"]
FOUND = version_info.CUDA_VERSION.major, version_info.CUDA_VERSION.minor
SMALL = KernelSpec("forward_combine", CombineConfig(), CombineClass(torch.bfloat16))

compiles = pytest.mark.skipif(
    FOUND < OLDEST,
    reason=f"CuTe DSL's libraries are of CUDA {FOUND[0]}.{FOUND[1]}, and sm_107a needs "
    f"{OLDEST[0]}.{OLDEST[1]}: make test-rubin",
)


@pytest.mark.parametrize(
    ("seen", "target"),
    [([RUBIN], "sm_107a"), ([(10, 0), RUBIN], "sm_100f"), ([(10, 3), RUBIN], "sm_100f")],
)
def test_the_target_of_rubin(seen, target):
    with family.as_if_seen(*seen):
        assert family.target(BLACKWELL) == target


def test_older_libraries_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(version_info, "CUDA_VERSION", SimpleNamespace(major=12, minor=9))
    message = (
        r"kernels for sm_107a need CuTe DSL's libraries of CUDA 13\.4 or newer; those in use are "
        r"of CUDA 12\.9\. Install newer ones: pip install 'nvidia-cutlass-dsl\[cu13\]'"
    )
    with family.as_if_seen(RUBIN), pytest.raises(toolkit.ToolkitError, match=message):
        compile._compile_entry("key", SMALL)


def test_the_command_says_so_in_a_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(version_info, "CUDA_VERSION", SimpleNamespace(major=12, minor=9))
    monkeypatch.setenv("FA4_HD256_CACHE_DIR", str(tmp_path / "cache"))
    words = ["build", "--kernel", name_of(SMALL), "--arch", "sm_107a", "--out", str(tmp_path)]
    assert main(words) == 2
    assert "error: kernels for sm_107a need" in capsys.readouterr().err


def test_kernels_of_other_libraries_have_keys_of_their_own(monkeypatch):
    found = []
    for version in ("", "4.8.1", "4.8.2"):
        monkeypatch.setattr(toolkit, "other_libraries", lambda version=version: version)
        found += [keys.cache_key(SMALL), keys.prebuilt_key(SMALL)]
    assert len(set(found)) == len(found)


@compiles
def test_the_forwards_ptx_is_that_of_the_family():
    """B200's kernel and Rubin's differ in the name of the target, so proofs hold for both."""
    spec, found = KernelSpec("forward", ForwardConfig(), ProblemClass(torch.bfloat16)), []
    for seen, target in (((10, 0), "sm_100f"), (RUBIN, "sm_107a")):
        with family.as_if_seen(seen):
            ptx = compile.compile_kernel(spec).ptx
        assert ptx.count(target) == 1
        found.append(ptx.replace(target, ""))
    assert found[0] == found[1]


def attend(seqlen_q: int, seqlen_k: int, **options):
    generator = torch.Generator().manual_seed(5)
    tensors = tuple(
        torch.randn(1, rows, heads, 256, generator=generator).bfloat16()
        for rows, heads in ((seqlen_q, 2), (seqlen_k, 1), (seqlen_k, 1))
    )
    return tensors, flash_attn_func(*tensors, **options, return_lse=True)


def test_the_familys_binary_runs_where_rubin_is_passed_for(monkeypatch):
    """The simulator's Rubin takes the kernel of B200: its plan, and its exp2."""
    monkeypatch.setenv("SM100_SIM_DEVICE", "rubin")
    tensors, (out, lse) = attend(127, 127, causal=True)
    found = reference.compare(out, lse, tensors, causal=True)
    assert found.max_error <= found.tolerance and found.lse_max_error <= 1e-3, found
    assert simulated_gpu(devices.current()).tuning_name == "Rubin"


@compiles
def test_every_kind_of_kernel_compiles():
    """One of each: what CuTe DSL refuses on a target it refuses by the kind of instruction."""
    needs = Needs(
        uses=("prefill", "decode", "training"), dtypes=(torch.bfloat16, torch.float8_e4m3fn),
        kv_dtypes=(None, torch.float8_e4m3fn, torch.uint8), mxfp8=True,
    )  # fmt: skip
    first = {spec.kind: spec for spec in reversed(specs_of(MODEL, needs, BLACKWELL, "Rubin"))}
    assert kernels_of(BLACKWELL).classes.keys() <= first.keys()
    with family.as_if_seen(RUBIN):
        for kind, spec in first.items():
            assert ".target sm_107a" in compile.compile_kernel(spec).ptx, kind


@compiles
@pytest.mark.parametrize("sanitize", ["0", "1"], ids=["plain", "sanitized"])
@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "clc"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_forward_runs_in_the_simulator(causal, use_clc, sanitize, monkeypatch):
    """300 queries of two heads are three tiles; 523 keys use each buffer of K and V again."""
    monkeypatch.setenv("SM100_SIM_DEVICE", "rubin:4")
    monkeypatch.setenv("SM100_SIM_SANITIZE", sanitize)
    compile.forget()
    with family.as_if_seen(RUBIN):
        tensors, (out, lse) = attend(300, 523, causal=causal, use_clc=use_clc, num_splits=1)
    found = reference.compare(out, lse, tensors, causal=causal)
    assert found.max_error <= found.tolerance and found.lse_max_error <= 1e-3, found
    report = sm100_sim.last_reports()[-1]
    assert "ForwardKernel" in report.kernel and not report.findings
    assert (report.clc["try_cancel"] > 0) == use_clc
    assert {key[1] for key in compile._memory} == {"sm_107a"}
