"""`python -m fa4_hd256 demo`: one attention layer of a real model, forward and backward, judged."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from .. import progress
from ..call.backward_problem import BackwardProblem
from ..call.forward_problem import Problem, forward_use_clc
from ..call.operator_arguments import BackwardTensors, ForwardTensors
from ..call.options import Options
from ..gpus.family import architecture_of, target
from ..kernels.kernel_set import kernels_of
from ..kernels.limits import HEAD_DIM
from ..models import model_named
from ..run.backward import BackwardWork, Wanted, plan_backward
from ..run.catalogue import KernelSpec
from ..run.compile import CompiledKernel, compile_kernel
from ..run.execute import execute
from ..run.forward import plan_described
from ..run.plan import LaunchPlan
from ..run.resources import resource_usage
from ..softmax_emu.pattern import FRAGMENT_COLUMNS
from . import reference

#: MMAs of every architecture's tensor core.
PRODUCTS = ("tcgen05.mma", "wgmma.mma_async")
#: exp2 of scores. Factors that are computed once per row take the form that does not flush.
EX2 = "ex2.approx.ftz.f32"


def run(model: str, seqlen: int, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Run causal attention in a model's shape. Return everything that the demo prints, as JSON
    values. Raises ValueError for an unknown model, and for CUDA where PyTorch finds no device."""
    heads = model_named(model)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but PyTorch finds no CUDA device; accepted here: cpu")
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(1, seqlen, n, HEAD_DIM, generator=generator).to(device, torch.bfloat16)
        for n in (heads.heads_q, heads.heads_kv, heads.heads_kv, heads.heads_q)
    )
    # The usual tiles, however few rows there are: the figures below are for these.
    config = kernels_of(architecture_of(q.device)).config("forward")()
    problem = Problem.describe((q, k, v), _options(), config=config)
    tensors = ForwardTensors(q, k, v)
    (out, lse), measured, kernels = _run(plan_described(problem, tensors), tensors)
    (kernel,) = kernels.values()
    with progress.step("computing the reference"):
        comparison = reference.compare(out, lse, (q, k, v), causal=True)
    return {
        "model": heads.name,
        "shape": {
            "batch": 1,
            "seqlen": seqlen,
            "heads": heads.heads_q,
            "heads_kv": heads.heads_kv,
            "head_dim": HEAD_DIM,
        },
        "dtype": "bfloat16",
        "causal": True,
        "target": target(problem.kernels.architecture),
        "backend": "simulator" if device == "cpu" else torch.cuda.get_device_name(),
        **asdict(comparison),
        "accurate": comparison.max_error <= 2 * comparison.pytorch_max_error,
        **measured,
        "pattern_share": _pattern_share(config),
        **kernel,
        **(_emulation(kernel, config) if "products" in kernel else {}),
        "backward": _run_backward((q, k, v), (out, lse), dout),
    }


def _options() -> Options:
    return Options.check(None, True, (None, None), 0.0, forward_use_clc(None, True))


def _pattern_share(config: Any) -> float:
    """Return the share of a row's scores that take the polynomial exp2, in whole fragments."""
    fragments = -(-config.block_kv // FRAGMENT_COLUMNS)
    return float(config.ex2_pattern.true_share(fragments * FRAGMENT_COLUMNS))


def _emulation(kernel: dict[str, Any], config: Any) -> dict[str, Any]:
    scores = config.score_elements(kernel["products"])
    return {"score_elements": scores, "emulated_share": (scores - kernel["mufu_ex2"]) / scores}


def _run_backward(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
) -> dict[str, Any]:
    """Return the errors of the gradients for dout, and what each kernel used and executed."""
    tensors = BackwardTensors(dout, None, *inputs, *results)
    problem = BackwardProblem.describe(tensors, _options())
    config = problem.forward.kernels.config("backward")()
    work = BackwardWork(tensors, problem, Wanted(), config)
    found, measured, kernels = _run(plan_backward(work, tensors), tensors)
    gradients = dict(zip("qkv", found))
    with progress.step("computing the reference of the gradients"):
        compared = reference.compare_gradients(gradients, inputs, dout, causal=True)
    return {
        "gradients": {f"d{name}": asdict(comparison) for name, comparison in compared.items()},
        "accurate": all(c.max_error <= c.tolerance for c in compared.values()),
        "head_parts": work.divided(None).problem.head_parts,
        "kernels": {kind.removeprefix("backward_"): kernel for kind, kernel in kernels.items()},
        **measured,
    }


def _run(
    plan: LaunchPlan, tensors: Sequence[torch.Tensor | None]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, dict[str, Any]]]:
    """Run a plan. Return its results, the times, and by kind of kernel what it used and executed.
    Only the simulator counts what is executed."""
    compiled = {spec: compile_kernel(spec) for spec in plan.specs}
    start = time.perf_counter()
    results = execute(plan, tensors)
    if plan.device.type == "cuda":
        torch.cuda.synchronize()
    measured = {
        "run_seconds": time.perf_counter() - start,
        "compile_seconds": sum(kernel.seconds for kernel in compiled.values()),
        "compiled_before": all(kernel.from_disk for kernel in compiled.values()),
    }
    kernels = {spec.kind: _resources(spec, kernel) for spec, kernel in compiled.items()}
    if plan.device.type == "cpu":
        import sm100_sim

        reports: dict[str, list[Any]] = {kind: [] for kind in kernels}
        last = sm100_sim.last_reports()[-len(plan.launches) :]
        for launch, report in zip(plan.launches, last, strict=True):
            reports[launch.spec.kind].append(report)
        for kind, of_kernel in reports.items():
            kernels[kind] |= _executed(of_kernel)
    return results, measured, kernels


def _resources(spec: KernelSpec, compiled: CompiledKernel) -> dict[str, Any]:
    plan = getattr(spec.config, "plan", spec.config)
    smem, tmem = getattr(plan, "smem", None), getattr(plan, "tmem", None)
    usage = resource_usage(compiled.cubin)
    return {
        "smem_bytes": 0 if smem is None else smem.num_bytes,
        "tmem_columns": 0 if tmem is None else tmem.allocated_columns,
        "registers": usage.registers,
        "stack_bytes": usage.stack,
        "local_bytes": usage.local,
    }


def _executed(reports: list[Any]) -> dict[str, Any]:
    first = reports[0]
    instructions: dict[str, int] = {}
    for report in reports:
        for name, counts in report.instructions.items():
            instructions[name] = instructions.get(name, 0) + counts["warps"]
    return {
        "grid": list(first.grid),
        "cluster": list(first.cluster),
        "clusters": math.prod(first.grid) // math.prod(first.cluster),
        "products": sum(report.warps(name) for report in reports for name in PRODUCTS),
        "mufu_ex2": sum(report.opcodes.get(EX2, {"lanes": 0})["lanes"] for report in reports),
        "tma_bytes": sum(sum(report.tma.values()) for report in reports),
        "instructions": instructions,
        "translate_seconds": sum(report.translate_seconds for report in reports),
    }


def text(result: dict[str, Any]) -> str:
    shape, backward, is_simulated = result["shape"], result["backward"], "grid" in result
    compiled = f": the compiled {result['target']} kernel" if is_simulated else ""
    executed = []
    if is_simulated:
        grid, cluster = (" x ".join(map(str, result[name])) for name in ("grid", "cluster"))
        executed = [
            f"  grid               {grid} CTAs in {result['clusters']} clusters of {cluster}",
            f"  products           {result['products']} instructions, "
            f"{result['score_elements']} score elements",
            f"  MUFU ex2           {result['mufu_ex2']} results: {_emulated(result)}",
            f"  TMA                {result['tma_bytes']} bytes",
        ]
    lines = [
        f"{result['model']}: causal attention, batch {shape['batch']}, seqlen {shape['seqlen']}, "
        f"{shape['heads']} query and {shape['heads_kv']} key/value heads, head_dim "
        f"{shape['head_dim']}, {result['dtype']}",
        f"  ran on             {result['backend']}{compiled}",
        _errors("out", result),
        f"  LSE, max error     {result['lse_max_error']:.3e} nats",
        *executed,
        f"  resources          {_used(result)}",
        *_ending(result),
        "backward, for a random gradient of out:",
        *(_errors(name, errors) for name, errors in backward["gradients"].items()),
    ]
    for name, kernel in backward["kernels"].items():
        if is_simulated:
            lines.append(
                f"  {name:18} {kernel['grid'][0]} CTAs, {kernel['products']} products, "
                f"{kernel['mufu_ex2']} MUFU ex2, {kernel['tma_bytes']} bytes by TMA"
            )
        lines.append(f"  {'' if is_simulated else name:18} {_used(kernel)}")
    return "\n".join([*lines, *_ending(backward)])


def _errors(name: str, errors: dict[str, Any]) -> str:
    return (
        f"  {name + ', max error':18} {errors['max_error']:.3e}   (same-dtype PyTorch: "
        f"{errors['pytorch_max_error']:.3e}), relative L2 {errors['rel_l2']:.3e}"
    )


def _used(kernel: dict[str, Any]) -> str:
    return (
        f"{kernel['registers']} registers, {kernel['stack_bytes']} bytes of stack, "
        f"{kernel['local_bytes']} of local memory; SMEM {kernel['smem_bytes']} bytes, TMEM "
        f"{kernel['tmem_columns']} columns"
    )


def _ending(result: dict[str, Any]) -> list[str]:
    origin = "loaded from the cache in" if result["compiled_before"] else "compiled in"
    return [
        f"  time               {origin} {result['compile_seconds']:.2f} s, "
        f"run in {result['run_seconds']:.2f} s",
        f"  verdict            {'accurate' if result['accurate'] else 'NOT ACCURATE'}",
    ]


def _emulated(result: dict[str, Any]) -> str:
    if not (result["emulated_share"] or result["pattern_share"]):
        return "all score elements"
    return (
        f"{result['emulated_share']:.4%} of the score elements emulated; the pattern's share is "
        f"{result['pattern_share']:.4%}"
    )


def main(arguments: Any) -> int:
    """Run and print. Return 1 if an error is above its tolerance, else 0."""
    result = run(arguments.model, arguments.seqlen, arguments.device)
    print(json.dumps(result) if arguments.json else text(result))
    return 0 if result["accurate"] and result["backward"]["accurate"] else 1
