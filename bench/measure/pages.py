"""Keys and values in pages timed beside none, on a GPU, ours and flash-attn-4's interleaved."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.suite import Case

from .providers import FlashAttention4, Inputs, Ours, Provider
from .timer import Sampling, Timer
from .variants import measured_variants


def measured_row(
    case: Case, sizes: Sequence[int | None], timer: Timer, sampling: Sampling
) -> dict[str, Any]:
    """`measured_variants` of one case in pages of each size, None for keys in no pages, by
    (provider, size)."""
    whole = Inputs.random(case, timer.device, torch.bfloat16)
    providers: tuple[Provider, ...] = (Ours(), FlashAttention4())
    # Both read the same pages: a cache of a GPU's size has no room for copies.
    of_sizes = {size: replace(whole, case=replace(case, page_size=size)) for size in sizes}
    variants = {
        (provider.name, size): (provider, inputs)
        for size, inputs in of_sizes.items() for provider in providers
    }  # fmt: skip
    row = measured_variants(variants, (Ours().name, None), timer, sampling)
    del variants, of_sizes, whole
    gc.collect()
    timer.release_memory()
    return row
