"""Everything a user can get wrong is refused before anything is compiled, in words that help."""

from __future__ import annotations

import inspect
import math
from collections import Counter

import numpy as np
import pytest
import torch
from operator_calls import forward_arguments

from fa4_hd256 import (
    ForwardConfig,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    interface,
    masks,
    plans,
)
from fa4_hd256.call import checks
from fa4_hd256.call.options import MOST_SPLITS
from fa4_hd256.gpus.family import architecture_of
from fa4_hd256.run import compile


def inputs(q=(1, 4, 2, 256), k=(1, 4, 1, 256), v=None, dtype=torch.bfloat16):
    return [torch.zeros(shape, dtype=dtype) for shape in (q, k, v or k)]


@pytest.fixture(autouse=True)
def _nothing_is_compiled():
    before = dict(compile.counters)
    yield
    assert dict(compile.counters) == before


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"q": (1, 4, 2, 128)}, r"q has head_dim 128.*accepted: 256"),
        ({"k": (1, 4, 1, 64)}, r"k has head_dim 64"),
        ({"v": (1, 4, 1, 128)}, r"v has head_dim 128"),
        ({"q": (4, 2, 256)}, r"q has 3 dimensions.*accepted: 4"),
        ({"q": (4, 256)}, r"q has 2 dimensions.*accepted: 4"),
        ({"q": ()}, r"q has 0 dimensions"),
        ({"k": (256,)}, r"k has 1 dimensions"),
        ({"v": (4, 256)}, r"v has 2 dimensions"),
        ({"k": (1, 1, 4, 1, 256)}, r"k has 5 dimensions"),
        ({"v": (1, 5, 1, 256)}, r"k and v must have the same shape.*4.*5"),
        ({"k": (2, 4, 1, 256)}, r"same batch; got q 1, k and v 2"),
        ({"q": (1, 4, 3, 256), "k": (1, 4, 2, 256)}, r"3 query heads over 2 key/value heads"),
        ({"q": (1, 4, 1, 256), "k": (1, 4, 2, 256)}, r"1 query heads over 2"),
        ({"q": (1, 0, 2, 256)}, r"q has seqlen 0"),
        ({"k": (1, 0, 1, 256)}, r"k has seqlen 0"),
        ({"q": (1, 4, 0, 256)}, r"q has no heads"),
        ({"k": (1, 4, 0, 256)}, r"k has no heads"),
    ],
)
def test_shapes(shapes, message):
    with pytest.raises(ValueError, match=message):
        flash_attn_func(*inputs(**shapes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float8_e5m2])
def test_dtype(dtype):
    with pytest.raises(TypeError, match=rf"{dtype}; accepted: torch.bfloat16 or torch.float16"):
        flash_attn_func(*inputs(dtype=dtype))


@pytest.mark.parametrize(
    ("function", "positional"),
    [(flash_attn_func, 3), (flash_attn_varlen_func, 3), (flash_attn_with_kvcache, 5)],
)
def test_arguments_behind_v_are_keyword_only(function, positional):
    """Other libraries have dropout_p, or qv, in the place of softmax_scale."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    by_name = [inspect.Parameter.KEYWORD_ONLY] * (len(kinds) - positional)
    assert kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * positional + by_name
    with pytest.raises(TypeError, match=f"takes.* {positional} positional arguments"):
        function(*[inputs()[0]] * positional, 0.0)


def test_mixed_dtypes():
    q, k, v = inputs()
    with pytest.raises(TypeError, match="share one dtype; got q torch.bfloat16, k torch.float16"):
        flash_attn_func(q, k.half(), v)


def test_not_a_tensor():
    q, k, _ = inputs()
    with pytest.raises(TypeError, match="v must be a torch.Tensor, got list"):
        flash_attn_func(q, k, [1.0])


@pytest.mark.parametrize("given", ["", "q", "k"])
@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_varlen_func])
def test_no_tensors(given, function):
    """Several tensors are None, in whichever order they are checked."""
    tensors = [tensor if name == given else None for name, tensor in zip("qkv", inputs())]
    with pytest.raises(TypeError, match="[qk] must be a torch.Tensor, got NoneType"):
        function(*tensors)


def test_sparse_tensor():
    q, k, v = inputs()
    with pytest.raises(TypeError, match="q must be a dense"):
        flash_attn_func(q.to_sparse(), k, v)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout):
    nested = torch.nested.nested_tensor([torch.zeros(4, 2, 256).bfloat16()], layout=layout)
    with pytest.raises(TypeError, match="q is a nested tensor; accepted: .*_varlen_func"):
        flash_attn_func(nested, nested, nested)


@pytest.mark.parametrize("name", ["learnable_sink", "k_descale", "out"])
def test_sparse_tensors_beside(name):
    q, k, v = inputs()
    given = {"learnable_sink": torch.zeros(2)}
    if name == "out":
        given = {"out": torch.zeros_like(q)}
    elif name == "k_descale":
        k = v = k.to(torch.float8_e4m3fn)
        given = {"k_descale": torch.ones(1, 1), "v_descale": torch.ones(1, 1)}
    given[name] = given[name].to_sparse()
    with pytest.raises(TypeError, match=f"{name} must be a dense"):
        flash_attn_func(q, k, v, **given)


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_numbers_that_no_float_is_as_large_as(name):
    with pytest.raises(ValueError, match=f"{name} is too large for a float"):
        flash_attn_func(*inputs(), **{name: 10**400})


@pytest.mark.parametrize("value", [1 << 63, 1 << 70, -1 << 70])
@pytest.mark.parametrize("name", ["num_splits", "window_size", "max_seqlen_q", "max_seqlen_k"])
def test_ints_that_no_operator_takes(name, value):
    """An operator's schema has 64 bits for an int."""
    given = {"max_seqlen_q": 5, name: (value, None) if name == "window_size" else value}
    with pytest.raises(ValueError, match="fits into 64 bits"):
        flash_attn_varlen_func(**packed(**given))


@pytest.mark.parametrize("which", ["k_descale", "v_descale"])
def test_scales_that_require_gradients(which):
    """Scales that require gradients are refused before anything is compiled, and after similar
    calls without."""
    q, k, _ = inputs()
    k = k.to(torch.float8_e4m3fn)
    scales = {"k_descale": torch.ones(1), "v_descale": torch.ones(1)}
    scales[which].requires_grad_()
    calls = {
        flash_attn_func: (q, k, k),
        flash_attn_varlen_func: (q, k, k),
        flash_attn_with_kvcache: (q, k, k),
    }
    for function, tensors in calls.items():
        with pytest.raises(NotImplementedError, match="requires? gradients.*torch.no_grad"):
            function(*tensors, **scales)


def test_device_mix():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="share one device; got q cpu, k meta, v cpu"):
        flash_attn_func(q, k.to("meta"), v)


def test_other_kinds_of_device():
    with pytest.raises(ValueError, match="on device xpu.*accepted: CUDA tensors on a B200"):
        architecture_of(torch.device("xpu"))


@pytest.mark.parametrize("capability", [(8, 9), (10, 1), (11, 0), (12, 0)])
def test_other_gpus(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    message = (
        rf"Some GPU with compute capability {capability[0]}\.{capability[1]}; accepted: CUDA "
        r"tensors on a B200 or GB200 \(compute capability 10.0\), B300 or GB300 \(compute "
        r"capability 10.3\), Rubin \(compute capability 10.7\), "
        r"H200 or H100 or GH200 \(compute capability 9.0\)"
    )
    with pytest.raises(ValueError, match=message):
        architecture_of(torch.device("cuda:0"))


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (10, 7), (9, 0)])
def test_gpus_of_the_family_are_accepted(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = architecture_of(torch.device("cuda:0"))
    assert found.name == ("sm_90a" if capability == (9, 0) else "sm_100a")


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 1e39, 1.1e6])
def test_scale_that_is_too_large(scale):
    with pytest.raises(ValueError, match="softmax_scale is .*accepted: any number of up to"):
        flash_attn_func(*inputs(), softmax_scale=scale)


@pytest.mark.parametrize("scale", ["1", True, torch.tensor(1.0)])
def test_scale_that_is_no_number(scale):
    with pytest.raises(TypeError, match="softmax_scale must be a real number or None"):
        flash_attn_func(*inputs(), softmax_scale=scale)


@pytest.mark.parametrize("causal", [1, None, "yes"])
def test_causal_that_is_no_bool(causal):
    with pytest.raises(TypeError, match="causal must be True or False"):
        flash_attn_func(*inputs(), causal=causal)


def test_clc_by_environment(monkeypatch):
    monkeypatch.setenv("FA_CLC", "yes")
    with pytest.raises(ValueError, match="FA_CLC is 'yes'"):
        flash_attn_func(*inputs())


@pytest.mark.parametrize("softcap", [-1.0, math.nan, math.inf, 1.001e4])
def test_softcap_that_is_none(softcap):
    with pytest.raises(ValueError, match="softcap is .*accepted: 0"):
        flash_attn_func(*inputs(), softcap=softcap)


@pytest.mark.parametrize(
    ("sink", "error", "message"),
    [
        ([0.0, 0.0], TypeError, "must be a torch.Tensor"),
        (torch.zeros(2, dtype=torch.int32), TypeError, "dtype torch.int32"),
        (torch.zeros(3), ValueError, r"shape \(3,\); accepted: \(2,\)"),
        (torch.zeros(2, device="meta"), ValueError, "share one device"),
    ],
)
def test_sinks(sink, error, message):
    with pytest.raises(error, match=message):
        flash_attn_func(*inputs(), learnable_sink=sink)


def test_window_that_is_no_int():
    with pytest.raises(TypeError, match="must be an int or None"):
        flash_attn_func(*inputs(), window_size=(1.5, None))


def packed(**changes):
    """Arguments of a varlen call that would be accepted, with changes."""
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    q, k = torch.zeros(8, 2, 256).bfloat16(), torch.zeros(8, 1, 256).bfloat16()
    call = {"q": q, "k": k, "v": k, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    return {**call, "max_seqlen_q": 5, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"max_seqlen_q": None}, TypeError, "max_seqlen_q must be an int"),
        ({"max_seqlen_q": torch.tensor([5, 6])}, TypeError, "max_seqlen_q is a tensor of shape"),
        ({"max_seqlen_q": 4}, ValueError, "max_seqlen_q is 4, but a sequence has 5"),
        ({"max_seqlen_q": 0}, ValueError, "max_seqlen_q is 0, but a sequence has 5 query rows"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1; accepted: 0 or more"),
        ({"max_seqlen_q": 1 << 31}, ValueError, "2147483648; accepted: up to 1073741824"),
        ({"max_seqlen_q": 1 << 40}, ValueError, "1099511627776; accepted: up to 1073741824"),
        ({"max_seqlen_k": torch.tensor(5.0)}, TypeError, "float32; accepted: an int, or"),
        ({"max_seqlen_k": 4}, ValueError, "max_seqlen_k is 4, but a sequence has 5 key rows"),
        ({"max_seqlen_k": 0}, ValueError, "max_seqlen_k is 0, but a sequence has 5 key rows"),
        (
            {"cu_seqlens_q": torch.tensor([0, 3, 8])},
            TypeError,
            r"cu_seqlens_q must be an int32 tensor, got a Tensor of shape \(3,\) and torch.int64",
        ),
        ({"cu_seqlens_q": [0, 3, 8]}, TypeError, r"must be an int32 tensor, got \[0, 3, 8\]"),
        (
            {"cu_seqlens_q": torch.tensor([[0, 3, 8]]).int()},
            ValueError,
            r"cu_seqlens_q has shape \(1, 3\) and strides \(3, 1\); accepted: one dimension",
        ),
        (
            {"cu_seqlens_k": torch.tensor([0, 0, 3, 0, 8]).int()[::2]},
            ValueError,
            r"cu_seqlens_k has shape \(3,\) and strides \(2,\); accepted: one dimension",
        ),
        ({"cu_seqlens_q": torch.tensor([0, 3, 9], dtype=torch.int32)}, ValueError, "at most 8"),
        ({"cu_seqlens_k": torch.tensor([0, 5, 3, 8], dtype=torch.int32)}, ValueError, "disagree"),
        ({"cu_seqlens_k": torch.tensor([0, 9, 8], dtype=torch.int32)}, ValueError, "ascend"),
        ({"seqused_k": torch.tensor([1], dtype=torch.int32)}, ValueError, "disagree"),
        ({"seqused_k": torch.tensor([1, -1], dtype=torch.int32)}, ValueError, "0 or more"),
        ({"q": torch.zeros(1, 8, 2, 256).bfloat16()}, ValueError, "accepted: 3"),
        ({"cu_seqlens_q": None, "max_seqlen_q": None}, ValueError, "accepted: 4"),
        (
            {"num_splits": MOST_SPLITS + 1},
            ValueError,
            f"num_splits is {MOST_SPLITS + 1}; accepted: 1",
        ),
        ({"num_splits": 2.0}, TypeError, "num_splits must be an int, got 2.0"),
    ],
)
def test_varlen(changes, error, message):
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**packed(**changes))


@pytest.mark.parametrize("value", [4.0, "4", True, [4], torch.tensor(4.0), torch.tensor([4, 4])])
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("form", ["dense", "masked", "cache", "cache with new rows"])
def test_bounds_that_are_not_read(form, name, value):
    """Types count also where nothing is packed, and where a block mask bounds the grid."""
    q, k, v = inputs()
    function, given = flash_attn_varlen_func, {"q": q, "k": k, "v": v}
    if form == "masked":
        seen = torch.ones(1, 1, 8, 8, dtype=torch.bool)
        given = packed(max_seqlen_q=None, block_mask=masks.from_dense(seen))
    elif form != "dense":
        function, given = flash_attn_with_kvcache, {"q": q, "k_cache": k, "v_cache": v}
    if form == "cache with new rows":
        given |= {"k": k[:, :1].clone(), "v": v[:, :1].clone(), "cache_seqlens": ints(1)}
    with pytest.raises(TypeError, match=rf"{name} (must be an int, or|is a tensor of shape)"):
        function(**given | {name: value})


FLAGS = [1, "yes", None, torch.ones(2), torch.tensor(True)]


@pytest.mark.parametrize("value", FLAGS, ids=str)
@pytest.mark.parametrize("name", ["return_lse", "return_max_logits"])
@pytest.mark.parametrize("function", [flash_attn_func, flash_attn_varlen_func])
def test_requests_of_results_that_are_no_bool(function, name, value):
    with pytest.raises(TypeError, match=f"{name} must be True or False, got"):
        function(*inputs(), **{name: value})
    with pytest.raises(TypeError, match=f"{name} must be True or False, got"):
        function(*inputs(), **{name: value}, mxfp8_gradients=object())


def test_bools_of_numpy_are_bools():
    """A call without any row launches nothing."""
    none = torch.zeros(2, dtype=torch.int32)
    q, k = torch.zeros(0, 2, 256).bfloat16(), torch.zeros(0, 1, 256).bfloat16()
    offsets = {"cu_seqlens_q": none, "cu_seqlens_k": none, "max_seqlen_q": 1}
    for wanted in (np.False_, np.True_):
        found = flash_attn_varlen_func(q, k, k, **offsets, return_lse=wanted)
        assert isinstance(found, tuple) == wanted


@pytest.mark.parametrize("value", FLAGS, ids=str)
@pytest.mark.parametrize("has_new", [False, True])
def test_a_request_of_the_lse_of_a_cache_that_is_no_bool(has_new, value):
    q, *caches = inputs()
    new = [cache[:, :1].clone() + 1 for cache in caches] if has_new else []
    with pytest.raises(TypeError, match="return_lse must be True or False, got"):
        flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=ints(1), return_lse=value)
    assert not any(cache.any() for cache in caches)


def test_more_tiles_than_a_grid_has():
    """Every sequence counts as long as the longest one."""
    offsets = torch.cat([torch.zeros(1000), torch.tensor([8])]).int()
    many = packed(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=1 << 30)
    with pytest.raises(ValueError, match="1000 sequences .* CTAs; accepted: up to 2147483647"):
        flash_attn_varlen_func(**many, max_seqlen_k=8)


def test_out_without_memory():
    """Tensors that only have a shape share none."""
    q, k, v = (tensor.to("meta") for tensor in inputs())
    out = torch.empty_like(q)
    assert flash_attn_func(q, k, v, out=out) is out


@pytest.mark.parametrize("side", ["q", "k"])
def test_lengths_beyond_the_rows(side):
    """A batch entry and a packed sequence accept lengths up to their rows."""
    name = f"seqused_{side}"
    q, k = torch.zeros(2, 5, 2, 256).bfloat16(), torch.zeros(2, 5, 1, 256).bfloat16()
    padded = {"q": q, "k": k, "v": k}
    for call, rows in ((padded, (5, 5)), (packed(), (3, 5))):
        expected = rf"{name} is \[3, 6\]; accepted: up to \[{rows[0]}, 5\], the rows of each"
        with pytest.raises(ValueError, match=expected):
            flash_attn_varlen_func(**call, **{name: ints(3, 6)})
        ragged = {key: value for key, value in call.items() if key.startswith("cu_")}
        batched = {n: call[n] if call[n].ndim == 4 else call[n][None] for n in "qk"}
        checks.check_contents(batched["q"], batched["k"], {**ragged, name: ints(*rows)})


def paged(pages=4, page_size=16, **changes):
    """Arguments of a call on keys in pages that would be accepted, with changes."""
    q, k = torch.zeros(2, 3, 2, 256).bfloat16(), torch.zeros(pages, page_size, 1, 256).bfloat16()
    used = torch.tensor([20, 5], dtype=torch.int32)
    table = torch.tensor([[0, 3, 9], [2, -1, 9]], dtype=torch.int32)
    return {"q": q, "k": k, "v": k, "seqused_k": used, "page_table": table, **changes}


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


ODD_PAGES = torch.zeros(4, 16, 1, 260).bfloat16()[..., :256]
FEW_ENTRIES = ints((0,), (2,))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"page_size": 0}, ValueError, "pages of 0 rows, .* a page_size of 1 or more"),
        ({"pages": 0}, ValueError, r"k and v have no pages, shape \(0, 16, 1, 256\)"),
        ({"page_table": ints((0, 3, 9))}, ValueError, "batch sizes disagree"),
        ({"page_table": ints(0, 3, 9)}, ValueError, r"page_table has shape \(3,\)"),
        ({"page_table": ints((), ())}, ValueError, r"page_table has shape \(2, 0\)"),
        ({"page_table": ints((0, 2), (1, 3)).T}, ValueError, "a last stride of 1"),
        ({"page_table": torch.zeros(2, 3)}, TypeError, "page_table must be an int32 tensor"),
        ({"seqused_k": None}, ValueError, r"page_table\[0, 2\] is 9; accepted: 0 to 3"),
        ({"cu_seqlens_k": ints(0, 20, 25)}, ValueError, "page_table is given with cu_seqlens_k"),
        ({"seqused_k": ints(20, 49)}, ValueError, r"seqused_k is \[20, 49\]; accepted: up to 48"),
        ({"seqused_k": ints(20, -1)}, ValueError, "0 or more"),
        ({"seqused_k": ints(20, 17)}, ValueError, r"page_table\[1, 1\] is -1; accepted: 0 to 3"),
        ({"seqused_k": ints(33, 5)}, ValueError, r"page_table\[0, 2\] is 9; accepted: 0 to 3"),
        ({"max_seqlen_k": 19}, ValueError, "max_seqlen_k is 19, but a sequence has 20 key rows"),
        ({"max_seqlen_k": 0}, ValueError, "max_seqlen_k is 0, but a sequence has 20 key rows"),
        ({"max_seqlen_k": 20.0}, TypeError, "max_seqlen_k must be an int"),
        ({"k": ODD_PAGES, "v": ODD_PAGES}, ValueError, "k has strides .* nothing is copied"),
        ({"v": ODD_PAGES}, ValueError, "v has strides .* nothing is copied"),
        ({"v": torch.zeros(4, 32, 1, 256).bfloat16()}, ValueError, "must have the same shape"),
        ({"q": torch.zeros(2, 3, 3, 256).bfloat16()[:1]}, ValueError, "batch sizes disagree"),
        (
            {"q": torch.zeros(2, 3, 2, 256).bfloat16().requires_grad_()},
            NotImplementedError,
            r"page_table: no gradients .* torch.no_grad\(\)",
        ),
    ],
)
def test_pages(changes, error, message):
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**paged(**changes))


def test_a_gate_alone_requires_gradients(monkeypatch):
    """Gradients that pages do not have are refused before anything is planned or compiled."""
    monkeypatch.setattr(plans, "Execution", None)
    gate = torch.zeros(2, 3, 2).bfloat16().requires_grad_()
    with pytest.raises(NotImplementedError, match="page_table: no gradients"):
        flash_attn_varlen_func(**paged(out_gate=gate))


def test_entries_that_no_query_sees_may_be_anything():
    """Left of a window, past the lengths in use, and of a sequence without queries."""
    call = paged(q=torch.zeros(1, 3, 2, 256), page_table=ints((-1, 3, 9), (7, 7, 7)))
    ragged = {
        "cu_seqlens_q": ints(0, 3, 3), "seqused_k": ints(20, 40), "page_table": call["page_table"]
    }  # fmt: skip
    # The first query is level with key 17.
    given = call["q"], call["k"]
    checks.check_page_numbers(*given, ragged, (1, None))
    for left in (2, None):
        with pytest.raises(ValueError, match=r"page_table\[0, 0\] is -1"):
            checks.check_page_numbers(*given, ragged, (left, None))
    of_both = ragged | {"cu_seqlens_q": ints(0, 2, 3)}
    with pytest.raises(ValueError, match=r"page_table\[1, 2\] is 7"):
        checks.check_page_numbers(*given, of_both, (0, None))
    # Behind a negative bound no query sees a key; before one the last queries see none.
    checks.check_page_numbers(*given, of_both, (1, -40))
    checks.check_page_numbers(*given, of_both, (-2, None))
    checks.check_page_numbers(*given, ragged | {"seqused_q": ints(0, 0)}, (None, None))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("softmax_scale", math.nan, "softmax_scale is nan"),
        ("softcap", -1.0, "softcap is -1.0; accepted: 0"),
        ("config", "{}x", "names no ForwardConfig"),
        ("num_splits", MOST_SPLITS + 1, f"num_splits is {MOST_SPLITS + 1}"),
    ],
)
def test_the_operator_by_itself(name, value, message):
    """Graphs and other callers reach the operator past the functions."""
    with pytest.raises(ValueError, match=message):
        torch.ops.fa4_hd256.forward(*forward_arguments(*inputs(), **{name: value}))


@pytest.mark.parametrize(("tensors", "message"), [
    (inputs(q=(4, 2, 256)), "q has 3 dimensions"),
    (inputs(k=(4, 256)), "k has 2 dimensions"),
    (inputs(q=(1, 4, 2, 128)), "q has head_dim 128"),
])  # fmt: skip
def test_tensors_of_the_operator_by_itself(tensors, message):
    with pytest.raises(ValueError, match=message):
        torch.ops.fa4_hd256.forward(*forward_arguments(*tensors))


def test_every_check_comes_once(monkeypatch):
    """Checks run once between the function and the launch, which this call without any row has none
    of."""
    seen = Counter()

    def counted(name, function):
        def check(*arguments):
            seen[name] += 1
            return function(*arguments)

        return check

    # Those that it imports check one tensor each.
    names = [
        name
        for name, found in vars(checks).items()
        if name.startswith("check_") or name.endswith("_of")
        if found.__module__ == checks.__name__
    ]
    for name in names:
        check = counted(name, getattr(checks, name))
        for module in (checks, interface):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, check)
    none = torch.zeros(2, dtype=torch.int32)
    call = packed(q=torch.zeros(0, 2, 256).bfloat16(), cu_seqlens_q=none, cu_seqlens_k=none)
    k = torch.zeros(0, 1, 256).bfloat16()
    sink = torch.zeros(2)
    flash_attn_varlen_func(**{**call, "k": k, "v": k, "learnable_sink": sink, "softcap": 1.0})
    # The longest sequence: of the queries, and of the keys.
    assert seen.pop("check_max_seqlen") == 2
    # Checks of gradients, gates, pages, padding, masks and bounds that are tensors are not on
    # this way.
    others = {
        "bounds_of", "check_entries_of_mask", "check_gradients", "check_leftpad", "check_lists",
        "check_mask", "check_mask_of", "check_mask_options", "check_max_seqlen", "check_out_gate",
        "check_page_numbers", "check_pages", "check_pages_on_gpu",
    }  # fmt: skip
    assert set(names) - set(seen) == others
    assert set(seen.values()) == {1}


def test_window_that_is_no_pair():
    with pytest.raises(ValueError, match="window_size is .*accepted: a pair"):
        flash_attn_func(*inputs(), window_size=(1,))


def test_config_of_another_type():
    with pytest.raises(TypeError, match="config must be a ForwardConfig.* or None, got dict"):
        flash_attn_func(*inputs(), config={"kv_stages": 3})


def test_backward_config_of_another_type():
    with pytest.raises(TypeError, match="backward_config must be a BackwardConfig or None, got"):
        flash_attn_func(*inputs(), backward_config=ForwardConfig())


@pytest.mark.parametrize("field", [{"kv_stages": 1}, {"kv_stages": 40}])
def test_config_over_its_budget(field):
    with pytest.raises(ValueError, match="kv_stages|SMEM|shared memory"):
        ForwardConfig(**field)
