"""Resource usage of a cubin's kernel, against NVIDIA's own tool."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess

import pytest
import torch

from fa4_hd256 import ForwardConfig
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.compile import compile_kernel
from fa4_hd256.run.resources import ResourceUsage, resource_usage
from sm100_sim.host.cubin import launch_registers

_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")


@pytest.fixture(scope="module")
def cubin() -> bytes:
    spec = KernelSpec("forward", ForwardConfig(), ProblemClass(torch.bfloat16))
    return compile_kernel(spec).cubin


@pytest.mark.architecture("sm_100a")
def test_figures_are_those_of_cuobjdump(cubin, tmp_path):
    files = importlib.metadata.files("nvidia-cuda-cuobjdump") or []
    (tool,) = [file.locate() for file in files if file.stem == "cuobjdump"]
    (tmp_path / "a.cubin").write_bytes(cubin)
    command = [str(tool), "--dump-resource-usage", str(tmp_path / "a.cubin")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ((name, registers, stack, _, local),) = _USAGE.findall(text)
    usage = ResourceUsage(int(registers), int(stack), int(local))
    assert usage.registers > 0
    assert resource_usage(cubin) == resource_usage(cubin, name) == usage
    assert launch_registers(cubin) == {name: usage.registers}  # the simulator's own reading


@pytest.mark.architecture("sm_100a")
def test_what_is_refused(cubin):
    with pytest.raises(RuntimeError, match="the cubin has no kernel other; it has kernel_"):
        resource_usage(cubin, "other")
    for broken in (b"", b"\x7fELF", b"PTX text", cubin[: len(cubin) // 2]):
        with pytest.raises(RuntimeError, match="does not tell what its kernels use"):
            resource_usage(broken)
