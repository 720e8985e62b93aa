"""The combining kernel alone: one row out of hand-made parts, against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.kernels.small.combine_config import CombineConfig, CombineRule
from fa4_hd256.run import forward as run_of_forward
from fa4_hd256.run.execute import execute
from fa4_hd256.run.plan import PlanBuilder

DTYPES = (torch.bfloat16, torch.float16)
#: Unit roundoff of float32.
ROUNDOFF = 2.0**-24


def describe(out, splits):
    """The problem whose result is `out`; keys do not matter to this kernel."""
    k = out.new_zeros(out.shape[0], 1, out.shape[2], 256)
    return replace(Problem.describe((out, k, k), Options(1.0)), num_splits=splits)


def combine(problem, parts, results):
    """Fill results from the parts, each (out, lse)."""
    names = ("parts", "lse of parts", "out", "lse")
    builder = PlanBuilder.for_tensors(problem.device, names, (*parts, *results))
    views = tuple(builder.inputs.values())
    run_of_forward.add_combine(builder, problem, views[:2], views[2:], {})
    execute(builder.plan(), (*parts, *results))


def random_parts(splits, shape, device, spread=2.0):
    """Return (out, lse) of the parts; shape: (batch, seqlen, heads); spread: of the LSEs."""
    batch, seqlen, heads = shape
    out = torch.randn(batch * splits, seqlen, heads, 256).to(device)
    lse = spread * torch.randn(batch * splits, heads, seqlen).to(device)
    return out, lse


def run(parts, splits, dtype=torch.bfloat16):
    """Return (out, lse) of the kernel, from memory that holds NaN."""
    entries, seqlen, heads, _ = parts[0].shape
    assert entries % splits == 0
    batch, device = entries // splits, parts[0].device
    out = torch.full((batch, seqlen, heads, 256), math.nan, dtype=dtype, device=device)
    lse = torch.full((batch, heads, seqlen), math.nan, device=device)
    combine(describe(out, splits), parts, (out, lse))
    return out, lse


def expected(parts, splits):
    """Return (out, lse, sum of the weights times |O|) in float64; rows of -inf alone are 0."""
    out, lse = (t.double().cpu().unflatten(0, (-1, splits)) for t in parts)
    total = torch.logsumexp(lse, dim=1)
    shift = total.masked_fill(total == -math.inf, 0.0)
    weight = torch.exp(lse - shift[:, None]).transpose(2, 3)[..., None]
    # Content of a split without a key counts for nothing, NaN neither.
    out = out.masked_fill(weight == 0, 0.0)
    return (weight * out).sum(1), total, (weight * out.abs()).sum(1)


def check(parts, splits, dtype=torch.bfloat16):
    """Within what float32 exponents, weights and sums and one rounding to dtype may lose."""
    out, lse = run(parts, splits, dtype)
    wanted, total, magnitude = expected(parts, splits)
    finite = parts[1].masked_fill(parts[1] == -math.inf, 0.0)
    # LSE * log2(e) is rounded and so is the difference of two of them, which moves a weight by as
    # much; ex2, lg2 and rcp.approx are good to 2^-22 (PTX ISA 9.7.3).
    exponent = 4 * ROUNDOFF * float(finite.abs().max())
    loss = 2 * exponent + (24 + splits) * ROUNDOFF
    bound = torch.finfo(dtype).eps / 2 * wanted.abs() + loss * magnitude + 2.0**-25
    assert ((out.double().cpu() - wanted).abs() <= bound).all()
    void = total == -math.inf
    assert (lse.cpu()[void] == -math.inf).all()
    error = (lse.double().cpu() - total)[~void].abs()
    assert error.numel() == 0 or error.max() <= exponent + 16 * ROUNDOFF
    assert out.dtype == dtype
    return out, lse


# One part alone; the parts whose loads are in flight together, one less and one more, where a
# second warp may begin, and a third; as many as lanes, one less and one more; all that may be.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 3, 4, 5, 9, 31, 32, 33, 64])
@pytest.mark.sampled("1-torch.bfloat16", "2-torch.bfloat16", "4-torch.bfloat16")
def test_numbers_of_parts(splits, dtype, device):
    check(random_parts(splits, (2, 5, 3), device), splits, dtype)


# A CTA makes four rows, or one, or two of many: one row, one less and one more than four, several,
# the last of a CTA beyond the end; slices of 64, of 128 and of all columns of a row.
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 3, 1), (1, 1, 5), (3, 1, 3), (2, 9, 2), (2, 9, 15)], ids=str
)
@pytest.mark.parametrize("splits", [3, 7, 33])
@pytest.mark.sampled("3-(1, 1, 1)", "3-(1, 3, 1)", "7-(1, 1, 1)")
def test_numbers_of_rows(shape, splits, device):
    check(random_parts(splits, shape, device), splits)


def test_one_part_is_left_as_it_is(device):
    parts = random_parts(1, (2, 5, 3), device)
    out, _ = check(parts, 1)
    assert torch.equal(out, parts[0].bfloat16())


def test_parts_without_a_key_count_for_nothing(device):
    """Whatever their O holds; each part of the three is such a one in some row."""
    out, lse = random_parts(3, (2, 6, 2), device)
    for row in range(6):
        for part in range(3):
            if row >> part & 1:
                lse[part::3, :, row] = -math.inf
                out[part::3, row] = (math.nan, math.inf, -math.inf)[part]
    got, _ = check((out, lse), 3)
    # Row 3 has the last part alone.
    assert torch.equal(got[:, 3], out[2::3, 3].bfloat16())


def test_rows_without_any_key(device):
    out, lse = random_parts(5, (2, 4, 3), device)
    out[:, 1:3], lse[..., 1:3] = math.nan, -math.inf
    got, total = check((out, lse), 5)
    assert (got[:, 1:3] == 0).all() and (total[..., 1:3] == -math.inf).all()
    assert got[:, ::3].isfinite().all() and total[..., ::3].isfinite().all()


@pytest.mark.parametrize("offset", [200.0, -200.0])
def test_far_apart(offset, device):
    """exp(200) is no float32: weights come from differences, and the smaller parts vanish."""
    out, lse = random_parts(4, (1, 6, 2), device)
    lse[1] += offset
    got, _ = check((out, lse), 4)
    if offset > 0:
        assert torch.equal(got[0], out[1].bfloat16())


@pytest.mark.parametrize("level", [5000.0, -5000.0])
def test_all_far_from_zero(level, device):
    """Scores of a large scale: no exponential of an LSE itself is ever taken."""
    out, lse = random_parts(3, (1, 6, 2), device)
    check((out, lse + level), 3)


@pytest.mark.parametrize("splits", [1, 3, 32, 40])
@pytest.mark.sampled("1", "3")
def test_a_nan_stays_in_its_row(splits, device):
    """An LSE that is NaN makes all of its row NaN, and nothing else.  A part whose LSE is +inf, as
    of a sink, has all of the weight."""
    out, lse = random_parts(splits, (2, 6, 3), device)
    clean = run((out, lse), splits)
    lse[splits - 1, 1, 4] = math.nan
    lse[splits, 2, 0] = math.inf
    got, total = run((out, lse), splits)
    spoiled = torch.zeros(2, 6, 3, dtype=torch.bool)
    spoiled[0, 4, 1] = spoiled[1, 0, 2] = True
    assert got[0, 4, 1].isnan().all() and total[0, 1, 4].isnan()
    assert torch.equal(got[1, 0, 2], out[splits, 0, 2].to(got.dtype))
    assert total[1, 2, 0] == math.inf
    assert torch.equal(got[~spoiled], clean[0][~spoiled])
    assert torch.equal(total.transpose(1, 2)[~spoiled], clean[1].transpose(1, 2)[~spoiled])


def test_a_nan_in_one_column_stays_there(device):
    """The NaN is in a part that has some weight."""
    out, lse = random_parts(3, (1, 6, 2), device)
    clean = run((out, lse), 3)
    out[1, 2, 1, 77] = math.nan
    got, total = run((out, lse), 3)
    assert torch.equal(total, clean[1])
    is_nan = got.isnan()
    assert is_nan[0, 2, 1, 77] and is_nan.sum() == 1
    assert torch.equal(got[~is_nan], clean[0][~is_nan])


def test_any_strides(device):
    """Heads first and sliced rows, of the parts as of the results; last strides are 1."""
    parts = random_parts(3, (2, 5, 4), device)
    wanted = run(parts, 3)
    wide = torch.full((6, 4, 5, 272), math.nan, device=device)
    out = wide[..., 8:264].transpose(1, 2).copy_(parts[0])
    lse = torch.full((4, 6, 9), math.nan, device=device)[..., 3:8].transpose(0, 1)
    lse.copy_(parts[1])
    assert not out.is_contiguous() and not lse.is_contiguous()
    rows = torch.full((5, 4, 2, 272), math.nan, dtype=torch.bfloat16, device=device)
    columns = torch.full((4, 2, 7), math.nan, device=device)
    results = rows[..., 8:264].permute(2, 0, 1, 3), columns[..., 1:6].transpose(0, 1)
    combine(describe(wanted[0], 3), (out, lse), results)
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
    # Nothing beside the results is written.
    beside = rows[..., :8], rows[..., 264:], columns[..., :1], columns[..., 6:]
    assert all(part.isnan().all() for part in beside)


@pytest.mark.parametrize("splits", [2, 4, 9, 32, 61])
@pytest.mark.sampled("2", "4")
def test_bits_do_not_depend_on_the_number_of_rows(splits, device):
    """Rows are shared by more warps and CTAs the fewer they are."""
    parts = random_parts(splits, (1, 150, 8), device)
    whole = run(parts, splits)
    for rows in (1, 5, 12, 40):
        few = run((parts[0][:, :rows], parts[1][..., :rows]), splits)
        assert torch.equal(few[0], whole[0][:, :rows])
        assert torch.equal(few[1], whole[1][..., :rows])


def test_a_second_run_is_bitwise_equal(device):
    parts = random_parts(5, (2, 9, 3), device)
    assert all(torch.equal(a, b) for a, b in zip(run(parts, 5), run(parts, 5), strict=True))


@pytest.mark.simulator
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("splits", [3, 32, 37])
@pytest.mark.sampled("3-None", "3-1")
def test_no_findings(splits, seed, sanitize):
    """The last CTA has fewer rows than warps, where a warp makes a row."""
    import sm100_sim

    sanitize(seed)
    run(random_parts(splits, (2, 3, 3), "cpu"), splits)
    report = sm100_sim.last_reports()[-1]
    problem = describe(torch.zeros(2, 3, 3, 256).bfloat16(), splits)
    config = problem.kernels.combine.of(splits, 18)
    ctas = -(-18 * config.slices // config.cta_rows)
    assert report.findings == [] and report.grid == (ctas, 1, 1)


def test_warps_of_a_row():
    """A warp for each four parts; of a CTA as many rows as an SM gets, up to sixteen warps."""
    rule = CombineRule()
    numbers = (1, 4, 5, 8, 9, 16, 17, 32, 33, 64)
    assert [rule.of(n, 128).row_warps for n in numbers] == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16]
    assert {rule.of(n, 128).cta_rows for n in numbers} == {1}
    # Fewer rows than SMs: slices of 64 or 128 columns, and a warp has as many times the parts.
    assert [rule.of(n, 32).row_warps for n in numbers] == [1, 1, 1, 1, 1, 1, 2, 2, 4, 4]
    assert [rule.of(64, rows).slices for rows in (1, 32, 33, 64, 65, 512)] == [4, 4, 2, 2, 1, 1]
    found = [rule.of(8, rows) for rows in (128, 129, 512, 1024, 1025, 8192)]
    assert [(c.cta_rows, c.alone) for c in found] == [
        (1, True),
        (2, True),
        (4, True),
        (8, True),
        (2, False),
        (2, False),
    ]
    assert [rule.of(n, 32).lane_parts for n in (32, 33)] == [1, 2]
    for parts in (0, 65):
        with pytest.raises(ValueError, match=f"{parts} KV splits; accepted: 1 to 64"):
            rule.of(parts, 32)
    for warps in (3, 8):
        with pytest.raises(ValueError, match=f"row_warps is {warps}; accepted: powers of two"):
            CombineConfig(row_warps=warps)


@pytest.mark.parametrize("parts_at_once", [0, 3, 64])
def test_configurations_that_are_not_accepted(parts_at_once):
    """A lane past the warp would give the weight of another part: 32 must be a multiple."""
    with pytest.raises(ValueError, match="parts_at_once"):
        CombineConfig(parts_at_once=parts_at_once)
