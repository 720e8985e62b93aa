"""Gradients in mxfp8 for tests, and what they are compared with.

The reference is float64 over what the operands stand for.  The tolerance is twice the error of the
same in float32 with P rounded as the kernels round it, and dS with a scale for each 32 elements
that are summed, the smallest block of mxfp8, where kernels have one for 32 x 32; and twice the
rounding of the result.
"""

from __future__ import annotations

import torch
from mxfp8_cases import uneven

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func
from fa4_hd256.architectures import named
from fa4_hd256.check import reference
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.quantize import dequantize_mxfp8, quantize_mxfp8_training
from fa4_hd256.quantize.mxfp8 import quantized

BLOCK, LARGEST = 32, 448.0


def has_gradients(architecture):
    """Return True if the architecture has a backward in mxfp8."""
    return kernels_of(named(architecture)).mxfp8_backward is not None


def inputs(lengths, heads, batch=None, dtype=torch.bfloat16, device="cpu"):
    """q, k and v that gradients flow to.  lengths: of queries and keys.  batch: None where they are
    packed."""
    outer = () if batch is None else (batch,)
    rows = ((lengths[0], heads[0]), (lengths[1], heads[1]), (lengths[1], heads[1]))
    tensors = (uneven(*outer, *row, 256).to(dtype).to(device) for row in rows)
    return [t.requires_grad_() for t in tensors]


def run(tensors, begins=(None, None), dlse=False, dout_factors=1.0, **options):
    """Return (out, dout, dlse, gradients of q, k and v) of a call and its backward.  begins: of
    packed sequences, with `options` of theirs; dout_factors: what normal numbers are multiplied
    with to be dout."""
    given = quantize_mxfp8_training(*tensors, *begins)
    if begins[0] is None:
        out, lse = flash_attn_func(**given._asdict(), return_lse=True, **options)
    else:
        sides = {"cu_seqlens_q": begins[0], "cu_seqlens_k": begins[1]}
        out, lse = flash_attn_varlen_func(**given._asdict(), **sides, return_lse=True, **options)
    dout = torch.randn(out.shape).to(out) * dout_factors
    dout = dout.to(out.dtype)
    of_lse = torch.randn(lse.shape).to(lse) if dlse else None
    results = (out, lse) if dlse else (out,)
    found = torch.autograd.grad(results, tensors, (dout, of_lse) if dlse else (dout,))
    return out.detach(), dout, of_lse, found


class Exact:
    """Values that operands stand for, in float64 on the CPU."""

    def __init__(self, tensors, dout, begins=(None, None)):
        q, k, v, dout = (t.detach().cpu() for t in (*tensors, dout))
        of_q, of_k = (None if b is None else b.cpu() for b in begins)

        def columns(name, tensor, offsets):
            return dequantize_mxfp8(*quantized(name, tensor, offsets), offsets)

        def rows(name, tensor, offsets):
            found = quantized(name, tensor, offsets, along_rows=True)
            return dequantize_mxfp8(*found, offsets, along_keys=True)

        self.q, self.k, self.v = columns("q", q, of_q), columns("k", k, of_k), columns("v", v, of_k)
        self.dout, self.dout_rows = columns("dout", dout, of_q), rows("dout", dout, of_q)
        self.q_rows, self.k_rows = rows("q", q, of_q), rows("k", k, of_k)

    def sequence(self, queries, keys):
        """Return one of packed sequences, with a batch of 1."""
        one = object.__new__(Exact)
        for name, tensor in vars(self).items():
            setattr(one, name, tensor[keys if name[0] in "kv" else queries][None])
        return one


def expected(exact, dout, out, dlse=None, rounds=False, **options):
    """Return gradients of q, k and v of dense tensors.  rounds: in float32, with P and dS
    rounded."""
    dtype, chosen = (
        torch.float32 if rounds else torch.float64,
        reference.AttentionOptions(**options),
    )
    scale = chosen.scale(256)
    batch, queries, heads, _ = exact.q.shape
    group = heads // exact.k.shape[2]
    seen = reference.visible((queries, exact.k.shape[1]), chosen.window)
    found = [torch.zeros_like(t, dtype=dtype) for t in (exact.q, exact.k, exact.v)]
    delta = (dout.cpu().to(dtype) * out.cpu().to(dtype)).sum(-1)
    for b in range(batch):
        for h in range(heads):
            at, of_keys = (b, slice(None), h), (b, slice(None), h // group)
            q, do, q_rows, do_rows = (
                t[at].to(dtype) for t in (exact.q, exact.dout, exact.q_rows, exact.dout_rows)
            )
            k, v, k_rows = (t[of_keys].to(dtype) for t in (exact.k, exact.v, exact.k_rows))
            scores = (scale * (q @ k.T)).masked_fill(~seen, -torch.inf)
            p = torch.softmax(scores, -1).masked_fill(~seen, 0.0)
            less = delta[at] if dlse is None else delta[at] - dlse[b, h].cpu().to(dtype)
            ds = p * (do @ v.T - less[:, None])
            for_dq, for_dk = ds, ds
            if rounds:
                p = (p * 2**8).to(torch.float8_e4m3fn).to(dtype) / 2**8
                for_dq, for_dk = _in_blocks(ds), _in_blocks(ds.T).T
            found[0][at] = scale * (for_dq @ k_rows)
            found[1][of_keys] += scale * (for_dk.T @ q_rows)
            found[2][of_keys] += p.T @ do_rows
    return found


def _in_blocks(values):
    """Round to e4m3 with a power of two for each 32 columns."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = padded.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(largest / LARGEST))).masked_fill(largest == 0, 1.0)
    rounded = (padded / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale
    return rounded.flatten(1)[:, :columns]


def errors(found, exact, dout, out, dlse=None, rows=None, **options):
    """Return {gradient: (largest error, tolerance)}.  rows: queries whose dq is looked at, and
    nothing else; None: all gradients."""
    wanted = expected(exact, dout, out, dlse, **options)
    rounded = expected(exact, dout, out, dlse, rounds=True, **options)
    if rows is not None:
        found, wanted, rounded = ([dq.cpu()[:, rows]] for dq, *_ in (found, wanted, rounded))
    return {
        name: (
            (own.cpu().double() - value).abs().amax().item(),
            2 * (like.double() - value).abs().amax().item()
            + 2 * (value.to(own.dtype).double() - value).abs().amax().item(),
        )
        for name, own, value, like in zip(("dq", "dk", "dv"), found, wanted, rounded)
    }


def accurate(found, exact, dout, out, dlse=None, rows=None, **options):
    """Assert that gradients are; rows: see `errors`."""
    found_errors = errors(found, exact, dout, out, dlse, rows, **options)
    for name, (error, tolerance) in found_errors.items():
        assert error <= tolerance, (name, error, tolerance)
