"""Compilation results of our backward kernels and of flash-attn-4's.

What it reports of each kernel, and what each executes for one unit of 256 queries x 128 keys: both
projects run in the simulator on the same problem (bf16, batch 1, one head, full attention), and
everything is divided by its units, prologue and epilogue included.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

import sm100_sim
from bench.peers import flash_attn_4
from fa4_hd256 import BackwardConfig, flash_attn_func
from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.chunks import divide
from fa4_hd256.call.operator_arguments import BackwardTensors
from fa4_hd256.call.options import Options
from fa4_hd256.check.single_kernels import run_backward
from fa4_hd256.gpus.devices import gpu_of
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.run.backward import Wanted
from fa4_hd256.run.catalogue import backward_specs
from fa4_hd256.run.compile import compile_kernel
from fa4_hd256.run.resources import resource_usage
from lab.compiled.compiled_forward import OURS
from lab.compiled.instruction_classes import kernel_code
from sm100_sim import LaunchConfig, Report, attached

UNIT_Q, UNIT_KV = 256, 128
#: Long enough for steady loops, short enough to run in seconds.
SEQLEN = 1024
#: The last two are the first choice of ours: dS is stored, and dK and dQ are products of it.
KERNELS = ("preprocess", "dQ", "dK/dV", "dV and dS", "dK and dQ from dS")
#: Those that flash-attn-4 has, too.
THEIRS = KERNELS[:3]
_ALLOC = re.compile(r"tcgen05\.alloc[^;]*,\s*(%\w+|\d+);")


@dataclass(frozen=True)
class BackwardReport:
    """One compiled kernel and a run of it.

    registers: per thread, at launch. stack, local: bytes per thread. spills: instructions that load
    or store local memory. smem_bytes: dynamic, of one CTA. tmem_columns: allocated, 0 for none.
    instructions: in the code. executed, mmas, load_bytes, store_bytes: of a unit; executed in
    instructions of a warp, bytes moved by TMA.
    """

    project: str
    kernel: str
    registers: int
    stack: int
    local: int
    spills: int
    smem_bytes: int
    tmem_columns: int
    instructions: int
    executed: float
    mmas: float
    load_bytes: float
    store_bytes: float


def tmem_columns(ptx: str) -> int:
    """The columns that a kernel's tcgen05.alloc requests, 0 if it has none.

    Raises ValueError where they are not a constant.
    """
    found = _ALLOC.search(ptx)
    if not found:
        return 0
    operand = found[1]
    constants = [operand] if operand.isdigit() else re.findall(
        rf"mov\.[bus]32\s+{re.escape(operand)}, (\d+);", ptx
    )  # fmt: skip
    if len(set(constants)) != 1:
        raise ValueError(f"tcgen05.alloc takes its columns from {operand}, which is no constant")
    return int(constants[0])


def kernel_of(report: Report) -> str | None:
    """Return which of KERNELS a launch of either project was, None for another one."""
    name = report.kernel.lower()
    if "preprocess" in name:
        return "preprocess"
    if "dkdv" in name:
        return "dK/dV"
    if "backwarddv" in name:
        return "dV and dS"
    if "backwardproducts" in name:
        return "dK and dQ from dS"
    is_backward = "backward" in name or "fmha_ba" in name
    return "dQ" if is_backward and report.warps("tcgen05.mma") else None


def _describe(
    project: str, code: tuple[str, bytes, str], report: Report, units: float
) -> BackwardReport:
    """code: PTX, cubin and the kernel's name in them."""
    ptx, cubin, name = code
    usage, instructions = resource_usage(cubin, name), kernel_code(cubin, name).instructions
    return BackwardReport(
        project, kernel_of(report) or name, usage.registers, usage.stack, usage.local,
        sum(i.base in ("LDL", "STL") for i in instructions), report.dynamic_smem,
        tmem_columns(ptx), len(instructions), report.warp_instructions / units,
        report.warps("tcgen05.mma") / units, report.tma["load_bytes"] / units,
        report.tma["store_bytes"] / units,
    )  # fmt: skip


def _units(seqlen: int) -> float:
    return -(-seqlen // UNIT_Q) * -(-seqlen // UNIT_KV)


def our_reports(seqlen: int = SEQLEN) -> Iterator[BackwardReport]:
    """Yield our kernels, each once, by the static scheduler: where dS is not stored, and where it
    is."""
    q, k, v, dout = (torch.randn(1, seqlen, 1, HEAD_DIM).bfloat16() for _ in range(4))
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    tensors = BackwardTensors(dout, None, q, k, v, out, lse)
    options = Options.check(None, False, (None, None), 0.0, False)
    problem = BackwardProblem.describe(tensors, options)
    known = set()
    for config in (BackwardConfig(ds_bytes=0), BackwardConfig()):
        run_backward(tensors, problem, Wanted(), config)
        kept = divide(problem, config.ds_bytes, gpu_of(q.device)).problem
        specs = backward_specs(kept, config).values()
        reports = sm100_sim.last_reports()[-len(specs) :]
        for spec, report in zip(specs, reports, strict=True):
            if kernel_of(report) in known:
                continue
            known.add(kernel_of(report))
            kernel = compile_kernel(spec)
            code = kernel.ptx, kernel.cubin, report.kernel
            yield _describe(OURS, code, report, _units(seqlen))


def their_reports(seqlen: int = SEQLEN) -> list[BackwardReport]:
    """flash-attn-4's kernels, as its interface chooses them; RuntimeError if not installed."""
    reason = flash_attn_4.unavailable()
    if reason:
        raise RuntimeError(reason)
    found = []

    def observe(config: LaunchConfig, report: Report) -> None:
        if kernel_of(report):
            code = config.ptx, config.cubin, config.kernel_name
            found.append(_describe(flash_attn_4.PACKAGE, code, report, _units(seqlen)))

    with attached(observe=observe), warnings.catch_warnings():
        # flash-attn-4 is older than the DSL it runs on here.
        warnings.simplefilter("ignore")
        shape = (1, seqlen, 1, HEAD_DIM)
        q, k, v = (
            torch.randn(shape, dtype=torch.bfloat16, device="cuda").requires_grad_()
            for _ in range(3)
        )
        out = flash_attn_4.attention(q, k, v)
        out.backward(torch.randn_like(out))
    return found


def measure(seqlen: int = SEQLEN) -> Iterator[BackwardReport]:
    """Yield both projects' kernels; flash-attn-4's are left out if it is not installed."""
    yield from our_reports(seqlen)
    if not flash_attn_4.unavailable():
        yield from their_reports(seqlen)


def count() -> int:
    """Return how many kernels `measure` yields."""
    return len(KERNELS) + (0 if flash_attn_4.unavailable() else len(THEIRS))


def in_order(reports: Iterable[BackwardReport]) -> list[BackwardReport]:
    """Return the reports in the order of `KERNELS`, of each kernel ours first."""
    return sorted(
        reports, key=lambda report: (KERNELS.index(report.kernel), report.project != OURS)
    )
