"""The backward's preprocess kernel alone: delta and LSE of every row, padding included."""

from __future__ import annotations

import math

import pytest
import torch
from paged_cases import offsets

from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.memory import tma_can_take
from fa4_hd256.call.options import Options
from fa4_hd256.check.single_kernels import empty_stats, run_preprocess
from fa4_hd256.kernels.small.backward_preprocess import PreprocessConfig

OPTIONS = Options.check(None, False, (None, None), 0.0, False)


def describe(q, lse_gradient=False, ragged=None, max_seqlen_q=None):
    """The problem of some q; keys do not matter to this kernel."""
    ragged = ragged or {}
    batch = next((t.numel() - n.startswith("cu_") for n, t in ragged.items()), q.shape[0])
    k = q.new_zeros(batch, 1, 1, 256)
    problem = Problem.describe((q, k, k), OPTIONS, None, ragged, max_seqlen_q)
    return BackwardProblem(problem, tuple(k.shape), lse_gradient, head_parts=1)


def run(rows, dlse=None, ragged=None, max_seqlen_q=None):
    """Statistics of rows (out, dout, lse)."""
    problem = describe(rows[0], dlse is not None, ragged, max_seqlen_q)
    stats = empty_stats(problem)
    given = dict(zip(("out", "dout", "lse"), rows, strict=True)) | {"stats": stats}
    given |= {} if dlse is None else {"dlse": dlse}
    run_preprocess(problem, given | (ragged or {}))
    return stats


def expected(out, dout, lse, dlse=None):
    """Return (2, heads, seqlen) of one sequence in float64: out, dout (seqlen, heads, 256)."""
    delta = (out.double() * dout.double()).sum(2).T.cpu()
    delta -= 0 if dlse is None else dlse.double().cpu()
    lse = lse.double().cpu()
    empty = lse == -math.inf
    exponent = -lse * math.log2(math.e)
    return torch.stack((exponent.masked_fill(empty, -math.inf), -delta.masked_fill(empty, 0.0)))


def check(stats, start, wanted):
    """Rows from `start` on as wanted, then those of padding up to a multiple of 256."""
    length = wanted.shape[2]
    got = stats[:, :, start : start + length].double().cpu()
    # float32 sums of 256 products of magnitude up to 20.
    assert torch.allclose(got, wanted, rtol=1e-6, atol=1e-4)
    padding = stats[:, :, start + length : start + -(-length // 256) * 256]
    assert (padding[0] == -math.inf).all() and (padding[1] == 0).all()


def random_rows(batch, seqlen, heads, device, dtype=torch.bfloat16):
    out, dout = (torch.randn(batch, seqlen, heads, 256).to(device, dtype) for _ in range(2))
    return out, dout, torch.randn(batch, heads, seqlen, device=device)


# One row; one less and one more than the 16 rows of a warp, the 128 of a CTA, the 256 of a block.
@pytest.mark.parametrize("seqlen", [1, 15, 17, 127, 128, 129, 255, 256, 257])
@pytest.mark.parametrize("lse_gradient", [False, True], ids=["out", "out and lse"])
@pytest.mark.sampled("out-1", "out-15", "out and lse-1")
def test_lengths(seqlen, lse_gradient, device):
    out, dout, lse = random_rows(2, seqlen, 3, device)
    dlse = torch.randn_like(lse) if lse_gradient else None
    stats = run((out, dout, lse), dlse)
    for b in range(2):
        wanted = expected(out[b], dout[b], lse[b], None if dlse is None else dlse[b])
        check(stats, b * -(-seqlen // 256) * 256, wanted)


@pytest.mark.sampled
def test_fp16(device):
    out, dout, lse = random_rows(1, 40, 1, device, torch.float16)
    check(run((out, dout, lse)), 0, expected(out[0], dout[0], lse[0]))


def test_rows_without_a_visible_key(device):
    """Whatever out, its gradient and that of the LSE hold, the row has no gradient."""
    out, dout, lse = random_rows(1, 40, 2, device)
    dlse = torch.randn_like(lse)
    lse[0, 1, ::3] = -math.inf
    dlse[0, 1, ::6] = math.nan
    dout[0, 3, 1] = math.inf
    stats = run((out, dout, lse), dlse)
    check(stats, 0, expected(out[0], dout[0], lse[0], dlse[0]))


def test_any_strides(device):
    """Transposed and sliced, the LSE too; 8 heads of one tensor; the odd ones are read."""
    dout = torch.randn(2, 3, 50, 256).to(device, torch.bfloat16).transpose(1, 2)
    out = torch.randn(50, 2, 8, 300).to(device, torch.bfloat16)[..., 1:7:2, 44:].transpose(0, 1)
    lse = torch.randn(50, 3, 2, device=device).permute(2, 1, 0)
    dlse = torch.randn(2, 50, 6, device=device)[..., ::2].transpose(1, 2)
    assert tma_can_take(out) and tma_can_take(dout)
    stats = run((out, dout, lse), dlse)
    for b in range(2):
        check(stats, b * 256, expected(out[b], dout[b], lse[b], dlse[b]))


def test_a_gradient_that_is_one_expanded_number(device):
    """lse.sum().backward() hands over such a gradient."""
    out, dout, lse = random_rows(2, 20, 2, device)
    dlse = torch.ones((), device=device).expand(2, 2, 20)
    stats = run((out, dout, lse), dlse)
    for b in range(2):
        check(stats, b * 256, expected(out[b], dout[b], lse[b], dlse[b]))


# Zero lengths first, last and in between; whole blocks; rests.
@pytest.mark.parametrize(
    "lengths", [(0, 300, 5, 0, 256, 129, 0), (256, 256), (1, 1, 1), (0, 0, 2)], ids=str
)
def test_packed_sequences(lengths, device):
    """Each begins at a multiple of 256, and none reaches into the next."""
    out, dout, lse = random_rows(1, sum(lengths), 2, device)
    cu = offsets(lengths, device)
    stats = run((out, dout, lse), ragged={"cu_seqlens_q": cu}, max_seqlen_q=max(lengths))
    ends = 0
    for b, length in enumerate(lengths):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        start = (int(cu[b]) + b * 256) // 256 * 256
        assert start >= ends
        check(stats, start, expected(out[0, rows], dout[0, rows], lse[0, :, rows]))
        ends = start + -(-length // 256) * 256
    assert ends <= stats.shape[2]
    # Rows between sequences count for nothing in a sum over all rows.
    written = torch.zeros(stats.shape[2], dtype=torch.bool)
    for b, length in enumerate(lengths):
        start = (int(cu[b]) + b * 256) // 256 * 256
        written[start : start + length] = True
    assert (stats[0][:, ~written] == -math.inf).all() and (stats[1][:, ~written] == 0).all()


@pytest.mark.sampled
def test_padded_sequences(device):
    """Rows past seqused_q are padding, whatever they hold."""
    out, dout, lse = random_rows(3, 300, 1, device)
    used = (300, 70, 0)
    for b, length in enumerate(used):
        for tensor in (out, dout):
            tensor[b, length:] = math.nan
    ragged = {"seqused_q": torch.tensor(used, dtype=torch.int32, device=device)}
    stats = run((out, dout, lse), ragged=ragged)
    for b, length in enumerate(used):
        check(stats, b * 512, expected(out[b, :length], dout[b, :length], lse[b, :, :length]))


def test_a_second_run_is_bitwise_equal(device):
    rows = random_rows(1, 300, 2, device)
    assert torch.equal(run(rows), run(rows))


@pytest.mark.simulator
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_no_findings(seed, sanitize):
    import sm100_sim

    sanitize(seed)
    rows = random_rows(2, 140, 2, "cpu")
    run(rows, torch.randn_like(rows[2]))
    assert sm100_sim.last_reports()[-1].findings == []


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((8, 48, 4), "8 warps of 48 rows"), ((8, 24, 4), "8 warps of 24"), ((8, 16, 3), "is 3")],
)
def test_configurations_that_are_not_accepted(sizes, message):
    with pytest.raises(ValueError, match=message):
        PreprocessConfig(*sizes)
