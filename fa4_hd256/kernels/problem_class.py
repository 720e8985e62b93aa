"""Problem classes: the facts of a call that are compiled into its kernels; everything else is an
argument at run time, scalars (`CallScalars`) by value."""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import Float32, Int32

from .limits import PAGE_MULTIPLE
from .mask.block_mask import MASK_TABLES
from .mask.masking import MaskKind
from .rows.sequences import CACHE_LEFTPAD, PAGE_TABLE, TREE_WORDS, SequenceTensors

#: The accepted dtypes of q, k and v, and what the kernels call them.
ELEMENT_TYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
}

#: Dtypes of k and v beside those above, and then of q, too.
E4M3 = torch.float8_e4m3fn
KV_DTYPES = (E4M3,)


def result_dtypes(q_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return tuple(ELEMENT_TYPES) if q_dtype in KV_DTYPES else (q_dtype,)


#: Names of the scales of q, k and v in the order in which kernels get them. q has one in e4m3.
Q_DESCALE = "q_descale"
KV_DESCALES = ("k_descale", "v_descale")
DESCALES = (Q_DESCALE, *KV_DESCALES)
#: What has a scale of its own, the values of `ProblemClass.descale`: a KV head of a sequence (one
#: scale may be expanded to all), float32; a KV head of a page of k and v, float32; a block of 32
#: elements, E8M0, in atoms (mxfp8).
OF_SEQUENCES, OF_PAGES, OF_BLOCKS = "sequences", "pages", "blocks"

#: Name of the gate of the result (`rows.output_gate`).
OUT_GATE = "out_gate"
#: What has a value of the gate, the values of `ProblemClass.out_gate`: an element, or a query head.
GATE_OF_ELEMENTS, GATE_OF_HEADS = "elements", "heads"


#: Name of the memory for V^T among `OptionalTensors`.
COLUMNS = "columns"


@dataclass(frozen=True)
class FunctionClass:
    """A user's score_mod or mask_mod."""

    #: By which the function is found (`functions.user_functions`).
    key: str
    #: Of each tensor that it reads dtype and number of dimensions, such as "float32 1".
    tensors: tuple[str, ...] = ()


#: `ProblemClass.page_size` of kernels that take pages of any size: their rows are gathered.
ANY_PAGE = 0


def compiled_page(page_size: int | None) -> int | None:
    """Return the `ProblemClass.page_size` of a call with pages of so many rows, None without."""
    return page_size if page_size is None or page_size % PAGE_MULTIPLE == 0 else ANY_PAGE


def query_rows(packed_heads: int, rows: int) -> int:
    """Return the tile rows that one query takes, whose packed heads have a row each.  rows: of the
    CTA or warpgroup that holds the query.  If `packed_heads` divides `rows` there is no padding,
    else the result is the next power of two, and rows past the heads are padding."""
    return packed_heads if rows % packed_heads == 0 else 1 << (packed_heads - 1).bit_length()


@dataclass(frozen=True)
class ProblemClass:
    """Facts of a call that are compiled into the forward kernel, and into those that make
    gradients."""

    #: Dtype of out, and of q, k and v unless `q_dtype` or `kv_dtype` says otherwise.
    dtype: torch.dtype
    #: Sides on which the mask bounds the visible keys; a causal mask bounds the right one.
    bounded_left: bool = False
    bounded_right: bool = False
    #: The softmax scale is negative.  The tensor core then negates Q K^T, and kernels get the
    #: absolute value of the scale.
    negative_scale: bool = False
    #: Scores pass through softcap * tanh(. / softcap).
    softcap: bool = False
    #: Each head has an attention sink.
    sink: bool = False
    #: Fields of `sequences.SequenceTensors` that are given, in the order of that class.
    ragged: tuple[str, ...] = ()
    #: The tile scheduler is the dynamic one.
    use_clc: bool = False
    #: Query heads of a KV head whose rows share the forward's query tiles: 1, or all of them.
    packed_heads: int = 1
    #: The forward's keys are split.
    split: bool = False
    #: KV splits have a fixed number of keys; a sequence fills as many as it can.  Otherwise each
    #: sequence has the same number of splits, equally long.
    fixed_parts: bool = False
    #: Rows of a page of keys and values; `ANY_PAGE`: rows are gathered; None: there are no pages.
    page_size: int | None = None
    #: Dtype of k and v, of `nvfp4_format.CACHE_DTYPES`; None: that of q.
    kv_dtype: torch.dtype | None = None
    #: Whose the scales of k and v, and of q in e4m3, are: `OF_SEQUENCES`, `OF_PAGES`, `OF_BLOCKS`;
    #: empty: there are none.
    descale: str = ""
    #: Classes of the score_mod and of the mask_mod, which says what listed tiles see; None: none.
    score_mod: FunctionClass | None = None
    mask_mod: FunctionClass | None = None
    #: Words of a tree mask have 64 bits, not 32.
    wide_tree: bool = False
    #: The forward writes the greatest score of each query (`online`, `largest`).
    max_logits: bool = False
    #: A negative bound hides rows at the end of each sequence (`windows`).
    hides_rows: bool = False
    #: `GATE_OF_ELEMENTS` or `GATE_OF_HEADS`: what has a value of the gate of the result.  Empty:
    #: there is no gate, or keys are split and the combining kernel has it.
    out_gate: str = ""
    #: Dtype of q, of `KV_DTYPES`, which k and v have then, too; None: `dtype`.
    q_dtype: torch.dtype | None = None

    @property
    def element_type(self) -> Any:
        return ELEMENT_TYPES[self.dtype]

    @property
    def scalars(self) -> tuple[str, ...]:
        return (*OF_SCORES, "part_keys") if self.fixed_parts else OF_SCORES

    @property
    def descales(self) -> tuple[str, ...]:
        if not self.descale:
            return ()
        return KV_DESCALES if self.q_dtype is None else DESCALES

    @property
    def mask(self) -> MaskKind:
        sides, has_tree = (self.bounded_left, self.bounded_right), TREE_WORDS in self.ragged
        is_padded = PAGE_TABLE in self.ragged and CACHE_LEFTPAD in self.ragged
        padded_pages = (self.page_size or 0) if is_padded else 0
        return MaskKind(*sides, has_tree, self.hides_rows, padded_pages)

    @property
    def gathers(self) -> bool:
        return self.page_size == ANY_PAGE

    @property
    def asks_places(self) -> bool:
        return self.score_mod is not None or self.mask_mod is not None

    @property
    def lists_steps(self) -> bool:
        """Return True if a block mask names the steps: `block_mask`, NOTE [listed tiles]."""
        return any(name in MASK_TABLES for name in self.ragged)

    @property
    def is_clipped(self) -> bool:
        """Return True if tiles end where sequences do, at any row of a tensor."""
        return self._have_lengths and not self.lists_steps

    @property
    def _have_lengths(self) -> bool:
        """Return True if sequences may have lengths of their own."""
        return any(name != TREE_WORDS for name in self.ragged)

    @property
    def has_unequal_tiles(self) -> bool:
        return self.bounded_left or self.bounded_right or self._have_lengths


@dataclass(frozen=True)
class GradientClass:
    """Facts of a call that are compiled into a kernel that makes gradients."""

    #: As for the forward, but without the sink, which these kernels do not need.
    problem: ProblemClass
    #: Whether dK and dV are written in float32, a part for each piece of the group of query heads;
    #: False for a kernel of dQ.
    partial: bool = False

    @property
    def use_clc(self) -> bool:
        return self.problem.use_clc

    @property
    def scalars(self) -> tuple[str, ...]:
        own = *OF_SCORES, "softmax_scale", "head_parts"
        return (*own, "score_origin") if self.problem.asks_places else own


class CallScalars(NamedTuple):
    """Scalars of a call, one record for all of its kernels. A field's type is that of the argument.
    `scalars` of a kernel's problem class names those that it gets; others are None."""

    #: Factor of the scores in the exponent of 2: |softmax_scale| * log2(e), with a softcap
    #: softcap * log2(e), with a score_mod log2(e).
    scale_log2: Float32
    #: |softmax_scale| / softcap, with a score_mod |softmax_scale|.
    cap_scale: Float32
    #: The scale with its sign.
    softmax_scale: Float32
    #: Bounds of the window, 0 or more; 0 on an unbounded side.
    window_left: Int32
    window_right: Int32
    #: Rows that a negative bound hides at each sequence's end (`windows`).
    unseen_queries: Int32
    unseen_keys: Int32
    #: The longest query and key sequence, or more.  The forward's host code takes `max_seqlen_k`
    #: out before it launches (`ForwardCommon.__call__`).
    max_seqlen_q: Int32
    max_seqlen_k: Int32
    #: Parts into which the query heads of a KV head are split.
    head_parts: Int32
    #: Clusters of a static grid.
    clusters: Int32
    #: Bytes of L2 for what the tiles of a section share.
    l2_bytes: Int32
    #: Keys of each KV split, where `fixed_parts`.
    part_keys: Int32
    #: (1,) int32 tensor of the dynamic scheduler that counts in memory.
    tile_counter: Any
    #: `kernel_functions.ScoreOrigin`.
    score_origin: Any

    @classmethod
    @functools.cache
    def kinds(cls) -> dict[str, Any]:
        hints = typing.get_type_hints(cls)
        return {name: kind for name, kind in hints.items() if kind is not Any}

    @classmethod
    def named(cls, names: Sequence[str], values: Mapping[str, Any]) -> CallScalars | None:
        """Return those of some names, None without: CuTe DSL warns of an empty record."""
        if not names:
            return None
        return cls(*(values[name] if name in names else None for name in cls._fields))


class OptionalTensors(NamedTuple):
    """Tensors that a problem class requests, None or empty for those that it does not. Kernels take
    them in the order of these fields, which no other place repeats."""

    #: (heads,) float32, the logits of the attention sink.
    sink: Any = None
    #: Lengths, pages and masks of the call.
    ragged: SequenceTensors = SequenceTensors()
    #: Scales that `ProblemClass.descales` names: (entries, heads_kv) float32; of blocks (batch,
    #: heads, tiles, 2, 128) int32.
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    #: Gate of the result, like out or (batch, seqlen_q, heads).
    out_gate: Any = None
    #: What the score_mod and the mask_mod of the call read.
    score_tensors: tuple[Any, ...] = ()
    mask_tensors: tuple[Any, ...] = ()
    #: Block scales of k and v in NVFP4, (.., 8) of out's type.
    k_block_scale: Any = None
    v_block_scale: Any = None
    #: Memory for V^T where the tiles take it, (batch * tiles of keys, heads_kv, 256, 64) of out's
    #: type.
    columns: Any = None


#: Scalars of all kernels that compute scores.
OF_SCORES = (
    "scale_log2", "cap_scale", "window_left", "window_right", "unseen_queries", "unseen_keys",
    "max_seqlen_q", "max_seqlen_k", "clusters", "l2_bytes",
)  # fmt: skip
#: That of kernels whose scheduler counts in memory.
TILE_COUNTER = "tile_counter"


def scalar_names(own: Any, counts_tiles: bool) -> tuple[str, ...]:
    """Return the names of a kernel's scalars.  counts_tiles: as of `KernelSet`."""
    return (*own.scalars, TILE_COUNTER) if own.use_clc and counts_tiles else own.scalars
