"""`python -m bench host`: what the host does before an eager call returns.

On a GPU: calls like one before, beside PyTorch's SDPA with cuDNN and flash-attn-4. Without one: all
but the launch, in whose place an empty C function stands (`bench.measure.host.stand_in`), on a few
rows, since results on the CPU are filled.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.measure import host
from bench.measure.providers import Inputs
from bench.peers import flash_attn_4
from bench.tables.comparison import OURS
from bench.tables.ready import results
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Table

COLUMNS = (
    Column("call"), Column("provider"), Column("median", "us", ".1f"),
    Column("low", "us", ".1f", "20 %"), Column("high", "us", ".1f", "80 %"),
    Column("loop", "ns", ".1f", "an empty loop"),
)  # fmt: skip
#: Rows of a sequence where there is no GPU.
FEW_ROWS = 2


def measure(chosen: str = "") -> Table:
    """Return the host time of every case with `chosen` in its name, on a GPU beside others. Raises
    ValueError if no case has that in its name."""
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
            _rows(case if on_gpu else case.of_few_rows(FEW_ROWS), device, on_gpu, machine)
            for case in chosen_cases
        )
        found = results(of_cases, len(chosen_cases), COLUMNS, lambda rows: rows, "measuring")
        rows = [row for of_case in found for row in of_case]
    note = (
        "Calls like one before. An empty loop: an iteration of one of Python that does nothing, "
        "between the calls. It takes up to twice as long where another thread has the other half "
        "of the core; only rows in which it takes as long compare. autograd alone: a function in "
        "Python of as many tensors, whose backward launches nothing and returns tensors that are "
        "there before."
    )
    return Table("host", "Host time of an eager call", COLUMNS, rows, (note,))


def _rows(
    case: host.HostCase, device: torch.device, peers: bool, machine: str
) -> list[dict[str, Any]]:
    inputs = host.inputs_of(case, device)
    calls = {OURS: host.our_call(case, inputs)}
    if case.backward:
        calls["autograd alone"] = host.empty_call(inputs)
    if peers and not case.packed and case.page_size is None:
        calls |= _peers(case, inputs)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        found = {name: host.microseconds(case, inputs, call) for name, call in calls.items()}
    origin = {BASIS: "measured", MACHINE: machine}
    return [
        {"call": case.name, "provider": name, **times._asdict()} | origin
        for name, times in found.items()
    ]


def _peers(case: host.HostCase, inputs: Inputs) -> dict[str, Callable[[], torch.Tensor]]:
    """Return others' calls of a dense case, those that are installed and offer it."""
    found: dict[str, Callable[[], torch.Tensor]] = {}
    if case.seqlen_q == case.seqlen_k:
        q, k, v = (t.transpose(1, 2) for t in inputs.leaves)
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": case.heads != case.heads_kv}
        found["SDPA, cuDNN"] = lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, **options
        ).transpose(1, 2)
    if not flash_attn_4.unavailable():
        leaves = inputs.leaves
        found[flash_attn_4.PACKAGE] = lambda: flash_attn_4.attention(*leaves, causal=True)
    return found


def main(arguments: argparse.Namespace) -> int:
    emit(measure(arguments.only), arguments)
    return 0
