"""Queries, keys and values in mxfp8 against float64: lengths, masks, options, packed sequences,
and what is refused.

The tolerance is twice the error of PyTorch with P rounded to e4m3 (`reference.e4m3_pytorch`), over
what the operands stand for.
"""

from __future__ import annotations

import pytest
import torch
from e4m3_cases import E4M3, LENGTHS, MASKS, judged
from mxfp8_cases import accurate_mxfp8, exact, operands, takes_blocks, uneven
from paged_cases import int32, offsets

import sm100_sim
from fa4_hd256 import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    masks,
)
from fa4_hd256.architectures import ARCHITECTURES, named
from fa4_hd256.call.mxfp8_scales import check_alone
from fa4_hd256.quantize import Mxfp8, quantize_mxfp8


@pytest.fixture(autouse=True)
def _is_offered(request, architecture):
    """Skip what calls kernels where the architecture has none for scales of blocks."""
    if not takes_blocks(architecture) and not request.node.get_closest_marker("simulator"):
        pytest.skip(f"{architecture} has no kernel for mxfp8")


def attend(given, **options):
    return flash_attn_func(**given._asdict(), return_lse=True, **options)


# ---------------------------------------------------------------- dense


@pytest.mark.parametrize(("lengths", "heads", "batch"), LENGTHS, ids=str)
@pytest.mark.sampled
def test_lengths(lengths, heads, batch, device):
    given = operands(lengths, heads, batch, device)
    accurate_mxfp8(attend(given), given)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.sampled
def test_masks(mask, device, use_clc):
    given = operands((300, 420), (4, 2), 2, device)
    accurate_mxfp8(attend(given, use_clc=use_clc, **mask), given, **mask)


@pytest.mark.parametrize(
    "options",
    [{"softmax_scale": -0.1}, {"softcap": 20.0, "causal": True}, {"softmax_scale": 0.0}],
    ids=str,
)
@pytest.mark.sampled
def test_options(options, device):
    """A sink is tested, too."""
    given, sink = operands((140, 260), (8, 2), 1, device), torch.randn(8, device=device)
    found = attend(given, learnable_sink=sink, **options)
    accurate_mxfp8(found, given, learnable_sink=sink, **options)


@pytest.mark.sampled
def test_split_keys(device):
    given = operands((140, 700), (4, 1), 2, device)
    accurate_mxfp8(attend(given, causal=True, num_splits=3), given, causal=True)


@pytest.mark.sampled
def test_block_mask(device):
    given = operands((300, 300), (2, 2), 1, device)
    mask = masks.prefix_lm(100, 300, 300, device=device)
    rows, columns = torch.arange(300)[:, None], torch.arange(300)
    seen = (columns < 100) | (columns <= rows)
    accurate_mxfp8(attend(given, block_mask=mask), given, mask=seen[None, None])


@pytest.mark.sampled
def test_bytes_and_strides(device):
    """Scales as bytes, and strided or unaligned ones, are those in atoms."""
    given = operands((140, 260), (2, 1), 1, device)
    wanted = attend(given)
    as_bytes = {n: t.view(torch.uint8) for n, t in given._asdict().items() if "scale" in n}
    wide = torch.empty(as_bytes["v_descale"].numel() + 3, dtype=torch.uint8, device=device)
    wide[3:] = as_bytes["v_descale"].flatten()
    as_bytes["v_descale"] = wide[3:].view(as_bytes["v_descale"].shape)
    twice = as_bytes["q_descale"].repeat_interleave(2, -1)[..., ::2]
    found = attend(given._replace(**as_bytes | {"q_descale": twice}))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.sampled
def test_nan_comes_through(device):
    """A scale of a row of Q that is NaN: NaN in its row alone."""
    given = operands((200, 200), (2, 1), 1, device)
    clean, _ = attend(given, causal=True)
    wild = given.q_descale.clone()
    # Head 0, row 150 = 128 + 22, block 3: the first block of four of the second tile.
    wild.view(torch.uint8).flatten()[2 * 512 + 22 * 16 + 3] = 0xFF
    out, lse = attend(given._replace(q_descale=wild), causal=True)
    assert out[0, 150, 0].isnan().all() and lse[0, 0, 150].isnan()
    out[0, 150, 0] = clean[0, 150, 0]
    assert torch.equal(out, clean)


# ---------------------------------------------------------------- packed sequences


# More sequences than a warp has lanes, for the count of the tiles before each.
@pytest.mark.parametrize(
    "lengths",
    [[(130, 300), (0, 40), (300, 129), (1, 0), (70, 70)], [(3, 5)] * 40 + [(130, 257)]],
    ids=("few", "many"),
)
@pytest.mark.sampled("static-few")
def test_packed_sequences(lengths, device, use_clc):
    of_q, of_k = zip(*lengths)
    begins = offsets(of_q, device), offsets(of_k, device)
    tensors = [
        uneven(sum(n), heads, 256).to(device) for n, heads in ((of_q, 4), (of_k, 2), (of_k, 2))
    ]
    given = quantize_mxfp8(*tensors, *begins)
    out, lse = flash_attn_varlen_func(
        **given._asdict(), cu_seqlens_q=begins[0], cu_seqlens_k=begins[1], max_seqlen_q=max(of_q),
        max_seqlen_k=max(of_k), causal=True, return_lse=True, use_clc=use_clc,
    )  # fmt: skip
    values = exact(given, begins)
    for number, (queries, _) in enumerate(lengths):
        rows, keys = (slice(*(int(b) for b in side[number : number + 2])) for side in begins)
        own = [t[where][None].cpu() for t, where in zip(values, (rows, keys, keys))]
        if queries:
            judged((out[rows][None].cpu(), lse[:, rows][None].cpu()), own, causal=True)


@pytest.mark.sampled
def test_lengths_in_use(device):
    """Keys past those in use may be NaN, but for scales of V in the last atom in use."""
    given = operands((150, 300), (2, 2), 2, device)
    used = [200, 90]
    for row, length in enumerate(used):
        given.k.view(torch.uint8)[row, length:] = 0x7F
        given.v.view(torch.uint8)[row, length:] = 0x7F
    out, lse = flash_attn_varlen_func(
        **given._asdict(), seqused_k=int32(used, device), return_lse=True
    )
    q, k, v = (t.cpu() for t in exact(given))
    for row, length in enumerate(used):
        own = q[row : row + 1], k[row : row + 1, :length], v[row : row + 1, :length]
        judged((out[row : row + 1].cpu(), lse[row : row + 1].cpu()), own)


# ---------------------------------------------------------------- in the simulator


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.sampled
def test_both_schedulers_give_the_same_bits(num_splits, monkeypatch, architecture, device):
    if device == "cpu":
        monkeypatch.setenv("SM100_SIM_DEVICE", f"{named(architecture).simulated}:3")
    given = operands((300, 400), (4, 2), 2, device)
    results = [
        attend(given, causal=True, use_clc=use_clc, num_splits=num_splits)
        for use_clc in (False, True)
    ]
    assert all(map(torch.equal, *results))


@pytest.mark.simulator
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("packed", [False, True], ids=("dense", "packed"))
@pytest.mark.sampled("static-packed-1")
def test_no_findings(packed, seed, use_clc, sanitize, architecture):
    if not takes_blocks(architecture):
        pytest.skip(f"{architecture} has no kernel for mxfp8")
    sanitize(seed, clusters=2)
    if packed:
        begins = offsets((300, 20, 280)), offsets((400, 130, 70))
        shapes = ((600, 2), (600, 1), (600, 1))
        given = quantize_mxfp8(*(uneven(*shape, 256) for shape in shapes), *begins)
        flash_attn_varlen_func(
            **given._asdict(), cu_seqlens_q=begins[0], cu_seqlens_k=begins[1], max_seqlen_q=300,
            max_seqlen_k=400, causal=True, use_clc=use_clc,
        )  # fmt: skip
    else:
        attend(operands((300, 400), (2, 1), 2), causal=True, use_clc=use_clc)
    assert sm100_sim.last_reports()[-1].findings == []


# ---------------------------------------------------------------- what is refused


def plain():
    """Operands of 3 queries and 9 keys, 4 query heads over 2."""
    shapes = ((3, 4), (9, 2), (9, 2))
    return quantize_mxfp8(*(torch.randn(1, *shape, 256) for shape in shapes))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [({"v_descale": None}, ValueError, "q_descale and k_descale given alone"),
     ({"k_descale": torch.ones(1)}, TypeError,
      "k_descale has dtype torch.float32 beside scales of blocks; accepted: torch.float8_e8m0fnu"),
     ({"q": torch.zeros(1, 3, 4, 256).bfloat16()}, ValueError, "q_descale given with q of"),
     ({"q_descale": torch.zeros(1, 2, 128, 8, dtype=torch.uint8)}, ValueError,
      r"q_descale has shape \(1, 2, 128, 8\); accepted: \(1, 4, 128, 8\), in atoms"),
     ({"v_descale": torch.zeros(1, 2, 128, 8, dtype=torch.uint8)}, ValueError,
      r"v_descale has shape \(1, 2, 128, 8\); accepted: \(1, 2, 256, 4\), in atoms"),
     ({"tree_mask": torch.ones(3, 3, dtype=torch.bool)}, NotImplementedError,
      "scales of blocks with tree_mask: not offered; accepted: dense q"),
     ({"return_max_logits": True}, NotImplementedError, "return_max_logits: .* does not keep")],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
@pytest.mark.simulator
def test_what_is_refused(change, error, message, architecture):
    if not takes_blocks(architecture):
        pytest.skip(f"{architecture} has no kernel for mxfp8")
    with pytest.raises(error, match=message):
        flash_attn_func(**plain()._asdict() | change)


@pytest.mark.simulator
def test_pages_are_refused():
    given = plain()._asdict()
    with pytest.raises(NotImplementedError, match="scales of blocks with page_table: not offered"):
        flash_attn_varlen_func(**given, page_table=int32([[0]]), seqused_k=int32([9]))


@pytest.mark.simulator
def test_new_rows_of_caches_are_refused(architecture):
    if not takes_blocks(architecture):
        pytest.skip(f"{architecture} has no kernel for mxfp8")
    given = plain()._asdict()
    cache = {{"k": "k_cache", "v": "v_cache"}.get(name, name): t for name, t in given.items()}
    rows = {name: given[name][:, :3].clone() for name in "kv"}
    before = cache["k_cache"].view(torch.uint8).clone()
    with pytest.raises(NotImplementedError, match="new rows of a cache with scales of blocks: not"):
        flash_attn_with_kvcache(**cache, **rows, cache_seqlens=int32([4]))
    assert torch.equal(cache["k_cache"].view(torch.uint8), before)


@pytest.mark.simulator
def test_some_heads_of_scales_of_v_are_refused(architecture):
    """Halves of the columns are outermost in memory: those of some heads are not its begin."""
    if not takes_blocks(architecture):
        pytest.skip(f"{architecture} has no kernel for mxfp8")
    given = quantize_mxfp8(*(torch.randn(2, 9, 2, 256) for _ in "qkv"))
    some = Mxfp8(*(t[:, :, :1] for t in given[:3]), *(t[:, :1] for t in given[3:]))
    with pytest.raises(
        ValueError, match=r"v_descale has strides .*; accepted: a contiguous tensor"
    ):
        flash_attn_func(**some._asdict())


def slices_of(scales):
    """Yield some sequences or heads of dense scales, contiguous and in another order than their
    shape says, and a part of the error."""
    yield scales[:1], "2, 2, 256, 4"
    yield scales[1:].view(torch.uint8), "more memory"
    yield scales.chunk(2)[0].detach(), "more memory"
    yield scales[0][None, 1:], "2, 2, 256, 4"
    with torch.inference_mode():
        yield scales.clone()[:1], "more memory"


@pytest.mark.simulator
def test_some_sequences_of_scales_of_v_are_refused(architecture):
    """Halves of the columns of a slice are not where its shape says. A layer's scales in one tensor
    of several layers, or in memory of the user's, are whole."""
    if not takes_blocks(architecture):
        pytest.skip(f"{architecture} has no kernel for mxfp8")
    given = quantize_mxfp8(*(torch.randn(2, 9, 2, 256) for _ in "qkv"))
    first = [t[:1] for t in given]
    for scales, said in slices_of(given.v_descale):
        heads = scales.shape[1]
        tensors = [t[:, :, :heads] for t in first[:3]] + [t[:, :heads] for t in first[3:5]]
        message = rf"v_descale is a part of .*{said}.*; accepted: scales of these sequences alone"
        with pytest.raises(ValueError, match=message):
            flash_attn_func(**Mxfp8(*tensors, scales)._asdict())
    layers = given.v_descale.view(torch.uint8).expand(3, -1, -1, -1, -1).contiguous()
    room = torch.zeros(3 * given.v_descale.numel(), dtype=torch.uint8)
    room[: given.v_descale.numel()] = given.v_descale.view(torch.uint8).flatten()
    for whole in (layers[1], room[: given.v_descale.numel()].view(given.v_descale.shape)):
        check_alone("v_descale", whole)


@pytest.mark.simulator
def test_scheduler_metadata_are_refused(architecture):
    """Metadata are made for tiles that query heads share."""
    if not takes_blocks(architecture):
        pytest.skip(f"{architecture} has no kernel for mxfp8")
    lengths = int32([9])
    metadata = get_scheduler_metadata(lengths, 3, 9, 4, 2, kv_dtype=E4M3, q_dtype=E4M3)
    message = "scales of blocks with scheduler_metadata: not offered; accepted: dense q, k and v"
    with pytest.raises(NotImplementedError, match=message):
        flash_attn_varlen_func(**plain()._asdict(), seqused_k=lengths, scheduler_metadata=metadata)


@pytest.mark.simulator
def test_too_few_scales_of_packed_sequences_are_refused(architecture):
    """A tile of its own for each sequence."""
    if not takes_blocks(architecture):
        pytest.skip(f"{architecture} has no kernel for mxfp8")
    begins = offsets((5, 6))
    given = quantize_mxfp8(*(torch.randn(11, 2, 256) for _ in "qkv"), begins, begins)
    half = given._replace(k_descale=given.k_descale[:, :128].contiguous())
    with pytest.raises(ValueError, match="k_descale has 1 tiles of a head; accepted: 2, ceil"):
        flash_attn_varlen_func(
            **half._asdict(), cu_seqlens_q=begins, cu_seqlens_k=begins, max_seqlen_q=6
        )


@pytest.mark.simulator
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_gradients_are_refused(which):
    given = plain()._asdict()
    given[which] = given[which].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradients flow"):
        flash_attn_func(**given)


@pytest.mark.simulator
@pytest.mark.parametrize("where", [one.name for one in ARCHITECTURES])
def test_architectures_without_a_kernel_say_so(where, monkeypatch):
    if takes_blocks(where):
        pytest.skip("it has one")
    monkeypatch.setenv("FA4_HD256_ARCH", where)
    message = f"q, k and v in mxfp8, with scales of blocks, which {where}.* not yet offered"
    with pytest.raises(NotImplementedError, match=message):
        flash_attn_func(**plain()._asdict())


@pytest.mark.simulator
def test_shapes_without_running(architecture):
    """Graphs know the dtype of out."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not takes_blocks(architecture):
        pytest.skip(f"{architecture} has no kernel for mxfp8")
    with FakeTensorMode():
        codes = [torch.empty(1, 9, 2, 256, dtype=E4M3) for _ in "qkv"]
        scales = [torch.empty(1, 2, *s, dtype=torch.float8_e8m0fnu) for s in ((128, 8),) * 2]
        of_v = torch.empty(1, 2, 256, 4, dtype=torch.float8_e8m0fnu)
        out, lse = flash_attn_func(**Mxfp8(*codes, *scales, of_v)._asdict(), return_lse=True)
    assert out.dtype == torch.bfloat16 and out.shape == (1, 9, 2, 256)
    assert lse.dtype == torch.float32 and lse.shape == (1, 2, 9)
