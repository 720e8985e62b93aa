"""FlexAttention's arguments: results as PyTorch's, gradients by a dense expression of them."""

import pytest
import torch
from torch.nn.attention import flex_attention as pytorch

from fa4_hd256 import flash_attn_func, masks
from fa4_hd256.check import reference
from fa4_hd256.integrations import warnings_once
from fa4_hd256.integrations.flex_attention import flex_attention, mask_mod_of, score_mod_of
from fa4_hd256.score_mods import alibi

HEADS, HEADS_KV, QUERIES, KEYS = 4, 2, 150, 200
SCALE = 0.07


@pytest.fixture
def tensors(device):
    """(query, key, value, gradient of out), in FlexAttention's layout."""
    random = torch.Generator().manual_seed(1)
    shapes = [(HEADS, QUERIES), (HEADS_KV, KEYS), (HEADS_KV, KEYS), (HEADS, QUERIES)]
    return [
        torch.randn(2, *shape, 256, generator=random).to(device, torch.bfloat16) for shape in shapes
    ]


def functions(device):
    bias = torch.linspace(-2, 2, HEADS * 65, device=device).reshape(HEADS, 65)
    ids = torch.arange(2 * KEYS, device=device).reshape(2, KEYS) // 60
    return {
        "bias by distance": lambda s, b, h, q, k: s + bias[h, (q - k).clamp(-32, 32) + 32],
        "capped by head": lambda s, b, h, q, k: 3 * torch.tanh(s / 3) * torch.exp2(-0.25 * h),
        "documents": lambda s, b, h, q, k: torch.where(ids[b, q] == ids[b, k], s, -torch.inf),
    }


def dense(score_mod, tensors, mask):
    """Return (out, lse) in float64 on the CPU, of the reference. score_mod, mask: of tensors
    there."""
    q, k, v = (t.transpose(1, 2) for t in tensors[:3])
    mask = None if mask is None else mask[None, None]
    options = {"softmax_scale": SCALE, "score_mod": score_mod, "mask": mask}
    out, lse = reference.attention(q, k, v, **options)
    return out.transpose(1, 2), lse


@pytest.mark.parametrize(
    ("name", "masked"),
    [("bias by distance", False), ("capped by head", True), ("documents", False)],
)
@pytest.mark.sampled("bias by distance-False")
def test_results_and_gradients(name, masked, tensors, device):
    score_mod, block_mask, mask = functions(device)[name], None, None
    if masked:

        def near(b, h, q, k):
            return (q - k).abs() < 90

        block_mask = pytorch.create_block_mask(near, None, None, QUERIES, KEYS, device=device)
        mask = near(0, 0, torch.arange(QUERIES)[:, None], torch.arange(KEYS))
    leaves = [t.clone().requires_grad_() for t in tensors[:3]]
    out, lse = flex_attention(
        *leaves, score_mod=score_mod, block_mask=block_mask, scale=SCALE, enable_gqa=True,
        return_lse=True,
    )  # fmt: skip
    found = torch.autograd.grad(out, leaves, tensors[3])
    wanted_out, wanted_lse = dense(functions("cpu")[name], leaves, mask)
    wanted = torch.autograd.grad(wanted_out, leaves, tensors[3].cpu().double())
    torch.testing.assert_close(out.cpu().double(), wanted_out, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, rtol=1e-4, atol=1e-4)
    for gradient, right in zip(found, wanted, strict=True):
        error = (gradient.double() - right.double()).norm() / right.double().norm()
        assert error < 1e-2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_results_as_of_pytorch(tensors, device):
    """PyTorch's own function, without gradients, runs where it can."""
    score_mod = functions(device)["bias by distance"]
    arguments = {"scale": SCALE, "enable_gqa": True, "return_aux": pytorch.AuxRequest(lse=True)}
    found = flex_attention(*tensors[:3], score_mod=score_mod_of(score_mod, device), **arguments)
    exact = [t.double() for t in tensors[:3]]
    wanted = pytorch.flex_attention(*exact, score_mod=score_mod, **arguments)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found[1].lse.double(), wanted[1].lse.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled
def test_where_nobody_sees_an_index_may_lead_beyond_its_tensor(tensors, device):
    table = torch.linspace(-1, 1, HEADS * 40, device=device).reshape(HEADS, 40)

    def near(b, h, q, k):
        return (q >= k) & (q - k < 40)

    block_mask = pytorch.create_block_mask(near, None, None, QUERIES, KEYS, device=device)
    out, lse = flex_attention(
        *tensors[:3], score_mod=lambda s, b, h, q, k: s + table[h, q - k], scale=SCALE,
        block_mask=block_mask, enable_gqa=True, return_lse=True,
    )  # fmt: skip
    own = table.cpu()
    wanted = dense(
        lambda s, b, h, q, k: s + own[h, (q - k).clamp(0, 39)], tensors,
        near(0, 0, torch.arange(QUERIES)[:, None], torch.arange(KEYS)),
    )  # fmt: skip
    torch.testing.assert_close(out.cpu().double(), wanted[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.cpu().double(), wanted[1], rtol=1e-4, atol=1e-4)


def test_auxiliary_results(tensors):
    request = pytorch.AuxRequest(lse=True)
    out, aux = flex_attention(*tensors[:3], enable_gqa=True, return_aux=request)
    assert aux.lse.shape == out.shape[:3]
    with pytest.raises(NotImplementedError, match="max_scores in return_aux is True"):
        flex_attention(
            *tensors[:3], enable_gqa=True, return_aux=pytorch.AuxRequest(max_scores=True)
        )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("function", [flex_attention, pytorch.flex_attention])
def test_lse_is_asked_for_in_one_way(function, tensors):
    """PyTorch has the same rule."""
    arguments = {"return_lse": True, "return_aux": pytorch.AuxRequest(), "enable_gqa": True}
    with pytest.raises(ValueError, match="both return_lse and return_aux"):
        function(*tensors[:3], **arguments)


def test_fewer_heads_must_be_asked_for(tensors):
    with pytest.raises(ValueError, match="query has 4 heads and key 2; accepted: equal"):
        flex_attention(*tensors[:3])


def test_a_tensor_that_would_get_no_gradient_is_refused(tensors):
    learnt = torch.ones(HEADS, device=tensors[0].device, requires_grad=True)
    for read in (learnt, learnt.double()):

        def biased(s, b, h, q, k, bias=read):
            return s + bias[h]

        with pytest.raises(ValueError, match="tensor of score_mod requires gradients"):
            flex_attention(*tensors[:3], score_mod=biased, enable_gqa=True)


MASKS = {
    "documents": lambda ids, b, h, q, k: (ids[b, q] == ids[b, k]) & (q + 50 >= k),
    "prefix or window": lambda ids, b, h, q, k: (k < 20 + 9 * h) | ((q - k).abs() <= 70),
    "no dimension": lambda ids, b, h, q, k: torch.logical_not((q - k) % 3 == ids.sum() * 0),
}


@pytest.mark.parametrize("name", ["documents", "prefix or window"])
@pytest.mark.sampled
def test_traced_masks(name, tensors, device):
    """The bits of a call whose mask was made before, forward and backward."""
    ids = torch.arange(2 * KEYS, device=device).reshape(2, KEYS) // 60
    mask = pytorch.create_block_mask(
        lambda b, h, q, k: MASKS[name](ids, b, h, q, k), 2, HEADS, QUERIES, KEYS, device=device
    )
    found = []
    for traces_mask in (False, True):
        leaves = [t.clone().requires_grad_() for t in tensors[:3]]
        out = flex_attention(
            *leaves, block_mask=mask, scale=SCALE, enable_gqa=True, traces_mask=traces_mask
        )
        found.append((out, *torch.autograd.grad(out, leaves, tensors[3])))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("ways", ["flex_attention", "flash_attn_func"])
def test_a_mask_for_all_heads_whose_function_tells_them_apart(ways, tensors, device):
    """The bits of a mask that has each batch entry and head, forward and backward."""

    def seen(b, h, q, k):
        return q + 60 >= k + h * 30 + b * 5

    shape = 1, 1, -(-QUERIES // 128)
    blocks = -(-KEYS // 128)
    counts = torch.full(shape, blocks, dtype=torch.int32, device=device)
    indices = torch.arange(blocks, dtype=torch.int32, device=device).expand(*shape, -1)
    lengths = {"BLOCK_SIZE": 128, "seq_lengths": (QUERIES, KEYS)}
    for_all = pytorch.BlockMask.from_kv_blocks(counts, indices, mask_mod=seen, **lengths)
    of_each = pytorch.create_block_mask(seen, 2, HEADS, QUERIES, KEYS, device=device)
    found = []
    for mask in (for_all, of_each):
        leaves = [t.clone().requires_grad_() for t in tensors[:3]]
        if ways == "flex_attention":
            out = flex_attention(*leaves, block_mask=mask, scale=SCALE, enable_gqa=True)
        else:
            rows = (t.transpose(1, 2) for t in leaves)
            out = flash_attn_func(*rows, softmax_scale=SCALE, block_mask=mask).transpose(1, 2)
        found.append((out, *torch.autograd.grad(out, leaves, tensors[3])))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_masks_that_are_not_traced(tensors, device):
    ids = torch.zeros(2, KEYS, device=device)
    mask = pytorch.create_block_mask(
        lambda b, h, q, k: MASKS["no dimension"](ids, b, h, q, k), None, None, QUERIES, KEYS,
        device=device,
    )  # fmt: skip
    arguments = {"enable_gqa": True, "traces_mask": True}
    with pytest.raises(NotImplementedError, match=r"mask_mod computes aten\.sum"):
        flex_attention(*tensors[:3], block_mask=mask, **arguments)
    with pytest.raises(TypeError, match="traces_mask is True and block_mask is TileMask"):
        flex_attention(*tensors[:3], block_mask=masks.as_tile_mask(mask), **arguments)
    with pytest.raises(NotImplementedError, match="cannot trace mask_mod: it branches on a value"):
        mask_mod_of(lambda b, h, q, k: q >= k if h > 0 else q < k, device)


@pytest.mark.sampled
def test_a_batch_of_keys_under_a_batch_of_queries(tensors, device):
    """One set of keys and values for all, as PyTorch's function takes it; gradients are sums."""
    q, k, v = (torch.randn(b, 1, 8, 256, device=device).bfloat16() for b in (2, 1, 1))
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out = flex_attention(*leaves)
    out.float().square().sum().backward()
    whole = [tensor.expand(2, -1, -1, -1).clone().requires_grad_() for tensor in (q, k, v)]
    expected = flex_attention(*whole)
    expected.float().square().sum().backward()
    assert torch.equal(out, expected) and torch.equal(leaves[0].grad, whole[0].grad)
    for found, parts in zip(leaves[1:], whole[1:], strict=True):
        summed = parts.grad.sum(0, keepdim=True)
        torch.testing.assert_close(found.grad, summed, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_layers_of_another_head_dim(device, caplog):
    """PyTorch's own function computes them; a line says so, once for each kind."""
    warnings_once._logged.clear()
    q, k, v = (torch.randn(1, 2, 8, 64, device=device).bfloat16() for _ in "qkv")
    block_mask = pytorch.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 8, 8, device=device)

    def score_mod(score, b, h, q, k):
        return score + h

    given = {"score_mod": score_mod, "block_mask": block_mask, "return_lse": True}
    for _ in range(2):
        found = flex_attention(q, k, v, **given)
    assert all(map(torch.equal, found, pytorch.flex_attention(q, k, v, **given)))
    lines = [record for record in caplog.records if record.name == "fa4_hd256"]
    assert len(lines) == 1 and "head_dim 64 take PyTorch's FlexAttention" in lines[0].getMessage()
    with pytest.raises(ValueError, match="head_dim is 64 with a ScoreMod.*accepted: head_dim 256"):
        flex_attention(q, k, v, score_mod=alibi(torch.ones(2, device=device)))
    with pytest.raises(ValueError, match="head_dim is 64 with a ScoreMod, a mask of"):
        flex_attention(q, k, v, block_mask=masks.as_tile_mask(block_mask))
