"""Kernels that a model needs are counted up whole: after `warm_up` none of its calls compiles
anything."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gpus import gpu

from fa4_hd256 import (
    AttentionModel,
    Mask,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    masks,
    warm,
    warm_up,
)
from fa4_hd256.architectures import ARCHITECTURES
from fa4_hd256.call import division
from fa4_hd256.call.backward_problem import BackwardProblem
from fa4_hd256.call.chunks import divide
from fa4_hd256.call.forward_problem import Problem, choose_tiles, is_masked, usable_tiles
from fa4_hd256.call.operator_arguments import (
    BackwardTensors,
    BackwardValues,
    ForwardTensors,
    ForwardValues,
)
from fa4_hd256.call.options import UNBOUNDED
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.kernels.problem_class import FunctionClass
from fa4_hd256.kernels.small.append_rows import AppendClass, RotaryClass
from fa4_hd256.models import MODELS
from fa4_hd256.run import backward, compile, forward, launch
from fa4_hd256.run.ahead import processes
from fa4_hd256.run.ahead.build import TARGETS
from fa4_hd256.run.ahead.needs import FORMS, Needs, _options, specs_of
from fa4_hd256.run.ahead.processes import in_own_order
from fa4_hd256.run.catalogue import backward_specs, combine_spec, forward_spec, tail_spec
from fa4_hd256.run.kernel_names import kernel_named, name_of
from fa4_hd256.run.tail import class_of, sides_of

pytestmark = pytest.mark.simulator

TRAINING = Needs(
    ("training", "decode"),
    tuple(FORMS),
    (torch.bfloat16, torch.float16),
    batch_invariant=True,
    page_sizes=(16, 128),
    scheduler_metadata=True,
)
#: SMs of a GPU, and of slices of one.
GPUS = {"sm_100a": ((74, "b200"), (9, "b200")), "sm_90a": ((66, "h200"), (7, "h200"))}


def calls(model, architecture, generator, count):
    """Random calls of a model as they are described: (problem, GPU)."""
    known, group = kernels_of(architecture).forward_tiles(), model.heads_q // model.heads_kv
    for _ in range(count):
        pick = generator.choice
        batch, queries = pick((1, 2, 7, 64, 300)), pick((1, 2, 3, 16, 17, 200, 777, 4096, 70000))
        keys = queries if pick((True, False)) else pick((1, 80, 1000, 2049, 9999, 131072, 1 << 20))
        ragged, mask = FORMS[pick(list(FORMS))], pick(model.masks)
        usable = known
        if is_masked(ragged):
            mask, usable = Mask(False), usable_tiles(known, architecture, ragged)
        tiles, packed = choose_tiles(usable, group, queries, ragged)
        is_packed = "cu_seqlens_q" in ragged
        shape = (1, batch * queries) if is_packed else (batch, queries)
        size = pick((16, 128)) if "page_table" in ragged else None
        yield Problem(
            (*shape, model.heads_q, 256), queries, keys, batch, pick(TRAINING.dtypes),
            torch.device("cpu"), _options(model, mask, pick((True, False))), model.sink, ragged,
            architecture, tiles, packed, page_size=size,
        ), gpu(*pick(GPUS[architecture.name]))  # fmt: skip


@pytest.mark.parametrize("name", ["gemma-3-4b", "embeddinggemma", "qwen3.8-27b", "glm-5-tp8"])
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.sampled("sm_100a-gemma-3-4b", "sm_90a-qwen3.8-27b")
def test_no_call_of_a_model_takes_another_kernel(name, arch):
    """Random calls, planned by what plans real ones: with KV splits, combined, in chunks of the
    backward."""
    target, model = TARGETS[arch], MODELS[name]
    known = set(specs_of(model, TRAINING, target.architecture, target.gpu))
    found, pick = set(), random.Random(7)
    for problem, where in calls(model, target.architecture, random.Random(name), 120):
        chosen = division.divided(problem, pick.choice((0, 0, 64, division.FIXED_SPLITS)), where)
        found.add(forward_spec(chosen, where))
        if chosen.num_splits > 1:
            found.add(combine_spec(chosen))
        if "q" in sides_of(problem.ragged):
            found.add(tail_spec(class_of(problem, "q", lse=True), problem))
        if "seqused_k" in problem.ragged and "seqused_q" not in problem.ragged:
            listed = replace(problem, ragged=(*problem.ragged, "scheduler_metadata"))
            listed = division.divided(listed, division.BY_RULE, where)
            found.add(forward_spec(listed, where))
            found |= {combine_spec(listed)} if listed.lists_splits else set()
        if problem.page_size is not None:
            continue
        k_shape = (problem.q_shape[0], problem.max_seqlen_k, model.heads_kv, 256)
        config = problem.kernels.config("backward")()
        memory: tuple[int, ...] = (0, config.ds_bytes)
        if is_masked(problem.ragged):
            problem = replace(problem, ragged=("mask_blocks", "mask_key_bits"))
            memory = (1 << 60,)
        asked = [BackwardProblem(problem, k_shape, False, 1)]
        if problem.ragged == FORMS["packed"]:
            counted = replace(problem, ragged=(*problem.ragged, "ds_begins"))
            asked.append(BackwardProblem(counted, k_shape, False, 1, listed_tiles=64))
        for ds_bytes, one in itertools.product(memory, asked):
            divided = divide(one, ds_bytes, where).problem
            found |= set(backward_specs(divided, config).values())
            sides = sides_of(divided.forward.ragged)
            if sides:
                # One gradient by itself takes no stored dS.
                some = ("qkk",) if divided.keeps_ds else ("q", "kk", "qkk")
                wanted = [side for side in pick.choice(some) if side in sides]
                own = class_of(divided.forward, wanted or sides)
                found.add(tail_spec(own, divided.forward))
    assert len({spec.kind for spec in found}) >= 6
    assert found <= known


def problem_of(arch, model, mask, queries, ragged, usable=tuple, use_clc=False, **others):
    """Return the problem of queries of one sequence. usable: from the forward's tiles to those of
    such calls; others: further fields, changed options among them."""
    architecture = TARGETS[arch].architecture
    tiles = usable(kernels_of(architecture).forward_tiles())
    chosen = choose_tiles(tiles, model.heads_q // model.heads_kv, queries, ragged)
    options = replace(_options(model, mask, use_clc), **others.pop("options", {}))
    return Problem(
        (1, queries, model.heads_q, 256), queries, 1000, 1, torch.bfloat16, torch.device("cpu"),
        options, model.sink, ragged, architecture, *chosen, **others,
    )  # fmt: skip


def known_with(needs, without, found, arch, model):
    """Return all kernels that are known with the needs, after a check: those found are among them,
    and are the needs' own; none goes."""
    target = TARGETS[arch]
    known, others = (
        set(specs_of(model, n, target.architecture, target.gpu)) for n in (needs, without)
    )
    assert found and found <= known and others <= known and not found & others
    return known


@pytest.mark.parametrize("arch", sorted(GPUS))
def test_trees(arch):
    """Trees of any number of nodes, more than decoding has queries among them, come beside all
    others."""
    model, ragged = MODELS["gemma-3-4b"], (*FORMS["packed-paged"], "tree_words")
    needs = Needs(("decode",), ("packed-paged",), page_sizes=(16,), tree_mask=True)
    found = set()
    for queries, mask, parts in itertools.product((1, 7, 16, 32, 64), model.masks, (1, 5)):
        problem = problem_of(
            arch, model, mask, queries, ragged, num_splits=parts, page_size=16,
            wide_tree=queries > 32,
        )  # fmt: skip
        found.add(forward_spec(problem, gpu(*GPUS[arch][0])))
    known_with(needs, replace(needs, tree_mask=False), found, arch, model)


@pytest.mark.parametrize("arch", sorted(GPUS))
def test_greatest_logits(arch):
    """Few and many queries, with one KV split and several, under both schedulers; none of e4m3."""
    model, e4m3 = MODELS["gemma-3-4b"], torch.float8_e4m3fn
    needs = Needs(("training",), ("packed",), kv_dtypes=(None, e4m3), max_logits=True)
    found = set()
    for queries, mask, parts, use_clc in itertools.product(
        (1, 200), model.masks, (1, 5), (False, True)
    ):
        problem = problem_of(
            arch, model, mask, queries, FORMS["packed"],
            lambda tiles: usable_tiles(tiles, TARGETS[arch].architecture, max_logits=True), use_clc,
            options={"max_logits": True}, num_splits=parts,
        )  # fmt: skip
        found.add(forward_spec(problem, gpu(*GPUS[arch][0])))
    known_with(needs, replace(needs, max_logits=False), found, arch, model)
    with pytest.raises(ValueError, match="max_logits with kv_dtypes"):
        replace(needs, uses=("decode",), kv_dtypes=(e4m3,))


@pytest.mark.parametrize("arch", sorted(GPUS))
def test_new_rows(arch):
    """Caches with rotary embedding and without are counted in all that calls can come to."""
    target, model = TARGETS[arch], MODELS["gemma-3-4b"]
    e4m3, bfloat16 = torch.float8_e4m3fn, torch.bfloat16
    needs = Needs(
        ("decode",), ("dense", "cache", "packed-paged"), page_sizes=(16,), kv_dtypes=(None, e4m3),
        rotary=True,
    )  # fmt: skip
    plain, known = (
        {spec for spec in specs_of(model, n, target.architecture, target.gpu)
         if spec.kind == "append_rows"}
        for n in (replace(needs, rotary=False), needs)
    )  # fmt: skip
    caches = [("", None), *((scales, e4m3) for scales in ("", "sequences", "pages"))]
    found, turned = set(), set()
    for paged, packed, cache in itertools.product((False, True), (False, True), caches):
        scales, kv_dtype = cache
        if scales == "pages" and not paged:
            continue
        own = AppendClass(bfloat16, packed, paged, kv_dtype, scales)
        found |= {own, AppendClass(e4m3, packed, paged)}
        # All its layers are causal; queries are packed in the form that has pages.
        for table, interleaved in itertools.product((bfloat16, torch.float32), (False, True)):
            turned.add(replace(own, rotary=RotaryClass(table, interleaved, True, packed=paged)))
    assert {spec.problem_class for spec in plain} == found
    assert {spec.problem_class for spec in known} == found | turned
    assert all(kernel_named(name_of(spec)) == spec for spec in known)


@pytest.mark.parametrize("arch", sorted(GPUS))
def test_places_in_a_cache(arch):
    """Entries and left padding, each by itself and both; rows of a page table are no kernel's."""
    model = MODELS["gemma-3-4b"]
    needs = Needs(
        ("decode",), ("dense", "padded", "cache", "packed-paged"), page_sizes=(16,),
        cache_batch_idx=True, cache_leftpad=True, tree_mask=True, scheduler_metadata=True,
    )  # fmt: skip
    places = ("cache_batch_idx",), ("cache_leftpad",), ("cache_batch_idx", "cache_leftpad")
    more = (), ("scheduler_metadata",), ("tree_words",)
    found = set()
    for form, size, own in [*(("cache", None, p) for p in places), ("packed-paged", 16, places[1])]:
        for beside, queries, mask in itertools.product(more, (1, 16), model.masks):
            problem = problem_of(
                arch, model, mask, queries, (*FORMS[form], *beside, *own), page_size=size,
                num_splits=1 + bool(beside),
            )  # fmt: skip
            found.add(forward_spec(problem, gpu(*GPUS[arch][0])))
    without = replace(needs, cache_batch_idx=False, cache_leftpad=False)
    known = known_with(needs, without, found, arch, model)
    assert all(kernel_named(name_of(spec)) == spec for spec in found)
    appends = {spec.problem_class.paged for spec in known if spec.kind == "append_rows"}
    assert appends == {False, True}
    for name in ("cache_batch_idx", "cache_leftpad"):
        with pytest.raises(
            ValueError, match=f"with {name}; accepted: one of those with seqused_k"
        ) as refused:
            Needs(forms=("dense", "padded"), **{name: True})
        assert "give them that of all rows, cache_seqlens=k_cache.shape[1]" in str(refused.value)


@pytest.mark.parametrize("arch", sorted(GPUS))
def test_alibi(arch):
    """Slopes of heads, and of sequences and heads; trees and training among the calls, e4m3 not."""
    model, e4m3 = AttentionModel("biased", 8, 2, (Mask(True),)), torch.float8_e4m3fn
    needs = Needs(
        ("decode", "training"), ("dense",), kv_dtypes=(None, e4m3), tree_mask=True, alibi=True
    )
    found = set()
    for slopes, ragged in itertools.product(("float32 1", "float32 2"), ((), ("tree_words",))):
        options = {"score_mod": FunctionClass("alibi", (slopes,))}
        problem = problem_of(arch, model, model.masks[0], 3, ragged, options=options)
        found.add(forward_spec(problem, gpu(*GPUS[arch][0])))
        if not ragged:
            backward = BackwardProblem(problem, (1, 1000, 2, 256), False, 1)
            config = problem.kernels.config("backward")()
            found |= set(backward_specs(backward, config).values())
    changed = {spec for spec in found if "alibi" in str(spec.problem_class)}
    target = TARGETS[arch]
    known = known_with(needs, replace(needs, alibi=False), changed, arch, model)
    assert len(changed) > 4 and found <= known
    with pytest.raises(ValueError, match="softcap is 5.0 with alibi"):
        specs_of(replace(model, softcap=5.0), needs, target.architecture, target.gpu)
    with pytest.raises(ValueError, match="alibi with kv_dtypes"):
        replace(needs, kv_dtypes=(e4m3,))


@pytest.mark.parametrize("arch", sorted(GPUS))
def test_training_beside_what_has_no_gradients(arch):
    """All that training alone takes, beside pages, scheduler metadata and keys in e4m3."""
    target, model = TARGETS[arch], AttentionModel("of this test", 8, 2, (Mask(True),))

    def known(uses, forms, **others):
        needs = Needs(uses, forms, **others)
        return set(specs_of(model, needs, target.architecture, target.gpu))

    uses, trained = ("training", "decode"), known(("training",), ("packed",))
    paged = known(uses, ("packed", "paged"), page_sizes=(16,), scheduler_metadata=True)
    assert trained | known(("decode",), ("paged",), page_sizes=(16,)) <= paged
    assert trained <= known(uses, ("packed",), kv_dtypes=(torch.float8_e4m3fn,))
    # Calls refuse scheduler metadata beside seqused_q.
    listed = known(uses, ("padded", "cache"), scheduler_metadata=True)
    both = [
        str(spec.problem_class)
        for spec in listed
        if "scheduler_metadata" in str(spec.problem_class)
    ]
    assert both and not any("seqused_q" in text for text in both)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_every_combining_kernel(architecture):
    """Kernels for any number of splits and rows are known."""
    rule = kernels_of(architecture).combine
    needs = Needs(("decode",), ("dense",))
    rows, *_ = next(iter(architecture.gpus.values()))
    specs = specs_of(MODELS["glm-5-tp8"], needs, architecture, rows)
    known = {spec.config for spec in specs if spec.kind == "forward_combine"}
    found = {rule.of(parts, rows) for parts in range(2, 65) for rows in range(1, 5000)}
    assert found == known


@pytest.mark.parametrize("arch", sorted(TARGETS))
@pytest.mark.sampled
def test_kernels_have_texts(arch):
    """Each comes back from its text as it was."""
    target = TARGETS[arch]
    for model in ("gemma-2-9b", "embeddinggemma"):
        specs = specs_of(MODELS[model], TRAINING, target.architecture, target.gpu)
        assert len(specs) > 100
        assert all(kernel_named(name_of(spec)) == spec for spec in specs)


def test_needs_that_are_none():
    with pytest.raises(ValueError, match="use is 'inference'; accepted: decode, prefill, training"):
        Needs(uses=("inference",))
    with pytest.raises(ValueError, match="form is 'pages'; accepted: dense, packed"):
        Needs(forms=("pages",))
    for given in ({"forms": ("paged",)}, {"page_sizes": (16,)}):
        with pytest.raises(ValueError, match="accepted: a form with pages, and the sizes of these"):
            Needs(**given)
    with pytest.raises(ValueError, match="page size is 0; accepted: an int of 1 or more"):
        Needs(forms=("paged",), page_sizes=(0,))
    for form in ("dense", "padded"):
        message = "accepted: one of those with seqused_k.*without seqused_q: cache, packed-cache"
        with pytest.raises(ValueError, match=message):
            Needs(forms=(form,), scheduler_metadata=True)
        with pytest.raises(ValueError, match=message):
            Needs(forms=(form,), rotary=True)
    with pytest.raises(ValueError, match="with training.*accepted: a form without pages among"):
        Needs(("training", "decode"), ("paged",), page_sizes=(16,))
    with pytest.raises(ValueError, match="nothing is requested"):
        Needs(dtypes=())
    with pytest.raises(ValueError, match="model is 'gemma'; accepted: gemma-1-2b"):
        warm_up("gemma")
    with pytest.raises(TypeError, match="model must be a name or an AttentionModel, got int"):
        warm_up(3)
    with pytest.raises(TypeError, match="needs must be fa4_hd256.Needs, got str"):
        warm_up("gemma-3-4b", "decode")
    with pytest.raises(ValueError, match="uses is 'decode'; accepted: a tuple or a list"):
        Needs(uses="decode")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtypes": [torch.float32]}, "dtype is torch.float32; accepted: torch.bfloat16, torch.fl"),
        ({"dtypes": ["bfloat16"]}, "dtype is 'bfloat16'; accepted"),
        ({"dtypes": [None]}, "dtype is None; accepted"),
        ({"kv_dtypes": [torch.int8]}, "kv_dtype is torch.int8; accepted: None, torch.float8"),
        ({"uses": [["decode"]]}, r"use is \['decode'\]; accepted: decode"),
        ({"forms": [{}]}, r"form is \{\}; accepted: dense"),
        ({"use_clc": 1}, "use_clc is 1; accepted: True, False or None"),
        ({"use_clc": "static"}, "use_clc is 'static'; accepted"),
        ({"batch_invariant": 1}, "batch_invariant is 1; accepted: True or False"),
        ({"scheduler_metadata": None}, "scheduler_metadata is None; accepted: True or False"),
        ({"tree_mask": "yes"}, "tree_mask is 'yes'; accepted: True or False"),
        ({"alibi": 0}, "alibi is 0; accepted: True or False"),
        ({"max_logits": 0}, "max_logits is 0; accepted: True or False"),
        ({"rotary": 1}, "rotary is 1; accepted: True or False"),
        *(
            ({"forms": ["paged"], "page_sizes": [size]}, f"page size is {size!r}; accepted: an i")
            for size in (16.0, "16", None, True, 0, [16])
        ),
    ],
)
def test_values_of_needs_that_are_none(given, message):
    with pytest.raises(ValueError, match=message.replace("[16]", r"\[16\]")):
        Needs(**given)


@pytest.fixture
def no_compiler(monkeypatch):
    """Refuse to compile what is accepted by mistake."""

    def refuse(spec):
        raise AssertionError(f"accepted: {spec}")

    monkeypatch.setattr(warm, "compile_kernel", refuse)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"heads_q": 0}, "heads_q is 0; accepted: an int, 1 or more"),
        ({"heads_kv": 2.0}, "heads_kv is 2.0; accepted"),
        ({"heads_q": True}, "heads_q is True; accepted"),
        ({"masks": ()}, r"masks is \(\); accepted: a tuple of one Mask or more"),
        ({"masks": [Mask(True)]}, "masks is .*; accepted: a tuple"),
        ({"masks": ("causal",)}, "masks is .*; accepted: a tuple"),
        ({"sink": None}, "sink is None; accepted: True or False"),
        ({"masks": (Mask(True, (5,)),)}, "window_size is .*; accepted: a pair"),
        ({"softcap": -1.0}, "softcap is -1.0; accepted: 0"),
        ({"softcap": float("nan")}, "softcap is nan; accepted: 0"),
        ({"softmax_scale": float("inf")}, "softmax_scale is inf; accepted"),
    ],
)
@pytest.mark.usefixtures("no_compiler")
def test_models_that_are_none(given, message):
    with pytest.raises(ValueError, match=message):
        warm_up(AttentionModel(**{"name": "", "heads_q": 4, "heads_kv": 2, **given}))


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", "meta", 1.5])
@pytest.mark.usefixtures("no_compiler")
def test_devices_that_are_none(device):
    with pytest.raises(ValueError, match=f"device.*{device}.*accepted"):
        warm_up("gemma-3-4b", device=device)


@pytest.mark.parametrize(
    ("ranks", "heads"),
    [
        (1, (16, 2)),
        (2, (8, 1)),
        (4, (4, 1)),
        (8, (2, 1)),
        (3, None),
        (0, None),
        (2.0, None),
        (None, None),
        (True, None),
    ],
)
def test_heads_of_ranks(ranks, heads):
    model = MODELS["qwen3-next-80b-a3b"]
    if heads is None:
        with pytest.raises(ValueError, match=f"{ranks} ranks for 16 query and 2 key/value heads"):
            model.sharded(ranks)
    else:
        found = model.sharded(ranks)
        assert (found.heads_q, found.heads_kv) == heads


def test_ranks_begin_with_kernels_of_their_own(monkeypatch):
    specs = list(range(10))
    assert in_own_order(specs) == specs
    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 4
    )
    monkeypatch.setattr(processes.torch, "distributed", group)
    orders = []
    for rank in range(4):
        group.get_rank = lambda rank=rank: rank
        orders.append(in_own_order(specs))
    assert [order[0] for order in orders] == [0, 2, 5, 7]
    assert all(sorted(order) == specs for order in orders)


#: Layers of small models, and the uses for which they are warm.
WARM = {
    "prefill": ((Mask(True),), ("prefill",)),
    "decode": ((Mask(True),), ("decode",)),
    "window": ((Mask(True, (63, None)),), ("prefill", "decode")),
    "both": ((Mask(True), Mask(True, (63, None))), ("prefill", "decode")),
}


@pytest.fixture
def warm_model(monkeypatch, layers):
    """A small model that is warm; from then on nothing compiles."""
    shape, uses = WARM[layers]
    model = AttentionModel("of this test", 2, 1, shape)
    compile.forget()
    loaded = []
    monkeypatch.setattr(warm, "prepare", lambda compiled, device: loaded.append(compiled))
    done = warm_up(model, Needs(uses, ["dense", "packed"], use_clc=False))
    assert done.kernels == len(loaded) == len({one.key for one in loaded}) > 4
    assert done.compiled <= done.kernels and done.seconds > 0

    def refuse(spec):
        raise AssertionError(f"a call needs {spec}")

    monkeypatch.setattr(compile, "_obtain", refuse)
    yield model
    compile.forget()


@pytest.mark.parametrize("layers", WARM)
@pytest.mark.sampled
def test_a_warm_model_compiles_nothing(warm_model, layers):
    """Prefill and decode, with a window and without, with one KV split and several."""
    lengths = {"decode": (1, 200), "prefill": (70, 70)}
    for mask, use, parts in itertools.product(warm_model.masks, WARM[layers][1], (1, 3)):
        queries, keys = lengths[use]
        q = torch.randn(1, queries, 2, 256).bfloat16()
        k = torch.randn(1, keys, 1, 256).bfloat16()
        flash_attn_func(q, k, k, causal=mask.causal, window_size=mask.window_size, num_splits=parts)
    longest = 40 if "prefill" in WARM[layers][1] else 1
    offsets = torch.tensor([0, 1, 2] if longest == 1 else [0, 30, 70], dtype=torch.int32)
    tokens = int(offsets[-1])
    q, k = torch.randn(tokens, 2, 256).bfloat16(), torch.randn(tokens, 1, 256).bfloat16()
    window = warm_model.masks[0].window_size
    bounds = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), longest)
    bounds |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    flash_attn_varlen_func(q, k, k, **bounds, causal=True, window_size=window)
    with pytest.raises(AssertionError, match="a call needs KernelSpec.*float16"):
        half = q.half(), k.half(), k.half()
        flash_attn_varlen_func(*half, **bounds, causal=True, window_size=window)


@pytest.mark.sampled
def test_padded_calls_and_those_with_a_block_mask(monkeypatch, architecture):
    """Kernels that real calls take, gradients among them, are counted up."""
    target, model = TARGETS[architecture], AttentionModel("of this test", 2, 1, (Mask(True),))
    needs = Needs(("prefill", "decode", "training"), ("padded", "block-mask"))
    known = specs_of(model, needs, target.architecture, target.gpu)
    compile.forget()
    asked, obtain = [], compile._obtain
    monkeypatch.setattr(compile, "_obtain", lambda spec: asked.append(spec) or obtain(spec))
    q, k = (torch.randn(2, 150, n, 256).bfloat16().requires_grad_() for n in (2, 1))
    used = torch.tensor([150, 30], dtype=torch.int32)
    flash_attn_varlen_func(q, k, k, seqused_q=used, seqused_k=used, causal=True).sum().backward()
    flash_attn_func(q, k, k, block_mask=masks.prefix_lm(20, 150)).sum().backward()
    compile.forget()
    compiled_in = str([spec.problem_class for spec in asked])
    assert "seqused_q" in compiled_in and "mask_key_bits" in compiled_in
    assert set(asked) <= set(known)


@pytest.mark.sampled
def test_calls_of_whole_caches_take_kernels_of_lengths(monkeypatch, architecture):
    """The advice of `Needs`: the length of all rows means what a call without lengths does."""
    target, model = TARGETS[architecture], AttentionModel("of this test", 2, 1, (Mask(True),))
    needs = Needs(("decode",), ("cache",), cache_batch_idx=True, cache_leftpad=True)
    known = specs_of(model, needs, target.architecture, target.gpu)
    q, k = torch.randn(2, 1, 2, 256).bfloat16(), torch.randn(3, 64, 1, 256).bfloat16()
    places = {
        "cache_batch_idx": torch.tensor([2, 0], dtype=torch.int32),
        "cache_leftpad": torch.tensor([5, 0], dtype=torch.int32),
    }
    whole = flash_attn_with_kvcache(q, k, k, causal=True, **places)
    compile.forget()
    asked, obtain = [], compile._obtain
    monkeypatch.setattr(compile, "_obtain", lambda spec: asked.append(spec) or obtain(spec))
    given = flash_attn_with_kvcache(q, k, k, cache_seqlens=k.shape[1], causal=True, **places)
    compile.forget()
    assert asked and set(asked) <= set(known) and torch.equal(whole, given)


def test_what_launches_need_is_made_before(monkeypatch):
    """The kernel is loaded on a GPU, and the scheduler has its counters."""
    done = []
    stream = SimpleNamespace(cuda_stream=5)
    monkeypatch.setattr(torch.cuda, "device", lambda device: launch.contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(launch, "tile_counter", lambda device, stream: done.append(stream))
    launch.prepare(SimpleNamespace(load=lambda: done.append("loaded")), torch.device("cuda", 0))
    assert done == ["loaded", 5]
    launch.prepare(None, torch.device("cpu"))


@pytest.mark.parametrize("arch", sorted(GPUS))
@pytest.mark.parametrize("packed", [False, True])
def test_plans_of_calls_name_kernels_that_are_known(arch, packed, monkeypatch):
    """Planned, not run: few and many queries, with one KV split and several, and the gradients of
    each tensor alone and of all."""
    monkeypatch.setenv("FA4_HD256_ARCH", arch)
    target = TARGETS[arch]
    model = AttentionModel("of this test", 8, 2, (Mask(True),))
    needs = Needs(("decode", "training"), ("dense", "packed"))
    known, found = set(specs_of(model, needs, target.architecture, target.gpu)), set()
    values = ForwardValues(1.0, UNBOUNDED, 0, backward_use_clc=True)
    shape = (1, 40) if packed else (2, 20)
    q, out, dout = (torch.zeros(*shape, 8, 256).bfloat16() for _ in range(3))
    k, v = (torch.zeros(*shape, 2, 256).bfloat16() for _ in "kv")
    lse, ragged = torch.zeros(shape[0], 8, shape[1]), dict[str, torch.Tensor]()
    if packed:
        names = "cu_seqlens_q", "cu_seqlens_k"
        ragged = {name: torch.tensor([0, 13, 40], dtype=torch.int32) for name in names}
        values = values._replace(max_seqlen_q=27, max_seqlen_k=27)
    for splits, use_clc in itertools.product((1, 3), (False, True)):
        own = values._replace(num_splits=splits, use_clc=use_clc)
        tensors = ForwardTensors(q, k, v, None, **ragged)
        found |= set(forward.plan_call((*tensors, None), own).specs)
    given = BackwardTensors(dout, None, q, k, v, out, lse, None, **ragged)
    for wanted in ((True, False), (False, True), (True, True)):
        asked = BackwardValues(values, (*wanted, False, False))
        found |= set(backward.plan_call(given, asked).specs)
    kinds = {spec.kind for spec in found}
    assert {"forward_combine", "backward_preprocess"} < kinds and len(kinds) > 5
    assert ("tail_rows" in kinds) == packed
    assert found <= known
    # No call has gradients of one tensor alone beside a dS by lengths that are known.
    tails = [spec.problem_class for spec in known if spec.kind == "tail_rows"]
    assert all(own.results == ("q", "k", "k") for own in tails if own.ds is not None)
