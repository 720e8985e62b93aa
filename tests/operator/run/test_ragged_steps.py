"""Kernels of ragged training batches: what later steps launch is known at the first one."""

from __future__ import annotations

import random

import pytest
import torch
from operator_calls import backward_arguments, forward_arguments

from fa4_hd256 import flash_attn_varlen_func
from fa4_hd256.call import operator_arguments
from fa4_hd256.call.operator_arguments import ForwardTensors
from fa4_hd256.call.options import UNBOUNDED
from fa4_hd256.models import CAUSAL, AttentionModel, local
from fa4_hd256.run import backward, compile, execute, forward
from fa4_hd256.run.ahead.build import TARGETS
from fa4_hd256.run.ahead.needs import Needs, specs_of
from fa4_hd256.run.compile import MissingKernelError, counters

#: Tokens of a step, one of these, and the mean of its documents.
TOTALS, MEAN_TOKENS = (2048, 4000, 4096, 8192, 16000), 600


def documents(steps):
    """Yield the tokens of the documents of each step, exponentially distributed."""
    draw = random.Random(1)
    for _ in range(steps):
        total, lengths = draw.choice(TOTALS), []
        while left := total - sum(lengths):
            lengths.append(min(left, max(1, int(draw.expovariate(1 / MEAN_TOKENS)))))
        yield lengths


def plans_of(lengths, heads, wanted, window_left):
    """Return the plans of a step: forward and backward of one layer."""
    total = sum(lengths)
    q, k = (torch.empty(1, total, count, 256, dtype=torch.bfloat16) for count in heads)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    ragged = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    values = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths), "window_right": 0}
    values |= {"window_left": window_left, "num_splits": 0}
    given = forward_arguments(q, k, k, **ragged, **values)
    count = len(ForwardTensors._fields)
    first = forward.plan_call((*given[:count], None), forward.ForwardValues(*given[count:]))
    del values["num_splits"]
    given = backward_arguments(
        dout=q, q=q, k=k, v=k, out=q, lse=torch.empty(1, heads[0], total),
        wanted=[*wanted, False, False], **ragged, **values,
    )  # fmt: skip
    tensors, values = operator_arguments.backward_arguments(given)
    return first, backward.plan_call(tensors, values)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("heads", [(16, 8), (16, 2), (8, 8)], ids=str)
@pytest.mark.parametrize("wanted", [[True, True], [True, False]], ids=["all", "q alone"])
@pytest.mark.sampled("all-(16, 2)-*", "q alone-(16, 8)-*", "all-(8, 8)-sm_90a")
def test_a_step_of_other_lengths_needs_no_other_kernel(heads, wanted, arch, monkeypatch):
    """A hundred steps, all causal and in a window: no kernel that the first did not name."""
    monkeypatch.setenv("FA4_HD256_ARCH", arch)
    known = set()
    for step, lengths in enumerate(documents(100)):
        for window_left in (UNBOUNDED, 1023):
            for plan in plans_of(lengths, heads, wanted, window_left):
                if step == 0:
                    known |= {*plan.specs, *plan.other_lengths}
                assert set(plan.specs) <= known, (step, lengths, set(plan.specs) - known)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("heads", [(16, 8), (16, 2), (8, 8)], ids=str)
@pytest.mark.sampled("(16, 8)-sm_90a", "(16, 2)-sm_100a")
def test_prebuilt_kernels_of_training_serve_every_step(heads, arch, monkeypatch):
    """A hundred steps, full and with LoRA: all take kernels that `build --use training` has."""
    monkeypatch.setenv("FA4_HD256_ARCH", arch)
    model = AttentionModel("of the steps", *heads, (CAUSAL, local(1024)))
    target = TARGETS[arch]
    needs = Needs(uses=("training",), forms=("packed",))
    built = set(specs_of(model, needs, target.architecture, target.gpu))
    taken = set()
    for lengths in documents(100):
        for window_left in (UNBOUNDED, 1023):
            for wanted in ([True, True], [True, False], [False, True]):
                for plan in plans_of(lengths, heads, wanted, window_left):
                    taken |= set(plan.specs)
    assert taken <= built, taken - built


def test_kernels_of_other_lengths_that_are_there_are_loaded(monkeypatch):
    """Load what a prebuilt directory has; a missing one is no error before a call takes it."""

    def compiled(spec):
        if spec == "missing":
            raise MissingKernelError("missing", "build it", None)
        return spec

    loaded = []
    monkeypatch.setattr(compile, "described", str)
    monkeypatch.setattr(execute, "compile_kernel", compiled)
    monkeypatch.setattr(execute.launch, "prepare", lambda kernel, device: loaded.append(kernel))
    execute.prepare_others(["dv", "missing", "sum"], torch.device("cpu"))
    assert loaded == ["dv", "sum"]


@pytest.mark.cuda
def test_a_step_of_other_lengths_makes_nothing_ready():
    """Kernels of other lengths are compiled with those of the first step."""
    readied = []
    for lengths in documents(30):
        before = sum(counters.values()) - counters["memory"]
        offsets = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        for window in ((None, None), (1023, 0)):
            q, k, v = (
                torch.randn(sum(lengths), heads, 256, device="cuda", dtype=torch.bfloat16)
                for heads in (16, 2, 2)
            )
            out = flash_attn_varlen_func(
                *(t.requires_grad_() for t in (q, k, v)), cu_seqlens_q=offsets,
                cu_seqlens_k=offsets, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths),
                causal=True, window_size=window,
            )  # fmt: skip
            out.backward(torch.randn_like(out))
        torch.cuda.synchronize()
        readied.append(sum(counters.values()) - counters["memory"] - before)
    assert readied[0] >= 10 and not any(readied[1:])
