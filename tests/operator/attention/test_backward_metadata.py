"""dS of packed sequences whose lengths the host has read: the tiles that are visible, no more."""

from __future__ import annotations

import random

import pytest
import torch
from backward_cases import check_each, packed
from operator_calls import backward_arguments
from paged_cases import offsets

import sm100_sim
from fa4_hd256 import flash_attn_varlen_func, get_backward_metadata, masks
from fa4_hd256.call import tile_mask
from fa4_hd256.call.packed_ds import begins_of
from fa4_hd256.kernels.backward.ds_tiles import DS_TILE_BYTES, count_tiles
from fa4_hd256.run import backward

#: Queries and keys of sequences: of one block, of several with rests, none on either side.
LENGTHS = ((300, 0, 40, 513), (300, 70, 0, 600))

MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (100, 30)}}


@pytest.fixture
def exact_room(monkeypatch):
    """Do not round, so that a tile too few shows."""
    monkeypatch.setattr(tile_mask, "ROUNDED_TILES", 1)
    monkeypatch.setattr(tile_mask, "ROUNDED_BITS", 64)


class Packed:
    """Tensors of sequences of these lengths, heads 2/1."""

    def __init__(self, lengths, device):
        self.lengths, self.longest = lengths, [max(*n, 1) for n in lengths]
        self.cu_q, self.cu_k = (offsets(n, device) for n in lengths)
        self.tensors = list(packed(lengths, (2, 1), torch.bfloat16, device))
        self.dout = torch.randn_like(self.tensors[0])

    def attend(self, *tensors, **options):
        return flash_attn_varlen_func(
            *tensors, cu_seqlens_q=self.cu_q, cu_seqlens_k=self.cu_k, max_seqlen_q=self.longest[0],
            max_seqlen_k=self.longest[1], **options,
        )  # fmt: skip

    def gradients(self, **options):
        leaves = [t.detach().requires_grad_() for t in self.tensors]
        return torch.autograd.grad(self.attend(*leaves, **options), leaves, self.dout)

    def metadata(self, **mask):
        return get_backward_metadata(self.cu_q, self.cu_k, **mask)

    def check(self, found, **options):
        """Check every sequence by itself."""
        check_each(dict(zip("qkv", found)), self.tensors, self.dout, self.lengths, **options)


def test_sequences_lie_one_behind_the_other(exact_room):
    """No tile has another's place, and there are no others."""
    draw, sides = random.Random(3), (None, 0, 1, 255, 256, 700)
    for _ in range(500):
        lengths = [
            tuple(draw.choice((0, draw.randint(1, 2000))) for _ in range(2))
            for _ in range(draw.randint(1, 6))
        ]
        window = draw.choice(sides), draw.choice(sides)
        counts = [0 if 0 in pair else count_tiles(pair, window) for pair in lengths]
        begins, total = begins_of(lengths, window)
        assert begins == [sum(counts[:i]) for i in range(len(counts))]
        assert total == max(sum(counts), 1)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.sampled
def test_gradients(mask, use_clc, device, backward_config, divisions, exact_room):
    """Gradients are the reference's, in no more room than there are tiles, with the bits of calls
    whose lengths are not known."""
    batch = Packed(LENGTHS, device)
    metadata = batch.metadata(**mask)
    tiles = sum(
        count_tiles(pair, metadata.window) for pair in zip(*LENGTHS, strict=True) if 0 not in pair
    )
    assert metadata.ds_tiles == tiles
    config = backward_config(ds_bytes=2 * tiles * DS_TILE_BYTES)
    options = {"use_clc": use_clc, **mask}
    found = batch.gradients(backward_metadata=metadata, backward_config=config, **options)
    (chunk,) = divisions[-1].chunks
    assert chunk.problem.ds_bytes == config.ds_bytes
    batch.check(found, **mask)
    without = batch.gradients(**options)
    assert divisions[-1].problem.ds_bytes > config.ds_bytes
    assert all(map(torch.equal, found, without))


@pytest.mark.sampled
def test_some_heads_at_a_time_and_no_room(device, backward_config, divisions, exact_room):
    """Heads of keys in two chunks; and kernels that store no dS."""
    batch = Packed(LENGTHS, device)
    batch.tensors[1:] = (t.repeat(1, 2, 1) for t in batch.tensors[1:])
    metadata, expected = batch.metadata(causal=True), batch.gradients(causal=True)
    of_head = metadata.ds_tiles * DS_TILE_BYTES
    for ds_bytes, chunks in ((2 * of_head, 1), (2 * of_head - 1, 2), (of_head - 1, 1)):
        found = batch.gradients(
            causal=True, backward_metadata=metadata,
            backward_config=backward_config(ds_bytes=ds_bytes),
        )  # fmt: skip
        assert len(divisions[-1].chunks) == chunks
        if ds_bytes >= of_head:
            assert all(map(torch.equal, found, expected))
        batch.check(found, causal=True)
    assert not divisions[-1].problem.keeps_ds


@pytest.mark.sampled
def test_calls_of_other_counts(device, divisions, exact_room):
    """Each has its own room, although it is repeated and differs in contents alone."""
    short, long = (((n, 600 - n),) * 2 for n in (300, 40))
    batches = [Packed(lengths, device) for lengths in (short, long)]
    for batch in (*batches, *batches):
        batch.longest = 600, 600
        metadata = batch.metadata(causal=True)
        batch.check(batch.gradients(causal=True, backward_metadata=metadata), causal=True)
    assert {division.problem.listed_tiles for division in divisions} == {24, 28}


def test_calls_without_gradients_are_as_without(device):
    batch = Packed(LENGTHS, device)
    metadata = batch.metadata(causal=True)
    found = batch.attend(*batch.tensors, causal=True, backward_metadata=metadata)
    assert torch.equal(found, batch.attend(*batch.tensors, causal=True))


def test_offsets_given_once_and_lengths_on_the_host(device):
    """cu_seqlens_k is cu_seqlens_q; copies on the CPU say the same."""
    batch = Packed((LENGTHS[0],) * 2, device)
    once = get_backward_metadata(batch.cu_q, causal=True)
    copies = get_backward_metadata(
        batch.cu_q.cpu(), batch.cu_k.cpu(), window_size=(None, 0), device=device
    )
    both = batch.metadata(causal=True)
    for one in (once, copies):
        assert one.ds_begins.device == both.ds_begins.device
        assert torch.equal(one.ds_begins, both.ds_begins)
        assert one[1:] == both[1:]


@pytest.mark.sampled
def test_compiled(device):
    """The graph is whole, and traced once for metadata of batches of as many tiles."""
    batches = [Packed(((n, 600 - n),) * 2, device) for n in (300, 299)]

    def layer(q, k, v, cu, metadata):
        return flash_attn_varlen_func(
            q * 1, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=600, max_seqlen_k=600,
            causal=True, backward_metadata=metadata,
        )  # fmt: skip

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for batch in batches:
        metadata = get_backward_metadata(batch.cu_q, causal=True)
        leaves = [t.detach().requires_grad_() for t in batch.tensors]
        with torch._dynamo.config.patch(error_on_recompile=True):
            out = compiled(*leaves, batch.cu_q, metadata)
        batch.check(torch.autograd.grad(out, leaves, batch.dout), causal=True)


@pytest.mark.sampled
def test_opcheck(device):
    batch = Packed(LENGTHS, device)
    metadata = batch.metadata(causal=True)
    out, lse = batch.attend(*batch.tensors, causal=True, return_lse=True)
    given = dict(zip(("q", "k", "v", "out"), (t[None] for t in (*batch.tensors, out))))
    call = backward_arguments(
        **given, dout=batch.dout[None], lse=lse[None], cu_seqlens_q=batch.cu_q,
        cu_seqlens_k=batch.cu_k, max_seqlen_q=batch.longest[0], max_seqlen_k=batch.longest[1],
        window_right=0, ds_begins=metadata.ds_begins, listed_tiles=metadata.ds_tiles,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.fa4_hd256.backward.default, call)


@pytest.mark.simulator
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.sampled
def test_no_findings(seed, sanitize, exact_room):
    sanitize(seed, clusters=2)
    batch = Packed(LENGTHS, "cpu")
    batch.gradients(causal=True, backward_metadata=batch.metadata(causal=True))
    reports = sm100_sim.last_reports()[-4:]
    assert all(report.seed == seed and report.findings == [] for report in reports)


def wrong(monkeypatch, change):
    """Return (a batch, metadata that nobody compares with its lengths)."""
    monkeypatch.setattr(backward, "check_begins", lambda *given: None)
    batch = Packed(LENGTHS, "cpu")
    return batch, change(batch.metadata(causal=True))


#: Metadata of other lengths.
STALE = {
    "one tile less": lambda one: one._replace(ds_tiles=one.ds_tiles - 1),
    "room for a block": lambda one: one._replace(ds_tiles=4),
    "all begin at the first": lambda one: one._replace(ds_begins=one.ds_begins * 0),
    "beyond the end": lambda one: one._replace(ds_begins=one.ds_begins + (1 << 20)),
    "before the start": lambda one: one._replace(ds_begins=one.ds_begins - (1 << 20)),
}


@pytest.mark.simulator
@pytest.mark.sampled("beyond the end")
@pytest.mark.parametrize("change", STALE.values(), ids=STALE)
def test_metadata_of_other_lengths(monkeypatch, exact_room, change):
    """All gradients are NaN, and no tile is read or written outside of dS, whose memory ends behind
    the last tile."""
    batch, metadata = wrong(monkeypatch, change)
    found = batch.gradients(causal=True, backward_metadata=metadata)
    assert all(gradient.isnan().all() for gradient in found)


# ------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        (torch.tensor([0, 3]), TypeError, "int32"),
        (torch.tensor([0, 3, 2], dtype=torch.int32), ValueError, "offsets that ascend from 0"),
        (torch.tensor([1, 3], dtype=torch.int32), ValueError, "offsets that ascend from 0"),
        (torch.zeros(2, 2, dtype=torch.int32), ValueError, r"accepted: \(batch \+ 1,\)"),
        (torch.zeros(0, dtype=torch.int32), ValueError, r"accepted: \(batch \+ 1,\)"),
        (3, TypeError, "cu_seqlens_q"),
    ],
    ids=["int64", "descending", "not from 0", "two dimensions", "none", "a number"],
)
def test_offsets_that_are_none(offsets, error, message):
    with pytest.raises(error, match=message):
        get_backward_metadata(offsets)


def test_as_many_offsets_of_keys():
    with pytest.raises(ValueError, match="cu_seqlens_q has 3 offsets, cu_seqlens_k 2"):
        get_backward_metadata(*(offsets(n, "cpu") for n in ((1, 2), (3,))))


def test_nothing_is_read_while_tracing_or_in_a_capture(monkeypatch):
    cu = offsets((1, 2), "cpu")
    with pytest.raises(RuntimeError, match="reads lengths"):
        torch.compile(get_backward_metadata, fullgraph=True, backend="eager")(cu)
    monkeypatch.setattr("fa4_hd256.metadata.is_captured", lambda device: True)
    with pytest.raises(RuntimeError, match="reads lengths"):
        get_backward_metadata(cu)


def test_metadata_of_another_call():
    """Metadata of another mask, other lengths, fewer sequences is refused; so is what is none."""
    batch = Packed(LENGTHS, "cpu")
    of_full = batch.metadata()
    with pytest.raises(ValueError, match=r"window of \(None, None\), the call's is \(None, 0\)"):
        batch.gradients(causal=True, backward_metadata=of_full)
    with pytest.raises(TypeError, match="backward_metadata is a tuple"):
        batch.gradients(causal=True, backward_metadata=tuple(of_full))
    other = Packed(((0, 300, 40, 513), LENGTHS[1]), "cpu")
    with pytest.raises(ValueError, match="dS of the sequences begins at tiles"):
        batch.gradients(causal=True, backward_metadata=other.metadata(causal=True))
    fewer = Packed(((853,), (970,)), "cpu").metadata(causal=True)
    with pytest.raises(ValueError, match="the batch sizes disagree"):
        batch.gradients(causal=True, backward_metadata=fewer)
    unknown = batch.metadata(causal=True)._replace(ds_tiles=0)
    with pytest.raises(ValueError, match="listed_tiles is 0 with ds_begins"):
        batch.gradients(causal=True, backward_metadata=unknown)


def test_what_goes_with_no_metadata():
    batch = Packed(LENGTHS, "cpu")
    metadata, used = batch.metadata(), torch.ones(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="backward_metadata is given with seqused_k"):
        batch.gradients(seqused_k=used, backward_metadata=metadata)
    mask = masks.from_dense(torch.ones(1, 1, 853, 970, dtype=torch.bool))
    with pytest.raises(ValueError, match="block_mask and backward_metadata"):
        batch.gradients(block_mask=mask, backward_metadata=metadata)
    leaves = [t[None].detach().requires_grad_() for t in batch.tensors]
    with pytest.raises(ValueError, match="ds_begins is given with"):
        flash_attn_varlen_func(*leaves, backward_metadata=metadata)
