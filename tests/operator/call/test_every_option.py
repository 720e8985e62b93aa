"""Every option of the public functions reaches the call or is refused, and every way to a call with
gradients asks whether its options have some."""

from __future__ import annotations

import inspect

import pytest
import torch
from operator_calls import forward_arguments
from replays import forget

from fa4_hd256 import (
    flash_attn_func,
    flash_attn_varlen_func,
    get_backward_metadata,
    interface,
    masks,
    plans,
)
from fa4_hd256.call import forward_problem, mxfp8_gradients
from fa4_hd256.mask_mods import MaskMod
from fa4_hd256.packed_row import packed_row
from fa4_hd256.quantize import quantize_mxfp8_training
from fa4_hd256.score_mods import alibi

OF_Q, OF_K = (2, 4), (3, 5)
HEADS = 2


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def near(batch, head, query, key, tensors):
    return (query * 5 + key * 3 + head) % 4 > 0


def mask(last):
    seen = torch.ones(1, 1, sum(OF_Q), sum(OF_K), dtype=torch.bool)
    seen[..., -1] = last
    return masks.from_dense(seen)


#: Another value of each option than that of `plain`.
VALUES = {
    "cu_seqlens_q": int32(0, 3, 6), "cu_seqlens_k": int32(0, 4, 8), "max_seqlen_q": 6,
    "max_seqlen_k": 8, "seqused_q": int32(1, 2), "seqused_k": int32(1, 2),
    "page_table": int32(0, 1)[:, None], "softmax_scale": 0.5, "causal": True,
    "window_size": (3, 1), "learnable_sink": torch.ones(HEADS), "softcap": 5.0, "num_splits": 2,
    "deterministic": True, "return_lse": True, "scheduler_metadata": int32(1),
    "batch_invariant": True, "config": "of the forward", "backward_config": "of the backward",
    "use_clc": True, "out": torch.zeros(sum(OF_Q), HEADS, 256).bfloat16(),
    "block_mask": mask(last=False), "q_descale": torch.ones(1), "k_descale": torch.ones(1),
    "v_descale": torch.ones(1), "score_mod": alibi(torch.ones(HEADS)),
    "tree_mask": torch.ones(4, 4, dtype=torch.bool), "mask_mod": MaskMod(near, "near, an option"),
    "backward_metadata": get_backward_metadata(int32(0, 2, 6)), "return_max_logits": True,
    "out_gate": torch.zeros(sum(OF_Q), HEADS).bfloat16(), "mxfp8_gradients": object(),
}  # fmt: skip
#: Options that change nothing: results are deterministic in any case.
WITHOUT_EFFECT = {"deterministic"}
#: Those of packed sequences under a block mask: its tables bound the grid.
WITHOUT_EFFECT_WHEN_MASKED = {"max_seqlen_q", "max_seqlen_k"}


def plain(function, is_masked):
    """Return the arguments of a call without options. Queries require gradients, without which
    backward_metadata is not read."""
    shapes = ((sum(OF_Q), HEADS), (sum(OF_K), 1), (sum(OF_K), 1))
    q, k, v = (torch.zeros(rows, heads, 256).bfloat16() for rows, heads in shapes)
    given = dict(zip("qkv", (q.requires_grad_(), k, v)))
    if function is flash_attn_func:
        given = {name: tensor.unsqueeze(0) for name, tensor in given.items()}
    else:
        given |= {"cu_seqlens_q": int32(0, 2, 6), "cu_seqlens_k": int32(0, 3, 8)}
        given |= {"max_seqlen_q": max(OF_Q), "max_seqlen_k": max(OF_K)}
    return given | ({"block_mask": mask(last=True)} if is_masked else {})


class Reached(Exception):
    """Raised in place of a call, with its arguments by value."""


def by_value(given):
    if isinstance(given, torch.Tensor):
        content = given.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return given.dtype, given.shape, content
    return tuple(map(by_value, given)) if isinstance(given, (tuple, list)) else given


def reached(function, given):
    """Return what the call is that a function's arguments lead to. Raises as the function does."""
    with pytest.raises(Reached) as caught:
        function(**given)
    return caught.value.args


@pytest.fixture
def _calls_end(monkeypatch):
    def find_and_run(*given):
        raise Reached(*map(by_value, given))

    monkeypatch.setattr(interface, "_find_and_run", find_and_run)


@pytest.mark.simulator
@pytest.mark.usefixtures("_calls_end")
@pytest.mark.parametrize(
    ("function", "is_masked", "option"),
    [
        pytest.param(function, is_masked, name, id=f"{function.__name__}-{form}-{name}")
        for function in (flash_attn_func, flash_attn_varlen_func)
        for form, is_masked in (("plain", False), ("masked", True))
        for name in inspect.signature(function).parameters
        if name not in ("q", "k", "v")
    ],
)
def test_no_option_is_dropped(function, is_masked, option):
    """The call differs from one without the option, or an error names the option."""
    given = plain(function, is_masked)
    before = reached(function, given)
    assert before == reached(function, plain(function, is_masked))
    try:
        function(**given | {option: VALUES[option]})
    except Reached as call:
        is_unread = option in WITHOUT_EFFECT
        if is_masked and function is flash_attn_varlen_func:
            is_unread = is_unread or option in WITHOUT_EFFECT_WHEN_MASKED
        assert (call.args == before) == is_unread
    except (NotImplementedError, TypeError, ValueError) as error:
        assert option in str(error)


#: Options that are refused for packed sequences under a block mask.
REFUSED_OF_ROW = {"tree_mask", "mxfp8_gradients"}


@pytest.mark.simulator
@pytest.mark.usefixtures("_calls_end")
@pytest.mark.parametrize(
    "option", sorted({*inspect.signature(flash_attn_func).parameters} - {*"qkv"} - REFUSED_OF_ROW)
)
def test_packed_sequences_under_a_mask_are_the_call_of_their_row(option):
    """All of an option comes along: the call is that of `flash_attn_func` with it."""
    given = plain(flash_attn_varlen_func, is_masked=True) | {option: VALUES[option]}
    packed = reached(flash_attn_varlen_func, given)
    tensors, functions = (
        [given.pop(name, None) for name in names]
        for names in ("qkv", ("block_mask", "mask_mod", "score_mod"))
    )
    begins = [given.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    row = packed_row(tuple(tensors), tuple(begins), {}, tuple(functions))._asdict()
    for name in ("max_seqlen_q", "max_seqlen_k"):
        del given[name]
    given |= {name: given[name].unsqueeze(0) for name in ("out", "out_gate") if name in given}
    # All but the form, which is of the function.
    dense = reached(flash_attn_func, row | given)
    assert packed[:2] + packed[3:] == dense[:2] + dense[3:]


# ---------------------------------------------------------------- options without gradients


def without_rows():
    """Return q, k, v and offsets of a call without any row, which launches nothing."""
    q = torch.zeros(0, HEADS, 256).bfloat16().requires_grad_()
    k = torch.zeros(0, 1, 256).bfloat16()
    return q, k, k, {"cu_seqlens_q": int32(0, 0), "cu_seqlens_k": int32(0, 0)}


def attend(q, k, v, offsets):
    return flash_attn_varlen_func(q, k, v, **offsets, max_seqlen_q=1, softcap=5.0)


def a_first_call():
    attend(*without_rows())


def a_call_like_one_without_gradients():
    given = without_rows()
    with torch.no_grad():
        attend(*given)
        attend(*given)
    attend(*given)


def the_operator():
    *tensors, offsets = without_rows()
    batched = (tensor.unsqueeze(0) for tensor in tensors)
    lengths = {"max_seqlen_q": 1, "max_seqlen_k": 1}
    values = forward_arguments(*batched, **offsets, **lengths, softcap=5.0)
    torch.ops.fa4_hd256.forward(*values)


def a_transform():
    q, *others = without_rows()
    torch.func.grad(lambda q: attend(q, *others).float().sum())(q)


def mxfp8():
    shapes = ((1, 3, HEADS, 256), (1, 9, HEADS, 256), (1, 9, HEADS, 256))
    tensors = (torch.randn(shape).bfloat16().requires_grad_() for shape in shapes)
    flash_attn_func(**quantize_mxfp8_training(*tensors)._asdict(), softcap=5.0)


@pytest.mark.simulator
@pytest.mark.parametrize(
    "way", [a_first_call, a_call_like_one_without_gradients, the_operator, a_transform, mxfp8]
)
def test_every_way_to_gradients_refuses_values_without_some(way, monkeypatch):
    """softcap stands for an option whose gradients nobody has written."""
    monkeypatch.setattr(forward_problem, "_VALUES_WITHOUT_GRADIENTS", ("softcap",))
    monkeypatch.setattr(mxfp8_gradients, "_REFUSED_VALUES", ())
    monkeypatch.setattr(plans, "repeats", lambda tensors: True)
    forget()
    if way is a_first_call:
        # It is refused before anything is planned.
        monkeypatch.setattr(plans, "Execution", None)
    try:
        with pytest.raises(NotImplementedError, match="^softcap: no gradients flow"):
            way()
    finally:
        forget()
