"""A call over caches of several forms, timed interleaved on a GPU: K and V in e4m3 and NVFP4 beside
bf16, in pages beside no pages, and in pages of few rows.

Boxes of TMA are no larger than a page, so that small pages take more instructions for the same
bytes; rows of pages below 16 are gathered. All forms hold the same numbers, and their results are
compared with the same float64 attention before anything is timed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from bench.measure.providers import FlashAttention4, Inputs, Ours, Provider
from bench.measure.settings import Sampling
from bench.measure.throughput import prepared_call
from bench.measure.timer import CudaTimer, Samples, interleave_prepared
from bench.peers.flash_attn_4 import PACKAGE
from bench.suite import FORWARD, Case
from bench.tables.comparison import OURS
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from fa4_hd256.kernels.limits import ELEMENT_BYTES
from fa4_hd256.kernels.nvfp4_format import NVFP4_BLOCK, block_scales_shape
from fa4_hd256.quantize.nvfp4 import dequantize_nvfp4, e2m1_codes

E4M3, BF16, NVFP4 = "e4m3", "bf16", "NVFP4"
#: Bytes of an element, by type of K and V, the scales of its block included.
BYTES: dict[str, float] = {BF16: ELEMENT_BYTES, E4M3: 1, NVFP4: 0.5 + 1 / NVFP4_BLOCK}


class Form(NamedTuple):
    """A cache and who reads it. kv_type: of K and V. size: rows of a page, None for no pages."""

    provider: str
    kv_type: str
    size: int | None


@dataclass(frozen=True)
class CacheCase(Case):
    """A `Case` over caches of all types and sizes; the first of both is what others are beside.
    peer: whether flash-attn-4 stands beside ours."""

    kv_types: tuple[str, ...] = (BF16,)
    sizes: tuple[int | None, ...] = (None,)
    peer: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()}, {' and '.join(self.kv_types)}"

    def of(self, size: int | None) -> Case:
        """Return the call over a cache in pages of a size, None for no pages."""
        lengths, heads = self.lengths, (self.heads, self.heads_kv)
        return Case(self.group, lengths, *heads, self.causal, page_size=size)

    def forms(self, provider: str = OURS) -> list[Form]:
        """Return the forms that a provider reads."""
        return [Form(provider, kv_type, n) for kv_type in self.kv_types for n in self.sizes]

    def name(self, form: Form) -> str:
        """Return the column of a form: what tells it from others of the row."""
        parts = ["theirs"] if form.provider != OURS else []
        parts += [form.kv_type] if len(self.kv_types) > 1 else []
        if len(self.sizes) > 1:
            parts.append("none" if form.size is None else f"pages_{form.size}")
        return "_".join(parts)

    def title(self, form: Form) -> str:
        parts = [form.provider] if form.provider != OURS else []
        parts += [form.kv_type] if len(self.kv_types) > 1 else []
        if len(self.sizes) > 1:
            parts.append("no pages" if form.size is None else f"pages of {form.size}")
        return ", ".join(parts)


def type_cases() -> list[CacheCase]:
    """Return sequences, keys and heads of the decode tables, and 32 of 8,192 keys, over caches of
    all types."""
    shapes = ((128, 131072, (32, 2)), (1, 131072, (32, 2)), (32, 8192, (16, 2)), (8, 8192, (16, 2)))
    return [
        CacheCase("decode", ((queries, keys),) * batch, *heads, True, kv_types=(BF16, E4M3, NVFP4))
        for batch, keys, heads in shapes for queries in (1, 2, 4)
    ]  # fmt: skip


def _paged(batches: tuple[int, ...], queries: tuple[int, ...], **more: Any) -> Iterator[CacheCase]:
    """Yield cases with heads of Qwen3.5."""
    for batch in batches:
        for keys in (8192, 131072):
            for rows in queries:
                yield CacheCase("pages", ((rows, keys),) * batch, 32, 2, True, **more)


def page_cases() -> list[CacheCase]:
    """Return cases in pages of the sizes that engines take, beside flash-attn-4."""
    return list(_paged((1, 128), (1, 2, 4), sizes=(None, 128, 16), peer=True))


def small_page_cases() -> list[CacheCase]:
    """Return cases in pages of few rows, over caches of either type. Each size has rows of its own,
    so that more than 64 of the long sequences have no room on an H200."""
    sizes = (64, 8, 4, 2, 1)
    return [
        case
        for cases in zip(
            *(_paged((1, 64), (1, 4), sizes=sizes, kv_types=(kind,)) for kind in (BF16, E4M3))
        )
        for case in cases
    ]


def _inputs(case: CacheCase, device: torch.device) -> dict[str, Inputs]:
    """Return inputs of the same numbers with K and V of each type: those that the narrowest has."""
    found = Inputs.random(case.of(None), device, torch.bfloat16)
    of_types = {BF16: found}
    if NVFP4 in case.kv_types:
        (k, of_k), (v, of_v) = map(_round_to_nvfp4, (found.k, found.v))
        of_types[NVFP4] = replace(found, k=k, v=v, block_scales=(of_k, of_v))
    if E4M3 in case.kv_types:
        k, v = map(_round_to_e4m3, (found.k, found.v))
        of_types[E4M3] = replace(found, k=k, v=v)
    return {kind: of_types[kind] for kind in case.kv_types}


# Both round in place, one sequence after the other: a cache of a GPU's size has no room for copies.


def _round_to_e4m3(tensor: torch.Tensor) -> torch.Tensor:
    """Round elements to those of e4m3, and return these."""
    codes = tensor.to(torch.float8_e4m3fn)
    for rows, exact in zip(tensor, codes):
        rows.copy_(exact)
    return codes


def _round_to_nvfp4(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round elements to multiples of 0.25 up to 3, which e4m3 has, too: NVFP4 with all scales of
    blocks equal. Return its codes and scales."""
    scale, device = 0.5, tensor.device
    shape = (*tensor.shape[:-1], tensor.shape[-1] // 2)
    codes = torch.empty(shape, dtype=torch.uint8, device=device)
    scales = torch.full(block_scales_shape(codes), scale, device=device).to(torch.float8_e4m3fn)
    for rows, own, of_rows in zip(tensor, codes, scales):
        own.copy_(e2m1_codes(rows.float() / scale))
        rows.copy_(dequantize_nvfp4(own, of_rows))
    return codes, scales


def measured(case: Case, timer: CudaTimer, sampling: Sampling) -> dict[str, Any]:
    """Return a row of the timer's GPU; clock and power are those of the last form of ours. case: a
    `CacheCase`."""
    assert isinstance(case, CacheCase)
    providers: dict[str, Provider] = {OURS: Ours()}
    if case.peer:
        providers[PACKAGE] = FlashAttention4()
    samples, reasons = _timed(case, providers, timer, sampling)
    gc.collect()
    timer.release_memory()
    last = samples.get(case.forms()[-1])
    state = last and last.median_state()
    return {
        "group": case.group, "shape": case.shape, "heads": case.heads_text,
        "kv_types": ", ".join(case.kv_types), **_figures(case, [*providers], samples),
        "refused": "; ".join(sorted({f"{form.provider}: {why}" for form, why in reasons.items()})),
        "failed": any(form.provider == OURS for form in reasons),
        "clock_mhz": state and state.clock_mhz, "power_watts": state and state.power_watts,
        BASIS: "measured", MACHINE: timer.gpu.text,
    }  # fmt: skip


def _timed(
    case: CacheCase, providers: dict[str, Provider], timer: CudaTimer, sampling: Sampling
) -> tuple[dict[Form, Samples], dict[Form, str]]:
    """Return the runs of each form whose result is right, and why others did not run."""
    # All sizes read the same tensors: a cache of a GPU's size has no room for copies.
    of_types = _inputs(case, timer.device)
    ready: dict[Form, Any] = {}
    reasons: dict[Form, str] = {}
    for form in (form for forms in zip(*map(case.forms, providers)) for form in forms):
        provider = providers[form.provider]
        inputs = replace(of_types[form.kv_type], case=case.of(form.size))
        reason = provider.missing() or provider.refuses(inputs.case, FORWARD)
        if reason is not None:
            reasons[form] = reason
            continue
        prepared, details = prepared_call(provider, inputs, FORWARD, timer)
        if prepared is None:
            reasons[form] = details["status"]
        else:
            ready[form] = prepared
    return interleave_prepared(timer, ready, sampling), reasons


def _figures(case: CacheCase, providers: list[str], samples: dict[Form, Samples]) -> dict[str, Any]:
    """Return the columns of every form, None of those that did not run."""
    row, base = dict[str, Any](), samples.get(case.forms()[0])
    for form in (form for provider in providers for form in case.forms(provider)):
        found, name = samples.get(form), case.name(form)
        row |= dict.fromkeys((name, f"range_{name}", f"over_{name}", f"rate_{name}"))
        if found is None:
            continue
        low, median, high = (found.quantile(share) for share in (0.2, 0.5, 0.8))
        row[name], row[f"range_{name}"] = median * 1e6, f"{low * 1e6:.1f}..{high * 1e6:.1f}"
        row[f"rate_{name}"] = case.kv_elements * BYTES[form.kv_type] / median / 1e12
        if base is not None:
            row[f"over_{name}"] = median / base.quantile(0.5) - 1
    return row


def columns_of(case: CacheCase) -> tuple[Column, ...]:
    ours = case.forms()
    theirs = case.forms(PACKAGE) if case.peer else []
    rated = [form for form in ours if form.size == case.sizes[0]]
    return (
        Column("shape"), Column("heads"), Column("kv_types", title="k, v"),
        *(column for form in ours for column in (
            Column(case.name(form), "us", ".1f", case.title(form)),
            Column(f"range_{case.name(form)}", title="p20..p80"),
        )),
        *(
            Column(f"over_{case.name(one)}", "", "+.1%", f"{case.title(one)} over the first")
            for one in ours[1:]
        ),
        *(Column(case.name(form), "us", ".1f", case.title(form)) for form in theirs),
        *(
            Column(f"rate_{case.name(one)}", "TB/s", ".2f", f"K and V once, {case.title(one)}")
            for one in rated
        ),
        Column("clock_mhz", "MHz", ".0f", "clock"), Column("power_watts", "W", ".0f", "power"),
    )  # fmt: skip


def table(case: CacheCase, title: str, rows: Sequence[dict[str, Any]]) -> Table:
    reasons = sorted({row["refused"] for row in rows} - {""})
    notes = (
        "Medians; all of a row interleaved, results checked. Page numbers are in an order by "
        "chance. Clock and power are those of the last of ours.",
        *(f"Not run: {reason}." for reason in reasons),
    )
    plot = Plot(("shape", "heads"), tuple(map(case.name, case.forms())), panel="kv_types")
    return Table("decode", title, columns_of(case), list(rows), notes, plot)
