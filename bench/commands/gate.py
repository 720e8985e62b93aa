"""`python -m bench gate`: what a sigmoid gate of the result costs, in the kernel and apart.

Without a gate, with `out_gate=` of each element and of each query and head, and with the gate
applied by PyTorch, compiled and eager; the forward alone and with its backward, with a cold and
with a warm L2. All are timed interleaved. What a gate adds is the median over the rounds of its
call's time less that of the call without a gate, so that a change of clock meets both. Needs a CUDA
GPU.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch

from bench.measure.checking import check_forward
from bench.measure.providers import Inputs
from bench.measure.settings import COLD, WARM, Sampling
from bench.measure.time_limit import TimeLimit
from bench.measure.timer import CudaTimer, Samples, interleave_prepared
from bench.suite import BACKWARD, FORWARD, Case
from bench.tables.ready import results
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Table
from fa4_hd256 import flash_attn_func

#: Calls: without a gate; a gate of each element, or of each query and head, in the kernel; one of
#: each element applied by PyTorch, compiled or operation by operation.
NONE, FUSED, OF_HEADS, COMPILED, EAGER = (
    "no gate", "fused", "fused, of heads", "apart, compiled", "apart, eager",
)  # fmt: skip
GATED = FUSED, OF_HEADS, COMPILED, EAGER
#: What is timed: the forward alone, and with its backward.
PASSES = FORWARD, f"{FORWARD} and {BACKWARD}"
#: Attention of Qwen3-Next: sequences x tokens, heads.
CASES = (Case("gates", ((4096, 4096),) * 4, 16, 2, True),)

COLUMNS = (
    Column("passes"), Column("shape"), Column("heads"), Column("l2", title="L2"),
    Column(NONE, "us", ".1f"),
    *(Column(f"{name}: adds", "us", "+.1f") for name in GATED),
    Column("range", title=f"{FUSED}, 20 to 80 %"),
    Column("clock_mhz", "MHz", ".0f", "clock"), Column("power_watts", "W", ".0f", "power"),
    Column("runs"), Column("status"),
)  # fmt: skip

Calls = dict[str, Callable[[], Any]]


def apart(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Apply a gate as transformers' layers do, in bf16."""
    return out * torch.sigmoid(gate)


def calls_of(case: Case, passes: str, device: torch.device) -> tuple[Inputs, torch.Tensor, Calls]:
    """Return the inputs, the gate of each element, and the calls by name, standard normal all."""
    inputs = Inputs.random(case, device, torch.bfloat16)
    generator = torch.Generator(device).manual_seed(1)

    def normal(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    gate, of_heads = normal(inputs.q.shape), normal(inputs.q.shape[:-1])
    compiled = torch.compile(apart, dynamic=False)

    def attention(out_gate: torch.Tensor | None = None) -> torch.Tensor:
        found = flash_attn_func(*inputs.leaves, causal=case.causal, out_gate=out_gate)
        assert isinstance(found, torch.Tensor)
        return found

    forwards: dict[str, tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]] = {
        NONE: (attention, ()),
        FUSED: (lambda: attention(gate), (gate,)),
        OF_HEADS: (lambda: attention(of_heads), (of_heads,)),
        COMPILED: (lambda: compiled(attention(), gate), (gate,)),
        EAGER: (lambda: apart(attention(), gate), (gate,)),
    }
    if passes == FORWARD:
        return inputs, gate, {name: forward for name, (forward, _) in forwards.items()}

    def with_gradients(forward: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> Any:
        for leaf in leaves:
            leaf.requires_grad_()
        return lambda: (out := forward(), *torch.autograd.grad(out, leaves, inputs.dout))

    calls = {
        name: with_gradients(forward, *inputs.leaves, *gates)
        for name, (forward, gates) in forwards.items()
    }
    return inputs, gate, calls


def failure(inputs: Inputs, gate: torch.Tensor, calls: Calls) -> str | None:
    """Return what is wrong with the results, None if nothing is. The call without a gate is
    compared with float64. The fused gate must have that result's values times the sigmoid, up to
    the rounding of both to bf16."""
    results = {name: calls[name]() for name in (NONE, FUSED)}
    plain, fused = (r[0] if isinstance(r, tuple) else r for r in results.values())
    if not (check := check_forward(inputs, plain)).passed:
        return check.failure
    expected = plain.detach().float() * torch.sigmoid(gate.detach().float())
    apart = (fused.detach().float() - expected).abs()
    # Half an ulp of each rounding, and what both kernels' sums of P V may differ by.
    accepted = 2**-7 * expected.abs() * (1 + 2**-7) + 1e-6
    if (wrong := int((apart > accepted).sum())) or not bool(fused.isfinite().all()):
        return (
            f"wrong: {wrong} elements of the gated result are off, the worst by {apart.max():.3g}"
        )
    return None


def measured(
    job: tuple[Case, str], timers: Mapping[str, CudaTimer], sampling: Sampling
) -> list[dict[str, Any]]:
    """Return a row for each timer. job: a case and its passes; timers: by the state of L2."""
    case, passes = job
    with torch.set_grad_enabled(passes != FORWARD):
        first = next(iter(timers.values()))
        with first.on_stream():
            inputs, gate, calls = calls_of(case, passes, first.device)
            reason = failure(inputs, gate, calls)
        rows = []
        for state, timer in timers.items():
            prepared = {} if reason else {name: timer.prepare(calls[name]) for name in calls}
            found = interleave_prepared(timer, prepared, sampling)
            origin = {"passes": passes, "shape": case.shape, "heads": case.heads_text}
            origin |= {"l2": state, BASIS: "measured", MACHINE: timer.gpu.text}
            rows.append(row_of(found, reason) | origin)
            del prepared
            gc.collect()
            timer.release_memory()
    return rows


def row_of(found: dict[str, Samples], reason: str | None) -> dict[str, Any]:
    """Return the figures of interleaved runs, None where the results were wrong."""
    row: dict[str, Any] = dict.fromkeys((c.name for c in COLUMNS), None)
    if reason is not None:
        return row | {"status": reason, "failed": True}
    plain = np.array(found[NONE].seconds)
    row[NONE] = float(np.median(plain)) * 1e6
    for name in GATED:
        added = (np.array(found[name].seconds) - plain) * 1e6
        row[f"{name}: adds"] = float(np.median(added))
        if name == FUSED:
            row["range"] = "{:+.1f} to {:+.1f}".format(*np.quantile(added, (0.2, 0.8)))
    state = found[FUSED].median_state()
    plainly = sorted({s.launch for s in found.values()} - {"graph"})
    return row | {
        "clock_mhz": state.clock_mhz, "power_watts": state.power_watts, "runs": len(plain),
        "status": "; ".join(plainly) or "ok", "failed": False,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> Table:
    note = (
        "Medians of interleaved CUDA graphs. Added: the median over the rounds of a call's time "
        "less that of the call without a gate in the round. Apart: out * sigmoid(gate) in bf16, as "
        "transformers' layers have it. With their gates' gradients, where there is a backward."
    )
    return Table("gate", "Sigmoid gates of attention's result", COLUMNS, rows, (note,))


def main(arguments: argparse.Namespace) -> int:
    """Exit status 1 if a result is wrong."""
    sampling, limit = Sampling(arguments.warmup, arguments.runs), TimeLimit(arguments.within)
    timers = {state: CudaTimer(l2=state) for state in (COLD, WARM)}
    jobs = [(case, one) for one in PASSES for case in CASES]
    begun = (measured(job, timers, sampling) for job in limit.begun(jobs))
    found = results(begun, len(jobs), COLUMNS, lambda rows: rows, "measuring")
    rows = list(chain.from_iterable(found))
    emit(limit.noted(table(rows)), arguments)
    return int(any(row["failed"] for row in rows))
