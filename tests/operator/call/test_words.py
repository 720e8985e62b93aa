"""Errors tell what was given in words: no object's insides, no rows of numbers."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch

from fa4_hd256 import (
    AttentionModel,
    BackwardConfig,
    ForwardConfig,
    Mask,
    Needs,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_backward_metadata,
    get_scheduler_metadata,
    use_prebuilt,
    warm_up,
)
from fa4_hd256.architectures import ARCHITECTURES
from fa4_hd256.compat import flash_attn_2, flash_attn_3, flash_attn_4
from fa4_hd256.integrations.context_parallel.spans import spans_by_rank
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.mask_mods import MaskMod
from fa4_hd256.models import MODELS
from fa4_hd256.run.ahead.build import build
from fa4_hd256.schedulers import clc_requested
from fa4_hd256.score_mods import ScoreMod, alibi
from fa4_hd256.softmax_emu import Ex2Pattern
from fa4_hd256.words import shown

#: Dataclasses, enumerations, tensors and other objects as Python writes them.
INSIDES = re.compile(
    r"\w+\(\w+=|dtype=torch\.|<\w+\.\w+: |object at 0x|<class|tensor\(\[|array\(\["
)
#: Advice on how to give an argument.
ADVICE = re.compile(r"\w+_config=\w+\(")

GIVEN = {
    "mask": Mask(True), "config": ForwardConfig(), "backward config": BackwardConfig(),
    "model": MODELS["gemma-3-4b"], "needs": Needs(), "tensor": torch.zeros(3, 700),
    "array": np.zeros((2, 3)), "class": Needs, "object": object(),
}  # fmt: skip
OPTIONS = (
    "softmax_scale", "causal", "window_size", "softcap", "num_splits", "learnable_sink", "out",
    "config", "backward_config", "block_mask", "score_mod", "batch_invariant", "use_clc",
    "mask_mod", "k_descale",
)  # fmt: skip

SCHEDULED = ("cache_seqlens", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv")


def message(function, *arguments, **options):
    """Return the error's text; empty where the call is accepted."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return str(error)
    return ""


def calls():
    q, k = torch.zeros(1, 40, 2, 256).bfloat16(), torch.zeros(1, 40, 1, 256).bfloat16()
    for option in OPTIONS:
        for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
            yield option, lambda v, f=function, o=option: f(q, k, k, **{"causal": True, o: v})
    for option in ("cache_seqlens", "page_table", "rotary_interleaved"):
        yield option, lambda v, o=option: flash_attn_with_kvcache(q, k, k, **{o: v})
    for option in ("cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "seqused_k"):
        yield option, lambda v, o=option: flash_attn_varlen_func(q, k, k, **{o: v})
    for option in ("uses", "forms", "dtypes", "page_sizes", "kv_dtypes"):
        yield option, lambda v, o=option: Needs(**{o: [v]})
        yield option, lambda v, o=option: Needs(**{o: v})
    for option in ("use_clc", "rotary"):
        yield option, lambda v, o=option: Needs(**{o: v})
    model = {"name": "own", "heads_q": 2, "heads_kv": 1, "masks": (Mask(True),)}
    for option in ("heads_q", "heads_kv", "masks", "sink"):
        yield option, lambda v, o=option: AttentionModel(**{**model, o: v})
    yield "directory", use_prebuilt
    yield "device", lambda v: warm_up("gemma-3-4b", device=v)
    yield "ranks", lambda v: warm_up("gemma-3-4b", tensor_parallel=v)
    yield "jobs", lambda v: build({}, "unused", v)
    yield "order", lambda v: spans_by_rank(v, 2, 4)
    yield "use_clc", clc_requested
    yield "slopes", alibi
    for kind in (ScoreMod, MaskMod):
        own = {"function": max, "key": "own"} | ({"slope": None} if kind is ScoreMod else {})
        for option in ("function", "key", "tensors"):
            yield option, lambda v, k=kind, o=option, own=own: k(**{**own, o: v})
    lengths = torch.ones(1, dtype=torch.int32)
    described = dict(zip(SCHEDULED, (lengths, 1, 1, 2, 1)))
    for option in (*SCHEDULED, "causal", "window_size", "kv_dtype"):
        yield option, lambda v, o=option: get_scheduler_metadata(**{**described, o: v})
    yield "cu_seqlens_q", lambda v: get_backward_metadata(v, v)
    for library in (flash_attn_2, flash_attn_3, flash_attn_4):
        for option in ("softmax_scale", "causal", "window_size", "softcap", "deterministic"):
            yield option, lambda v, f=library.flash_attn_func, o=option: f(q, k, k, **{o: v})


@pytest.mark.parametrize("given", GIVEN)
def test_errors_show_no_insides(given):
    value, refused, bad = GIVEN[given], 0, []
    for option, call in calls():
        if isinstance(value, ForwardConfig) and option == "config":
            continue  # accepted, and would run
        if isinstance(value, BackwardConfig) and option == "backward_config":
            continue
        told = message(call, value)
        refused += bool(told)
        if INSIDES.search(ADVICE.sub("", told)):
            bad.append(f"{option}: {told}")
    assert not bad and refused > 60


def configurations():
    """Every class of a configuration and of its parts, with a value that is accepted."""
    found = {Ex2Pattern: Ex2Pattern()}
    for architecture in ARCHITECTURES:
        kernels = kernels_of(architecture)
        kinds = *kernels.configs("forward"), *kernels.configs("backward")
        left = [kind() for kind in kinds]
        while left:
            one = left.pop()
            found[type(one)] = one
            parts = [getattr(one, field.name) for field in fields(one)]
            left += [part for part in parts if is_dataclass(part) and type(part) not in found]
    return found


CONFIGURATIONS = configurations()


def test_configurations_of_both_architectures_are_tried():
    names = Counter(kind.__name__ for kind in CONFIGURATIONS)
    assert names["ForwardConfig"] == names["BackwardConfig"] == names["ForwardWarpPlan"] == 2
    assert {"DecodeConfig", "E4m3Config", "E4m3WarpPlan", "SinglePlan", "DkdvPlan"} <= set(names)


@pytest.mark.parametrize("kind", CONFIGURATIONS, ids=lambda k: f"{k.__module__}.{k.__name__}")
def test_fields_of_configurations_say_what_they_accept(kind):
    """A value of another kind is refused by the field's name, before anything is derived."""
    base = CONFIGURATIONS[kind]
    wrong = {**GIVEN, "text": "3", "none": None, "list": [0, 1], "nan": math.nan, "half": 0.3}
    for field in fields(base):
        own = getattr(base, field.name)
        for name, value in wrong.items():
            if type(value) is type(own) or name == "half" and isinstance(own, float):
                continue
            if value is None and "None" in str(field.type):
                continue
            with pytest.raises((TypeError, ValueError)) as refused:
                replace(base, **{field.name: value})
            told = str(refused.value)
            assert told.startswith(field.name) and not INSIDES.search(told), f"{name}: {told}"
            assert "accepted" in told or "must be" in told, told
            assert shown(value) in told or type(value).__name__ in told, told


def test_parts_of_another_architecture_are_told_apart():
    blackwell, hopper = (kernels_of(a).config("forward") for a in ARCHITECTURES)
    with pytest.raises(TypeError) as refused:
        blackwell(warps=hopper().warps)
    assert str(refused.value) == (
        "warps is a fa4_hd256.kernels.hopper.forward.config.ForwardWarpPlan; accepted: "
        "a fa4_hd256.kernels.blackwell.forward.config.ForwardWarpPlan"
    )


def test_nothing_asked_for_names_what_is_empty():
    told = message(Needs, uses=())
    assert "uses empty; accepted: at least one" in told and not INSIDES.search(told)


@pytest.mark.parametrize(("value", "text"), [
    (1.5, "1.5"), ("x", "'x'"), (None, "None"), ((1, None), "(1, None)"), ([True], "[True]"),
    ((1,), "(1,)"), (torch.float16, "torch.float16"), (torch.device("cpu"), "cpu"),
    (torch.zeros(2, 3), "a Tensor of shape (2, 3) and torch.float32"), (Needs, "the class Needs"),
    (Mask(True), "a Mask"), (AttentionModel("own", 2, 1, (Mask(True),)), "an AttentionModel"),
    ("x" * 300, "'" + "x" * 199 + "..."), (list(range(9)), "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
])  # fmt: skip
def test_values_in_words(value, text):
    assert shown(value) == text
