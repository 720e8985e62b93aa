"""Functions of `fa4_hd256.compat` have their libraries' signatures; every argument has a fate."""

from __future__ import annotations

import inspect
import sys
import types
from pathlib import Path

import pytest
import torch

from fa4_hd256 import interface, kv_cache
from fa4_hd256.call.options import ExactWindow
from fa4_hd256.compat import arguments, flash_attn_2, flash_attn_3, flash_attn_4
from fa4_hd256.integrations import sglang

ROOT = Path(__file__).resolve().parents[3]
LIBRARIES = {
    flash_attn_2: arguments.FLASH_ATTN_2, flash_attn_3: arguments.FLASH_ATTN_3,
    flash_attn_4: arguments.FLASH_ATTN_4,
}  # fmt: skip
FUNCTIONS = [
    pytest.param(module, name, id=f"{module.__name__[-1]}-{name}")
    for module in LIBRARIES
    for name in module.__all__
]

_OPTIONS_2 = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False"
)
_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_SCALES = "q_descale=None k_descale=None v_descale=None"
#: Facts of flash-attention 2.8 and of flash-attention 3 (hopper/), which no machine here has.
WRITTEN = {
    flash_attn_2: {
        "flash_attn_func": f"q k v {_OPTIONS_2}",
        "flash_attn_kvpacked_func": f"q kv {_OPTIONS_2}",
        "flash_attn_qkvpacked_func": f"qkv {_OPTIONS_2}",
        "flash_attn_varlen_func": f"q k v {_LENGTHS} {_OPTIONS_2} block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q kv {_LENGTHS} {_OPTIONS_2}",
        "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {_OPTIONS_2}",
        "flash_attn_with_kvcache": (
            "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
            "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None "
            "causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True "
            "alibi_slopes=None num_splits=0 return_softmax_lse=False"
        ),
    },
    flash_attn_3: {
        "flash_attn_qkvpacked_func": (
            f"qkv softmax_scale=None causal=False {_SCALES} window_size=(-1,-1) "
            "attention_chunk=0 softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 "
            "return_attn_probs=False"
        ),
        "flash_attn_func": (
            f"q k v softmax_scale=None causal=False qv=None {_SCALES} window_size=(-1,-1) "
            "attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False "
            "sm_margin=0 return_attn_probs=False"
        ),
        "flash_attn_varlen_func": (
            f"q k v {_LENGTHS} seqused_q=None seqused_k=None softmax_scale=None causal=False "
            f"qv=None {_SCALES} window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 "
            "pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
        ),
        "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
        "flash_attn_with_kvcache": (
            "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None "
            "cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None "
            "cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None "
            f"{_SCALES} softmax_scale=None causal=False window_size=(-1,-1) attention_chunk=0 "
            "softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 "
            "pack_gqa=None sm_margin=0 return_softmax_lse=False"
        ),
        "get_scheduler_metadata": (
            "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim "
            "cache_seqlens qkv_dtype=torch.bfloat16 headdim_v=None cu_seqlens_q=None "
            "cu_seqlens_k_new=None cache_leftpad=None page_size=None max_seqlen_k_new=0 "
            "causal=False window_size=(-1,-1) attention_chunk=0 has_softcap=False num_splits=0 "
            "pack_gqa=None sm_margin=0"
        ),
    },
}


def parameters(function):
    """Return (name, default) of each, none of them keyword-only."""
    found = inspect.signature(function).parameters.values()
    assert {each.kind for each in found} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return [(each.name, each.default) for each in found]


def tensors(head_dim=256):
    return [torch.zeros(1, 4, 1, head_dim).bfloat16() for _ in range(3)]


@pytest.mark.parametrize("module", WRITTEN, ids=lambda module: module.__name__[-1])
def test_signatures_that_are_written_down(module):
    assert set(WRITTEN[module]) == set(module.__all__)
    for name, text in WRITTEN[module].items():
        expected = []
        for word in text.split():
            argument, _, default = word.partition("=")
            value = eval(default, {"torch": torch}) if default else inspect.Parameter.empty
            expected.append((argument, value))
        assert parameters(getattr(module, name)) == expected, name


def test_signatures_of_flash_attn_4():
    theirs = pytest.importorskip("flash_attn.cute.interface")
    for name in flash_attn_4.__all__:
        assert parameters(getattr(flash_attn_4, name)) == parameters(getattr(theirs, name)), name


@pytest.mark.parametrize("module, name", FUNCTIONS)
def test_every_argument_has_a_fate(module, name):
    known = LIBRARIES[module].arguments
    assert set(inspect.signature(getattr(module, name)).parameters) <= set(known)


@pytest.mark.parametrize("module, name", FUNCTIONS)
def test_refused_arguments_are_refused_by_name(module, name):
    """Names are checked before anything else, so that any other values will do."""
    function, library = getattr(module, name), LIBRARIES[module]
    given = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is inspect.Parameter.empty:
            given[parameter.name] = tensors()[0]
    if name == "flash_attn_qkvpacked_func":
        given["qkv"] = torch.zeros(1, 4, 3, 1, 256).bfloat16()
    if "kvpacked" in name and "kv" in given:
        given["kv"] = torch.zeros(1, 4, 2, 1, 256).bfloat16()
    if name == "flash_attn_varlen_qkvpacked_func":
        given["qkv"] = torch.zeros(4, 3, 1, 256).bfloat16()
    if name == "get_scheduler_metadata":
        return
    for argument, default in parameters(function):
        if library.arguments[argument].fate != arguments.REFUSED:
            continue
        assert default in library.arguments[argument].accepted
        with pytest.raises(NotImplementedError, match=f"^{argument} of {library.name}'s"):
            function(**given, **{argument: 3 if default in (0, 0.0) else torch.ones(1)})


@pytest.mark.parametrize("library", LIBRARIES.values(), ids=lambda library: library.name)
def test_the_page_has_the_tables(library):
    assert arguments.document(library) in (ROOT / "docs" / "api.md").read_text()


@pytest.fixture
def given(monkeypatch):
    """Arguments of the calls that reach our own functions."""
    found = []

    def attend(*args, return_lse=False, **options):
        found.append((args, options))
        result = torch.zeros_like(args[0]), torch.zeros(1, 1, 4, requires_grad=True)
        return result if return_lse else result[0]

    for module, names in (
        (interface, ("flash_attn_func", "flash_attn_varlen_func")),
        (kv_cache, ("flash_attn_with_kvcache",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, attend)
    return found


def test_results(given):
    """flash-attn-4 returns a pair always; the others say so by an argument of other names."""
    q, k, v = tensors()
    assert flash_attn_4.flash_attn_func(q, k, v)[1] is None
    out, lse = flash_attn_4.flash_attn_func(q.requires_grad_(), k, v)
    assert not lse.requires_grad
    assert flash_attn_4.flash_attn_func(q, k, v, return_lse=True)[1].requires_grad
    q = q.detach()
    assert isinstance(flash_attn_3.flash_attn_func(q, k, v), torch.Tensor)
    assert len(flash_attn_3.flash_attn_func(q, k, v, return_attn_probs=True)) == 2
    assert len(flash_attn_3.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)) == 2
    out, lse, probabilities = flash_attn_2.flash_attn_func(q, k, v, return_attn_probs=True)
    assert probabilities.numel() == 0
    assert isinstance(flash_attn_2.flash_attn_func(q, k, v, 0.0), torch.Tensor)


def test_windows(given):
    """A negative bound is none in flash-attention 2 and 3; in 4 only two of them are."""
    q, k, v = tensors()
    cases = (
        ((-1, -1), (None, None)),
        ((-7, 3), (None, 3)),
        ([0, -2], (0, None)),
        ((-1, 0), (None, 0)),
    )
    for module in (flash_attn_2, flash_attn_3):
        for window, expected in cases:
            module.flash_attn_func(q, k, v, window_size=window)
            assert given[-1][1]["window_size"] == expected
    cases = ((-1, -5), (None, None)), ((2, None), (2, None)), ((None, 0), (None, 0))
    for window, expected in cases:
        flash_attn_4.flash_attn_func(q, k, v, window_size=window)
        assert given[-1][1]["window_size"] == expected
    for window in ((-1, None), (None, -1), (7, -3), (-1, 4)):
        flash_attn_4.flash_attn_func(q, k, v, window_size=window)
        found = given[-1][1]["window_size"]
        assert isinstance(found, ExactWindow) and found == window


@pytest.mark.parametrize("module", LIBRARIES, ids=lambda module: module.__name__[-1])
def test_windows_that_are_none(module, given):
    q, k, v = tensors()
    for window, error, message in (
        (128, ValueError, "window_size is 128; accepted: a pair"),
        (None, ValueError, "window_size is None; accepted: a pair"),
        ((1, 2, 3), ValueError, "window_size is .1, 2, 3.; accepted: a pair"),
        ((1.5, 0), TypeError, "window_size is .1.5, 0.; each side must be an int or None"),
        (("3", 0), TypeError, "window_size is .'3', 0.; each side must be an int or None"),
    ):
        with pytest.raises(error, match=message):
            module.flash_attn_func(q, k, v, window_size=window)
    assert not given
    module.flash_attn_func(q, k, v, window_size=(None, None))
    assert given[-1][1]["window_size"] == (None, None)


@pytest.mark.parametrize("module", LIBRARIES, ids=lambda module: module.__name__[-1])
def test_tensors_and_numbers_that_are_none(module):
    """The operator itself says what it takes."""
    q, k, v = tensors()
    for wrong in (None, [1.0], q.float().numpy()):
        kind = type(wrong).__name__
        for changed, name in (((wrong, k, v), "q"), ((q, wrong, v), "k"), ((q, k, wrong), "v")):
            with pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, got {kind}$"):
                module.flash_attn_func(*changed)
    with pytest.raises(TypeError, match="softcap must be a real number, got str"):
        module.flash_attn_func(q, k, v, softcap="1")
    with pytest.raises(ValueError, match="softcap is nan; accepted: 0"):
        module.flash_attn_func(q, k, v, softcap=float("nan"))
    if module is not flash_attn_2:
        for wrong in (None, "2"):
            with pytest.raises(TypeError, match=f"num_splits must be an int, got {wrong!r}"):
                module.flash_attn_func(q, k, v, num_splits=wrong)


def test_packed_tensors_of_other_shapes(given):
    offsets, rows = torch.tensor([0, 4]).int(), torch.zeros(4, 2, 256).bfloat16()
    q = rows[None]

    def zeros(*shape):
        return torch.zeros(*shape, 256).bfloat16()

    two, three = flash_attn_2, flash_attn_3
    calls = [
        (lambda qkv: two.flash_attn_qkvpacked_func(qkv), "qkv", ((1, 4, 6), (1, 4, 4, 2), ())),
        (lambda qkv: three.flash_attn_qkvpacked_func(qkv), "qkv", ((1, 4, 2, 2),)),
        (lambda kv: two.flash_attn_kvpacked_func(q, kv), "kv", ((1, 4, 3, 1), (1, 2, 1), ())),
        (
            lambda qkv: two.flash_attn_varlen_qkvpacked_func(qkv, offsets, 4), "qkv",
            ((4, 2, 2), (1, 4, 3, 2), ()),
        ),
        (
            lambda kv: two.flash_attn_varlen_kvpacked_func(rows, kv, offsets, offsets, 4, 4), "kv",
            ((4, 3, 1), (1, 4, 2, 1), (4,)),
        ),
    ]  # fmt: skip
    for call, name, shapes in calls:
        for shape in shapes:
            with pytest.raises(
                ValueError, match=rf"^{name} has shape .*256.*\); accepted: \(.*, 256"
            ):
                call(zeros(*shape))
        with pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, got NoneType"):
            call(None)
    for heads, wrong in ((7, 2), (7, 9), (7, -1), (6, 0), (6, 6), (6, 3)):
        with pytest.raises(ValueError, match=f"num_heads_q is {wrong} of {heads} heads; accepted:"):
            three.flash_attn_qkvpacked_func(zeros(1, 4, heads), num_heads_q=wrong)
    with pytest.raises(TypeError, match="num_heads_q must be an int, got '2'"):
        three.flash_attn_qkvpacked_func(zeros(1, 4, 6), num_heads_q="2")
    assert not given


def test_packed_tensors(given):
    """Packed tensors are views of one tensor, in the order of its parts."""
    qkv = torch.arange(1 * 4 * 3 * 2 * 256).view(1, 4, 3, 2, 256).bfloat16()
    for module in (flash_attn_2, flash_attn_3):
        module.flash_attn_qkvpacked_func(qkv)
        assert all(torch.equal(a, b) for a, b in zip(given[-1][0], qkv.unbind(2), strict=True))
    flash_attn_3.flash_attn_qkvpacked_func(qkv.flatten(2, 3), num_heads_q=4)
    assert [each.shape[2] for each in given[-1][0]] == [4, 1, 1]
    with pytest.raises(ValueError, match="num_heads_q is None"):
        flash_attn_3.flash_attn_qkvpacked_func(qkv.flatten(2, 3))
    flash_attn_2.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:])
    assert torch.equal(given[-1][0][2], qkv[:, :, 2])


def test_scales_of_e4m3(given):
    """Scales that are not given beside others are 1; that of q is ignored for another dtype."""
    q, k, v = (tensor.to(torch.float8_e4m3fn) for tensor in tensors())
    scales = {name: torch.tensor([[number]]) for name, number in (
        ("q_descale", 3.0), ("k_descale", 5.0), ("v_descale", 7.0))}  # fmt: skip
    flash_attn_3.flash_attn_func(q, k, v, **scales)
    args, options = given[-1]
    assert args[0].dtype == args[1].dtype == k.dtype
    assert [options[name].item() for name in scales] == [3.0, 5.0, 7.0]
    flash_attn_3.flash_attn_func(q, k, v, k_descale=scales["k_descale"])
    assert [given[-1][1][name].item() for name in scales] == [1.0, 5.0, 1.0]
    flash_attn_3.flash_attn_func(q, k, v)
    assert not {*scales} & {*given[-1][1]}
    flash_attn_3.flash_attn_func(q.bfloat16(), k, v, **scales)
    assert "q_descale" not in given[-1][1] and given[-1][1]["v_descale"].item() == 7.0


@pytest.mark.parametrize("value", [1, None, torch.ones(2)], ids=["1", "None", "a tensor"])
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_a_request_of_the_lse_that_is_no_bool(given, name, value):
    """Our own function always returns it here."""
    with pytest.raises(TypeError, match="return_lse must be True or False, got"):
        getattr(flash_attn_4, name)(*tensors(), return_lse=value)
    assert not given


@pytest.mark.parametrize("module", [flash_attn_2, flash_attn_3], ids=["2", "3"])
def test_requests_that_are_no_bool_have_the_names_of_the_library(given, module):
    with pytest.raises(TypeError, match="^return_attn_probs must be True or False, got 1"):
        module.flash_attn_func(*tensors(), return_attn_probs=1)
    with pytest.raises(TypeError, match="^return_softmax_lse must be True or False, got None"):
        module.flash_attn_with_kvcache(*tensors(), return_softmax_lse=None)
    assert not given


def test_what_flash_attention_3_ignores_is_not_passed_on(given):
    """Engines pass offsets of new rows without rows: our function refuses them."""
    q, cache = torch.zeros(2, 1, 2, 256).bfloat16(), torch.zeros(2, 16, 1, 256).bfloat16()
    ignored = {"cu_seqlens_k_new": torch.tensor([0, 1, 2]).int()}
    ignored["rotary_seqlens"] = torch.tensor([5, 2]).int()
    for attend in (flash_attn_3.flash_attn_with_kvcache, sglang.flash_attn_with_kvcache):
        attend(q, cache, cache, **ignored)
        assert not {*ignored} & {*given[-1][1]}
        new = {"k": cache[:, 0], "v": cache[:, 0]}
        tables = dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(16, 8))
        attend(q, cache, cache, **new, **tables, **ignored)
        assert {*ignored} <= {*given[-1][1]}


CALLS_WITH_LENGTHS = [
    (flash_attn_2, "flash_attn_varlen_func", "packed"),
    (flash_attn_2, "flash_attn_with_kvcache", "cache"),
    (flash_attn_3, "flash_attn_varlen_func", "packed"),
    (flash_attn_3, "flash_attn_with_kvcache", "cache"),
    (flash_attn_4, "flash_attn_varlen_func", "packed"),
]


@pytest.mark.parametrize("module, name, kind", CALLS_WITH_LENGTHS)
def test_functions_with_lengths_are_one_graph(module, name, kind, monkeypatch):
    """torch.compile traces them, down to our own functions, without a break."""

    def attend(q, *others, return_lse=False, **options):
        result = q + options["cache_seqlens" if kind == "cache" else "cu_seqlens_q"].sum()
        return (result, result) if return_lse else result

    monkeypatch.setattr(interface, "flash_attn_varlen_func", attend)
    monkeypatch.setattr(kv_cache, "flash_attn_with_kvcache", attend)
    q, options = torch.zeros(1, 4, 1, 256).bfloat16(), {"cache_seqlens": torch.tensor([3]).int()}
    expected = q + 3
    if kind == "packed":
        offsets = torch.tensor([0, 4]).int()
        q, expected = q[0], q[0] + 4
        options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        options |= {"max_seqlen_q": 4, "max_seqlen_k": 4}
    function = getattr(module, name)
    compiled = torch.compile(
        lambda q: function(q, q, q, **options), fullgraph=True, backend="eager"
    )
    result = compiled(q)
    assert torch.equal(result[0] if module is flash_attn_4 else result, expected)


def test_pages_of_flash_attention_2(given):
    q = torch.zeros(5, 2, 256).bfloat16()
    cache = torch.zeros(6, 16, 1, 256).bfloat16()
    of_q, of_k = torch.tensor([0, 2, 5]).int(), torch.tensor([0, 20, 50]).int()
    table = torch.zeros(2, 3).int()
    flash_attn_2.flash_attn_varlen_func(q, cache, cache, of_q, of_k, 3, 30, block_table=table)
    options = given[-1][1]
    small = cache[:, :4]
    for function, name in (
        (flash_attn_2.flash_attn_with_kvcache, "block_table"),
        (flash_attn_3.flash_attn_with_kvcache, "page_table"),
        (flash_attn_4.flash_attn_varlen_func, "page_table"),
    ):
        function(q, small, small, **{name: table})
    assert options["seqused_k"].tolist() == [20, 30] and "cu_seqlens_k" not in options
    assert options["seqused_k"].dtype == torch.int32
    for wrong, kind in ((None, "None"), ([0, 20, 50], r"\[0, 20, 50\]"), (of_k.long(), ".*int64")):
        with pytest.raises(TypeError, match=f"^cu_seqlens_k must be an int32 tensor, got {kind}"):
            flash_attn_2.flash_attn_varlen_func(
                q, cache, cache, of_q, wrong, 3, 30, block_table=table
            )
    for wrong in ((None, of_k), (of_q, None)):
        name = "cu_seqlens_q" if wrong[0] is None else "cu_seqlens_k"
        with pytest.raises(TypeError, match=f"^{name} must be an int32 tensor, got None"):
            flash_attn_2.flash_attn_varlen_func(q, q, q, *wrong, 3, 30)


@pytest.mark.parametrize("module", LIBRARIES, ids=lambda module: module.__name__[-1])
def test_another_head_dim_goes_to_the_library(module, monkeypatch):
    library, given = LIBRARIES[module], tensors(64)
    monkeypatch.setitem(sys.modules, library.module, None)
    with pytest.raises(ValueError, match=rf"head_dim 64; accepted: 256, .*{library.name} is inst"):
        module.flash_attn_func(*given)
    # A package of another library under the same name, as flash-attn-4's is of flash-attn's.
    installed = types.ModuleType(library.module)
    monkeypatch.setitem(sys.modules, library.module, installed)
    with pytest.raises(ValueError, match="head_dim 64; accepted: 256, .*has no flash_attn_func"):
        module.flash_attn_func(*given)
    installed.flash_attn_func = lambda q, k, v, **options: (q, options)
    q, options = module.flash_attn_func(*given, causal=True)
    assert q is given[0] and options["causal"] is True
    # Our own module under their name is not the library.
    installed.flash_attn_func = module.flash_attn_func
    with pytest.raises(ValueError, match="fa4_hd256's own"):
        module.flash_attn_func(*given)


def test_combine():
    """Against the softmax of all keys; a split without keys may hold anything."""
    scores, values = torch.randn(3, 1, 5, 2, 7), torch.randn(3, 1, 5, 2, 7, 8)
    scores[1, 0, 2] = -torch.inf
    scores[:, 0, 4, 1] = -torch.inf
    parts = (scores.softmax(-1)[..., None] * values).sum(-2)
    lse = scores.logsumexp(-1)
    together = scores.permute(1, 2, 3, 0, 4).flatten(3)
    expected = together.softmax(-1)[..., None] * values.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
    expected = torch.nan_to_num(expected.sum(-2))
    for module in (flash_attn_3, flash_attn_4):
        out, found = module.flash_attn_combine(parts, lse)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(found, together.logsumexp(-1))
    place = torch.empty_like(expected, dtype=torch.float16)
    assert flash_attn_3.flash_attn_combine(parts, lse, place)[0] is place
    assert flash_attn_4.flash_attn_combine(parts, lse, return_lse=False)[1] is None
    out, _ = flash_attn_3.flash_attn_combine(parts, lse, None, torch.bfloat16)
    assert out.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="out_partial has shape"):
        flash_attn_3.flash_attn_combine(parts, lse[:2])
    for wrong, error, message in (
        ({"out_partial": None}, TypeError, "out_partial must be a torch.Tensor, got NoneType"),
        ({"lse_partial": 3}, TypeError, "lse_partial must be a torch.Tensor, got int"),
        ({"out": [1]}, TypeError, "out must be a torch.Tensor or None, got list"),
        # PyTorch would broadcast the first, and refuse the second in other words.
        ({"out": torch.empty(2, *parts.shape[1:])}, ValueError, "out has shape .2, 1, 5, 2, 8."),
        ({"out": torch.empty(1, 5, 3, 8)}, ValueError, "out has shape .*; accepted: .1, 5, 2, 8."),
        ({"out_dtype": "bf16"}, TypeError, "out_dtype must be a torch.dtype or None, got 'bf16'"),
    ):
        for module in (flash_attn_3, flash_attn_4):
            with pytest.raises(error, match=message):
                module.flash_attn_combine(**{"out_partial": parts, "lse_partial": lse} | wrong)
