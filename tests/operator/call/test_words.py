"""Errors tell what was given in words: no object's insides, no rows of numbers."""

from __future__ import annotations

import re

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
    use_prebuilt,
    warm_up,
)
from fa4_hd256.models import MODELS
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
    "config", "backward_config", "block_mask", "score_mod", "batch_invariant",
)  # fmt: skip


def message(function, *arguments, **options):
    """Return the error's text; empty where the call is accepted."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return str(error)
    return ""


def calls():
    q, k = torch.zeros(1, 4, 2, 256).bfloat16(), torch.zeros(1, 4, 1, 256).bfloat16()
    for option in OPTIONS:
        for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
            yield option, lambda v, f=function, o=option: f(q, k, k, **{o: v})
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


@pytest.mark.parametrize("given", GIVEN)
def test_errors_show_no_insides(given):
    value, refused = GIVEN[given], 0
    for option, call in calls():
        if isinstance(value, ForwardConfig) and option == "config":
            continue  # accepted, and would run
        if isinstance(value, BackwardConfig) and option == "backward_config":
            continue
        told = message(call, value)
        refused += bool(told)
        assert not INSIDES.search(ADVICE.sub("", told)), f"{option}: {told}"
    assert refused > 30


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
