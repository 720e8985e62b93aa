"""Masks that kernels evaluate: functions in CuTe DSL beside a block mask's lists, against the
float64 reference, and bit for bit against bits made before."""

from __future__ import annotations

import cutlass
import pytest
import torch
from operator_calls import backward_arguments, forward_arguments
from test_block_mask import inputs
from torch.nn.attention.flex_attention import BlockMask

import sm100_sim
from fa4_hd256 import flash_attn_func, masks
from fa4_hd256.call.tile_mask import ASKED
from fa4_hd256.check import reference
from fa4_hd256.kernels.mask import block_mask
from fa4_hd256.mask_mods import MaskMod
from fa4_hd256.run import backward as run_of_backward
from fa4_hd256.run import compile
from fa4_hd256.score_mods import alibi

#: Limits by batch entry and query, of more queries than any call here has.
LIMITS = (torch.arange(2 * 700, dtype=torch.int32) * 977 % 701).view(2, 700)
#: Turns by query head.
TURNS = torch.tensor([0.0, 2.0, 1.0])


def everything(batch, head, query, key, tensors):
    """Mask by all that a mask_mod gets, and tensors of both dtypes."""
    limits, turns = tensors
    turn = cutlass.Int32(turns[head])
    return ((query * 7 + key * 3 + turn) % 5 > 1) & (key < limits[batch, query])


def everything_of_torch(b, h, q, k):
    return ((q * 7 + k * 3 + TURNS.long()[h]) % 5 > 1) & (k < LIMITS[b, q])


def even(batch, head, query, key, tensors):
    return (query + key) % 2 == 0


def mod_of(device="cpu"):
    return MaskMod.of(everything, (LIMITS.to(device), TURNS.to(device)))


def tiles_and_dense(lengths, heads=2, batch=1, own_heads=1, device="cpu"):
    """Return (lists of full, partial and empty tiles in every order, of the last queries none; what
    `everything` makes of them, for every head)."""
    of_tiles = [-(-length // 128) for length in lengths]
    kinds = torch.randint(0, 3, (batch, own_heads, *of_tiles), dtype=torch.int8)
    if of_tiles[0] > 1:
        kinds[..., -1, :] = 0
    mask = masks.TileMask.of_kinds(lengths, kinds)
    wide = mask.tiles.repeat_interleave(128, 2).repeat_interleave(128, 3)
    wide = wide[..., : lengths[0], : lengths[1]].expand(batch, heads, *lengths)
    index = torch.meshgrid(*map(torch.arange, wide.shape), indexing="ij")
    dense = (wide == block_mask.FULL) | ((wide == ASKED) & everything_of_torch(*index))
    return masks.TileMask.of_kinds(lengths, kinds.to(device)), dense


def leaves(*given, **named):
    return tuple(tensor.requires_grad_() for tensor in inputs(*given, **named))


def attend(tensors, lists, mask_mod, sink=None, **options):
    """Return (out, lse), and gradients of q, k, v and the sink for random ones of both."""
    named = {} if sink is None else {"learnable_sink": sink}
    results = flash_attn_func(
        *tensors, block_mask=lists, mask_mod=mask_mod, return_lse=True, **named, **options
    )
    torch.manual_seed(1)
    given = tuple(torch.randn(r.shape).to(r.device, r.dtype) for r in results)
    of = (*tensors, *([] if sink is None else [sink]))
    return results, torch.autograd.grad(results, of, given), given


def check(tensors, dense, found, score_mod=None, **options):
    """Compare the results of `attend` with the reference."""
    results, gradients, given = found
    exact = tuple(tensor.detach() for tensor in tensors)
    options |= {"mask": dense, "score_mod": score_mod}
    compared = reference.compare(*results, exact, **options)
    assert compared.max_error <= compared.tolerance, compared
    assert compared.lse_max_error <= 1e-3, compared
    named = dict(zip(("q", "k", "v", "sink"), gradients))
    for name, one in reference.compare_gradients(named, exact, *given, **options).items():
        assert one.max_error <= one.tolerance, (name, one)


# One row and key; several tiles whose lists differ and that end inside a tile, with lists of each
# head; of each entry, with the dynamic scheduler.
@pytest.mark.parametrize(
    ("lengths", "heads", "batch", "own_heads", "use_clc"),
    [((1, 1), (1, 1), 1, 1, False), ((515, 390), (2, 1), 1, 2, False),
     ((300, 385), (3, 3), 2, 1, True)],
)  # fmt: skip
@pytest.mark.sampled("lengths1-heads1-1-2-False")
def test_forward_and_gradients(lengths, heads, batch, own_heads, use_clc, device):
    lists, dense = tiles_and_dense(lengths, heads[0], batch, own_heads, device)
    tensors = leaves(*lengths, heads, batch, device=device)
    found = attend(tensors, lists, mod_of(device), use_clc=use_clc)
    check(tensors, dense, found)


@pytest.mark.sampled
def test_kinds_of_scores(device):
    """float16, a softcap, a sink, a scale below 0: rows that see nothing have the sink alone."""
    lengths, options = (200, 300), {"softcap": 20.0, "softmax_scale": -0.1}
    lists, dense = tiles_and_dense(lengths, device=device)
    tensors = leaves(*lengths, dtype=torch.float16, device=device)
    sink = torch.randn(2, device=device).requires_grad_()
    found = attend(tensors, lists, mod_of(device), sink, **options)
    check(tensors, dense, found, learnable_sink=sink.detach(), **options)


@pytest.mark.sampled
def test_beside_a_score_mod(device):
    """Each reads its own tensors."""
    lengths, slopes = (200, 300), torch.tensor([0.05, 0.011], device=device)
    lists, dense = tiles_and_dense(lengths, device=device)
    tensors = leaves(*lengths, device=device)
    found = attend(tensors, lists, mod_of(device), score_mod=alibi(slopes))
    own = slopes.double().cpu()
    check(
        tensors, dense, found,
        score_mod=lambda s, b, h, q, k: s - own[h] * (q + 100 - k).abs(),
    )  # fmt: skip


@pytest.mark.parametrize("heads_kv", [2, 1], ids=["heads", "heads of a group"])
@pytest.mark.sampled("heads of a group")
def test_chunks(heads_kv, device, backward_config, monkeypatch):
    """Heads and entries count in the whole call, wherever a chunk of dS begins."""
    lists, dense = tiles_and_dense((200, 256), 2, 2, 1, device)
    tensors, origins = leaves(200, 256, (2, heads_kv), 2, device=device), []
    divide = run_of_backward.divide

    def spy(*given):
        division = divide(*given)
        origins.extend(chunk.problem.origin for chunk in division.chunks)
        return division

    monkeypatch.setattr(run_of_backward, "divide", spy)
    one = backward_config(ds_bytes=4 * 128 * 128 * 2)
    check(tensors, dense, attend(tensors, lists, mod_of(device), backward_config=one))
    assert {(origin.batch, origin.head) for origin in origins} == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.sampled
def test_ranges_of_queries(device, backward_config):
    """Queries count in the whole call, too, in the mask_mod and beside it in a score_mod."""
    lengths, slopes = (600, 200), torch.tensor([0.05, 0.011], device=device)
    lists, dense = tiles_and_dense(lengths, device=device)
    tensors, own = leaves(*lengths, device=device), slopes.double().cpu()
    one = backward_config(ds_bytes=4 * 128 * 128 * 2)
    found = attend(tensors, lists, mod_of(device), score_mod=alibi(slopes), backward_config=one)
    check(
        tensors, dense, found,
        score_mod=lambda s, b, h, q, k: s - own[h] * (q - 400 - k).abs(),
    )  # fmt: skip


def test_nothing_is_made_before(device):
    """Only the lists of a BlockMask are read."""

    def refuse(b, h, q, k):
        raise AssertionError("evaluated")

    counts = torch.ones(1, 1, 2, dtype=torch.int32, device=device)
    indices = torch.arange(2, dtype=torch.int32, device=device)[None, None, :, None]
    mask = BlockMask.from_kv_blocks(
        counts, indices.expand(1, 1, 2, 2).contiguous(), mask_mod=refuse, seq_lengths=(256, 256)
    )
    tensors = leaves(256, 256, device=device)
    index = torch.meshgrid(*map(torch.arange, (1, 2, 256, 256)), indexing="ij")
    dense = everything_of_torch(*index) & (index[2] // 128 == index[3] // 128)
    check(tensors, dense, attend(tensors, mask, mod_of(device)))
    assert masks.as_tile_mask(mask, with_bits=False).bits is None


def test_another_tensor_takes_the_same_kernel(device):
    """The function is compiled in, tensors are not; they are read in every call."""
    lists, _ = tiles_and_dense((100, 100), device=device)
    lists = masks.TileMask(lists.lengths, torch.full_like(lists.tiles, ASKED), None)
    tensors = inputs(100, 100, device=device)
    limits = LIMITS.to(device).clone()
    mod = MaskMod.of(everything, (limits, TURNS.to(device)))
    first = flash_attn_func(*tensors, block_mask=lists, mask_mod=mod)
    compiled = compile.counters["compiled"] + compile.counters["disk"]
    limits.fill_(50)
    second = flash_attn_func(*tensors, block_mask=lists, mask_mod=mod)
    assert not torch.equal(first, second)
    assert compile.counters["compiled"] + compile.counters["disk"] == compiled


def test_graphs_and_schemas(device, architecture):
    """torch.compile keeps the operators whole, and gives the same bits; their schemas hold."""
    lists, _ = tiles_and_dense((150, 200), device=device)
    mod, tensors = mod_of(device), leaves(150, 200, device=device)

    def layer(q, k, v):
        return flash_attn_func(q * 2, k, v, block_mask=lists, mask_mod=mod, use_clc=False)

    dout, found = torch.randn(tensors[0].shape).to(device, torch.bfloat16), []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        found.append(torch.autograd.grad(call(*tensors), tensors, dout))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    q, k, v = (tensor.detach() for tensor in tensors)
    halves = 2 if architecture == "sm_100a" else 1
    own = {f"mask_tensor_{i}": tensor for i, tensor in enumerate(mod.tensors)}
    own["mask_mod"], operators = mod.key, torch.ops.fa4_hd256
    steps = {"mask_steps": lists.steps(halves)}
    torch.library.opcheck(operators.forward.default, forward_arguments(q, k, v, **steps, **own))
    lse, blocks = torch.zeros(1, 2, 150, device=device), {"mask_blocks": lists.blocks}
    torch.library.opcheck(
        operators.backward.default,
        backward_arguments(dout=dout, q=q, k=k, v=v, out=q, lse=lse, **blocks, **own),
    )


def call_of_exact_tensors(device):
    """Return (out, dq) of 1 + 128 queries and keys, and of tensors that have no more numbers."""

    def read_once(batch, head, query, key, tensors):
        of_queries, of_keys = tensors
        return of_queries[query] <= of_keys[head, key]

    tensors = leaves(129, 129, device=device)
    own = torch.zeros(129, device=device), torch.zeros(2, 129, device=device)
    lists, _ = tiles_and_dense((129, 129), device=device)
    lists = masks.TileMask(lists.lengths, torch.full_like(lists.tiles, ASKED), None)
    mod = MaskMod.of(read_once, own)
    out = flash_attn_func(*tensors, block_mask=lists, mask_mod=mod)
    return out, torch.autograd.grad(out, tensors[0], torch.ones_like(out))[0]


@pytest.mark.sampled
def test_places_stay_inside(device):
    """Kernels read no tensor past its end for rows of a tile that no sequence has."""
    out, dq = call_of_exact_tensors(device)
    assert out.isfinite().all() and dq.isfinite().all()


@pytest.mark.simulator
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.sampled
def test_no_findings(seed, sanitize):
    sanitize(seed, clusters=2)
    lists, _ = tiles_and_dense((300, 390))
    attend(leaves(300, 390), lists, mod_of(), use_clc=False)
    reports = sm100_sim.last_reports()[-4:]
    assert all(report.seed == seed and report.findings == [] for report in reports)


def test_wrong_mask_mods():
    with pytest.raises(TypeError, match="function of a MaskMod is NoneType.*batch, head, query"):
        MaskMod(None, "none")
    with pytest.raises(TypeError, match="key of a MaskMod is ''"):
        MaskMod(even, "")
    with pytest.raises(ValueError, match="a MaskMod has 5 tensors; accepted: up to 4"):
        MaskMod.of(even, (torch.ones(1),) * 5)
    with pytest.raises(TypeError, match="tensor 0 of a MaskMod has dtype torch.bool"):
        MaskMod.of(even, (torch.ones(1).bool(),))
    table = torch.ones(3)
    with pytest.raises(ValueError, match=r"reads tensor\(.*accepted: numbers.*Pass tensors"):
        MaskMod.of(lambda batch, head, query, key, tensors: table[0] > 0)
    MaskMod(even, "evens")
    with pytest.raises(ValueError, match="'evens' of a mask_mod names other functions"):
        MaskMod(everything, "evens")
    assert MaskMod.of(even).key == MaskMod.of(even).key != MaskMod.of(everything).key


def test_wrong_calls(device):
    q, k, v = inputs(8, 8, device=device)
    lists, _ = tiles_and_dense((8, 8), device=device)
    mod = MaskMod.of(even)
    with pytest.raises(TypeError, match="mask_mod is function; accepted: a MaskMod"):
        flash_attn_func(q, k, v, block_mask=lists, mask_mod=even)
    with pytest.raises(ValueError, match="mask_mod is given without block_mask.*from_kv_blocks"):
        flash_attn_func(q, k, v, mask_mod=mod)
    with pytest.raises(ValueError, match="block_mask has no bits; accepted: .* mask_mod"):
        flash_attn_func(q, k, v, block_mask=lists)
    with pytest.raises(ValueError, match="this mask has no bits"):
        lists.dense()
    with pytest.raises(ValueError, match="causal or window_size bound the keys"):
        flash_attn_func(q, k, v, causal=True, block_mask=lists, mask_mod=mod)
    learnt = MaskMod.of(even, (torch.ones(1, device=device, requires_grad=True),))
    with pytest.raises(ValueError, match="tensor of mask_mod requires gradients"):
        flash_attn_func(q, k, v, block_mask=lists, mask_mod=learnt)
    other = MaskMod.of(even, (torch.ones(1, device="meta"),))
    with pytest.raises(ValueError, match="tensor 0 of the mask_mod is on meta"):
        flash_attn_func(q, k, v, block_mask=lists, mask_mod=other)


@pytest.mark.simulator
@pytest.mark.sampled
def test_what_is_no_truth():
    lists, _ = tiles_and_dense((8, 8))
    lists = masks.TileMask(lists.lengths, torch.full_like(lists.tiles, ASKED), None)
    wrong = MaskMod.of(lambda batch, head, query, key, tensors: "seen")
    with pytest.raises(TypeError, match="returns str; accepted: a Boolean"):
        flash_attn_func(*inputs(8, 8), block_mask=lists, mask_mod=wrong)


def test_calls_of_the_operator(device, architecture):
    """Lists take bits or a function, never both or neither."""
    q, k, v = inputs(8, 8, device=device)
    lists, _ = tiles_and_dense((8, 8), device=device)
    bits = torch.zeros(1, 128, 4, dtype=torch.int32, device=device)
    steps, key = lists.steps(2 if architecture == "sm_100a" else 1), MaskMod.of(even).key
    operator = torch.ops.fa4_hd256.forward

    def call(**given):
        return operator(*forward_arguments(q, k, v, **given))

    with pytest.raises(ValueError, match="mask_steps without bits; accepted: mask_bits"):
        call(mask_steps=steps)
    with pytest.raises(ValueError, match="mask_bits beside the key of a mask_mod"):
        call(mask_steps=steps, mask_bits=bits, mask_mod=key)
    with pytest.raises(ValueError, match="the key of a mask_mod without mask_steps"):
        call(mask_mod=key)
    with pytest.raises(ValueError, match="knows no mask_mod 'nobody'; make the MaskMod"):
        call(mask_steps=steps, mask_mod="nobody")
    with pytest.raises(ValueError, match="tensors of a mask_mod are given without one"):
        call(mask_steps=steps, mask_bits=bits, mask_tensor_0=bits)
