"""The arguments of the torch operators by name, in their order: tensors first, then plain values.

An operator has no defaults, so that all of them always come; records of values have some, for those
who make one by themselves. What goes from one operator to another goes by name.
"""

from __future__ import annotations

import operator
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.functions.user_functions import FUNCTION_TENSORS
from ..kernels.limits import HEAD_DIM
from ..kernels.mask.block_mask import MASK_GRADIENTS
from ..kernels.nvfp4_format import BLOCK_SCALES
from ..kernels.problem_class import DESCALES, OUT_GATE
from ..kernels.rows.sequences import DS_BEGINS, SequenceTensors

#: Tensors that say where rows of sequences lie and which are seen: lengths, pages, scheduler
#: metadata, block masks, tree masks. In the order in which kernels take them.
RAGGED = SequenceTensors._fields
#: Lengths and offsets of sequences, the first of them, which calls with gradients may have, too.
LENGTHS = RAGGED[:4]
#: All tensors of a call beside q, k, v and the sink.
OTHERS = (OUT_GATE, *RAGGED, *DESCALES, *BLOCK_SCALES, *FUNCTION_TENSORS)


class ForwardTensors(NamedTuple):
    """Tensors of a forward, None where not given; their meanings: `flash_attn_func`,
    `SequenceTensors`. score_tensor_0 to 4, mask_tensor_0 to 4: what a score_mod and a mask_mod
    read. Users give packed sequences without a batch; the operator takes them with one of 1."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sink: torch.Tensor | None = None
    out_gate: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    scheduler_metadata: torch.Tensor | None = None
    mask_steps: torch.Tensor | None = None
    mask_bits: torch.Tensor | None = None
    mask_blocks: torch.Tensor | None = None
    mask_key_bits: torch.Tensor | None = None
    tree_words: torch.Tensor | None = None
    ds_begins: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    k_block_scale: torch.Tensor | None = None
    v_block_scale: torch.Tensor | None = None
    score_tensor_0: torch.Tensor | None = None
    score_tensor_1: torch.Tensor | None = None
    score_tensor_2: torch.Tensor | None = None
    score_tensor_3: torch.Tensor | None = None
    score_tensor_4: torch.Tensor | None = None
    mask_tensor_0: torch.Tensor | None = None
    mask_tensor_1: torch.Tensor | None = None
    mask_tensor_2: torch.Tensor | None = None
    mask_tensor_3: torch.Tensor | None = None
    mask_tensor_4: torch.Tensor | None = None

    def others(self) -> dict[str, Any]:
        return {name: t for name, t in zip(OTHERS, self[_FIRST_OTHER:]) if t is not None}

    def with_batches(self) -> ForwardTensors:
        """Return packed sequences with a batch of 1, keys in pages as they are. Raises ValueError
        for one of another rank."""
        changed = {}
        if self.cu_seqlens_q is not None:
            changed["q"] = with_batch("q", self.q)
            if self.out_gate is not None:
                changed[OUT_GATE] = self.out_gate.unsqueeze(0)
        if self.cu_seqlens_k is not None and self.page_table is None:
            changed |= {"k": with_batch("k", self.k), "v": with_batch("v", self.v)}
        return self._replace(**changed) if changed else self


class BackwardTensors(NamedTuple):
    """Tensors of a backward. dout: like out, of any strides; dlse: like lse, None for zero; out,
    lse: results of the forward; the others are those of the forward that gradients take."""

    dout: torch.Tensor
    dlse: torch.Tensor | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    sink: torch.Tensor | None = None
    out_gate: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    mask_blocks: torch.Tensor | None = None
    mask_key_bits: torch.Tensor | None = None
    ds_begins: torch.Tensor | None = None
    score_tensor_0: torch.Tensor | None = None
    score_tensor_1: torch.Tensor | None = None
    score_tensor_2: torch.Tensor | None = None
    score_tensor_3: torch.Tensor | None = None
    score_tensor_4: torch.Tensor | None = None
    mask_tensor_0: torch.Tensor | None = None
    mask_tensor_1: torch.Tensor | None = None
    mask_tensor_2: torch.Tensor | None = None
    mask_tensor_3: torch.Tensor | None = None
    mask_tensor_4: torch.Tensor | None = None

    @staticmethod
    def kept(
        tensors: Sequence[Any], out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Return what a forward saves for its backward: the fields behind dlse. tensors: begin with
        the fields of `ForwardTensors`."""
        return *tensors[:_DIFFERENTIABLE], out, lse, *_of_gradients(tensors)

    def with_batches(self) -> BackwardTensors:
        """Return packed sequences with a batch of 1."""
        changed = given_batches(self, ("dout", "out", "q", "k", "v"))
        if self.out_gate is not None and "q" in changed:
            changed[OUT_GATE] = self.out_gate.unsqueeze(0)
        return self._replace(**changed)

    def others(self) -> dict[str, torch.Tensor]:
        given = zip(BackwardTensors._fields, self)
        return {name: t for name, t in given if name in OTHERS and t is not None}


class ForwardValues(NamedTuple):
    """window_left, window_right: `options.UNBOUNDED` without a bound. config, backward_config: see
    `named_configs`; what is the backward's is used by autograd alone. score_mod, mask_mod: the key
    of one, None for none. listed_tiles: as of `BackwardProblem`."""

    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float = 0.0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    use_clc: bool = False
    config: str = ""
    backward_config: str = ""
    num_splits: int = 1
    backward_use_clc: bool = False
    score_mod: str | None = None
    mask_mod: str | None = None
    listed_tiles: int = 0

    @classmethod
    def beside(cls, known: Sequence[str]) -> tuple[str, ...]:
        """Return the names of fields that are not `known`."""
        return tuple(name for name in cls._fields if name not in known)

    def given(self, names: Sequence[str]) -> list[str]:
        """Return those of some fields' names whose values differ from the default."""
        return [name for name in names if getattr(self, name) != self._field_defaults[name]]


class BackwardValues(NamedTuple):
    """Values of a backward. forward: those of its forward. wanted: whether dq, whether dk and dv,
    whether dsink, whether the gradient of out_gate are requested."""

    forward: ForwardValues
    wanted: Sequence[bool]

    @property
    def options(self) -> ForwardValues:
        own = self.forward
        return own._replace(use_clc=own.backward_use_clc, config=own.backward_config)


class CacheTensors(NamedTuple):
    """Tensors of a call that writes new rows to a KV cache and attends to all; None where not
    given; out may be None in eager calls alone. Their meanings: `flash_attn_with_kvcache`.

    out, k_cache, v_cache: written to. lengths: (batch,) int32 rows in use before the call.
    page_table: that of the attention. new_page_table: that of the new rows, None for the same one;
    without page_table each entry of the cache counts as one page. Packed q and out have no batch.
    """

    out: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor
    sink: torch.Tensor | None = None
    out_gate: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    scheduler_metadata: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    tree_words: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    k_block_scale: torch.Tensor | None = None
    v_block_scale: torch.Tensor | None = None
    score_tensor_0: torch.Tensor | None = None
    score_tensor_1: torch.Tensor | None = None
    score_tensor_2: torch.Tensor | None = None
    score_tensor_3: torch.Tensor | None = None
    score_tensor_4: torch.Tensor | None = None
    cu_seqlens_k_new: torch.Tensor | None = None
    new_page_table: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    rotary_seqlens: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def capacity(self) -> int:
        """Return the rows that a sequence can have."""
        rows = self.k_cache.shape[1]
        return rows if self.page_table is None else rows * self.page_table.shape[1]

    def attention(self, lengths: torch.Tensor) -> ForwardTensors:
        """Return the tensors of the attention. lengths: rows in use with the new ones."""
        shared = {name: getattr(self, name) for name in _OF_ATTENTION}
        return ForwardTensors(k=self.k_cache, v=self.v_cache, seqused_k=lengths, **shared)


class CacheValues(NamedTuple):
    """Values of such a call: those of its attention, and rotary_interleaved."""

    attention: ForwardValues
    rotary_interleaved: bool


def flat(values: Any) -> tuple[Any, ...]:
    first = values[0]
    return (*first, *values[1:]) if isinstance(first, ForwardValues) else tuple(values)


def values_of(kind: Any, given: Sequence[Any]) -> Any:
    count = len(ForwardValues._fields)
    own = ForwardValues(*given[:count])
    return own if kind is ForwardValues else kind(own, given[count])


def forward_arguments(given: Sequence[Any]) -> tuple[ForwardTensors, ForwardValues]:
    count = len(ForwardTensors._fields)
    return ForwardTensors(*given[:count]), values_of(ForwardValues, given[count:])


def backward_arguments(given: Sequence[Any]) -> tuple[BackwardTensors, BackwardValues]:
    count = len(BackwardTensors._fields)
    return BackwardTensors(*given[:count]), values_of(BackwardValues, given[count:])


def cache_arguments(given: Sequence[Any]) -> tuple[CacheTensors, CacheValues]:
    count = len(CacheTensors._fields)
    return CacheTensors(*given[:count]), values_of(CacheValues, given[count:])


#: Tensors of the attention that a call with new rows has under the same names.
_OF_ATTENTION = tuple(
    name for name in CacheTensors._fields if name in ("q", *ForwardTensors._fields[3:])
)

#: q, k, v; and behind the sink.
_DIFFERENTIABLE, _FIRST_OTHER = 3, 4
_of_gradients = operator.itemgetter(
    *[ForwardTensors._fields.index(name) for name in BackwardTensors._fields[7:]]
)
assert ForwardTensors._fields[_FIRST_OTHER:] == OTHERS
assert BackwardTensors._fields[7:] == (
    "sink",
    OUT_GATE,
    *LENGTHS,
    *MASK_GRADIENTS,
    DS_BEGINS,
    *FUNCTION_TENSORS,
)

#: What an operator's schema calls a type.
_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    float: "float",
    int: "SymInt",
    int | None: "SymInt?",
    bool: "bool",
    str: "str",
    str | None: "str?",
    Sequence[bool]: "bool[]",
}


def schema_of(*kinds: type, written: Sequence[str] = ()) -> str:
    """The arguments of an operator, as its schema has them: the fields of these, in order, of
    records among them theirs.  written: those that it writes to."""
    marks = {name: f"Tensor({letter}!)" for name, letter in zip(written, "abcde", strict=False)}
    return ", ".join(
        schema_of(hint)
        if hint is ForwardValues
        else f"{_TYPES[hint].replace('Tensor', marks.get(name, 'Tensor'))} {name}"
        for kind in kinds
        for name, hint in typing.get_type_hints(kind).items()
    )


def given_batches(tensors: Any, of_rows: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return those of a backward's tensors, by name, that lack the batch of packed sequences, with
    one of 1. of_rows: names of those with four dimensions; lse and dlse have three."""
    dimensions = dict.fromkeys(of_rows, 4) | {"lse": 3, "dlse": 3}
    given = {name: getattr(tensors, name) for name in dimensions}
    return {
        name: tensor.unsqueeze(0)
        for name, tensor in given.items()
        if tensor is not None and tensor.ndim < dimensions[name]
    }


def with_batch(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Packed sequences, (total, heads, 256), with a batch of 1."""
    if tensor.ndim != 3:
        raise ValueError(wrong_rank(name, tensor, 3, f"(total, heads, {HEAD_DIM})"))
    return tensor.unsqueeze(0)


def wrong_rank(name: str, tensor: torch.Tensor, accepted: int, form: str) -> str:
    return (
        f"{name} has {tensor.ndim} dimensions, shape {tuple(tensor.shape)}; accepted: {accepted}, "
        f"{form}"
    )
