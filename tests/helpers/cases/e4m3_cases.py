"""Queries, keys and values in e4m3 for tests, and what attention over them is compared with."""

from __future__ import annotations

import torch

from fa4_hd256.architectures import named
from fa4_hd256.check import reference
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.problem_class import DESCALES

E4M3 = torch.float8_e4m3fn
LSE_TOLERANCE = 1e-3
#: (queries, keys), (query heads, KV heads), batch: one row, fewer and more than a tile (256
#: queries, 128 keys), several tiles that are not full.
LENGTHS = [((1, 1), (1, 1), 2), ((7, 333), (8, 2), 1), ((256, 128), (2, 1), 1),
           ((300, 700), (4, 2), 2)]  # fmt: skip
MASKS = [{"causal": True}, {"window_size": (100, 0)}, {"window_size": (70, 5)},
         {"window_size": (None, 9)}, {"window_size": (40, -20)}]  # fmt: skip


def codes(*shape, device="cpu"):
    """Normal numbers in e4m3."""
    return torch.randn(*shape).to(E4M3).to(device)


def scales(*shape):
    """Return scales of k and of v: neither powers of two nor alike."""
    return 0.3 + torch.rand(*shape), 0.05 + 0.2 * torch.rand(*shape)


def exact(keys, given):
    """k and v in float64. keys: (k, v) in e4m3; given: their scales, None for 1."""
    return tuple(map(reference.dequantised, keys, given or (None, None)))


def accurate(found, q, values, **options):
    """found: (out, lse); values: k and v in float64."""
    comparison = reference.Expected.of((q, *values), **options).compare(*found)
    assert comparison.max_error <= comparison.tolerance, comparison
    assert comparison.lse_max_error <= LSE_TOLERANCE, comparison


# ---------------------------------------------------------------- q in e4m3, too


def takes_queries(architecture):
    """Return True if a forward kernel of the architecture takes q in e4m3."""
    return any(tiles.q_dtype == E4M3 for tiles in kernels_of(named(architecture)).forwards)


def triple(lengths, heads, batch=1, device="cpu"):
    """q, k and v of (queries, keys) and (query heads, KV heads)."""
    rows = zip((lengths[0], lengths[1], lengths[1]), (heads[0], heads[1], heads[1]))
    return [codes(batch, length, count, 256, device=device) for length, count in rows]


def all_scales(*shape, device="cpu"):
    """Return scales of q, k and v by the names of the arguments."""
    found = 0.5 + torch.rand(*shape), *scales(*shape)
    return {name: scale.to(device) for name, scale in zip(DESCALES, found)}


def dequantised(tensors, given=None):
    """q, k and v in float64. given: of `all_scales`, or of some of these; None for 1."""
    named_scales = ((given or {}).get(name) for name in DESCALES)
    return tuple(map(reference.dequantised, tensors, named_scales))


def accurate_e4m3(found, tensors, given=None, **options):
    """found: (out, lse) of q, k and v; given: their scales, None for 1. options: of the
    reference."""
    out, values = found[0], dequantised(tensors, given)
    on_hopper = out.is_cuda and torch.cuda.get_device_capability(out.device)[0] == 9
    # A log of a sum of exponentials is off by at most what its scores are off by; softcap and masks
    # make that no more.
    scores = hopper_score_error(*tensors[:2], given) if on_hopper else 0.0
    judged(found, values, abs(options.get("softmax_scale", 1 / 16)) * scores, **options)


def judged(found, values, score_error=0.0, **options):
    """found: (out, lse); values: q, k and v in float64; score_error: what the tensor core's sums
    allow a score to be off by."""
    out, lse = found
    comparison = reference.Expected.of_e4m3(values, out.dtype, **options).compare(out, lse)
    assert comparison.max_error <= comparison.tolerance, comparison
    assert comparison.lse_max_error <= LSE_TOLERANCE + score_error, (comparison, score_error)


# ---------------------------------------------------------------- sums of Hopper's tensor core


def _exponents(numbers, least):
    """Return exponents of float64 numbers as the tensor core aligns them: at least that of the
    smallest normal number of their type; a product with 0 is aligned to nothing."""
    found = (torch.frexp(numbers)[1] - 1).clamp(min=least)
    return torch.where(numbers == 0, -(10**4), found)


def _cut(numbers, exponents):
    """Return numbers without what lies below 2^exponents."""
    unit = torch.ldexp(torch.ones_like(numbers), exponents)
    return (numbers / unit).trunc() * unit


def hopper_products(q, k):
    """q k^T of e4m3 rows, (queries, D) and (keys, D), in float64, with the sums of wgmma.

    32 products and the sum before are cut off 13 bits below the largest of their exponents, what
    they add up to behind 14 bits: the rule of `sm100_sim.tools.golden.instructions.tensor_sums`,
    which recorded cases of an H200 follow bit for bit.
    """
    q, k = q.double(), k.double()
    total = torch.zeros(len(q), len(k), dtype=torch.float64, device=q.device)
    for columns in range(0, q.shape[1], 32):
        part = [t[:, columns : columns + 32] for t in (q, k)]
        terms = torch.cat((part[0][:, None] * part[1], total[..., None]), dim=2)
        of_products = _exponents(part[0], -6)[:, None] + _exponents(part[1], -6)
        of_terms = torch.cat((of_products, _exponents(total, -126)[..., None]), dim=2)
        least = of_terms.amax(dim=2, keepdim=True).clamp(min=-100) - 13
        total = _cut(terms, least).sum(dim=2)
        total = _cut(total, torch.frexp(total)[1] - 14)
    return total


def hopper_score_error(q, k, given):
    """Return the largest error of q k^T in wgmma's sums, times the scales. q, k: of `triple`."""
    named_scales = [(given or {}).get(name) for name in DESCALES[:2]]
    largest, group = 0.0, q.shape[2] // k.shape[2]
    for batch in range(len(q)):
        for head in range(k.shape[2]):
            rows = q[batch, :, head * group : (head + 1) * group].flatten(0, 1)
            keys = k[batch, :, head]
            if not len(rows) or not len(keys):
                continue
            off = (hopper_products(rows, keys) - rows.double() @ keys.double().T).abs().max()
            for scale in named_scales:
                if scale is not None:
                    off = off * scale.expand(len(q), k.shape[2])[batch, head]
            largest = max(largest, float(off))
    return largest
