"""Kernels of calls in mxfp8, and of their gradients, are made ahead of time by `warm_up` and
`build`."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
import torch
from mxfp8_gradient_cases import inputs
from paged_cases import int32, offsets
from planned_kernels import planned_kernels

from fa4_hd256 import (
    AttentionModel,
    Mask,
    Needs,
    flash_attn_func,
    flash_attn_varlen_func,
    masks,
    warm_up,
)
from fa4_hd256.__main__ import main
from fa4_hd256.architectures import ARCHITECTURES
from fa4_hd256.kernels.kernel_set import kernels_of
from fa4_hd256.quantize import quantize_mxfp8, quantize_mxfp8_training
from fa4_hd256.run.ahead.build import TARGETS
from fa4_hd256.run.ahead.needs import specs_of
from fa4_hd256.run.kernel_names import kernel_named, name_of

pytestmark = pytest.mark.simulator

#: Where kernels in mxfp8 are, and where not.
OFFERED = [a.name for a in ARCHITECTURES if kernels_of(a).mxfp8_backward is not None]
ABSENT = [a.name for a in ARCHITECTURES if a.name not in OFFERED]
MODEL = AttentionModel("of this test", 4, 2, (Mask(True), Mask(False), Mask(True, (100, 0))))
FORMS = ("dense", "packed", "padded", "cache", "packed-cache", "block-mask")
NEEDS = Needs(
    ("decode", "prefill", "training"), FORMS, (torch.bfloat16, torch.float16),
    batch_invariant=True, scheduler_metadata=True, out_gate=True, mxfp8=True,
)  # fmt: skip


@functools.cache
def known(architecture, needs=NEEDS, model=MODEL):
    target = TARGETS[architecture]
    return set(specs_of(model, needs, target.architecture, target.gpu))


@functools.cache
def operands(is_packed_q, is_packed_k, queries):
    """Return (offsets of either side, tensors of `quantize_mxfp8` by name) of random rows."""
    begins = offsets((queries, 70)), offsets((500, 200))
    sides = tuple(b if packed else None for b, packed in zip(begins, (is_packed_q, is_packed_k)))
    shapes = [
        (side[-1], heads, 256) if side is not None else (2, rows, heads, 256)
        for side, rows, heads in (
            (sides[0], queries, 4), (sides[1], 700, 2), (sides[1], 700, 2),
        )
    ]  # fmt: skip
    return sides, quantize_mxfp8(*map(torch.randn, shapes), *sides)._asdict()


@functools.cache
def trained_operands(is_packed, dtype):
    """Return (offsets, tensors with gradients, those of `quantize_mxfp8_training` by name)."""
    begins = (offsets((300, 70)),) * 2 if is_packed else (None, None)
    tensors = inputs((370, 370), (4, 2), None if is_packed else 2, dtype)
    return begins, tensors, quantize_mxfp8_training(*tensors, *begins)._asdict()


def masked(mask):
    return {"causal": mask.causal, "window_size": mask.window_size}


@pytest.mark.parametrize("where", OFFERED)
def test_no_forward_takes_another_kernel(where, monkeypatch):
    """Forms, masks, few and many queries, KV splits, gates, both dtypes of the result."""
    monkeypatch.setenv("FA4_HD256_ARCH", where)
    pick = random.Random(3)
    with planned_kernels(monkeypatch) as found:
        for form, mask, queries in itertools.product(FORMS, MODEL.masks, (1, 300)):
            sides, given = operands("packed" in form, form == "packed", queries)
            out = torch.empty(given["q"].shape, dtype=pick.choice(NEEDS.dtypes))
            given = given | {"out": out, "use_clc": pick.choice((False, True))}
            if pick.choice((False, True)):
                given["out_gate"] = torch.zeros_like(out)
            if form == "block-mask":
                seen = masks.prefix_lm(1, queries, 700)
                flash_attn_func(**given, block_mask=seen)
                continue
            given |= masked(mask) | pick.choice(({"num_splits": 3}, {"batch_invariant": True}, {}))
            if form in ("padded", "cache", "packed-cache"):
                given["seqused_k"] = int32([500, 3])
            if form == "padded":
                given["seqused_q"] = int32([queries, 1])
            for name, side, rows in (("q", sides[0], queries), ("k", sides[1], 500)):
                if side is not None:
                    given |= {f"cu_seqlens_{name}": side, f"max_seqlen_{name}": max(rows, 70)}
            flash_attn_varlen_func(**given)
    assert {"forward_mxfp8", "forward_combine"} <= {spec.kind for spec in found}
    assert found <= known(where), found - known(where)


@pytest.mark.parametrize("where", OFFERED)
def test_no_backward_takes_another_kernel(where, monkeypatch):
    """Dense and packed, both dtypes, of LSE and not, both schedulers; few heads, whose groups are
    divided."""
    monkeypatch.setenv("FA4_HD256_ARCH", where)
    with planned_kernels(monkeypatch) as found:
        for is_packed, mask, dtype, of_lse, use_clc in itertools.product(
            (False, True), MODEL.masks, NEEDS.dtypes, (False, True), (False, True)
        ):
            begins, tensors, given = trained_operands(is_packed, dtype)
            given = given | masked(mask) | {"use_clc": use_clc, "return_lse": True}
            if is_packed:
                given |= {"cu_seqlens_q": begins[0], "cu_seqlens_k": begins[1]}
                out, lse = flash_attn_varlen_func(**given, max_seqlen_q=300)
            else:
                out, lse = flash_attn_func(**given)
            results = (out, lse) if of_lse else (out,)
            torch.autograd.grad(results, tensors, [torch.zeros_like(t) for t in results])
    assert {"backward_dv_mxfp8", "backward_products_mxfp8"} <= {spec.kind for spec in found}
    assert found <= known(where), found - known(where)


@pytest.mark.parametrize("where", OFFERED)
def test_they_come_beside_all_others_and_have_texts(where):
    own, others = known(where), known(where, Needs(NEEDS.uses, FORMS, NEEDS.dtypes, out_gate=True))
    more = {spec for spec in own - others if "mxfp8" in spec.kind}
    assert len(more) > 50
    assert all(kernel_named(name_of(spec)) == spec for spec in more)
    forward = known(where, Needs(("prefill",), ("dense",), mxfp8=True))
    assert not any("backward" in spec.kind for spec in forward)
    # A gate, softcap and a sink are the forward's alone.
    gated = AttentionModel("gated", 4, 2, softcap=20.0, sink=True)
    forward = known(where, Needs(("prefill",), ("dense",), mxfp8=True, out_gate=True), gated)
    assert any("mxfp8" in spec.kind and spec.problem_class.softcap for spec in forward)


@pytest.mark.parametrize("where", ABSENT)
def test_architectures_without_kernels_say_so(where, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FA4_HD256_ARCH", where)
    message = f"in mxfp8, with scales of blocks, which {where}.* not yet offered there"
    with pytest.raises(NotImplementedError, match=message):
        warm_up(MODEL, NEEDS, device="cpu")
    arguments = ["build", "--heads", "4/2", "--arch", where, "--out", str(tmp_path), "--mxfp8"]
    assert main(arguments) == 2
    assert f"in mxfp8, with scales of blocks, which {where}" in capsys.readouterr().err


def test_needs_that_are_none():
    with pytest.raises(ValueError, match="with mxfp8, which pages are not offered with; accepted"):
        Needs(forms=("paged",), page_sizes=(16,), mxfp8=True)
    with pytest.raises(ValueError, match="mxfp8 is 1; accepted: True or False"):
        Needs(mxfp8=1)
    needs = Needs(("training",), mxfp8=True)
    for changed in ({"softcap": 20.0}, {"sink": True}):
        model = AttentionModel("of this test", 4, 2, **changed)
        with pytest.raises(ValueError, match="with mxfp8 and training; accepted: neither"):
            known(OFFERED[0], needs, model)
