"""The backward's errors by kind of call, in the simulator, on every architecture.

Which kernels ran is read from the simulator's reports and must be what a case says.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import sm100_sim
from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, masks
from fa4_hd256.architectures import ARCHITECTURES, named
from fa4_hd256.check import reference
from fa4_hd256.environment import ARCHITECTURE
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.score_mods import alibi

DTYPES = (torch.bfloat16, torch.float16)
#: Edges of a dense mask's tiles.
_TILE = 128


@dataclass(frozen=True)
class Call:
    """A kind of call; q, k, v, the gradient of out and sinks are standard normal.

    lengths: (queries, keys) of each sequence, several are packed. heads: of q, then of k and v.
    options: those that our calls and `reference.attention` both have. sink, slopes, holes: whether
    a sink a head, ALiBi's slopes, or a block mask with full, empty and partial tiles are given.
    stores_ds: or dS is recomputed. parts: whether query heads of a group are split.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    lengths: tuple[tuple[int, int], ...] = ((256, 300),)
    heads: tuple[int, int] = (2, 2)
    sink: bool = False
    slopes: bool = False
    holes: bool = False
    stores_ds: bool = True
    parts: bool = False


#: Keys end inside a tile everywhere; a window has both of its edges inside of tiles.
CALLS = (
    Call("full"),
    Call("causal", (("causal", True),)),
    Call("window (100, 20)", (("window_size", (100, 20)),)),
    Call("softcap 20", (("softcap", 20.0),)),
    Call("heads 4/1, in parts", heads=(4, 1), parts=True),
    Call("packed, causal", (("causal", True),), ((130, 150), (70, 40), (56, 110))),
    Call("sink", sink=True),
    Call("block mask", holes=True),
    Call("ALiBi", slopes=True),
    Call("full, dS anew", stores_ds=False),
)


@dataclass(frozen=True)
class Case:
    """One run. architecture: as FA4_HD256_ARCH names it."""

    call: Call
    dtype: torch.dtype
    architecture: str


@dataclass(frozen=True)
class GradientAccuracy:
    """Errors of one case, by name of the tensor: "q", "k", "v"."""

    case: Case
    comparisons: dict[str, reference.GradientComparison]

    @property
    def accurate(self) -> bool:
        return all(found.max_error <= found.tolerance for found in self.comparisons.values())


@dataclass(frozen=True)
class _Inputs:
    """Inputs of a call: q, k, v and dout, (rows of all sequences, heads, 256) each; and its
    options, as our functions take them and as the reference does."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    dout: torch.Tensor
    ours: dict[str, Any]
    of_reference: dict[str, Any]

    @classmethod
    def of(cls, call: Call, dtype: torch.dtype) -> _Inputs:
        generator = torch.Generator().manual_seed(0)
        of_q, of_k = (sum(lengths) for lengths in zip(*call.lengths, strict=True))
        heads, heads_kv = call.heads
        q, k, v, dout = (
            torch.randn(rows, h, HEAD_DIM, generator=generator).to(dtype)
            for rows, h in ((of_q, heads), (of_k, heads_kv), (of_k, heads_kv), (of_q, heads))
        )
        ours, of_reference = dict(call.options), dict(call.options)
        if call.sink:
            ours["learnable_sink"] = torch.randn(heads, generator=generator)
            of_reference["learnable_sink"] = ours["learnable_sink"]
        if call.slopes:
            slopes = 2.0 ** -torch.arange(1, heads + 1)
            ours["score_mod"] = alibi(slopes)
            of_reference["score_mod"] = _alibi(slopes, of_k - of_q)
        if call.holes:
            of_reference["mask"] = _holes(of_q, of_k, generator)
            ours["block_mask"] = masks.from_dense(of_reference["mask"])
        return cls((q, k, v), dout, ours, of_reference)


def _alibi(slopes: torch.Tensor, shift: int) -> Any:
    """score_mod of the reference. shift: keys of a sequence less its queries."""

    def changed(score, batch, head, query, key):  # type: ignore[no-untyped-def]
        distance = (query + shift - key).abs()
        return score - slopes[head].to(score.dtype) * distance.to(score.dtype)

    return changed


def _holes(of_q: int, of_k: int, generator: torch.Generator) -> torch.Tensor:
    """Dense mask whose tiles are full, empty and partial in alternation."""
    tiles = torch.arange(-(-of_q // _TILE))[:, None] + torch.arange(-(-of_k // _TILE))
    kinds = (tiles % 3).repeat_interleave(_TILE, 0).repeat_interleave(_TILE, 1)[:of_q, :of_k]
    seen = torch.rand(of_q, of_k, generator=generator) > 0.5
    return ((kinds == 0) | ((kinds == 2) & seen))[None, None]


def measure(case: Case) -> GradientAccuracy:
    """Run one case in the simulator. Raises RuntimeError if other kernels ran than those the case
    is of."""
    given = _Inputs.of(case.call, case.dtype)
    with mock.patch.dict(os.environ, {ARCHITECTURE.name: case.architecture}):
        found = _gradients(case, given)
    _check_kernels(case.call)
    return GradientAccuracy(case, _expected(case.call, given).compare(found))


def _gradients(case: Case, given: _Inputs) -> dict[str, torch.Tensor]:
    """Compute our gradients, by autograd, (1, rows, heads, 256) each."""
    config = kernels_of(named(case.architecture)).config("backward")
    config = config() if case.call.stores_ds else config(ds_bytes=0)
    leaves = tuple(tensor.detach().requires_grad_() for tensor in given.tensors)
    options = given.ours | {"backward_config": config}
    function: Callable[..., Any] = flash_attn_func
    called, dout = tuple(leaf[None] for leaf in leaves), given.dout[None]
    if len(case.call.lengths) > 1:
        function, called, dout = flash_attn_varlen_func, leaves, given.dout
        starts = (torch.tensor(starts, dtype=torch.int32) for starts in _starts(case.call))
        longest = map(max, zip(*case.call.lengths, strict=True))
        names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
        options |= dict(zip(names, (*starts, *longest), strict=True))
    found = torch.autograd.grad(function(*called, **options), leaves, dout)
    return {name: gradient[None] for name, gradient in zip("qkv", found, strict=True)}


def _starts(call: Call) -> list[list[int]]:
    """Return each sequence's first query, and first key, and the ends of the last one."""
    return [[0, *itertools.accumulate(lengths)] for lengths in zip(*call.lengths, strict=True)]


def _expected(call: Call, given: _Inputs) -> reference.ExpectedGradients:
    """Compute the reference of each sequence by itself, put together: PyTorch's error is the
    largest of any."""
    parts = []
    q, k, v = given.tensors
    for of_sequence in zip(*map(itertools.pairwise, _starts(call)), strict=True):
        rows, keys = (slice(*ends) for ends in of_sequence)
        own = (q[None, rows], k[None, keys], v[None, keys])
        parts.append(
            reference.ExpectedGradients.of(own, given.dout[None, rows], **given.of_reference)
        )
    return reference.ExpectedGradients(
        {name: torch.cat([part.exact[name] for part in parts], dim=1) for name in "qkv"},
        {name: max(part.pytorch_max_error[name] for part in parts) for name in "qkv"},
        {name: max(part.cancellation.get(name, 0.0) for part in parts) for name in "qkv"},
    )


def _check_kernels(call: Call) -> None:
    """Check that MMAs of a stored dS, and a sum of parts, ran in the last backward if expected."""
    kernels = [report.kernel for report in sm100_sim.last_reports()]
    first = max(i for i, name in enumerate(kernels) if "PreprocessKernel" in name)
    ran = tuple(
        any(kind in name for name in kernels[first:]) for kind in ("ProductsKernel", "SumKernel")
    )
    if ran != (call.stores_ds, call.parts):
        raise RuntimeError(f"{call.name}: stored dS and parts are {ran}; ran {kernels[first:]}")


def default_cases() -> list[Case]:
    names = [architecture.name for architecture in ARCHITECTURES]
    return [
        Case(call, dtype, name) for name, dtype, call in itertools.product(names, DTYPES, CALLS)
    ]
