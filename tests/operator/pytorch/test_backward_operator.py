"""The backward as PyTorch sees it: autograd, torch.compile, opcheck, what is computed and when."""

from __future__ import annotations

import pytest
import torch
from backward_cases import accurate, gradients, inputs
from gpus import gpu
from operator_calls import backward_arguments, forward_arguments
from torch.utils._python_dispatch import TorchDispatchMode

from fa4_hd256 import BackwardConfig, flash_attn_func, flash_attn_varlen_func
from fa4_hd256.call.backward_problem import KeyWork, choose_head_parts
from fa4_hd256.gpus.family import architecture_of
from fa4_hd256.gpus.gpu import Gpu
from fa4_hd256.kernels.blackwell.architecture import RECOMPUTED
from fa4_hd256.kernels.blackwell.backward.config import ProductsPlan
from fa4_hd256.kernels.hopper.architecture import STORED
from fa4_hd256.run.plan import PlanBuilder

#: More rows than a decode tile has: the forward's kernels, which others compile.
LENGTHS = 40, 50


def small(device, **options):
    """Return q, k, v that require gradients."""
    tensors = inputs(LENGTHS, device=device, **options)
    return tuple(tensor.requires_grad_() for tensor in tensors)


def test_opcheck_of_the_backward(device):
    operator = torch.ops.fa4_hd256.backward.default
    q, k, v = inputs((70, 90), (2, 2), device=device)
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    of_rows = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    given = {"dout": torch.randn_like(out), "dlse": torch.randn_like(lse)}
    for wanted in ([True, True, False, False], [False, True, False, False]):
        call = backward_arguments(**of_rows, **given, window_right=0, wanted=wanted)
        torch.library.opcheck(operator, call)


def test_shapes_without_running():
    """The meta device can run nothing; shapes and dtypes still come out."""
    q, k, v = (
        torch.empty(2, s, h, 256, dtype=torch.float16, device="meta", requires_grad=True)
        for s, h in ((5, 6), (7, 2), (7, 2))
    )
    sink = torch.empty(6, device="meta", requires_grad=True)
    out, lse = torch.ops.fa4_hd256.forward(*forward_arguments(q, k, v, sink=sink))
    (out.sum() + lse.sum()).backward()
    for leaf in (q, k, v, sink):
        assert leaf.grad.shape == leaf.shape and leaf.grad.dtype == leaf.dtype


@pytest.fixture
def kernels(monkeypatch):
    """Kinds of the backward's kernels, in the order in which they ran."""
    seen = []
    original = PlanBuilder.launch

    def spy(builder, spec, arguments):
        if spec.kind.startswith("backward"):
            seen.append(spec)
        original(builder, spec, arguments)

    monkeypatch.setattr(PlanBuilder, "launch", spy)
    return seen


#: Kernel for two query heads on one of keys, which are parts where tiles are so few.
SUM = "backward_sum"
#: Kernels that make only the gradient of q, and those of k and v, without a stored dS.
ALONE = {
    "sm_100a": {"q": ["backward_dq"], "kv": ["backward_dkdv"]},
    "sm_90a": {"q": ["backward_single_dq"], "kv": ["backward_single_dk", "backward_single_dv"]},
}


@pytest.mark.parametrize("asked", ["q", "k", "v", "qv", "s"])
@pytest.mark.sampled
def test_only_what_is_asked_for_is_computed(asked, kernels, device):
    alone = ALONE[architecture_of(torch.device(device)).name]
    kinds = {
        "q": alone["q"], "k": [*alone["kv"], SUM], "v": [*alone["kv"], SUM],
        "qv": ["backward_dv", "backward_products", SUM], "s": [],
    }[asked]  # fmt: skip
    named = dict(zip("qkvs", (*inputs(LENGTHS, device=device), torch.randn(2, device=device))))
    leaves = [named[name].requires_grad_() for name in asked]
    q, k, v, sink = named.values()
    out = flash_attn_func(q, k, v, learnable_sink=sink)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout)
    assert [spec.kind for spec in kernels] == ["backward_preprocess", *kinds]
    whole = gradients((q, k, v), dout, learnable_sink=sink)
    for name, gradient in zip(asked, found):
        if asked in "qkv":
            # From a dS that is not stored: other kernels, another order of sums.
            accurate({asked: gradient}, (q, k, v), dout, learnable_sink=sink)
        else:
            assert torch.equal(gradient, whole["sink" if name == "s" else name])


def test_the_gradient_of_lse_costs_nothing_where_it_is_not_used(kernels, device):
    """return_lse alone does not compile a kernel for it; using lse does."""
    q, k, v = small(device)
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    out.sum().backward(retain_graph=True)
    assert not kernels[0].problem_class.lse_gradient
    kernels.clear()
    (out.sum() + lse.sum()).backward()
    assert kernels[0].problem_class.lse_gradient


def test_nothing_runs_without_a_gradient(kernels, device):
    q, k, v = small(device)
    with torch.no_grad():
        assert not flash_attn_func(q, k, v).requires_grad
    unused = flash_attn_func(q, k, v)
    (q.sum() + 0 * unused.detach().sum()).backward()
    assert kernels == []


@pytest.mark.architecture("sm_100a")
@pytest.mark.sampled
def test_configuration(kernels, device):
    """Every kernel gets its part of it; the number of stages changes no sum."""
    config = BackwardConfig(products=ProductsPlan(stages=2))
    tensors = [t.detach() for t in small(device)]
    dout = torch.randn_like(tensors[0])
    found = gradients(tensors, dout, backward_config=config)
    preprocess, *own, last = kernels
    assert [spec.config for spec in own] == [
        config.of_kernel(kind) for kind in ("backward_dv", "backward_products")
    ]
    assert (preprocess.kind, last.kind) == ("backward_preprocess", SUM)
    expected = gradients(tensors, dout)
    assert all(torch.equal(found[name], expected[name]) for name in "qkv")


def test_second_order_gradients_are_refused(device):
    """An error, not a zero."""
    q, k, v = small(device)
    out = flash_attn_func(q, k, v)
    (gradient,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second-order gradients; call backward"):
        gradient.sum().backward()


def test_a_result_changed_in_place_is_noticed(device):
    """out is saved for the backward, so PyTorch must refuse to use a changed one."""
    q, k, v = small(device)
    out = flash_attn_func(q, k, v)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_accumulate(device):
    """Two calls share k and v; .grad is the sum of both."""
    q, k, v = small(device)
    (flash_attn_func(q, k, v).sum() + flash_attn_func(q, k, v, causal=True).sum()).backward()
    ones = torch.ones_like(q)
    parts = [gradients((q, k, v), ones, causal=causal) for causal in (False, True)]
    for leaf, name in zip((q, k, v), "qkv"):
        assert torch.equal(leaf.grad, parts[0][name] + parts[1][name])


def test_a_checkpointed_layer(device):
    """Recomputed in the backward: the same bits."""
    from torch.utils.checkpoint import checkpoint

    tensors, found = inputs(LENGTHS, device=device), []
    dout = torch.randn_like(tensors[0])
    for run in (flash_attn_func, lambda *t: checkpoint(flash_attn_func, *t, use_reentrant=False)):
        leaves = [t.detach().requires_grad_() for t in tensors]
        found.append(torch.autograd.grad(run(*leaves), leaves, dout))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class NoSynchronisation(TorchDispatchMode):
    """Refuses what makes the host wait for a CUDA device to read or to count."""

    REFUSED = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "unique")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.REFUSED, f"{name} would synchronise"
        return function(*args, **(kwargs or {}))


def refuse_reading(monkeypatch):
    """Refuse methods that hand contents to Python inside an operator, where no dispatch mode
    looks."""

    def refuse(tensor, *_):
        raise AssertionError("reading a tensor's contents would synchronise")

    for name in ("item", "tolist", "cpu", "nonzero", "equal", "unique",
                 "__bool__", "__int__", "__float__", "__index__"):  # fmt: skip
        monkeypatch.setattr(torch.Tensor, name, refuse)


@pytest.mark.sampled
def test_no_host_synchronisation(device, monkeypatch):
    """Nothing of the operator's own reads a tensor; checks of contents are for the CPU alone."""
    from fa4_hd256.call import checks

    monkeypatch.setattr(checks, "check_contents", lambda *_: None)
    q, k, v = small(device)
    used = torch.tensor([7], dtype=torch.int32, device=device)
    sink = torch.randn(2, device=device, requires_grad=True)
    dlse = torch.randn(1, 2, LENGTHS[0], device=device)
    refuse_reading(monkeypatch)
    with NoSynchronisation():
        out, lse = flash_attn_varlen_func(
            q, k, v, seqused_q=used, seqused_k=used, causal=True, learnable_sink=sink,
            return_lse=True,
        )  # fmt: skip
        torch.autograd.backward((out, lse), (torch.ones_like(out), dlse))
    assert all(leaf.grad is not None for leaf in (q, k, v, sink))


def test_a_check_of_contents_would_be_noticed(monkeypatch):
    """The test above can fail: the check of offsets that the CPU alone gets does read them."""
    q, k, v = (t[0].detach() for t in small("cpu"))
    offsets = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([0, 20], dtype=torch.int32)
    refuse_reading(monkeypatch)
    with pytest.raises(AssertionError, match="would synchronise"):
        flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1], max_seqlen_q=9,
            max_seqlen_k=20,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dout": torch.zeros(1, 4, 2, 256)}, TypeError, "dout has dtype torch.float32"),
        ({"dout": torch.zeros(1, 8, 2, 256).bfloat16()}, ValueError, r"dout has shape \(1, 8"),
        ({"dlse": torch.zeros(1, 4, 2)}, ValueError, r"dlse has shape .*accepted: \(1, 2, 4\)"),
        ({"lse": torch.zeros(1, 2, 4).double()}, TypeError, "lse has dtype torch.float64"),
    ],
)
def test_arguments_that_are_not_accepted(changes, error, message):
    """The operator itself refuses; autograd never gives it any."""
    q, k, v = inputs((4, 20))
    call = {"dout": q, "q": q, "k": k, "v": v, "out": q, "lse": torch.zeros(1, 2, 4), **changes}
    with pytest.raises(error, match=message):
        torch.ops.fa4_hd256.backward(*backward_arguments(**call))


@pytest.mark.architecture("sm_100a")
@pytest.mark.parametrize(
    ("tiles", "units", "group", "mean", "parts"),
    [
        (74, 16, 16, 1.0, 1),  # a tile for each CTA pair
        (64, 16, 16, 1.0, 8),  # 7 rounds of 2 heads, not one of 16
        (148, 16, 16, 1.0, 1),  # two full rounds
        (80, 16, 16, 1.0, 8),  # 9 rounds of 2 heads, not 2 of 16
        (16, 16, 16, 1.0, 4),  # one round; five parts would be of 4, 4, 4, 4 and no head
        (148, 16, 16, 0.5, 8),  # a long tile that starts last would be waited for
        (148, 2, 16, 0.5, 2),  # the same with little work, for which parts are dear
        (4096, 1, 16, 0.5, 1),
        (1, 1, 6, 1.0, 6),  # never more parts than heads
        (1, 1, 1, 0.5, 1),
        (0, 1, 4, 1.0, 1),  # no key at all
    ],
)
def test_parts_of_a_group(tiles, units, group, mean, parts):
    """The chosen parts end soonest on 74 CTA pairs, and none is without a head."""
    assert choose_head_parts(KeyWork(tiles, units, mean), group, gpu(), RECOMPUTED) == parts
    largest = -(-group // parts)
    assert (parts - 1) * largest < group <= parts * largest


#: Best of 1, 2, 4, 8 and 16 parts on an H200 (lab/notes.md), with a second best 1 % behind or more:
#: (heads, KV heads, batch, tokens of a sequence, whether causal) -> parts.
MEASURED_PARTS = [
    (32, 2, 1, 2048, True, 8),
    (32, 2, 1, 8192, True, 8),
    (32, 2, 16, 1024, True, 4),
    (32, 2, 2, 8192, True, 8),
    (32, 2, 16, 1024, False, 1),
    (16, 2, 1, 2048, True, 8),
    (16, 2, 8, 2048, True, 4),
    (16, 2, 4, 4096, True, 4),
    (16, 1, 1, 1024, True, 16),
    (16, 1, 4, 4096, True, 8),
    (8, 1, 8, 2048, True, 4),
    (64, 8, 1, 1024, True, 4),
    (64, 8, 16, 1024, True, 1),
]


@pytest.mark.parametrize(
    ("heads", "heads_kv", "batch", "seqlen", "causal", "parts"), MEASURED_PARTS
)
def test_measured_parts_of_a_group(heads, heads_kv, batch, seqlen, causal, parts):
    h200 = Gpu((9, 0), sms=132, pairs=66, l2_bytes=60 << 20, hbm_bytes_per_second=4.8e12)
    blocks = seqlen // STORED.keys
    mean = (blocks + 1) / (2 * blocks) if causal else 1.0
    pairs = heads_kv * batch
    work = KeyWork(pairs * blocks, seqlen // STORED.queries, mean, pairs, seqlen)
    assert choose_head_parts(work, heads // heads_kv, h200, STORED) == parts


def test_results_agree_with_the_reference(device):
    """The small shape that the tests here use is right to begin with."""
    tensors = inputs(LENGTHS, device=device)
    dout = torch.randn_like(tensors[0])
    accurate(gradients(tensors, dout), tensors, dout)
