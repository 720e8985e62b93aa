"""Errors of attention over keys and values in e4m3, by what the tensor core multiplies them with.

Emulated in PyTorch: operands are rounded as each method rounds them, products and sums are in
float64, so that the rounding of operands alone shows.  Our kernels' own rows are what their
compiled code computes in the simulator.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch

from fa4_hd256 import flash_attn_func
from fa4_hd256.check import reference
from fa4_hd256.environment import ARCHITECTURE
from fa4_hd256.kernels.blackwell.decode.config import HEADROOM
from fa4_hd256.kernels.limits import HEAD_DIM

__all__ = ["CASES", "METHODS", "OURS", "Case", "Errors", "errors", "inputs"]

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
HEADS = 16
#: The rows of the compiled kernels, and whose they are.
OURS = {"two parts, our kernel": "sm_100a", "float16, our kernel": "sm_90a"}


@dataclass(frozen=True)
class Case:
    """A decoding step: one query of 16 heads over one KV head, standard normal values.

    sharpness: what queries are multiplied with. outliers: what four channels of Q and K are.
    scales: of K and V: "tensor", or "page" of 16 keys.
    """

    name: str
    keys: int
    sharpness: float = 1.0
    outliers: float = 1.0
    scales: str = "tensor"


CASES = (
    Case("normal", 1024),
    Case("normal, a scale a page", 1024, scales="page"),
    Case("flat: queries of a tenth", 1024, sharpness=0.1),
    Case("sharp: queries four times", 1024, sharpness=4.0),
    Case("outliers: 4 channels of Q and K eight times", 1024, outliers=8.0),
    Case("long", 16384),
)


@dataclass(frozen=True)
class Inputs:
    """Return q in bf16; k and v in float64 as they were; their codes, and what those stand for."""

    q: torch.Tensor
    values: tuple[torch.Tensor, torch.Tensor]
    codes: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor]
    exact: tuple[torch.Tensor, torch.Tensor]


def inputs(case: Case) -> Inputs:
    """Make the inputs of a case, always the same ones. Scales bring the largest magnitude to
    448."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, rows, heads, HEAD_DIM, generator=generator)
        for rows, heads in ((1, HEADS), (case.keys, 1), (case.keys, 1))
    )
    for tensor in (q, k):
        tensor[..., :4] *= case.outliers
    q = (q * case.sharpness).bfloat16()
    page = 16 if case.scales == "page" else case.keys
    codes, scales, exact = [], [], []
    for tensor in (k, v):
        pages = tensor.reshape(-1, page, 1, HEAD_DIM)
        scale = pages.abs().amax(dim=(1, 3)) / LARGEST
        code = (pages / scale[:, None, :, None]).to(E4M3)
        codes.append(code)
        scales.append(scale)
        exact.append(reference.dequantised(code, scale).reshape(tensor.shape))
    k, v = k.double(), v.double()
    return Inputs(q, (k, v), (codes[0], codes[1]), (scales[0], scales[1]), (exact[0], exact[1]))


def _bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16).double()


def _float16(values: torch.Tensor) -> torch.Tensor:
    return values.half().double()


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-LARGEST, LARGEST).float().to(E4M3).double()


def _one_part(values: torch.Tensor) -> torch.Tensor:
    return _e4m3(values)


def _two_parts(values: torch.Tensor) -> torch.Tensor:
    high = _e4m3(values)
    return high + _e4m3((values - high) * 16) / 16


def _of_rows(
    rounded: Callable[[torch.Tensor], torch.Tensor], q: torch.Tensor, top: int = 7
) -> torch.Tensor:
    """Rows brought to [2^top, 2^(top + 1)) by a power of two, rounded, and back."""
    scale = 2.0 ** (top - q.abs().amax(dim=-1, keepdim=True).log2().floor())
    return rounded(q * scale) / scale


#: Method -> (Q, P) as the tensor core gets them; P comes with 1 for the largest of a row.
METHODS: dict[str, tuple[Callable, Callable]] = {
    "bf16: K and V converted": (lambda q: q, _bf16),
    "float16: K and V converted, Q and P rounded": (
        lambda q: _of_rows(_float16, q, 14), lambda p: _float16(p * 2**6) / 2**6
    ),
    "e4m3: Q and P in one part": (
        lambda q: _of_rows(_one_part, q), lambda p: _one_part(p * 2**8) / 2**8
    ),
    "e4m3: Q in two parts, P in one": (
        lambda q: _of_rows(_two_parts, q), lambda p: _one_part(p * 2**8) / 2**8
    ),
    "e4m3: Q and P in two parts": (
        lambda q: _of_rows(_two_parts, q),
        lambda p: _two_parts(p * 2**HEADROOM) / 2**HEADROOM,
    ),
}  # fmt: skip


def _attention(given: Inputs, method: str) -> torch.Tensor:
    """Return out in float64, not rounded to bf16."""
    of_q, of_p = METHODS[method]
    k, v = (tensor[0, :, 0] for tensor in given.exact)
    scores = of_q(given.q[0, 0].double()) @ k.T / HEAD_DIM**0.5
    p = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    return (of_p(p) @ v / p.sum(dim=1, keepdim=True))[None, None]


def _ours(given: Inputs, architecture: str) -> torch.Tensor:
    """Return out of an architecture's compiled kernel in bf16. One scale for K and one for V."""
    k, v = (code.reshape(1, -1, 1, HEAD_DIM) for code in given.codes)
    k_descale, v_descale = (scale.reshape(1) for scale in given.scales)
    with mock.patch.dict(os.environ, {ARCHITECTURE.name: architecture}):
        out = flash_attn_func(given.q, k, v, num_splits=1, k_descale=k_descale, v_descale=v_descale)
    assert isinstance(out, torch.Tensor)
    return out.double()


@dataclass(frozen=True)
class Errors:
    """Errors of one method: largest and relative L2 error against attention of what the codes stand
    for; the latter also against that of the values before they became codes."""

    max_error: float
    rel_l2: float
    rel_l2_of_values: float


def errors(case: Case) -> dict[str, Errors]:
    """Return the errors by method; ours, where the simulator runs it, rounded to bf16 as it leaves
    it."""
    given = inputs(case)
    of_codes, _ = reference.attention(given.q, *given.exact)
    of_values, _ = reference.attention(given.q, *given.values)
    found = {name: _attention(given, name) for name in METHODS}
    found["none: the codes' own error"] = of_codes
    found["none: rounded to bf16"] = of_codes.bfloat16().double()
    if case.scales == "tensor" and case.keys <= CASES[0].keys:
        found |= {name: _ours(given, architecture) for name, architecture in OURS.items()}
    return {
        name: Errors(
            (out - of_codes).abs().max().item(),
            ((out - of_codes).norm() / of_codes.norm()).item(),
            ((out - of_values).norm() / of_values.norm()).item(),
        )
        for name, out in found.items()
    }
