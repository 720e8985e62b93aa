"""Gradients in mxfp8 against float64: lengths, masks, packed sequences, chunks, and what is
refused.  Tolerances: `mxfp8_gradient_cases`."""

from __future__ import annotations

import pytest
import torch
from mxfp8_gradient_cases import Exact, accurate, has_gradients, inputs, run
from paged_cases import int32, offsets

import sm100_sim
from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, get_backward_metadata, masks
from fa4_hd256.architectures import ARCHITECTURES, named
from fa4_hd256.kernels.blackwell.backward.config import BackwardConfig
from fa4_hd256.kernels.blackwell.backward.mxfp8.config import Mxfp8BackwardConfig
from fa4_hd256.quantize import quantize_mxfp8, quantize_mxfp8_training
from fa4_hd256.run import mxfp8_backward


@pytest.fixture(autouse=True)
def _is_offered(architecture, request):
    """Skip what calls kernels where the architecture has none for gradients in mxfp8."""
    if not has_gradients(architecture) and "where" not in request.fixturenames:
        pytest.skip(f"{architecture} has no backward in mxfp8")


def judged(tensors, begins=(None, None), **options):
    """Run a dense call and its backward; assert that the gradients are accurate."""
    own = {n: options.pop(n) for n in ("use_clc", "backward_config", "dlse") if n in options}
    out, dout, dlse, found = run(tensors, begins, **options, **own)
    accurate(found, Exact(tensors, dout, begins), dout, out, dlse, **options)
    assert [t.dtype for t in found] == [t.dtype for t in tensors]


# ---------------------------------------------------------------- dense


# A row and a key; fewer and more than a tile (256 keys, 128 queries), several query heads of a KV
# head; several tiles of either side that are not full.
LENGTHS = [((1, 1), (1, 1), 2), ((7, 333), (4, 1), 1), ((300, 420), (4, 2), 2)]


@pytest.mark.parametrize(("lengths", "heads", "batch"), LENGTHS, ids=str)
@pytest.mark.sampled
def test_lengths(lengths, heads, batch, device):
    judged(inputs(lengths, heads, batch, device=device))


@pytest.mark.parametrize(
    "mask",
    [{"causal": True}, {"window_size": (100, 0)}, {"window_size": (70, 5)},
     {"window_size": (None, 9)}, {"window_size": (40, -20)}],
    ids=str,
)  # fmt: skip
@pytest.mark.sampled
def test_masks(mask, device, use_clc):
    judged(inputs((300, 420), (4, 2), 1, device=device), use_clc=use_clc, **mask)


@pytest.mark.sampled
def test_float16_and_a_negative_scale(device):
    tensors = inputs((200, 300), (2, 1), 1, torch.float16, device)
    judged(tensors, causal=True, softmax_scale=-0.05)


@pytest.mark.sampled
def test_gradient_of_lse(device):
    judged(inputs((140, 260), (2, 1), 1, device=device), dlse=True, causal=True)


@pytest.mark.sampled
def test_a_query_without_keys(device):
    """Return 0 for its dq; it adds nothing to dk and dv."""
    tensors = inputs((300, 100), (2, 1), 1, device=device)
    out, dout, _, found = run(tensors, causal=True)
    accurate(found, Exact(tensors, dout), dout, out, causal=True)
    assert not found[0][:, :200].any()


@pytest.mark.sampled
def test_small_gradients_beside_large_ones(device):
    """Queries whose dO is 2^10 times smaller than their neighbours', with which they share scales
    of dS, keep the relative error of their dq."""
    tensors = inputs((140, 260), (2, 1), 1, device=device)
    small = torch.arange(140) % 2 == 1
    factors = torch.where(small, 2.0**-10, 1.0).view(1, -1, 1, 1).to(device)
    out, dout, _, found = run(tensors, causal=True, dout_factors=factors)
    values = Exact(tensors, dout)
    accurate(found, values, dout, out, causal=True)
    accurate(found, values, dout, out, rows=small, causal=True)


@pytest.mark.sampled
def test_only_one_gradient(device):
    q, k, v = inputs((140, 260), (2, 1), 1, device=device)
    given = quantize_mxfp8_training(q.detach(), k, v.detach())
    out = flash_attn_func(**given._asdict(), causal=True)
    out.backward(torch.ones_like(out))
    assert q.grad is v.grad is None and k.grad.isfinite().all() and k.grad.any()


@pytest.mark.sampled
def test_nan_comes_through(device):
    """A NaN of dO: in dq of its row alone, in dk of all keys that it sees, in dv in its column."""
    tensors = inputs((200, 200), (2, 1), 1, device=device)
    given = quantize_mxfp8_training(*tensors)
    out = flash_attn_func(**given._asdict(), causal=True)
    dout = torch.randn(out.shape).to(out)
    dout[0, 150, 1, 7] = torch.nan
    dq, dk, dv = torch.autograd.grad(out, tensors, dout)
    assert dq[0, 150, 1].isnan().all()
    assert dq[0, :, 0].isfinite().all() and dq[0, :150, 1].isfinite().all()
    assert dk[0, :151].isnan().all()
    assert dv[0, :151, :, 7].isnan().all() and dv[0, :, :, :7].isfinite().all()


# ---------------------------------------------------------------- chunks


#: Bytes of dS of all query heads of a KV head in a sequence of 700, causal: 3 blocks of 256 x 256
#: meet 6, each of 4 tiles of 17 KiB.
OF_HEAD = 2 * 6 * 4 * 17 * 1024


@pytest.mark.parametrize("parts", [2, 1, 0.6], ids=("a KV head", "a sequence", "queries"))
@pytest.mark.sampled
def test_chunks(parts, device, monkeypatch):
    """A KV head of both sequences at a time, of one, and some of its queries."""
    found, divide = [], mxfp8_backward.divide

    def noted(*arguments):
        found.append(divide(*arguments))
        return found[-1]

    monkeypatch.setattr(mxfp8_backward, "divide", noted)
    tensors = inputs((700, 700), (4, 2), 2, device=device)
    config = Mxfp8BackwardConfig(ds_bytes=int(OF_HEAD * parts))
    judged(tensors, causal=True, backward_config=config)
    assert found[0].problem.ds_bytes_of_head == 2 * OF_HEAD
    assert len(found[0].chunks) == {2: 2, 1: 4, 0.6: 8}[parts]


@pytest.mark.simulator
@pytest.mark.sampled
def test_too_little_memory_is_refused():
    tensors = inputs((300, 300), (2, 1), 1)
    given = quantize_mxfp8_training(*tensors)
    config = Mxfp8BackwardConfig(ds_bytes=1 << 10)
    out = flash_attn_func(**given._asdict(), backward_config=config)
    with pytest.raises(
        NotImplementedError, match="keep dS of a KV head, .* bytes here .* accepted"
    ):
        out.backward(out.detach())


# ---------------------------------------------------------------- packed sequences


@pytest.mark.parametrize(
    "lengths",
    [[(130, 300), (0, 40), (300, 129), (1, 0), (70, 70)], [(3, 5)] * 40 + [(130, 257)]],
    ids=("few", "many"),
)
@pytest.mark.sampled("static-few")
def test_packed_sequences(lengths, device, use_clc):
    of_q, of_k = zip(*lengths)
    begins = offsets(of_q, device), offsets(of_k, device)
    tensors = inputs((sum(of_q), sum(of_k)), (4, 2), device=device)
    out, dout, _, found = run(
        tensors, begins, max_seqlen_q=max(of_q), max_seqlen_k=max(of_k), causal=True,
        use_clc=use_clc,
    )  # fmt: skip
    values = Exact(tensors, dout, begins)
    for number, (queries, keys) in enumerate(lengths):
        rows, columns = (slice(*(int(b) for b in side[number : number + 2])) for side in begins)
        own = [t[where][None] for t, where in zip(found, (rows, columns, columns))]
        if queries and keys:
            one = values.sequence(rows, columns)
            accurate(own, one, dout[rows][None], out[rows][None], causal=True)
        else:
            assert not any(t.any() for t in own)


@pytest.mark.simulator
@pytest.mark.parametrize("lengths", [(0, 0), (5, 0), (0, 5)], ids=str)
def test_sides_without_rows(lengths):
    """All packed sequences of a side may be empty."""
    begins = offsets(lengths[:1]), offsets(lengths[1:])
    tensors = inputs(lengths, (4, 2))
    out, _, _, found = run(tensors, begins, max_seqlen_q=5, max_seqlen_k=5, causal=True)
    assert out.shape == tensors[0].shape and not out.any()
    assert [t.shape for t in found] == [t.shape for t in tensors]
    assert not any(t.any() for t in found)


@pytest.mark.simulator
@pytest.mark.parametrize("is_packed", [False, True], ids=("dense", "packed"))
@pytest.mark.sampled
def test_no_query_sees_a_key(is_packed):
    """The window lies behind all keys of all queries."""
    begins = (offsets([1]), offsets([3])) if is_packed else (None, None)
    bounds = {"max_seqlen_q": 1, "max_seqlen_k": 3} if is_packed else {}
    tensors = inputs((1, 3), (2, 1), None if is_packed else 1)
    out, _, _, found = run(tensors, begins, window_size=(100, -3), **bounds)
    assert not out.any()
    assert [t.shape for t in found] == [t.shape for t in tensors]
    assert not any(t.any() for t in found)


# ---------------------------------------------------------------- in the simulator


@pytest.mark.sampled
def test_both_schedulers_give_the_same_bits(monkeypatch, architecture, device):
    if device == "cpu":
        monkeypatch.setenv("SM100_SIM_DEVICE", f"{named(architecture).simulated}:3")
    tensors = inputs((300, 700), (4, 2), 1, device=device)
    results = []
    for use_clc in (False, True):
        torch.manual_seed(5)
        results.append(run(tensors, causal=True, use_clc=use_clc)[3])
    assert all(map(torch.equal, *results))


@pytest.mark.simulator
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("packed", [False, True], ids=("dense", "packed"))
@pytest.mark.sampled("static-packed-1")
def test_no_findings(packed, seed, use_clc, sanitize):
    sanitize(seed, clusters=2)
    if packed:
        begins = offsets((300, 20, 280)), offsets((400, 130, 70))
        tensors = inputs((600, 600), (4, 2))
        run(tensors, begins, max_seqlen_q=300, max_seqlen_k=400, causal=True, use_clc=use_clc)
    else:
        run(inputs((300, 400), (2, 1), 2), causal=True, use_clc=use_clc)
    reports = sm100_sim.last_reports()
    assert [report.findings for report in reports] == [[]] * len(reports)


# ---------------------------------------------------------------- what is refused


def training():
    """Operands of 3 queries and 9 keys, 4 query heads over 2."""
    return quantize_mxfp8_training(*inputs((3, 9), (4, 2), 1))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [({"softcap": 20.0}, NotImplementedError, "mxfp8_gradients with softcap: not offered"),
     ({"learnable_sink": torch.zeros(4)}, NotImplementedError, "with learnable_sink: not offered"),
     ({"out_gate": torch.zeros(1, 3, 4).bfloat16()}, NotImplementedError, "with out_gate: not"),
     ({"block_mask": masks.prefix_lm(1, 3, 9)}, NotImplementedError, "with block_mask: not"),
     ({"return_max_logits": True}, NotImplementedError, "with return_max_logits: not offered"),
     ({"out": torch.zeros(1, 3, 4, 256).bfloat16()}, NotImplementedError, "with out: not offered"),
     ({"backward_config": BackwardConfig()}, TypeError, "must be a .*Mxfp8BackwardConfig or None"),
     ({"mxfp8_gradients": 3}, TypeError, "mxfp8_gradients is a int; accepted: that of")],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
@pytest.mark.simulator
def test_what_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        flash_attn_func(**training()._asdict() | options)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [({"q": torch.zeros(1, 3, 4, 256)}, TypeError, r"mxfp8_gradients.q has dtype torch.float32"),
     ({"k": torch.zeros(1, 9, 2, 256).half()}, TypeError, "mxfp8_gradients.k has dtype"),
     ({"q_rows": torch.zeros(1, 4, 4, 256).to(torch.float8_e4m3fn)}, ValueError,
      "mxfp8_gradients.q_rows has shape"),
     ({"k_rows": torch.zeros(1, 9, 2, 256).bfloat16()}, TypeError,
      "mxfp8_gradients.k_rows has dtype torch.bfloat16; accepted: torch.float8_e4m3fn"),
     ({"v_columns_descale": torch.ones(1)}, TypeError, "v_columns_descale has dtype"),
     ({"k_rows": None}, TypeError, "mxfp8_gradients.k_rows must be a torch.Tensor, got NoneType"),
     ({"k_rows_descale": torch.zeros(1, 2, 256, 4, dtype=torch.uint8, device="meta")}, ValueError,
      "mxfp8_gradients.k_rows_descale is on meta; accepted: cpu"),
     ({"q_rows_descale": torch.zeros(1, 4, 128, 8, dtype=torch.uint8)}, ValueError,
      r"q_rows_descale has shape .*; accepted: \(1, 4, 256, 4\)")],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
@pytest.mark.simulator
def test_operands_that_do_not_fit_are_refused(changes, error, message):
    given = training()
    given = given._replace(mxfp8_gradients=given.mxfp8_gradients._replace(**changes))
    with pytest.raises(error, match=message):
        flash_attn_func(**given._asdict())


@pytest.mark.simulator
@pytest.mark.parametrize("name", ["q_rows_descale", "k_rows_descale"])
def test_some_sequences_of_scales_of_rows_are_refused(name):
    given = training()
    two = quantize_mxfp8_training(*inputs((3, 9), (4, 2), 2)).mxfp8_gradients
    part = given.mxfp8_gradients._replace(**{name: getattr(two, name)[:1]})
    with pytest.raises(ValueError, match=rf"mxfp8_gradients.{name} is a part of a tensor of shape"):
        flash_attn_func(**given._replace(mxfp8_gradients=part)._asdict())


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("name", "side"), [("v_columns", "k"), ("q_rows", "q"), ("k_rows", "k")], ids=str
)
def test_too_few_scales_of_packed_sequences_are_refused(name, side):
    """A tile of its own for each sequence."""
    begins = offsets((5, 6))
    given = quantize_mxfp8_training(*inputs((11, 11), (4, 2)), begins, begins)
    scales = f"{name}_descale"
    whole = getattr(given.mxfp8_gradients, scales)
    half = whole[:, :128] if name == "v_columns" else whole[..., :4]
    fewer = given.mxfp8_gradients._replace(**{scales: half.contiguous()})
    message = f"{scales} has 1 tiles of a head; accepted: 2, ceil.* of cu_seqlens_{side}"
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(
            **given._replace(mxfp8_gradients=fewer)._asdict(), cu_seqlens_q=begins,
            cu_seqlens_k=begins, max_seqlen_q=6, max_seqlen_k=6,
        )  # fmt: skip


@pytest.mark.simulator
def test_metadata_are_refused():
    begins = offsets((5, 6))
    given = quantize_mxfp8_training(*inputs((11, 11), (4, 2)), begins, begins)._asdict()
    given |= {"cu_seqlens_q": begins, "cu_seqlens_k": begins, "max_seqlen_q": 6}
    metadata = get_backward_metadata(begins, causal=True)
    with pytest.raises(ValueError, match="backward_metadata is given with mxfp8_gradients"):
        flash_attn_varlen_func(**given, causal=True, backward_metadata=metadata)
    with pytest.raises(NotImplementedError, match="with scheduler_metadata: not offered"):
        flash_attn_varlen_func(**given, scheduler_metadata=int32([1]))


@pytest.mark.simulator
def test_lengths_in_use_are_refused():
    with pytest.raises(NotImplementedError, match="with seqused_k: not offered; accepted: dense"):
        flash_attn_varlen_func(**training()._asdict(), seqused_k=int32([5]))


@pytest.mark.simulator
def test_operands_without_scales_of_blocks_are_refused():
    given = training()._asdict()
    scales = {name: torch.ones(1) for name in given if name.endswith("descale")}
    with pytest.raises(ValueError, match="mxfp8_gradients given without scales of blocks"):
        flash_attn_func(**given | scales)


@pytest.mark.simulator
def test_graphs_are_refused():
    given = training()._asdict()
    compiled = torch.compile(flash_attn_func, backend="eager")
    with pytest.raises(Exception, match="mxfp8_gradients inside torch.compile"):
        compiled(**given)


@pytest.mark.simulator
def test_second_order_gradients_are_refused():
    tensors = inputs((3, 9), (4, 2), 1)
    out = flash_attn_func(**quantize_mxfp8_training(*tensors)._asdict())
    with pytest.raises(NotImplementedError, match="no second-order gradients"):
        torch.autograd.grad(out.sum(), tensors, create_graph=True)


@pytest.mark.simulator
def test_without_gradients_the_result_is_that_of_the_operands():
    tensors = [t.detach() for t in inputs((30, 90), (4, 2), 1)]
    found = flash_attn_func(**quantize_mxfp8_training(*tensors)._asdict(), return_lse=True)
    wanted = flash_attn_func(**quantize_mxfp8(*tensors)._asdict(), return_lse=True)
    assert all(map(torch.equal, found, wanted)) and not found[0].requires_grad


@pytest.mark.simulator
@pytest.mark.parametrize("where", [one.name for one in ARCHITECTURES])
def test_architectures_without_kernels_say_so(where, monkeypatch):
    if has_gradients(where):
        pytest.skip("it has some")
    monkeypatch.setenv("FA4_HD256_ARCH", where)
    with pytest.raises(NotImplementedError, match=f"{where}.* has no backward in mxfp8 yet"):
        flash_attn_func(**training()._asdict())
