"""Gradients through score_mods, of a stored dS and of a recomputed one, against the float64
reference."""

from __future__ import annotations

import pytest
import torch
from test_score_mods import CASES, inputs, packed

from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, masks
from fa4_hd256.check import reference
from fa4_hd256.run import backward as run_of_backward
from fa4_hd256.score_mods import alibi

#: Bytes of a block of dS, 256 keys x 256 queries.
BLOCK_BYTES = 256 * 256 * 2


def gradients(results, tensors):
    """Gradients of (out, lse) for random ones of these, which are returned, too."""
    given = tuple(torch.randn_like(result) for result in results)
    return torch.autograd.grad(results, tensors, given), given


def check(found, tensors, given, **options):
    """Check (dq, dk, dv) against the reference; given: gradients of out and lse."""
    exact = tuple(tensor.detach() for tensor in tensors)
    compared = reference.compare_gradients(
        dict(zip("qkv", found, strict=True)), exact, *given, **options
    )
    for one in compared.values():
        assert one.max_error <= one.tolerance, compared


def leaves(*given, **named):
    return tuple(tensor.requires_grad_() for tensor in inputs(*given, **named))


# With a stored dS and a recomputed one; a diagonal, both edges of a window, neither; a group that
# shares keys; a scale below 0.
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "recomputed"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("alibi", {"causal": True}), ("bounded", {"softmax_scale": -0.3}),
     ("everything", {"window_size": (70, 20)})],
)  # fmt: skip
@pytest.mark.sampled
def test_gradients(name, options, stored, device, backward_config):
    lengths, case = (150, 200), CASES[name]
    tensors = leaves(*lengths, (2, 1), 2, device)
    config = None if stored else backward_config(ds_bytes=0)
    mod = case.mod(device, (2, 2))
    results = flash_attn_func(
        *tensors, score_mod=mod, return_lse=True, backward_config=config, **options
    )
    found, given = gradients(results, tensors)
    check(found, tensors, given, score_mod=case.of_reference(*lengths), **options)


@pytest.mark.sampled
def test_gradients_of_chunks(device, backward_config, monkeypatch):
    """Places count in the whole call, wherever a chunk of dS begins."""
    lengths, case, origins = (300, 420), CASES["everything"], []
    divide = run_of_backward.divide

    def spy(*given):
        division = divide(*given)
        origins.extend(chunk.problem.origin for chunk in division.chunks)
        return division

    monkeypatch.setattr(run_of_backward, "divide", spy)
    tensors = leaves(*lengths, (2, 2), 2, device)
    options = {"window_size": (60, None)}
    results = flash_attn_func(
        *tensors, score_mod=case.mod(device, (2, 2)), return_lse=True,
        backward_config=backward_config(ds_bytes=2 * BLOCK_BYTES), **options,
    )  # fmt: skip
    found, given = gradients(results, tensors)
    assert all(any(origin[i] for origin in origins) for i in range(len(origins[0])))
    check(found, tensors, given, score_mod=case.of_reference(*lengths), **options)


@pytest.mark.sampled
def test_gradients_of_a_block_mask(device):
    lengths, case = (200, 300), CASES["everything"]
    dense = torch.rand(1, 2, *lengths) > 0.5
    dense[..., :128, 128:256] = False
    tensors = leaves(*lengths, (2, 1), 1, device)
    results = flash_attn_func(
        *tensors, score_mod=case.mod(device, (1, 2)), return_lse=True,
        block_mask=masks.from_dense(dense.to(device)),
    )  # fmt: skip
    found, given = gradients(results, tensors)
    check(found, tensors, given, score_mod=case.of_reference(*lengths), mask=dense)


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "recomputed"])
@pytest.mark.sampled
def test_gradients_of_packed_sequences(stored, device, backward_config):
    of_q, of_k, case = [130, 0, 70], [150, 40, 200], CASES["everything"]
    q, cu_q, _ = packed(of_q, 2, device)
    k, cu_k, _ = packed(of_k, 1, device)
    v, _, _ = packed(of_k, 1, device)
    tensors = tuple(t.requires_grad_() for t in (q, k, v))
    config = None if stored else backward_config(ds_bytes=0)
    results = flash_attn_varlen_func(
        *tensors, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=130, max_seqlen_k=200,
        causal=True, score_mod=case.mod(device, (3, 2)), return_lse=True, backward_config=config,
    )  # fmt: skip
    found, (dout, dlse) = gradients(results, tensors)
    for b in range(len(of_q)):
        rows, keys = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_q, cu_k))
        own = [t[None, span] for t, span in zip(tensors, (rows, keys, keys), strict=True)]
        made = [t[None, span] for t, span in zip(found, (rows, keys, keys), strict=True)]
        if of_q[b]:
            given, mod = (dout[None, rows], dlse[None, :, rows]), case.of_reference
            check(made, own, given, causal=True, score_mod=mod(of_q[b], of_k[b], b))
        else:
            assert not any(t.any() for t in made[1:])


@pytest.mark.sampled
def test_one_gradient_alone(device):
    """Kernels of one gradient give what those of all do, but for rounding."""
    lengths, case, options = (100, 130), CASES["bounded"], {"softmax_scale": -0.3}
    tensors = q, k, v = leaves(*lengths, (2, 1), 1, device)
    out = flash_attn_func(q, k, v, score_mod=case.mod(device, (1, 2)), **options)
    dout = torch.randn_like(out)
    (dq,) = torch.autograd.grad(out, q, dout, retain_graph=True)
    expected = torch.autograd.grad(out, tensors, dout)[0]
    assert (dq - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.sampled
def test_tensors_may_not_change_before_the_backward(device):
    """Gradient kernels read what the forward read."""
    slopes = torch.ones(1, device=device)
    tensors = leaves(8, 8, (1, 1), 1, device)
    out = flash_attn_func(*tensors, score_mod=alibi(slopes))
    slopes.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
