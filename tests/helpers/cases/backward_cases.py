"""Helpers of the tests of the backward: random inputs, gradients by autograd, their comparison."""

from __future__ import annotations

import torch
from paged_cases import offsets

import sm100_sim
from fa4_hd256 import flash_attn_func
from fa4_hd256.check import reference

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(
    lengths: tuple[int, int],
    heads: tuple[int, int] = (2, 1),
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> Tensors:
    """Random q, k, v; lengths and heads: those of q, then those of k and v."""
    shapes = tuple(zip(lengths, heads))
    return tuple(torch.randn(batch, s, h, 256).to(device, dtype) for s, h in (*shapes, shapes[1]))


def gradients(tensors: Tensors, dout, dlse=None, **options) -> dict[str, torch.Tensor]:
    """ "q", "k", "v", and with a sink "sink", by autograd through `flash_attn_func`."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in tensors)
    leaves = {"q": q, "k": k, "v": v}
    if options.get("learnable_sink") is not None:
        leaves["sink"] = options.pop("learnable_sink").detach().requires_grad_()
    out, lse = flash_attn_func(
        q, k, v, learnable_sink=leaves.get("sink"), return_lse=True, **options
    )
    results, cotangents = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    found = torch.autograd.grad(results, tuple(leaves.values()), cotangents)
    return dict(zip(leaves, found))


def accurate(found: dict, tensors: Tensors, dout, dlse=None, **options) -> None:
    """Every gradient has the shape and dtype of its tensor and an error within the tolerance."""
    options.pop("backward_config", None)
    for name, tensor in zip("qkv", tensors):
        gradient = found.get(name, tensor)
        assert gradient.shape == tensor.shape and gradient.dtype == tensor.dtype
    compared = reference.compare_gradients(found, tensors, dout, dlse, **options)
    for name, comparison in compared.items():
        assert comparison.max_error <= comparison.tolerance, (name, comparison)


def check(tensors: Tensors, dout=None, dlse=None, use_clc=None, **options) -> dict:
    """Gradients of `tensors`, compared; dout is random if None. Returns them."""
    dout = torch.randn_like(tensors[0]) if dout is None else dout
    found = gradients(tensors, dout, dlse, use_clc=use_clc, **options)
    accurate(found, tensors, dout, dlse, **options)
    return found


def last_reports(count: int) -> list[sm100_sim.Report]:
    """The last simulated launches, so many, without those that add up parts of dK and dV or finish
    packed results."""
    others = "SumKernel", "TailKernel"
    reports = sm100_sim.last_reports()
    found = [r for r in reports if not any(name in r.kernel for name in others)]
    return found[-count:]


def packed(lengths, heads, dtype, device):
    """Random q, k, v of (total, heads, 256) each; lengths and heads: of q, then of k and v."""
    sizes = tuple((sum(n), h) for n, h in zip(lengths, heads))
    return tuple(torch.randn(n, h, 256).to(device, dtype) for n, h in (*sizes, sizes[1]))


def check_each(found, tensors, dout, lengths, **options):
    """Packed gradients of q, k, v sequence by sequence."""
    starts = [offsets(n).tolist() for n in lengths]
    for b in range(len(lengths[0])):
        rows, keys = (slice(start[b], start[b + 1]) for start in starts)
        places = {"q": rows, "k": keys, "v": keys}
        part = tuple(tensor[places[name]][None] for name, tensor in zip("qkv", tensors))
        accurate(
            {name: found[name][place][None] for name, place in places.items()},
            part, dout[rows][None], **options,
        )  # fmt: skip
