"""`python -m bench host`: what the host does before an eager call returns, by part.

On a GPU: calls that came before and calls on the long way through the operator, beside PyTorch's
SDPA with cuDNN and flash-attn-4. Without one: all but the launch, in whose place an empty C
function stands (`bench.measure.host.stand_in`), on a few rows, since results on the CPU are filled.

With --ragged: the kernels that packed training steps of other lengths each make ready.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.measure import host, ragged
from bench.peers import flash_attn_4
from bench.tables.ready import results
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Table

COLUMNS = (
    Column("call"),
    Column("how"),
    Column("median", "us", ".1f"),
    Column("low", "us", ".1f", "20 %"),
    Column("high", "us", ".1f", "80 %"),
    Column("loop", "ns", ".1f", "an empty loop"),
    Column("parts", "us"),
)

RAGGED_COLUMNS = (
    Column("heads"),
    Column("gradients", title="gradients of"),
    Column("steps"),
    Column("first", title="kernels made ready in step 1"),
    Column("later", title="in the others"),
    Column("compiled", title="of all, compiled"),
    Column("seconds", "s", ".2f", "step 1"),
    Column("step", "ms", ".1f", "a later step, median"),
)
#: (query heads, KV heads, tensors with gradients) of runs: full training and LoRA have all three, a
#: first layer behind frozen embeddings q alone.
RAGGED_CASES = ((16, 8, "qkv"), (16, 2, "qkv"), (16, 8, "q"))

#: Rows of a sequence where there is no GPU.
FEW_ROWS = 2


def measure(chosen: str = "", peers: bool = True) -> Table:
    """Return the host time of every case with `chosen` in its name. peers: beside others, on a GPU.

    Raises ValueError if no case has that in its name.
    """
    chosen_cases = [case for case in host.CASES if chosen in case.name]
    if not chosen_cases:
        names = "; ".join(case.name for case in host.CASES)
        raise ValueError(f"no call has {chosen!r} in its name; there are: {names}")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    machine = torch.cuda.get_device_name(device) if on_gpu else "CPU, launches by a stand-in"
    if not on_gpu:
        # Results are filled there, which other threads are no help with.
        torch.set_num_threads(1)
    with contextlib.nullcontext() if on_gpu else host.stand_in():
        of_cases = (
            _rows(case if on_gpu else case.of_few_rows(FEW_ROWS), device, on_gpu and peers, machine)
            for case in chosen_cases
        )
        found = results(of_cases, len(chosen_cases), COLUMNS, lambda rows: rows, "measuring")
        rows = [row for of_case in found for row in of_case]
    notes = (
        "Parts are timed by themselves, one after the other; those of the long way by clocks "
        "around functions of the package.",
        "An empty loop: an iteration of one of Python that does nothing, between the calls. It "
        "takes up to twice as long where another thread has the other half of the core; only rows "
        "in which it takes as long compare.",
    )
    return Table("host", "Host time of an eager call", COLUMNS, rows, notes)


def _rows(
    case: host.HostCase, device: torch.device, peers: bool, machine: str
) -> list[dict[str, Any]]:
    """Rows of a case, one for each way."""
    tensors = host.Tensors.random(case, device)
    return [
        {
            "call": case.name, "how": how, **times._asdict(),
            "parts": ", ".join(f"{name} {time:.1f}" for name, time in parts.items()) or None,
            BASIS: "measured", MACHINE: machine,
        }
        for how, times, parts in _times(case, tensors, peers)
    ]  # fmt: skip


def _times(
    case: host.HostCase, tensors: host.Tensors, peers: bool
) -> Iterator[tuple[str, host.Times, dict[str, float]]]:
    """Yield (way of the call, its times, its parts)."""
    call = host.our_call(case, tensors)
    call()
    times = host.microseconds(case, tensors, call)
    yield "came before", times, host.parts_of_repeated(case, tensors, call)
    with host.unkept():
        times = host.microseconds(case, tensors, call)
        yield "long way", times, host.parts_of_long_way(case, tensors, call)
    if peers and not case.packed and not case.paged:
        for name, run in _peers(case, tensors).items():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                yield name, host.microseconds(case, tensors, run), {}


def _peers(case: host.HostCase, tensors: host.Tensors) -> dict[str, Callable[[], torch.Tensor]]:
    """Others' calls of a dense case, those that are installed and offer it."""
    (seqlen_q, seqlen_k), (heads, heads_kv) = case.lengths[0], case.heads
    found: dict[str, Callable[[], torch.Tensor]] = {}
    if seqlen_q == seqlen_k or not case.causal:
        q, k, v = (t.transpose(1, 2) for t in (tensors.q, tensors.k, tensors.v))
        options: dict[str, Any] = {"is_causal": case.causal, "enable_gqa": heads != heads_kv}
        found["SDPA, cuDNN"] = lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, **options
        ).transpose(1, 2)
    if not flash_attn_4.unavailable():
        leaves = tensors.q, tensors.k, tensors.v
        found[flash_attn_4.PACKAGE] = lambda: flash_attn_4.attention(*leaves, causal=case.causal)
    return found


def ragged_training(steps: int) -> Table:
    """Return what packed steps of both of Gemma's masks make ready. Raises ValueError without a
    GPU, where nothing is made ready ahead."""
    if steps < 2:
        raise ValueError(f"--ragged is {steps}; accepted: 2 steps or more")
    if not torch.cuda.is_available():
        raise ValueError("--ragged without a CUDA device; accepted: a machine that has one")
    device = torch.device("cuda", torch.cuda.current_device())
    origin = {BASIS: "measured", MACHINE: torch.cuda.get_device_name(device)}
    rows = []
    for heads, heads_kv, gradients in RAGGED_CASES:
        found = ragged.train(steps, (heads, heads_kv), gradients, device)
        rows.append({
            "heads": f"{heads}/{heads_kv}", "gradients": ", ".join(gradients), "steps": steps,
            **found._asdict(), "step": found.step * 1e3, **origin,
        })  # fmt: skip
    notes = (
        "A step: forward and backward of a causal layer and of one with a window of 1,024 keys, "
        f"packed documents of {ragged.MEAN_TOKENS} tokens on average, exponentially distributed, "
        f"{', '.join(map(str, ragged.TOTALS))} in all. Made ready: compiled, or loaded from a "
        "cache or a prebuilt directory. Cases share kernels, so that the first has most.",
    )
    return Table("ragged", "Kernels of packed training steps", RAGGED_COLUMNS, rows, notes)


def main(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if arguments.ragged is not None:
        emit(ragged_training(arguments.ragged), arguments)
        return 0
    emit(measure(arguments.only, not arguments.no_peers), arguments)
    return 0
