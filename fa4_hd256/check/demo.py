"""`python -m fa4_hd256 demo`: one attention layer of a real model, forward and backward, judged."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from typing import Any

import torch

from .. import progress
from ..call.backward_problem import BackwardCall
from ..call.chunks import divide
from ..call.forward_problem import Problem
from ..call.options import Options
from ..gpus.family import architecture_of, target
from ..kernels.kernel_set import kernels_of
from ..kernels.limits import HEAD_DIM
from ..models import AttentionModel, model_named
from ..run.backward import Wanted, run_backward
from ..run.catalogue import backward_specs, forward_spec
from ..run.compile import CompiledKernel, compile_kernel
from ..run.forward import launch_forward
from ..run.launch import gpu_of
from ..run.resources import resource_usage
from ..softmax_emu.pattern import FRAGMENT_COLUMNS
from . import reference

#: MMAs of every architecture's tensor core.
PRODUCTS = ("tcgen05.mma", "wgmma.mma_async")


def run(model: str, seqlen: int, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Run causal attention in a model's shape; everything the demo prints, as JSON values.

    Raises ValueError for an unknown model, and for CUDA where PyTorch finds no device.
    """
    heads = model_named(model)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but PyTorch finds no CUDA device; accepted here: cpu")
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, seqlen, n, HEAD_DIM, generator=generator).to(device, torch.bfloat16)
        for n in (heads.heads_q, heads.heads_kv, heads.heads_kv)
    )
    # The usual tiles, however few rows there are: the figures below are for these.
    config = kernels_of(architecture_of(q.device)).config("forward")()
    problem = Problem.describe((q, k, v), _options(), config=config)
    compiled = compile_kernel(forward_spec(problem, gpu_of(q.device), config))
    start = time.perf_counter()
    out, lse = launch_forward(config, problem, (q, k, v))
    _synchronise(device)
    seconds = time.perf_counter() - start
    executed = _executed(config) if device == "cpu" else {}
    with progress.step("computing the reference"):
        comparison = reference.compare(out, lse, (q, k, v), causal=True)
    return {
        "model": heads.name,
        "shape": {"batch": 1, "seqlen": seqlen, **_heads(heads), "head_dim": HEAD_DIM},
        "dtype": "bfloat16",
        "causal": True,
        "target": target(problem.kernels.architecture),
        "backend": "simulator" if device == "cpu" else torch.cuda.get_device_name(),
        **asdict(comparison),
        "accurate": comparison.max_error <= 2 * comparison.pytorch_max_error,
        "run_seconds": seconds,
        "compile_seconds": compiled.seconds,
        "compiled_before": compiled.from_disk,
        "pattern_share": _pattern_share(config),
        **_resources(compiled, *_plan_sizes(config)),
        **executed,
        "backward": _run_backward((q, k, v), out, lse, generator),
    }


def _pattern_share(config: Any) -> float:
    """Return the share of a row's score elements that take the polynomial exp2, in whole
    fragments."""
    fragments = -(-config.block_kv // FRAGMENT_COLUMNS)
    return float(config.ex2_pattern.true_share(fragments * FRAGMENT_COLUMNS))


def _options() -> Options:
    """Causal attention, otherwise the defaults of `flash_attn_func`."""
    return Options.check(None, True, (None, None), 0.0).scheduled(None)


def _run_backward(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Gradients for a random gradient of out: their errors, and what each kernel took."""
    device = out.device.type
    dout = torch.randn(out.shape, generator=generator).to(out)
    call = BackwardCall(*inputs, out, lse, dout, dlse=None, sink=None, ragged={})
    problem = call.describe(_options(), None, None)
    config = problem.forward.kernels.config("backward")()
    division = divide(problem, config.ds_bytes, gpu_of(out.device))
    problem = division.problem
    specs = backward_specs(problem, config)
    kernels = [compile_kernel(spec) for spec in specs.values()]
    start = time.perf_counter()
    found = dict(zip("qkv", run_backward(call, problem, Wanted(), config)))
    _synchronise(device)
    seconds = time.perf_counter() - start
    executed: list[dict[str, Any]] = [{}] * len(specs)
    if device == "cpu":
        executed = _executed_backward(len(division.chunks), problem.sums)
    with progress.step("computing the reference of the gradients"):
        compared = reference.compare_gradients(found, inputs, dout, causal=True)
    return {
        "gradients": {f"d{name}": asdict(comparison) for name, comparison in compared.items()},
        "accurate": all(c.max_error <= c.tolerance for c in compared.values()),
        "head_parts": problem.head_parts,
        "kernels": {
            name: {**_resources(kernel, *_plan_sizes(getattr(config, name, None))), **counts}
            for name, kernel, counts in zip(specs, kernels, executed, strict=True)
        },
        "run_seconds": seconds,
        "compile_seconds": sum(kernel.seconds for kernel in kernels),
        "compiled_before": all(kernel.from_disk for kernel in kernels),
    }


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _plan_sizes(plan: Any) -> tuple[int, int]:
    """Return (SMEM bytes, TMEM columns), 0 where there is none; the preprocess kernel has no
    plan."""
    if plan is None:
        return 0, 0
    tmem = getattr(plan, "tmem", None)
    return plan.smem.num_bytes, 0 if tmem is None else tmem.allocated_columns


def _heads(model: AttentionModel) -> dict[str, int]:
    return {"heads": model.heads_q, "heads_kv": model.heads_kv}


def _resources(compiled: CompiledKernel, smem_bytes: int, tmem_columns: int) -> dict[str, Any]:
    found: dict[str, Any] = {"smem_bytes": smem_bytes, "tmem_columns": tmem_columns}
    usage = resource_usage(compiled.cubin)
    return {
        **found,
        "registers": usage.registers,
        "stack_bytes": usage.stack,
        "local_bytes": usage.local,
    }


def _executed(config: Any) -> dict[str, Any]:
    """Return what the last simulated launch executed, from the simulator's report."""
    import sm100_sim

    report = sm100_sim.last_reports()[-1]
    mma = _products([report])
    scores = config.score_elements(mma)
    # Scores take the flushing form; softmax_emu uses the other one for once-per-row factors.
    hardware = report.opcodes.get("ex2.approx.ftz.f32", {"lanes": 0})["lanes"]
    return {
        "grid": list(report.grid),
        "cluster": list(report.cluster),
        "clusters": math.prod(report.grid) // math.prod(report.cluster),
        "products": mma,
        "mufu_ex2": hardware,
        "score_elements": scores,
        "emulated_share": (scores - hardware) / scores,
        "tma_bytes": sum(report.tma.values()),
        "instructions": {name: counts["warps"] for name, counts in report.instructions.items()},
        "translate_seconds": report.translate_seconds,
    }


def _products(reports: list[Any]) -> int:
    """Instructions of the tensor core that warps executed."""
    return sum(report.warps(name) for report in reports for name in PRODUCTS)


def _executed_backward(rounds: int, sums: bool) -> list[dict[str, Any]]:
    """Return what the last simulated launches executed: preprocess, then the other two interleaved,
    then the sum of parts where there are any."""
    import sm100_sim

    reports = sm100_sim.last_reports()[-1 - 2 * rounds - sums :]
    of_sums = [reports.pop()] if sums else []
    return [
        {
            "grid": list(of_kernel[0].grid),
            "products": _products(of_kernel),
            "mufu_ex2": sum(
                r.opcodes.get("ex2.approx.ftz.f32", {"lanes": 0})["lanes"] for r in of_kernel
            ),
            "tma_bytes": sum(sum(r.tma.values()) for r in of_kernel),
        }
        for of_kernel in (reports[:1], reports[1::2], reports[2::2], of_sums)
        if of_kernel
    ]


def text(result: dict[str, Any]) -> str:
    """The result as the demo prints it."""
    shape = result["shape"]
    lines = [
        f"{result['model']}: causal attention, batch {shape['batch']}, seqlen {shape['seqlen']}, "
        f"{shape['heads']} query and {shape['heads_kv']} key/value heads, head_dim "
        f"{shape['head_dim']}, {result['dtype']}",
        f"  ran on             {result['backend']}"
        + (f": the compiled {result['target']} kernel" if result["backend"] == "simulator" else ""),
        f"  out, max error     {result['max_error']:.3e}   (same-dtype PyTorch: "
        f"{result['pytorch_max_error']:.3e}; accepted up to twice that)",
        f"  out, relative L2   {result['rel_l2']:.3e}",
        f"  LSE, max error     {result['lse_max_error']:.3e} nats",
    ]
    if "grid" in result:
        lines += _executed_text(result)
    lines.append(
        f"  registers          {result['registers']} a thread at launch, "
        f"{result['stack_bytes']} bytes of stack, {result['local_bytes']} of local memory"
    )
    origin = "loaded from the cache in" if result["compiled_before"] else "compiled in"
    return "\n".join(
        [
            *lines,
            f"  SMEM, TMEM         {result['smem_bytes']} bytes, {result['tmem_columns']} columns",
            f"  time               {origin} {result['compile_seconds']:.2f} s, "
            f"run in {result['run_seconds']:.2f} s",
            f"  verdict            {_verdict(result)}",
            *_backward_text(result["backward"]),
        ]
    )


def _verdict(result: dict[str, Any]) -> str:
    return "accurate" if result["accurate"] else "NOT ACCURATE"


def _backward_text(result: dict[str, Any]) -> list[str]:
    lines = ["backward, for a random gradient of out:"]
    for name, errors in result["gradients"].items():
        lines.append(
            f"  {name}, max error      {errors['max_error']:.3e}   (same-dtype PyTorch: "
            f"{errors['pytorch_max_error']:.3e}), relative L2 {errors['rel_l2']:.3e}"
        )
    for name, kernel in result["kernels"].items():
        if "grid" in kernel:
            lines.append(
                f"  {name:18} {kernel['grid'][0]} CTAs, {kernel['products']} products, "
                f"{kernel['mufu_ex2']} MUFU ex2, {kernel['tma_bytes']} bytes by TMA"
            )
        registers = (
            f"{kernel['registers']} registers, {kernel['stack_bytes']} bytes of stack, "
            f"{kernel['local_bytes']} of local memory; "
        )
        lines.append(
            f"  {'':18} {registers}SMEM {kernel['smem_bytes']} bytes, TMEM "
            f"{kernel['tmem_columns']} columns"
        )
    origin = "loaded from the cache in" if result["compiled_before"] else "compiled in"
    return [
        *lines,
        f"  time               {origin} {result['compile_seconds']:.2f} s, "
        f"run in {result['run_seconds']:.2f} s",
        f"  verdict            {_verdict(result)}",
    ]


def _executed_text(result: dict[str, Any]) -> list[str]:
    grid = " x ".join(map(str, result["grid"]))
    cluster = " x ".join(map(str, result["cluster"]))
    return [
        f"  grid               {grid} CTAs in {result['clusters']} clusters of {cluster}",
        f"  products           {result['products']} instructions, "
        f"{result['score_elements']} score elements",
        f"  MUFU ex2           {result['mufu_ex2']} results: {_emulated(result)}",
        f"  TMA                {result['tma_bytes']} bytes",
    ]


def _emulated(result: dict[str, Any]) -> str:
    if not (result["emulated_share"] or result["pattern_share"]):
        return "all score elements"
    return (
        f"{result['emulated_share']:.4%} of the score elements emulated; the pattern's share is "
        f"{result['pattern_share']:.4%}"
    )


def main(arguments: Any) -> int:
    """Run and print; exit status 1 if the error of out is above twice PyTorch's own, or that of a
    gradient above its tolerance (`reference.GradientComparison`)."""
    result = run(arguments.model, arguments.seqlen, arguments.device)
    print(json.dumps(result) if arguments.json else text(result))
    return 0 if result["accurate"] and result["backward"]["accurate"] else 1
