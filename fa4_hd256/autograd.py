"""Gradients of the torch operator: the operator that computes them, and how autograd calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from . import environment
from .call import named_configs
from .call.backward_problem import BackwardCall
from .call.forward_problem import LENGTHS, OTHERS, RAGGED, Options, given_ragged
from .call.score_tensors import score_class_of
from .eager import OperatorCalls, is_intercepted
from .kernels.block_mask import MASK_GRADIENTS, MASK_STEPS
from .kernels.problem_class import DESCALES, KV_DTYPES
from .kernels.score_change import SCORE_TENSORS
from .run.backward import Wanted, run_backward

__all__ = [
    "backward", "call_backward", "check_differentiable", "gradients", "gradients_of", "save",
    "save_for_backward",
]  # fmt: skip

#: Arguments of `forward` that gradients flow to, by position: q, k, v, sink.
Q, K, V, SINK = 0, 1, 2, 7
#: Its arguments before those that have no gradients: page_table and what follows it.
NUM_PLAIN = 19
#: Of `RAGGED`, between the lengths and what gradients take of a block mask.
_BETWEEN = RAGGED.index(MASK_GRADIENTS[0]) - len(LENGTHS)
#: Places of the latter, among arguments from page_table on.
_MASK = slice(_BETWEEN, _BETWEEN + len(MASK_GRADIENTS))
#: And of what a score_mod reads, the last tensors.
_SCORES = slice(len(OTHERS) - len(LENGTHS) - len(SCORE_TENSORS), len(OTHERS) - len(LENGTHS))


@torch.library.custom_op("fa4_hd256::backward", mutates_args=())
def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    sink: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    use_clc: bool,
    config: str,
    wanted: Sequence[bool],
    mask_blocks: torch.Tensor | None = None,
    mask_key_bits: torch.Tensor | None = None,
    score_tensor_0: torch.Tensor | None = None,
    score_tensor_1: torch.Tensor | None = None,
    score_tensor_2: torch.Tensor | None = None,
    score_tensor_3: torch.Tensor | None = None,
    score_mod: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, dsink) of `forward`, whose results were out and lse.

    dout: like out, of any strides; dlse: like lse, None for zero. config: of the architecture's
    backward. wanted: whether dq, whether dk and dv, whether dsink are asked for; the others are
    empty. Bitwise the same for the same arguments. The other arguments are those of `forward`.
    """
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    masked = *[None] * _BETWEEN, mask_blocks, mask_key_bits
    scores = score_tensor_0, score_tensor_1, score_tensor_2, score_tensor_3
    ragged = given_ragged(*lengths, *masked, *[None] * (_SCORES.start - _MASK.stop), *scores)
    options = Options.of_operator(
        softmax_scale, window_left, window_right, softcap, use_clc,
        score_class_of(score_mod, ragged, q),
    )  # fmt: skip
    call = BackwardCall(q, k, v, out, lse, dout, dlse, sink, ragged)
    problem = call.describe(options, max_seqlen_q, max_seqlen_k)
    kind = problem.forward.kernels.config("backward")
    given = named_configs.decode(config, kind)
    if config == named_configs.DEFAULT and (ds_bytes := environment.ds_bytes()) is not None:
        given = replace(given, ds_bytes=ds_bytes)
    return run_backward(call, problem, Wanted(*wanted), given)


@backward.register_fake
def _(dout, dlse, q, k, v, out, lse, softmax_scale, window_left, window_right, softcap, sink,
      cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, use_clc, config,
      wanted, mask_blocks=None, mask_key_bits=None, score_tensor_0=None, score_tensor_1=None,
      score_tensor_2=None, score_tensor_3=None, score_mod=None):  # fmt: skip
    dq, dkdv, dsink = wanted
    return (
        q.new_empty(q.shape if dq else 0),
        k.new_empty(k.shape if dkdv else 0),
        v.new_empty(v.shape if dkdv else 0),
        q.new_empty(0) if sink is None else sink.new_empty(sink.shape if dsink else 0),
    )


def _refuse_second_order(context: Any, *gradients: Any) -> None:
    raise NotImplementedError(
        "fa4_hd256 offers no second-order gradients; call backward without create_graph=True"
    )


backward.register_autograd(_refuse_second_order)


#: Tensors of the operator, by their places: dout, q and out, k and v; lse and its gradient.
_ROWS_Q, _ROWS_K, _ROW_VALUES = (0, 2, 5), (3, 4), (1, 6)
#: Of q with its batch.
_RANK = 4
#: All but those of block masks and of a score_mod.
_TENSORS = 8 + len(LENGTHS)


def _operator(tensors: Sequence[torch.Tensor | None], scalars: tuple) -> tuple[torch.Tensor, ...]:
    """The operator; arguments as for `call_backward`."""
    given = list(tensors)
    for places, dimensions in (((*_ROWS_Q, *_ROWS_K), _RANK), (_ROW_VALUES, _RANK - 1)):
        for place in places:
            tensor = given[place]
            if tensor is not None and tensor.ndim < dimensions:
                given[place] = tensor.unsqueeze(0)
    wanted = list(scalars[-1])
    before, lists = given[7:_TENSORS], given[_TENSORS:]
    score_mod = scalars[-2]
    return backward(
        *given[:7], *scalars[:4], *before, *scalars[4:-2], wanted, *lists, score_mod
    )


#: Tensors behind those of all calls, which may be left out.
_LISTS = (*MASK_GRADIENTS, *SCORE_TENSORS)

backward_calls = OperatorCalls(
    "fa4_hd256::backward",
    _operator,
    ("dout", "dlse", "q", "k", "v", "out", "lse", "sink", *LENGTHS, *_LISTS),
)


def call_backward(
    tensors: Sequence[torch.Tensor | None], scalars: tuple
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv, dsink) as `backward` has them, those of packed sequences without a batch; what
    is not asked for may be None or anything.

    tensors: dout, dlse, q, k, v, out, lse, the sink, those of `LENGTHS`, of a block mask those of
    `MASK_GRADIENTS`, of a score_mod those of `SCORE_TENSORS`, which may be left out; packed
    sequences with or without a batch of 1. scalars: the other arguments of `backward`, in order but
    for the key of a score_mod, which comes before `wanted`; hashable.
    """
    tensors = (*tensors, *[None] * (_TENSORS + len(_LISTS) - len(tensors)))
    # With gradients of gradients asked for, the operator refuses them.
    found = None
    if not torch.is_grad_enabled() and not is_intercepted():
        facts = (*scalars, *[tensor is None for tensor in tensors])
        found = backward_calls.find(facts, tensors, lambda: scalars)
    results = _operator(tensors, scalars) if found is None else backward_calls.run(
        found[0], tensors, found[1]
    )
    packed = [tensor is not None and tensor.ndim < _RANK for tensor in tensors[2:5]]
    if not any(packed):
        return results
    *of_rows, dsink = results
    return *(
        made.squeeze(0) if is_packed and made is not None and made.ndim == _RANK else made
        for made, is_packed in zip(of_rows, packed, strict=True)
    ), dsink  # fmt: skip


def save_for_backward(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """setup_context of `forward`: what `gradients` needs, and no more."""
    others, lists = inputs[:NUM_PLAIN], inputs[NUM_PLAIN:]
    check_differentiable(inputs[K], lists)
    tensors = (*others[:3], *others[7:12], *lists[_MASK], *lists[_SCORES])
    save(ctx, tensors, (*others[3:7], *others[12:], lists[-1]), output)
    ctx.num_inputs = len(inputs)


def check_differentiable(k: torch.Tensor, lists: Sequence[torch.Tensor | None]) -> None:
    """Raise NotImplementedError for a call that has no gradients. lists: its arguments from
    page_table on."""
    page_table, part_list, mask_steps, _, mask_blocks, _, *others = lists
    of_forward = others[: 1 + len(DESCALES)]
    refused = page_table, part_list, *of_forward
    if k.dtype in KV_DTYPES or any(tensor is not None for tensor in refused):
        raise NotImplementedError(
            "k and v in float8, page_table, scheduler_metadata, tree_mask: no gradients flow "
            "through such calls; accepted: tensors that do not require gradients, or a call under "
            "torch.no_grad()"
        )
    if mask_steps is not None and mask_blocks is None:
        raise NotImplementedError(
            f"{MASK_STEPS} without {' and '.join(MASK_GRADIENTS)}, which gradients take; accepted: "
            "all of them, or tensors that do not require gradients"
        )


def save(
    ctx: Any, tensors: Sequence[torch.Tensor | None], scalars: tuple,
    output: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Keep what `gradients_of` needs. tensors: of `forward`: q, k, v, the sink, those of `LENGTHS`
    and of `MASK_GRADIENTS` and `SCORE_TENSORS`; scalars: its other arguments."""
    q, k, v, *others = tensors
    ctx.save_for_backward(q, k, v, *output, *others)
    *options, max_seqlen_q, max_seqlen_k, _, _, backward_config, _, use_clc, score_mod = scalars
    ctx.scalars = (*options, max_seqlen_q, max_seqlen_k, use_clc, backward_config, score_mod)
    # A result without a gradient, LSE mostly, has None then, and costs nothing.
    ctx.set_materialize_grads(False)


def gradients_of(
    ctx: Any, needed: Sequence[bool], dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of q, k, v and the sink, None for those not asked for. needed: which are."""
    wanted = (needed[0], needed[1] or needed[2], needed[3])
    if (dout is None and dlse is None) or not any(wanted):
        return (None,) * len(needed)
    tensors = ctx.saved_tensors
    if dout is None:
        out = tensors[3]
        dout = out.new_zeros(()).expand(out.shape)
    given = call_backward((dout, dlse, *tensors), (*ctx.scalars, wanted))
    return tuple(
        gradient if asked else None for gradient, asked in zip(given, needed, strict=True)
    )


def gradients(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the arguments of `forward`; None for those not asked for."""
    found: list[torch.Tensor | None] = [None] * ctx.num_inputs
    places = (Q, K, V, SINK)
    needed = [ctx.needs_input_grad[place] for place in places]
    for place, gradient in zip(places, gradients_of(ctx, needed, dout, dlse), strict=True):
        found[place] = gradient
    return tuple(found)
