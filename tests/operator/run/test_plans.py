"""Plans of calls: what they say, who finds them, and that a call which found one has the results
of one that made it."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from replays import as_on_a_gpu, forget

from bench.measure import host
from fa4_hd256 import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    interface,
    masks,
    plans,
)
from fa4_hd256.run import execute
from fa4_hd256.run.plan import PlanBuilder
from fa4_hd256.score_mods import ScoreMod, alibi

pytestmark = pytest.mark.simulator


def tensors(*shapes, dtype=torch.bfloat16):
    return [torch.randn(shape).to(dtype) for shape in shapes]


def dense(seqlen_q=70, seqlen_k=90, heads=(2, 1), batch=1):
    shapes = ((seqlen_q, heads[0]), (seqlen_k, heads[1]), (seqlen_k, heads[1]))
    return tensors(*((batch, s, h, 256) for s, h in shapes))


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


FORWARDS = {
    "causal": (flash_attn_func, dense, {"causal": True}),
    "dynamic": (flash_attn_func, dense, {"causal": True, "use_clc": True}),
    "split": (flash_attn_func, lambda: dense(3, 300), {"num_splits": 3}),
    "sink": (
        flash_attn_func,
        dense,
        {"learnable_sink": lambda: torch.randn(2, dtype=torch.bfloat16)},
    ),
    "packed": (
        flash_attn_varlen_func,
        lambda: tensors((40, 2, 256), (60, 1, 256), (60, 1, 256)),
        {
            "cu_seqlens_q": lambda: int32(0, 15, 40), "cu_seqlens_k": lambda: int32(0, 33, 60),
            "max_seqlen_q": 25, "max_seqlen_k": 33, "causal": True,
        },
    ),
    "used": (
        flash_attn_varlen_func,
        lambda: dense(30, 50, batch=2),
        {"seqused_q": lambda: int32(30, 11), "seqused_k": lambda: int32(17, 50)},
    ),
    "mask": (
        flash_attn_func, dense,
        {"block_mask": lambda: masks.sliding_window(30, 70, 90, first_tokens=3)},
    ),
    "score_mod": (
        flash_attn_func, dense, {"score_mod": lambda: alibi(torch.rand(2)), "causal": True}
    ),
    "max logits": (flash_attn_func, dense, {"causal": True, "return_max_logits": True}),
    "tree": (
        flash_attn_func, lambda: dense(4, 100, (4, 1)),
        {"tree_mask": lambda: torch.rand(4, 4) < 0.6, "num_splits": 1},
    ),
    "e4m3": (
        flash_attn_func,
        lambda: [t if n == 0 else t.to(torch.float8_e4m3fn) for n, t in enumerate(dense(1, 90))],
        {name: lambda: torch.rand(1, 1) for name in ("k_descale", "v_descale")},
    ),
    "left padding": (
        flash_attn_with_kvcache,
        lambda: tensors((2, 1, 2, 256), (6, 16, 1, 256), (6, 16, 1, 256)),
        {
            "cache_seqlens": lambda: int32(17, 40), "cache_leftpad": lambda: int32(0, 18),
            "page_table": lambda: torch.randperm(6).view(2, 3).int(), "causal": True,
        },
    ),
    "pages, split": (
        flash_attn_varlen_func,
        lambda: tensors((2, 3, 2, 256), (6, 16, 1, 256), (6, 16, 1, 256)),
        {
            "seqused_k": lambda: int32(17, 50), "num_splits": 2,
            # Another table, whose rows are those of a wider one.
            "page_table": lambda: torch.stack([torch.randperm(6)] * 3).int()[:2, :5],
        },
    ),
}  # fmt: skip


def options_of(given):
    return {name: value() if callable(value) else value for name, value in given.items()}


@pytest.mark.parametrize("case", FORWARDS.values(), ids=FORWARDS)
@pytest.mark.sampled("causal", "mask")
def test_a_forward_by_a_plan_that_was_found(case, launched):
    function, make, given = case
    options = options_of(given)
    function(*make(), **options, return_lse=True)
    inputs, options = make(), options_of(given)
    before = len(launched)
    found = function(*inputs, **options, return_lse=True)
    assert len(launched) > before, "no plan was found"
    forget()
    count = len(launched)
    expected = function(*inputs, **options, return_lse=True)
    assert len(launched) == count
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


@pytest.mark.parametrize("name", ["dynamic", "split", "packed"])
@pytest.mark.sampled
def test_kernels_get_their_arguments_as_on_a_gpu(name, launched, monkeypatch):
    """First calls and those that find their plan: by one address, of the packed arguments."""
    function, make, given = FORWARDS[name]
    inputs, options = make(), options_of(given)
    expected = function(*inputs, **options, return_lse=True)
    called = as_on_a_gpu(monkeypatch)
    for _ in range(2):
        found = function(*inputs, **options, return_lse=True)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    assert len(called) == 2 * len(set(called)) >= 2


BACKWARDS = {
    "causal": (flash_attn_func, dense, {"causal": True}),
    "grouped in parts": (flash_attn_func, lambda: dense(130, 70, (4, 1)), {"softcap": 9.0}),
    "sink": (flash_attn_func, dense, {"learnable_sink": lambda: torch.randn(2)}),
    "packed": FORWARDS["packed"],
    "mask": FORWARDS["mask"],
    "score_mod": FORWARDS["score_mod"],
}


def gradients(case, inputs, options, dout, lse_gradient=None):
    function, _, _ = case
    leaves = [t.detach().requires_grad_() for t in inputs]
    out, lse = function(*leaves, **options, return_lse=True)
    given = (dout,) if lse_gradient is None else (dout, lse_gradient)
    results = (out,) if lse_gradient is None else (out, lse)
    return torch.autograd.grad(results, leaves, given)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("case", BACKWARDS.values(), ids=BACKWARDS)
@pytest.mark.sampled("causal-False", "causal-True", "mask-False")
def test_a_backward_by_a_plan_that_was_found(case, with_lse, launched):
    _, make, given = case
    options = options_of(given)
    inputs = make()
    dout = torch.randn_like(inputs[0])
    rows = inputs[0].shape[:-1]
    dlse = torch.randn(rows).transpose(-1, -2).contiguous() if with_lse else None
    gradients(case, make(), options, torch.randn_like(dout), dlse)
    before = len(launched)
    found = gradients(case, inputs, options, dout, dlse)
    assert len(launched) >= before + 4, launched
    forget()
    count = len(launched)
    expected = gradients(case, inputs, options, dout, dlse)
    assert len(launched) == count
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


# ---------------------------------------------------------------- what a plan says


def forward_plan(**options):
    """The plan of a forward of `dense` tensors."""
    (plan,) = plans.launched_by(lambda: flash_attn_func(*dense(), **options))
    return plan


def test_a_plan_says_what_is_launched(launched):
    plan = forward_plan(causal=True, learnable_sink=torch.randn(2).bfloat16())
    assert plan.inputs == ("q", "k", "v", "sink") and plan.results == ("out", "lse")
    assert [one.name for one in plan.allocations] == ["out", "lse"]
    (launch,) = plan.launches
    assert {"q", "k", "v", "out", "lse"} <= {view.name for view in launch.views}
    text = str(plan)
    assert text.startswith("on cpu, given q, k, v, sink\nallocate out (1, 70, 2, 256) bfloat16")
    assert "float32 of sink -> sink in float32" in text and "launch forward" in text
    assert "window_right 0" in text and text.endswith("return out, lse")


def test_the_launches_of_a_divided_call(launched):
    """Splits are memory of the call, and combined by a launch of their own."""
    forget()
    flash_attn_func(*dense(300, 520, (1, 1)), num_splits=3)
    (execution,) = plans._cache.executions.values()
    plan = execution.plan
    assert [launch.spec.kind for launch in plan.launches][-1] == "forward_combine"
    assert len(plan.launches) == 2 and plan.allocation("splits") is not None


@pytest.mark.parametrize("with_sink", [False, True])
def test_rows_between_sequences_are_filled_for_a_sum_alone(with_sink):
    """No kernel reads statistics of rows between sequences; the gradient of a sink sums them."""
    function, make, given = FORWARDS["packed"]
    leaves = [tensor.requires_grad_() for tensor in make()]
    sink = torch.zeros(leaves[0].shape[1], requires_grad=True) if with_sink else None
    with host.stand_in():
        out = function(*leaves, **options_of(given), learnable_sink=sink)
        (plan,) = plans.launched_by(lambda: out.sum().backward())
    values = [value for _, _, value in plan.allocation("stats").fills]
    assert (values == [-math.inf, 0.0]) if with_sink else -math.inf not in values


def test_plans_hold_no_tensor(launched):
    """Neither of the call that made them, nor of one that found them."""
    tensors_, sink = dense(), torch.randn(2)
    for _ in range(2):
        flash_attn_func(*tensors_, causal=True, learnable_sink=sink)
    seen = [weakref.ref(tensor) for tensor in (*tensors_, sink)]
    del tensors_, sink
    gc.collect()
    assert not any(one() is not None for one in seen)


def test_operands_that_are_copied_are_part_of_a_plan(launched):
    """A call whose keys TMA cannot read finds its plan, too, and copies them each time."""
    q, k, v = dense()
    odd = torch.zeros(1, 90, 1, 260).bfloat16()[..., 3:259].copy_(k)
    first = flash_attn_func(q, odd, v)
    before = len(launched)
    other = torch.zeros(1, 90, 1, 260).bfloat16()[..., 3:259].copy_(k + 1)
    found = flash_attn_func(q, other, v)
    assert len(launched) > before and not torch.equal(found, first)
    assert torch.equal(found, flash_attn_func(q, (k + 1).contiguous(), v))


# ---------------------------------------------------------------- what a key has


@pytest.fixture
def long_way(monkeypatch):
    """Calls by a stand-in for executions: results of one that made its plan are 0, of one that
    found it 1. Yields the list of plans made."""
    taken = []

    class Executed:
        def __init__(self, plan, values=None, written=()):
            self.plan, self.values, self.written = plan, values, written
            self.has_run = self.is_differentiable = False

        def run(self, tensors, addresses, only_first=False):
            value = 1.0 if self.has_run else 0.0
            self.has_run = True
            q = next(tensor for tensor in tensors if tensor is not None)
            return torch.full_like(q, value), torch.full(q.shape[:-1], value)

    def plan(tensors, values):
        taken.append(values)
        return None

    monkeypatch.setattr(plans, "Execution", Executed)
    monkeypatch.setattr(plans, "repeats", lambda tensors: True)
    monkeypatch.setattr(interface, "_EAGER_FORWARD", replace(interface._EAGER_FORWARD, plan=plan))
    forget()
    yield taken
    forget()


def repeats(function, *tensors, **options):
    """Return True if a call found its plan; the stand-ins return ones then."""
    return bool((function(*tensors, **options) == 1).all())


def strided(*shape):
    """Values of a transposed layout."""
    batch, rows, heads, columns = shape
    return torch.randn(batch, heads, rows, columns).bfloat16().transpose(1, 2)


def like(tensor):
    return torch.randn(tensor.shape).to(tensor.dtype)


#: Change -> the call's tensors and options after it; before it (q, k, v), causal.
CHANGES = {
    "length of q": lambda q, k, v: ((like(q)[:, :5].contiguous(), k, v), {}),
    "length of k and v": lambda q, k, v: ((q, k[:, :5].contiguous(), v[:, :5].contiguous()), {}),
    "batch": lambda q, k, v: (tuple(torch.cat([t, t]) for t in (q, k, v)), {}),
    "heads": lambda q, k, v: ((torch.cat([q, q], 2), k, v), {}),
    "strides of q": lambda q, k, v: ((strided(*q.shape), k, v), {}),
    "strides of k": lambda q, k, v: ((q, strided(*k.shape), v), {}),
    "strides of v": lambda q, k, v: ((q, k, strided(*v.shape)), {}),
    "dtype": lambda q, k, v: (tuple(t.half() for t in (q, k, v)), {}),
    "alignment": lambda q, k, v: ((shifted(q), k, v), {}),
    "causal": lambda q, k, v: ((q, k, v), {"causal": False}),
    "scale": lambda q, k, v: ((q, k, v), {"softmax_scale": 0.1}),
    "window": lambda q, k, v: ((q, k, v), {"window_size": (3, None)}),
    "softcap": lambda q, k, v: ((q, k, v), {"softcap": 2.0}),
    "splits": lambda q, k, v: ((q, k, v), {"num_splits": 2}),
    "scheduler": lambda q, k, v: ((q, k, v), {"use_clc": True}),
    "sink": lambda q, k, v: ((q, k, v), {"learnable_sink": torch.randn(q.shape[2])}),
    "gate": lambda q, k, v: ((q, k, v), {"out_gate": like(q)}),
    "out": lambda q, k, v: ((q, k, v), {"out": torch.empty_like(q)}),
}  # fmt: skip


def shifted(tensor):
    """Copy the values to one element past an aligned address."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
    return room.view(tensor.shape).copy_(tensor)


def small():
    return tensors((1, 9, 2, 256), (1, 20, 2, 256), (1, 20, 2, 256))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_key_tells_calls_apart(change, long_way):
    """Neither the key nor a guard takes one call for another."""
    first = small()
    assert not repeats(flash_attn_func, *first, causal=True)
    for _ in range(3):
        assert repeats(flash_attn_func, *small(), causal=True)
    changed, options = change(*small())
    assert not repeats(flash_attn_func, *changed, **({"causal": True} | options))
    assert repeats(flash_attn_func, *changed, **({"causal": True} | options))
    assert repeats(flash_attn_func, *small(), causal=True)


@pytest.mark.parametrize("variable, value", [
    ("FA_CLC", "1"), ("FA4_HD256_RESERVED_SMS", "2"), ("CUTE_DSL_SOMETHING", "1"),
    ("FA4_HD256_ARCH", "sm_90a"), ("FA4_HD256_DS_BYTES", "0"),
])  # fmt: skip
def test_the_key_has_the_environment(variable, value, long_way, monkeypatch):
    monkeypatch.delenv("FA_CLC", raising=False)
    monkeypatch.delenv("FA4_HD256_ARCH", raising=False)
    for _ in range(3):
        flash_attn_func(*small(), causal=True)
    count = len(long_way)
    monkeypatch.setenv(variable, value)
    assert not repeats(flash_attn_func, *small(), causal=True)
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    assert repeats(flash_attn_func, *small(), causal=True)
    monkeypatch.delenv(variable)
    assert repeats(flash_attn_func, *small(), causal=True) and len(long_way) == count + 1


def test_packed_lengths_are_in_the_key(long_way):
    def call(longest=25, offsets=(0, 15, 40), total=40, used=None):
        shapes = ((total, 2, 256), (total, 1, 256), (total, 1, 256))
        cu = int32(*offsets)
        return repeats(
            flash_attn_varlen_func, *tensors(*shapes), cu_seqlens_q=cu, cu_seqlens_k=cu,
            max_seqlen_q=longest, max_seqlen_k=longest, seqused_k=used,
        )  # fmt: skip

    assert not call() and call() and call()
    # Other contents of the same shape are no other call.
    assert call(offsets=(0, 20, 40))
    assert not call(longest=26) and not call(offsets=(0, 5, 15, 40)) and not call(total=41)
    assert not call(used=int32(3, 4)) and call(used=int32(4, 5)) and call()


def test_a_packed_call_with_out_is_not_one_without(long_way):
    def call(**options):
        packed = tensors((40, 2, 256), (40, 1, 256), (40, 1, 256))
        longest = {"max_seqlen_q": 25, "max_seqlen_k": 25}
        return repeats(
            flash_attn_varlen_func, *packed, cu_seqlens_q=cu, cu_seqlens_k=cu, **longest, **options
        )

    cu = int32(0, 15, 40)
    out = torch.empty(40, 2, 256, dtype=torch.bfloat16)
    assert not call() and call() and call()
    assert not call(out=out) and call(out=out) and call()


def test_a_score_mod_is_in_the_key(long_way):
    """The key has its functions and how its tensors lie, not what they hold."""

    def call(mod, function=flash_attn_func):
        if function is flash_attn_func:
            return repeats(function, *small(), causal=True, score_mod=mod)
        rows, offsets = tensors((20, 2, 256), (20, 2, 256), (20, 2, 256)), int32(0, 5, 20)
        lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 15}
        return repeats(function, *rows, **lengths, score_mod=mod)

    halved = ScoreMod.of(lambda score, place, tensors: score * 0.5)
    other = ScoreMod.of(lambda score, place, tensors: score * 0.25)
    for function in (flash_attn_func, flash_attn_varlen_func):
        assert not call(None, function) and call(None, function)
        assert not call(alibi(torch.rand(2)), function) and call(alibi(torch.rand(2)), function)
        assert not call(alibi(torch.rand(1, 2)), function)
        assert not call(halved, function) and not call(other, function)
        assert call(halved, function) and call(other, function) and call(None, function)


WRONG = [
    {"causal": 1}, {"num_splits": True}, {"use_clc": 1}, {"window_size": (True, None)},
    {"softmax_scale": True}, {"softcap": True},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_equal_values_of_other_types_are_refused_as_ever(wrong, long_way):
    """Calls with the accepted value, which is equal to it, come before."""
    accepted = {
        "causal": True, "num_splits": 1, "use_clc": True, "window_size": (1, None),
        "softmax_scale": 1.0, "softcap": 1.0,
    }  # fmt: skip
    (name,) = wrong
    for _ in range(3):
        flash_attn_func(*small(), **{name: accepted[name]})
    with pytest.raises(TypeError):
        flash_attn_func(*small(), **wrong)


def test_a_first_call_that_is_refused_leaves_nothing_behind(long_way, monkeypatch):
    """Neither what the checks refuse, nor what the plan does."""

    def plan(*given):
        raise ValueError("such a plan there is not")

    with monkeypatch.context() as refusing:
        refused = replace(interface._EAGER_FORWARD, plan=plan)
        refusing.setattr(interface, "_EAGER_FORWARD", refused)
        for options in ({}, {"softmax_scale": "a word"}):
            with pytest.raises((TypeError, ValueError)):
                flash_attn_func(*small(), **options)
    cache = plans._cache
    assert not cache.executions and not cache.alike and not cache.guards


def test_gradients_are_kept_apart(long_way):
    """Calls that want gradients and calls that do not find the same execution, and have what they
    want."""
    q, k, v = small()
    for _ in range(3):
        assert not flash_attn_func(q, k, v).requires_grad
    wanted = q.clone().requires_grad_()
    for _ in range(3):
        assert flash_attn_func(wanted, k, v).requires_grad
        with torch.no_grad():
            assert not flash_attn_func(wanted, k, v).requires_grad
        with torch.inference_mode():
            assert flash_attn_func(wanted, k, v).is_inference()


def test_scales_that_require_gradients_are_refused_as_ever(long_way):
    """Similar calls whose scales do not share the cached execution."""
    q, k, v = small()
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    scales = {"k_descale": torch.ones(1), "v_descale": torch.ones(1)}
    for _ in range(3):
        flash_attn_func(q, k, v, **scales)
    scales["v_descale"].requires_grad_()
    with pytest.raises(NotImplementedError, match="there are none to them"):
        flash_attn_func(q, k, v, **scales)
    with torch.no_grad():
        assert repeats(flash_attn_func, q, k, v, **scales)


def test_what_may_be_intercepted_goes_through_the_operator(long_way, monkeypatch):
    """Subclasses, modes and transforms see the operator."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    def forward(*given):
        seen.append(type(given[0]))
        return torch.zeros_like(given[0]), torch.zeros(given[0].shape[:-1])

    for _ in range(3):
        flash_attn_func(*small())
    monkeypatch.setattr(interface, "forward", forward)

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    given = small()
    for mode in (Dispatch, Function):
        with mode():
            flash_attn_func(*given)
    flash_attn_func(given[0].as_subclass(Subclass), *given[1:])
    torch.vmap(lambda q: flash_attn_func(q, *given[1:]))(given[0][None])
    with torch.autograd.forward_ad.dual_level():
        flash_attn_func(*given)
    assert len(seen) == 5
    assert repeats(flash_attn_func, *given)


def resized(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("without", [
    lambda q: torch._efficientzerotensor(q.shape, dtype=q.dtype), resized,
], ids=["zeros", "resized"])  # fmt: skip
def test_elements_without_memory_are_not_launched_on(without, long_way, monkeypatch):
    """Everything but the address, which is 0, is like that of a call before."""

    class Refused(Exception):
        pass

    def refuse(*given):
        raise Refused

    for _ in range(3):
        flash_attn_func(*small())
    monkeypatch.setattr(interface, "forward", refuse)
    q, k, v = small()
    with pytest.raises(Refused):
        flash_attn_func(without(q), k, v)
    assert repeats(flash_attn_func, *small())


def test_what_cannot_be_hashed_has_no_plan_that_is_kept(long_way):
    """A window as a list is accepted, and looked up nowhere."""
    for _ in range(3):
        assert not repeats(flash_attn_func, *small(), window_size=[3, None])
    assert len(long_way) == 3


@pytest.mark.parametrize("wrong", [None, 3])
def test_what_is_no_tensor_is_refused_behind_a_guard(wrong, long_way):
    """In the user's words, as in a first call."""
    q, *_ = small()
    for _ in range(3):
        flash_attn_func(*small())
    with pytest.raises(TypeError, match="k must be a torch.Tensor"):
        flash_attn_func(q, wrong, wrong)


def test_what_is_refused_is_not_kept(long_way):
    """A tensor in the place of an option, which may be large."""
    scale = torch.ones(1)
    seen = weakref.ref(scale)
    for _ in range(3):
        flash_attn_func(*small())
    with pytest.raises(TypeError):
        flash_attn_func(*small(), softmax_scale=scale)
    del scale
    gc.collect()
    assert seen() is None


def test_few_plans_are_kept(long_way, monkeypatch):
    monkeypatch.setattr(plans, "LARGEST", 4)
    for rows in range(1, 8):
        for _ in range(3):
            flash_attn_func(*tensors(*[(1, rows, 1, 256)] * 3))
    assert len(plans._cache.executions) == 4 and len(plans._cache.guards) <= 4


@pytest.mark.parametrize("may_be_shared", [False, True])
def test_operations_read_no_memory_that_other_calls_write_to(may_be_shared):
    """On a GPU the LSE that nobody reads is of another shape, and holds anything."""
    builder = PlanBuilder(torch.device("cpu"), {})
    builder.result("lse", (1, 2, 3), torch.float32, 0.0, True, may_be_shared)
    builder.operate("maximum", ("lse",), lambda lse: lse.amax())
    if not may_be_shared:
        builder.plan()
        return
    with pytest.raises(AssertionError, match="maximum of lse has memory that other calls write to"):
        builder.plan()


def test_places_in_runs():
    """A guard compares them run by run."""
    assert plans._runs([]) == []
    assert plans._runs([3]) == [slice(3, 4)]
    assert plans._runs([0, 1, 2, 5, 7, 8]) == [slice(0, 3), slice(5, 6), slice(7, 9)]


@pytest.mark.parametrize("wrong", ["k", "v", "cache_seqlens"])
def test_new_rows_that_lack_a_tensor_are_refused_behind_a_guard(wrong):
    """The facts of a call with new rows do not say which of them are given."""
    q, k, v = tensors((1, 1, 2, 256), (1, 1, 1, 256), (1, 1, 1, 256))
    caches = tensors((4, 16, 1, 256), (4, 16, 1, 256))
    given = {"k": k, "v": v, "cache_seqlens": int32(3), "page_table": torch.tensor([[0, 1]]).int()}
    with host.stand_in():
        for _ in range(3):
            flash_attn_with_kvcache(q, *caches, **given)
        assert [len(guards) for guards in plans._cache.guards.values()] == [1]
        with pytest.raises((TypeError, ValueError)):
            flash_attn_with_kvcache(q, *caches, **given | {wrong: None})
        out = torch.empty_like(q)
        assert flash_attn_with_kvcache(q, *caches, **given, out=out) is out


def test_what_kernels_alone_use_is_one_allocation(launched, monkeypatch):
    """Statistics and dS of a backward lie in one block where nothing is filled, as on a GPU."""
    case, inputs = BACKWARDS["causal"], dense()
    dout = torch.randn_like(inputs[0])
    expected = gradients(case, inputs, {"causal": True}, dout)
    begins, together = [], execute._together

    def unfilled(plan):
        bare = tuple(replace(one, fills=()) for one in plan.allocations)
        found = together(replace(plan, allocations=bare))
        begins.append(found[1])
        return found

    monkeypatch.setattr(execute, "_together", unfilled)
    forget()
    for one, other in zip(gradients(case, inputs, {"causal": True}, dout), expected, strict=True):
        assert torch.equal(one, other)
    of_forward, of_backward = begins
    assert not of_forward and {"stats", "ds"} <= set(of_backward)
    assert len(set(of_backward.values())) == len(of_backward)
    assert all(begin % 512 == 0 for begin in of_backward.values())
    monkeypatch.setattr(execute, "MOST_SCRATCH", 0)
    forget()
    gradients(case, inputs, {"causal": True}, dout)
    assert begins[-1] == {}
