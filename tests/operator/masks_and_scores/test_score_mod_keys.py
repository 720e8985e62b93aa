"""Names of score_mods, how they are found, and what is refused."""

from __future__ import annotations

import functools
import math
import re
import subprocess
import sys
from dataclasses import replace

import cutlass.cute as cute
import pytest
import torch
from checkout import ROOT
from operator_calls import forward_arguments

from fa4_hd256 import (
    ForwardConfig,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    masks,
)
from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.functions import meaning
from fa4_hd256.call.operator_arguments import BackwardTensors
from fa4_hd256.call.options import Options
from fa4_hd256.kernels.functions.user_functions import ALIBI, MASK_MOD, SCORE_MOD
from fa4_hd256.kernels.problem_class import FunctionClass, ProblemClass
from fa4_hd256.mask_mods import MaskMod
from fa4_hd256.run import compile, keys
from fa4_hd256.run.catalogue import KernelSpec, backward_specs
from fa4_hd256.run.kernel_names import kernel_named, name_of
from fa4_hd256.run.tracing import check_unchanged, trace_and_compile
from fa4_hd256.score_mods import ScoreMod, alibi

BOUND = 2.0


def capped(score, place, tensors):
    return cute.arch.fmin(score, BOUND)


def plus(number, second=0.0):
    return lambda score, place, tensors: score + number * math.pi + second


def key_of(function, slope=None):
    return ScoreMod.of(function, slope).key


def made(source):
    """The function `f` of a source, as that of another module."""
    found = {}
    exec(source, {"cute": cute}, found)
    return found["f"]


SOURCE = "def f(score, place, tensors):\n    return score * 2.0\n"


def test_keys_follow_what_is_compiled(monkeypatch):
    first = key_of(capped)
    assert key_of(capped) == first
    assert key_of(capped, plus(1.0)) != first
    assert key_of(made(SOURCE)) == key_of(made("\n# A comment.\n" + SOURCE))
    assert key_of(made(SOURCE)) != key_of(made(SOURCE.replace("2.0", "3.0")))
    assert key_of(made(SOURCE)) != key_of(made(SOURCE.replace("2.0", "2")))
    assert key_of(made(SOURCE)) != key_of(made(SOURCE.replace("*", "+")))
    assert key_of(plus(1.0)) == key_of(plus(1.0)) != key_of(plus(2.0))
    inner = SOURCE.replace("score * 2.0", "(lambda s: s * 2.0)(score)")
    assert key_of(made(inner)) != key_of(made(inner.replace("2.0", "3.0")))
    monkeypatch.setitem(globals(), "BOUND", 3.0)
    assert key_of(capped) != first


def test_functions_that_call_others():
    """Called functions count, whether they call back or not."""

    def outer(depth):
        def helper(score):
            return score * depth if depth else outer(depth)

        return lambda score, place, tensors: helper(score)

    assert key_of(outer(1.0)) == key_of(outer(1.0)) != key_of(outer(2.0))


def test_what_has_no_sound_name():
    table = torch.ones(3)
    with pytest.raises(ValueError, match=r"reads tensor\(.*accepted: numbers.*Pass tensors"):
        ScoreMod.of(lambda score, place, tensors: score + table[0])
    with pytest.raises(ValueError, match="a list, which cannot be named"):
        ScoreMod.of(plus([1.0]))
    # A key of one's own is taken, once.
    ScoreMod(plus([1.0]), None, "of a list")
    with pytest.raises(ValueError, match="'of a list' of a score_mod names other functions"):
        ScoreMod(capped, None, "of a list")
    with pytest.raises(ValueError, match="'alibi' of a score_mod names other functions"):
        ScoreMod(capped, None, "alibi")


def importing(score, place, tensors):
    from checkout import ROOT  # of a package that is nobody's in particular

    return score * len(ROOT.parts)


def importing_math(score, place, tensors):
    import math

    return score * math.pi


def importing_a_module_of_its_package(score, place, tensors):
    from .math import exp  # not Python's module of that name

    return exp(score)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (importing_a_module_of_its_package, "imports '.math' when it runs, .*accepted: an import"),
        (importing, "imports 'checkout' when it runs, .*accepted: an import outside"),
        (lambda score, place, tensors: score * globals()["BOUND"], "<built-in function globals"),
        (lambda score, place, tensors: score * eval("BOUND"), "<built-in function eval"),
    ],
)  # fmt: skip
def test_what_reads_what_it_does_not_name(function, says):
    with pytest.raises(ValueError, match=says):
        ScoreMod.of(function)


def test_imports_of_what_means_the_same_everywhere():
    assert key_of(importing_math) == key_of(importing_math)


def test_attributes_of_functions_count():
    def helper(score):
        return score * helper.factor

    def changed(score, place, tensors):
        return helper(score)

    keys = []
    for helper.factor in (0.5, 2.0, 0.5):
        keys.append(key_of(changed))
    assert keys[0] == keys[2] != keys[1]


def inputs(seqlen=8, heads=2, dtype=torch.bfloat16):
    return tuple(torch.randn(1, seqlen, heads, 256).to(dtype) for _ in range(3))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: alibi([0.5, 0.25]), TypeError, "slopes is list; accepted: a float32 tensor"),
        (lambda: alibi(torch.ones(2).double()), TypeError, "slopes is torch.float64"),
        (lambda: alibi(torch.ones(1, 1, 2)), ValueError, r"slopes has shape \(1, 1, 2\)"),
        (lambda: ScoreMod.of(capped, 1.0), TypeError, "slope of a ScoreMod is float"),
        (lambda: ScoreMod(None, None, "none"), TypeError, "function of a ScoreMod is NoneType"),
        (lambda: ScoreMod(capped, None, ""), TypeError, "key of a ScoreMod is ''"),
        (lambda: ScoreMod.of(capped, None, [torch.ones(1)]), TypeError, "tensors .* is list"),
        (lambda: ScoreMod.of(capped, None, (1.0,)), TypeError, "tensor 0 of a ScoreMod is float"),
        (lambda: ScoreMod.of(capped, None, (torch.ones(1).half(),)), TypeError, "dtype .*float16"),
        (lambda: ScoreMod.of(capped, None, (torch.ones(()),)), ValueError, r"shape \(\)"),
        (lambda: ScoreMod.of(capped, None, (torch.ones(1),) * 5), ValueError, "5 tensors.*up to 4"),
    ],
)
def test_wrong_score_mods(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_wrong_calls(device):
    q, k, v = (t.to(device) for t in inputs())
    mod = alibi(torch.ones(2, device=device))
    with pytest.raises(TypeError, match="score_mod is function; accepted: a ScoreMod"):
        flash_attn_func(q, k, v, score_mod=capped)
    with pytest.raises(ValueError, match=r"softcap is 5.0 with a score_mod; accepted: one"):
        flash_attn_func(q, k, v, softcap=5.0, score_mod=mod)
    with pytest.raises(ValueError, match="tensor 0 of the score_mod is on meta"):
        flash_attn_func(q, k, v, score_mod=alibi(torch.ones(2, device="meta")))
    learnt = alibi(torch.ones(2, device=device, requires_grad=True))
    with pytest.raises(ValueError, match="tensor of score_mod requires gradients"):
        flash_attn_func(q, k, v, score_mod=learnt)
    offsets = torch.tensor([0, 8], dtype=torch.int32, device=device)
    with pytest.raises(TypeError, match="score_mod is Tensor"):
        flash_attn_varlen_func(
            q[0], k[0], v[0], cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=8,
            score_mod=offsets,
        )  # fmt: skip


@pytest.mark.architecture("sm_100a")
def test_keys_and_values_in_e4m3():
    q, k, v = inputs()
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="float8_e4m3fn with a score_mod"):
        flash_attn_func(q, k, v, score_mod=alibi(torch.ones(2)))


def test_products_of_a_stored_ds_are_the_same_whatever_changes_scores(backward_config):
    """The kernel that stores dS is another one for each; those of its products compute no score."""
    q, k, _ = inputs()
    config, specs = backward_config(), []
    for options in (
        Options(1.0), Options(1.0, softcap=3.0),
        Options(1.0, score_mod=FunctionClass("alibi", ("float32 1",))),
    ):  # fmt: skip
        tensors = BackwardTensors(q, None, q, k, k, q, torch.zeros(1, 2, q.shape[1]))
        problem = replace(BackwardProblem.describe(tensors, options), keeps_ds=True)
        specs.append(backward_specs(problem, config))
    first, *others = specs
    assert all(found["products"] == first["products"] for found in others)
    assert len({found["dv"] for found in specs}) == 3


@pytest.mark.parametrize("shape", [(1,), (3,), (3, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("way", ["dense", "packed", "masked", "kvcache"])
def test_slopes_of_other_heads_are_refused(device, way, shape):
    """Wrong slopes would be read past their end, or be those of other heads."""
    q, k, v = (t.to(device) for t in inputs())
    ends = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    sequences = 1 if way in ("dense", "kvcache") else 2
    if shape == (2, 1) and sequences == 1:
        shape = (2, 2)
    score_mod = alibi(torch.ones(shape, device=device))
    expected = re.escape(
        f"slopes of alibi has shape {shape}; accepted: (2,), of the query heads, or "
        f"({sequences}, 2), of each sequence and these"
    )
    with pytest.raises(ValueError, match=expected):
        if way == "dense":
            flash_attn_func(q, k, v, score_mod=score_mod)
        elif way == "kvcache":
            flash_attn_with_kvcache(q, k, v, score_mod=score_mod)
        else:
            mask = masks.prefix_lm(2, 8, device=device) if way == "masked" else None
            flash_attn_varlen_func(
                q[0], k[0], v[0], cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=5,
                max_seqlen_k=5, score_mod=score_mod, block_mask=mask,
            )  # fmt: skip


def test_keys_that_nobody_made(device):
    q, k, v = (t.to(device) for t in inputs())
    operator = torch.ops.fa4_hd256.forward
    with pytest.raises(ValueError, match="knows no score_mod 'nobody'; make the ScoreMod"):
        operator(*forward_arguments(q, k, v, score_mod="nobody"))
    slopes = torch.ones(2, device=device)
    with pytest.raises(ValueError, match="tensors of a score_mod are given without one"):
        operator(*forward_arguments(q, k, v, score_tensor_0=slopes))
    assert SCORE_MOD.functions_of("alibi").slope is None


def test_a_kernel_has_a_text():
    """Another process builds it from the text; it must know the key, as of ALiBi."""
    own = ProblemClass(torch.bfloat16, score_mod=FunctionClass("alibi", ("float32 1",)))
    spec = KernelSpec("forward", ForwardConfig(), own)
    assert kernel_named(name_of(spec)) == spec
    other = KernelSpec("forward", ForwardConfig(), replace(own, score_mod=FunctionClass("other")))
    with pytest.raises(ValueError, match="knows no score_mod 'other'"):
        trace_and_compile(other)


SCRIPT = """
import sys; sys.path.insert(0, sys.argv[1])
import torch
from fa4_hd256 import flash_attn_func
from fa4_hd256.run.compile import counters
from fa4_hd256.score_mods import ScoreMod
from functions import halved, doubled
torch.manual_seed(0)
q, k, v = (torch.randn(1, 4, 1, 256).bfloat16() for _ in range(3))
for function in (halved, doubled):
    flash_attn_func(q, k, v, score_mod=ScoreMod.of(function))
print(counters["compiled"], counters["disk"])
"""
FUNCTIONS = """
def halved(score, place, tensors):
    return score * 0.5

def doubled(score, place, tensors):
    return score * 2.0
"""


@pytest.mark.simulator
@pytest.mark.sampled
def test_another_process_finds_the_kernels(tmp_path, monkeypatch):
    """Two functions take two kernels, which the next process has not to compile."""
    monkeypatch.setenv("FA4_HD256_CACHE_DIR", str(tmp_path / "kernels"))
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    assert found == [["2", "0"], ["0", "2"]]


@pytest.fixture
def restart(monkeypatch):
    """Forgets which functions keys name, as another process does."""

    def forget():
        monkeypatch.setattr(SCORE_MOD, "_known", dict(known))
        monkeypatch.setattr(meaning, "_noted", {})

    known = SCORE_MOD._known
    return forget


def key_on_disk(function):
    """Return the key of a kernel whose score_mod has a key of the user's own; None where it is not
    cached."""
    ScoreMod(function, None, "my own")
    own = ProblemClass(torch.bfloat16, score_mod=FunctionClass("my own"))
    spec = KernelSpec("forward", ForwardConfig(), own)
    return keys.cache_key(spec) if keys.lasts(spec) else None


def test_an_edited_function_with_a_key_of_ones_own(restart):
    """A process that is started again does not take the kernel of the function as it was."""
    functions = (
        lambda: made(SOURCE), lambda: made(SOURCE.replace("2.0", "3.0")), lambda: plus(1.0),
        lambda: plus(2.0), lambda: plus([1.0]), lambda: plus([2.0]), lambda: Times(2.0),
        lambda: Times(3.0), lambda: Times(2.0).method, lambda: functools.partial(capped),
        lambda: functools.partial(capped, slope=1), lambda: plus(torch.ones(2)),
        lambda: plus(torch.zeros(2)),
    )  # fmt: skip
    found = []
    for make in functions * 2:
        restart()
        found.append(key_on_disk(make()))
    count = len(functions)
    assert found[:count] == found[count:] and None not in found
    assert len(set(found)) == count


def test_a_function_that_says_not_what_it_means_is_kept_in_the_process(restart, monkeypatch):
    stored = []
    monkeypatch.setattr(compile, "disk_cache", lambda: stored)
    monkeypatch.setattr(compile, "_compile_entry", lambda key, spec: "compiled again")
    for function in (importing, lambda score, place, tensors: score * eval("BOUND")):
        restart()
        assert key_on_disk(function) is None
        own = ProblemClass(torch.bfloat16, score_mod=FunctionClass("my own"))
        spec = KernelSpec("forward", ForwardConfig(), own)
        assert compile._jit_entry("a key", spec) == ("compiled again", "compiled")


def test_a_function_that_changes_keeps_no_key(restart):
    limit = 1.0

    def bounded(score, place, tensors):
        return score * limit

    restart()
    first = key_on_disk(bounded)
    assert key_on_disk(bounded) == first
    limit = 2.0
    with pytest.raises(ValueError, match="'my own' of a score_mod names other functions already"):
        ScoreMod(bounded, None, "my own")
    own = ProblemClass(torch.bfloat16, score_mod=FunctionClass("my own"))
    with pytest.raises(ValueError, match="'my own' has changed since its ScoreMod was made"):
        keys.cache_key(KernelSpec("forward", ForwardConfig(), own))


def test_a_mask_mod_with_the_key_of_a_score_mod_by_name(restart, monkeypatch):
    """A change of the mask_mod is noticed: `ALIBI` is a name of score_mods alone."""
    limit = 3

    def near(batch, head, query, key, tensors):
        return query - key < limit

    restart()
    monkeypatch.setattr(MASK_MOD, "_known", {})
    MaskMod(near, ALIBI)
    limit = 4
    with pytest.raises(ValueError, match="'alibi' of a mask_mod names other functions already"):
        MaskMod(near, ALIBI)


def test_what_tracing_leaves_in_a_function():
    """CuTe DSL puts other code in the place of a function's own, and marks it."""
    traced, fresh = made(SOURCE), made(SOURCE)
    first = ScoreMod.of(traced)
    own = ScoreMod(traced, None, "traced")
    traced._original_code, traced._preprocessed = traced.__code__, True
    traced.__code__ = made(SOURCE.replace("2.0", "3.0")).__code__
    assert ScoreMod.of(traced).key == ScoreMod.of(fresh).key == first.key
    for mod in (first, own):
        replace(mod, tensors=(torch.ones(1),))
    problem_class = ProblemClass(torch.bfloat16, score_mod=FunctionClass(first.key))
    assert keys.lasts(KernelSpec("forward", ForwardConfig(), problem_class))


def both(first, second):
    return lambda *given: first(*given) + second(*given)


def times(factor):
    """A wrapper that is no decorator of CuTe DSL's."""

    def of(function):
        @functools.wraps(function)
        def scaled(*given):
            return function(*given) * factor

        return scaled

    return of


def test_functions_of_one_factory_are_not_taken_for_each_other():
    """Nested functions share the code of the outer one."""
    one, two, three = (plus(float(n)) for n in range(3))
    nested = [both(both(one, two), three), both(both(one, three), three), both(one, two)]
    assert len({key_of(function) for function in nested}) == 3
    assert key_of(both(both(one, two), three)) == key_of(nested[0])


def test_what_a_wrapper_does_counts():
    found = [times(2.0)(capped), times(3.0)(capped), capped, times(2.0)(times(3.0)(capped))]
    assert len({key_of(function) for function in found}) == len(found)


class Times:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, score, place, tensors):
        return score * self.factor

    def method(self, score, place, tensors):
        return score * self.factor


def by_keyword(number):
    def f(score, place, tensors, *, factor=number):
        return score * factor

    return f


def that_calls(name):
    """A function that calls one which calls one which calls one of these back."""

    def last(*given):
        return target(*given)

    def middle(*given):
        return last(*given)

    def first(*given):
        return middle(*given)

    target = {"first": first, "middle": middle, "last": last}[name]
    return first


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Times(2.0), Times(3.0)),
        (Times(2.0).method, Times(3.0).method),
        (functools.partial(capped), functools.partial(plus(1.0))),
        (by_keyword(2.0), by_keyword(3.0)),
        (plus(0.0), plus(-0.0)),
        (that_calls("first"), that_calls("middle")),
    ],
    ids=["instances", "methods", "partial", "keywords", "zeros", "recursion"],
)
def test_what_a_key_of_ones_own_tells_apart(one, other, request):
    key = f"apart {request.node.callspec.id}"
    for _ in range(2):
        ScoreMod(one, None, key)
    with pytest.raises(ValueError, match=f"'{key}' of a score_mod names other functions"):
        ScoreMod(other, None, key)


def test_what_is_made_again_is_the_same():
    """A function made again has the same key, and one of one's own."""
    for number in (float("nan"), (1.0, (2.0, 3.0))):
        mods = [ScoreMod.of(times((number,))(capped)) for _ in range(2)]
        assert mods[0].key == mods[1].key
        for mod in mods:
            replace(mod, key=f"again {number}")


def test_keys_that_others_are_made_by():
    """Keys of functions in a part, or in a row, are no one's own."""
    for key in ("in a part: alibi", "in a row: alibi"):
        with pytest.raises(ValueError, match=f"'{key}' of a score_mod names other functions"):
            ScoreMod(capped, None, key)
        ScoreMod(*SCORE_MOD.functions_of(key), key)
    with pytest.raises(ValueError, match="knows no score_mod 'nobody'"):
        ScoreMod(capped, None, "in a row: nobody")


def test_tensors_of_functions_made_of_others():
    """A kernel has room for one more than a user's, however often they are made."""
    key, ones = "in a row: in a part: alibi", (torch.ones(1),)
    functions = SCORE_MOD.functions_of(key)
    assert len(ScoreMod(*functions, key, ones * 5).tensors) == len(SCORE_MOD.tensors)
    with pytest.raises(ValueError, match="a ScoreMod has 6 tensors; accepted: up to 5"):
        ScoreMod(*functions, key, ones * 6)


def test_a_function_that_is_not_whole_yet():
    def unfinished(score, place, tensors):
        return score * later

    with pytest.raises(ValueError, match="reads 'later', which has no value yet"):
        ScoreMod.of(unfinished)
    later = 2.0
    ScoreMod.of(unfinished)


def test_what_changes_before_it_is_compiled(monkeypatch):
    """A kernel is never kept by the key of another; calls in a part and in a row are no others."""
    mod = ScoreMod.of(capped)
    for key in (mod.key, "in a row: " + mod.key, "in a part: in a row: " + mod.key):
        own = ProblemClass(torch.bfloat16, score_mod=FunctionClass(key))
        check_unchanged(own)
        with monkeypatch.context() as changed:
            changed.setitem(globals(), "BOUND", 3.0)
            says = f"{mod.key}' has changed since ScoreMod.of was called.*ScoreMod.of again"
            with pytest.raises(ValueError, match=says):
                trace_and_compile(KernelSpec("forward", ForwardConfig(), own))
            check_unchanged(replace(own, score_mod=FunctionClass(ScoreMod.of(capped).key)))
    limit = 3

    def near(batch, head, query, key, tensors):
        return query - key < limit

    masked = ProblemClass(torch.bfloat16, mask_mod=FunctionClass(MaskMod.of(near).key))
    check_unchanged(masked)
    limit = 4
    with pytest.raises(ValueError, match="has changed since MaskMod.of was called"):
        check_unchanged(masked)
    # Nothing is known of a key of one's own.
    check_unchanged(replace(masked, mask_mod=FunctionClass(MaskMod(near, "near").key)))
