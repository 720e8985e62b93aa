"""A forward call: what the user said of it (`Call`), and one validated description (`Problem`), on
which all that comes after may rely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..architectures import Architecture
from ..gpus.family import architecture_of
from ..kernels.forward.tiles import ForwardTiles
from ..kernels.functions.user_functions import FUNCTION_KINDS
from ..kernels.kernel_set import MXFP8, KernelSet, kernels_of
from ..kernels.mask.block_mask import MASK_BITS, MASK_GRADIENTS, MASK_STEPS, MASK_TABLES
from ..kernels.mask.windows import Reach
from ..kernels.nvfp4_format import BLOCK_SCALES, CACHE_DTYPES, block_scales_of
from ..kernels.problem_class import (
    DESCALES,
    GATE_OF_ELEMENTS,
    GATE_OF_HEADS,
    OUT_GATE,
    ProblemClass,
    compiled_page,
    query_rows,
    result_dtypes,
)
from ..kernels.rows.sequences import (
    CACHE_BATCH_IDX,
    DS_BEGINS,
    PADDING,
    PAGE_TABLE,
    SCHEDULER_METADATA,
    TREE_WORDS,
)
from ..schedulers.choice import BACKWARD_PREFERS_CLC, clc_requested, grid_rows, prefers_clc
from . import checks, descales, memory, named_configs
from .functions.tensors import functions_of_keys
from .operator_arguments import RAGGED, BackwardTensors, ForwardTensors, ForwardValues
from .options import (
    FIXED_SPLITS,
    Options,
    check_beside_list,
    check_num_splits,
    check_options,
    is_unknown,
    plain,
    requested_splits,
)
from .process import sms_are_shared
from .tree_mask import check_words, is_wide


class Call(NamedTuple):
    """Arguments that are no tensors, as users give them; score_mod, mask_mod: the key of one.
    listed_tiles: as of `BackwardProblem`. Public functions make its fields by
    `plans.call_fields`."""

    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    use_clc: Any
    num_splits: Any
    batch_invariant: Any
    max_seqlen_q: Any
    max_seqlen_k: Any
    config: Any
    backward_config: Any
    score_mod: str | None
    mask_mod: str | None
    listed_tiles: int

    def values(self, tensors: ForwardTensors) -> ForwardValues:
        """Return the operator's arguments that are no tensors. Checks what the operator's schema,
        which takes plain values alone, cannot carry; shapes, dtypes and ranges are checked with the
        tensors (`Problem.describe`)."""
        num_splits = requested_splits(self.num_splits, self.batch_invariant)
        options = Options.check(self.softmax_scale, self.causal, self.window_size, self.softcap)
        others = tensors.others()
        named = dict(zip(("q", "k", "v", "learnable_sink"), tensors))
        checks.check_kinds(named, others, num_splits)
        longest = longest_of(others, self.max_seqlen_q, self.max_seqlen_k)
        if num_splits == FIXED_SPLITS and "cu_seqlens_k" in others and longest[1] is None:
            raise ValueError(
                "max_seqlen_k is None with cu_seqlens_k and batch_invariant=True; accepted: an "
                "int, the same for all batches, since KV splits follow it"
            )
        if SCHEDULER_METADATA in others:
            check_beside_list(num_splits)
        masked = MASK_STEPS in others
        if masked:
            checks.check_mask_options(options.window, num_splits)
        q, *_ = tensors.with_batches()
        names = config_names(q, self.config, self.backward_config)
        offsets = tensors.cu_seqlens_q
        # Packed queries have a batch of 1.
        rows = 1 if offsets is None else q.shape[1]
        is_bounded = masked or options.window != (None, None)
        use_clc = forward_use_clc(self.use_clc, is_bounded, rows, offsets, longest[0])
        (window_left, window_right), (config, backward_config) = options.bounds, names
        return ForwardValues(
            softmax_scale=options.softmax_scale,
            window_left=window_left,
            window_right=window_right,
            softcap=options.softcap,
            max_seqlen_q=longest[0],
            max_seqlen_k=longest[1],
            use_clc=use_clc,
            config=config,
            backward_config=backward_config,
            num_splits=num_splits,
            backward_use_clc=backward_use_clc(self.use_clc),
            score_mod=self.score_mod,
            mask_mod=self.mask_mod,
            listed_tiles=self.listed_tiles,
        )


_AT_SPLITS = Call._fields.index("num_splits")
#: num_splits and batch_invariant; max_seqlen_q and max_seqlen_k.
_SPLITS, LONGEST = slice(_AT_SPLITS, _AT_SPLITS + 2), slice(_AT_SPLITS + 2, _AT_SPLITS + 4)


def bounded(
    arguments: tuple[Any, ...], q: torch.Tensor, tree_words: torch.Tensor | None
) -> tuple[Any, ...]:
    """Return the fields of a `Call` with numbers for max_seqlen_q and max_seqlen_k
    (`checks.bounds_of`)."""
    is_fixed = requested_splits(*arguments[_SPLITS]) == FIXED_SPLITS
    bounds = checks.bounds_of(arguments[LONGEST], q, tree_words, is_fixed)
    return (*arguments[: LONGEST.start], *bounds, *arguments[LONGEST.stop :])


@dataclass(frozen=True)
class Problem:
    """A forward call: q (batch, seqlen_q, heads_q, 256), k and v (batch, seqlen_k, heads_kv, 256).
    Packed sequences have a batch of 1 here and `sequences` entries."""

    #: Of the queries that the launch computes: all of each sequence, or some from first_query on.
    q_shape: tuple[int, ...]
    #: Bounds of the longest sequence, which grids follow.
    max_seqlen_q: int
    max_seqlen_k: int
    #: Sequences of the call: the batch, or the packed ones.
    sequences: int
    #: See `ProblemClass`.
    dtype: torch.dtype
    #: Where the tensors are.
    device: torch.device
    #: Masks, scale and scheduler.
    options: Options
    #: Whether there is a sink.
    sink: bool
    #: Names of the tensors of `RAGGED` that kernels of the forward read, in their order.
    ragged: tuple[str, ...]
    #: Architecture of the device.
    architecture: Architecture
    #: Tiles of the kernel that the call takes: `choose_tiles`.
    tiles: ForwardTiles
    #: Query heads that share one of these tiles: `choose_tiles`.
    packed_heads: int = 1
    #: KV splits of each query tile, or of all sequences together where the scheduler metadata lists
    #: them; 1 until `division` has divided the call.
    num_splits: int = 1
    #: Keys of a split; None where splits are equal or listed.
    part_keys: int | None = None
    #: Rows of a page where k and v are (pages, page_size, heads_kv, 256), else None.
    page_size: int | None = None
    #: See `ProblemClass`.
    q_dtype: torch.dtype | None = None
    kv_dtype: torch.dtype | None = None
    descale: str = ""
    wide_tree: bool = False
    #: As of `ProblemClass`, but set also where the combining kernel applies the gate.
    out_gate: str = ""
    #: First query of each sequence that the launch computes.
    first_query: int = 0
    #: Configuration that the user names; None for the default one of the call and the GPU.
    config: Any = None

    @classmethod
    def describe(
        cls,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        options: Options,
        sink: torch.Tensor | None = None,
        others: dict[str, torch.Tensor] | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        config: Any = None,
        out_dtype: torch.dtype | None = None,
    ) -> Problem:
        """Validate q, k, v (4-D) and what goes with them, the options' ranges among it.

        others: tensors beside these that are given, by name (`operator_arguments.OTHERS`).
        max_seqlen_q: with cu_seqlens_q. max_seqlen_k: with cu_seqlens_k or page_table; None for as
        many as k, or a row of pages, has rows. config, out_dtype: None for the default ones. Raises
        TypeError for a wrong kind or dtype, ValueError for a wrong shape, head_dim, ratio of heads,
        device, length or option, NotImplementedError without a forward of the architecture."""
        (q, k, v), others = tensors, others or {}
        check_options(options.softmax_scale, options.softcap)
        checks.check_functions(options.score_mod, options.mask_mod, options.softcap, k, others)
        check_forward_tensors(q, k, v, sink, others)
        sequences = checks.count_sequences(q, k, others)
        architecture = architecture_of(q.device)
        dtypes, paged = _dtypes(q, k, out_dtype), PAGE_TABLE in others
        of_dtypes = dtypes["kv_dtype"], dtypes["q_dtype"], descales.are_of_blocks(others)
        known = kernels_of(architecture).forward_tiles(config, *of_dtypes)
        known = usable_tiles(known, architecture, others, options.max_logits)
        if is_masked(others):
            checks.check_mask(q, k, others, known[0])
        descale = descales.descale_of(others, k, sequences, paged)
        _check_contents(tensors, others, options, descale)
        longest = checks.check_max_seqlen("q", q, others, max_seqlen_q)
        if max_seqlen_k is None and not paged:
            max_seqlen_k = max(1, k.shape[1])
        check_words(others.get(TREE_WORDS), sequences, longest, options.window)
        max_seqlen_k = checks.check_max_seqlen("k", k, others, max_seqlen_k)
        tiles, packed = choose_tiles(known, q.shape[2] // k.shape[2], longest, others)
        if config is None:
            is_causal = options.window[1] is not None
            tiles = tuned_tiles(architecture, tiles, is_causal, max_seqlen_k, paged)
        return cls(
            q_shape=tuple(q.shape),
            max_seqlen_q=longest,
            max_seqlen_k=max_seqlen_k,
            sequences=sequences,
            **dtypes,
            device=q.device,
            options=options,
            sink=sink is not None,
            ragged=_read_by_kernels(others),
            architecture=architecture,
            tiles=tiles,
            packed_heads=packed,
            page_size=k.shape[1] if paged else None,
            descale=descale,
            wide_tree=is_wide(others.get(TREE_WORDS)),
            out_gate=_form_of_gate(others.get(OUT_GATE), q, dtypes["dtype"]),
            config=config,
        )

    @property
    def problem_class(self) -> ProblemClass:
        options = self.options
        left, right = options.window
        return ProblemClass(
            self.dtype,
            left is not None,
            right is not None,
            options.softmax_scale < 0,
            options.softcap > 0,
            self.sink,
            self.ragged,
            options.use_clc,
            self.packed_heads,
            self.num_splits > 1,
            self.part_keys is not None,
            compiled_page(self.page_size),
            self.kv_dtype,
            self.descale,
            options.score_mod,
            options.mask_mod,
            self.wide_tree,
            options.max_logits,
            Reach.of(options.window).hides_rows,
            "" if self.num_splits > 1 else self.out_gate,
            self.q_dtype,
        )

    @property
    def scales(self) -> tuple[str, ...]:
        """Return the names of `DESCALES` that the call has: all or none."""
        return self.problem_class.descales if self.descale else ()

    @property
    def function_tensors(self) -> tuple[str, ...]:
        functions = self.options.score_mod, self.options.mask_mod
        return tuple(
            name
            for kind, function in zip(FUNCTION_KINDS, functions, strict=True)
            for name in kind.tensors[: 0 if function is None else len(function.tensors)]
        )

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the names of what kernels get of `OptionalTensors` but for the sink and V^T."""
        # With split keys the combining kernel has it.
        gate = (OUT_GATE,) if self.out_gate and self.num_splits == 1 else ()
        own = block_scales_of(self.kv_dtype)
        return *self.ragged, *self.scales, *gate, *self.function_tensors, *own

    @property
    def lists_splits(self) -> bool:
        """Return True if KV splits are listed; their results lie one after the other."""
        return SCHEDULER_METADATA in self.ragged

    @property
    def kernels(self) -> KernelSet:
        return kernels_of(self.architecture)

    @property
    def tile_queries(self) -> int:
        """Queries of a tile of the forward."""
        return self.tiles.rows // query_rows(self.packed_heads, self.tiles.cta_rows)

    @property
    def num_tiles(self) -> int:
        blocks = -(-self.max_seqlen_q // self.tile_queries)
        return blocks * (self.q_shape[2] // self.packed_heads) * self.sequences

    @property
    def is_empty(self) -> bool:
        """Return True if there is no query row at all, so that nothing is launched."""
        return self.sequences == 0 or self.q_shape[0] == 0 or self.q_shape[1] == 0

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        batch, seqlen, heads, _ = self.q_shape
        return (batch, heads, seqlen)


def packed_heads(group: int, given: Any, tiles: ForwardTiles, pads: bool = False) -> int:
    """Return how many of the `group` query heads of a KV head share a query tile: all or none.

    All where they divide the rows of a CTA of the `tiles`, or where its tile `pads` and has room: a
    causal tile then spans fewer queries, so that less of it is masked, and short sequences fill it.
    None where queries have lengths in use: a descriptor that clips rows of a batch entry has no
    dimension left for the heads; none with scales of blocks, whose atoms are of a head's rows; and
    none with a block mask, which is by tiles of queries of a head.
    """
    rows = tiles.cta_rows
    fits = query_rows(group, rows) <= rows if pads else rows % group == 0
    alone = "seqused_q" in given or is_masked(given) or tiles.kind == MXFP8
    return group if fits and not alone else 1


def _dtypes(q: torch.Tensor, k: torch.Tensor, out_dtype: torch.dtype | None) -> dict[str, Any]:
    q_dtype, kv_dtype = (t.dtype if t.dtype in CACHE_DTYPES else None for t in (q, k))
    dtype = out_dtype or result_dtypes(q.dtype)[0]
    return {"dtype": dtype, "q_dtype": q_dtype, "kv_dtype": kv_dtype}


def _form_of_gate(gate: torch.Tensor | None, q: torch.Tensor, dtype: torch.dtype) -> str:
    """Return the form of a gate, empty for none. Raises TypeError for another dtype than out's."""
    if gate is None:
        return ""
    if gate.dtype != dtype:
        raise TypeError(f"{OUT_GATE} has dtype {gate.dtype}; accepted: that of out, {dtype}")
    return GATE_OF_ELEMENTS if gate.ndim == q.ndim else GATE_OF_HEADS


def is_masked(given: Any) -> bool:
    return any(name in given for name in MASK_TABLES)


def _check_contents(
    tensors: tuple[torch.Tensor, ...],
    others: dict[str, torch.Tensor],
    options: Options,
    descale: str,
) -> None:
    """Check that pages can be read where they are, and what lengths, page tables and scales hold
    if the call looks at it (`reads_contents`). tensors: q, k, v. descale: whose scales k and v
    have."""
    q, k, v = tensors
    for name in (PAGE_TABLE, CACHE_BATCH_IDX):
        if name in others:
            memory.check_in_place({"k": k, "v": v}, f"{name}, where nothing is copied")
    if checks.reads_contents(q.device):
        checks.check_contents(q, k, others)
        pages = None
        if PAGE_TABLE in others:
            pages = checks.check_page_numbers(q, k, others, options.window)
        descales.check_values(others, descale, pages)


def _read_by_kernels(given: Any) -> tuple[str, ...]:
    """Return the ragged tensors that kernels of the forward read, in order."""
    of_others = (*(MASK_GRADIENTS if MASK_STEPS in given else ()), DS_BEGINS)
    return tuple(name for name in RAGGED if name in given and name not in of_others)


def usable_tiles(
    known: tuple[ForwardTiles, ...],
    architecture: Architecture,
    given: Any = (),
    max_logits: bool = False,
) -> tuple[ForwardTiles, ...]:
    """Return the tiles of kernels that take calls with such tensors, or with the greatest logits: a
    block mask may name steps of some, and V^T is made of dense keys alone. Raises
    NotImplementedError if there are none."""
    names = ", ".join(_read_by_kernels(given))
    for option, why, is_requested, takes in (
        ("block_mask", "takes none", is_masked(given), lambda one: one.takes_lists),
        ("return_max_logits", "does not keep them", max_logits, lambda one: one.kind == "forward"),
        (names, "takes dense keys alone", names, lambda one: not one.takes_columns),
    ):
        usable = tuple(filter(takes, known)) if is_requested else known
        if is_requested and not usable:
            kind = known[0].kind if known else "forward"
            raise NotImplementedError(
                f"{option}: the kernel {kind} of {architecture.name} {why}; accepted: the default "
                "configuration, with q, k and v in torch.bfloat16 or torch.float16"
            )
        known = usable
    return known


def choose_tiles(
    known: tuple[ForwardTiles, ...], group: int, longest: int, given: Any
) -> tuple[ForwardTiles, int]:
    """Return (tiles, packed heads) of a call, the one rule of which kernel a forward takes.

    known: tiles in the order of preference. Those fit that are meant for as many query rows as a
    sequence and the heads that share a tile have (`ForwardTiles.most_rows`). The first fitting
    tiles win whose rows all heads of a group share; if none are shared, the first fitting ones; if
    none fit, the last known. group: query heads of a KV head. longest: queries of a sequence.
    given: names of the call's tensors beside q, k, v and the sink.

    The rule looks at the heads and the longest queries alone, never at the batch or what tensors
    hold: bits of a sequence may not depend on these (`batch_invariant`), and nothing waits for the
    device. The kernel for few rows is ahead where keys are few, by what a tile takes beside its
    steps; where keys are many both are alike.
    """
    fitting = []
    for tiles in known:
        most = tiles.rows if tiles.most_rows is None else tiles.most_rows
        pads = tiles.pads and query_rows(group, tiles.cta_rows) * longest <= most
        packed = packed_heads(group, given, tiles, pads)
        of_query = query_rows(packed, tiles.cta_rows)
        if tiles.most_rows is None or of_query * longest <= most:
            fitting.append((tiles, packed))
    if not fitting:
        # No tiles are meant for so many rows: use several of the last ones.
        return tiles, packed
    shared = (one for one in fitting if one[1] == group)
    return next(shared, fitting[0])


def tuned_tiles(
    architecture: Architecture, tiles: ForwardTiles, causal: bool, seqlen_k: int, paged: bool
) -> ForwardTiles:
    """Return the tiles of the default configuration of a call (`KernelSet.tuned`), which the GPU
    does not decide: of other keys a step, perhaps, than those by which its kernel was chosen."""
    configured: ForwardTiles
    configured = kernels_of(architecture).tuned(tiles, causal, seqlen_k, "", paged).tiles
    return configured


def operands_of(tensors: ForwardTensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v as kernels read them. Of k and v one head where all of theirs are one
    expanded head, but not with scales, which each head has of its own."""
    if any(getattr(tensors, name) is not None for name in (*DESCALES, *BLOCK_SCALES)):
        return tensors.q, tensors.k, tensors.v
    return tensors.q, *memory.without_expanded_heads(tensors.k, tensors.v)


def check_forward_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    others: dict[str, torch.Tensor],
) -> None:
    """All that can be checked where sizes are symbols and tensors have no contents."""
    packed_q, packed_k = "cu_seqlens_q" in others, "cu_seqlens_k" in others
    packed = {"q": packed_q, "k": packed_k, "v": packed_k}
    checks.check_tensors({"q": q, "k": k, "v": v}, packed)
    kinds = packed_q, packed_k, PAGE_TABLE in others, CACHE_BATCH_IDX in others
    checks.check_shapes(q.shape, k.shape, v.shape, *kinds)
    if sink is not None:
        checks.check_sink(sink, q)
    if OUT_GATE in others:
        checks.check_out_gate(others[OUT_GATE], q)
    checks.check_ragged(q, {name: t for name, t in others.items() if name in RAGGED})
    descales.check_given(q, k, others)
    descales.check_block_scales(k, v, others)


def forward_use_clc(
    use_clc: bool | None,
    is_bounded: bool,
    rows: int = 1,
    offsets: torch.Tensor | None = None,
    longest: int | None = None,
) -> bool:
    """Return True if the forward of a user who passes `use_clc` takes the dynamic tile scheduler.
    is_bounded: whether a window or a block mask bounds the keys. rows: of queries. offsets,
    longest: cu_seqlens_q and max_seqlen_q where these are packed. Raises as `clc_requested`."""
    # Rows that there are, and rows that the grid has room for.
    filling = (1, 1)
    if offsets is not None and longest is not None and not is_unknown(longest):
        filling = rows, grid_rows(rows, offsets.numel() - 1, longest, PADDING)
    return clc_requested(plain(use_clc), prefers_clc(is_bounded, *filling, sms_are_shared()))


def backward_use_clc(use_clc: bool | None) -> bool:
    """Return True if the backward of a user who passes `use_clc` takes the dynamic tile scheduler.
    Raises as `clc_requested` does."""
    return clc_requested(plain(use_clc), BACKWARD_PREFERS_CLC)


def longest_of(
    others: dict[str, torch.Tensor], max_seqlen_q: int | None, max_seqlen_k: int | None
) -> tuple[int | None, int | None]:
    """Return (max_seqlen_q, max_seqlen_k) of packed sequences, the latter of keys in pages, too;
    None where they are not packed. Raises TypeError for what is no int, packed or not."""
    max_seqlen_q, max_seqlen_k = plain(max_seqlen_q), plain(max_seqlen_k)
    offsets_q, offsets_k = (others.get(f"cu_seqlens_{side}") for side in "qk")
    if offsets_q is not None or max_seqlen_q is not None:
        checks.check_longest("q", max_seqlen_q)
    if max_seqlen_k is not None:
        checks.check_longest("k", max_seqlen_k)
    if offsets_q is None:
        max_seqlen_q = None
    if offsets_k is None and "page_table" not in others:
        max_seqlen_k = None
    elif max_seqlen_k is None and offsets_k is not None and offsets_k is offsets_q:
        max_seqlen_k = max_seqlen_q
    return max_seqlen_q, max_seqlen_k


def config_names(q: torch.Tensor, config: Any, backward_config: Any) -> tuple[str, str]:
    def name(given: Any, direction: str) -> str:
        if given is None:
            return named_configs.DEFAULT
        kinds = kernels_of(architecture_of(q.device)).configs(direction)
        said = "config" if direction == "forward" else "backward_config"
        return named_configs.encode(given, *kinds, said=said)

    return name(config, "forward"), name(backward_config, "backward")


#: Tensors of a forward that gradients do not take: a call with gradients has none of them.
_WITHOUT_GRADIENTS = tuple(
    name
    for name in ForwardTensors._fields
    if name not in (*BackwardTensors._fields, MASK_STEPS, MASK_BITS)
)
#: Values of a forward that calls with gradients may have; of others they have the default.
DIFFERENTIABLE_VALUES = (
    "softmax_scale", "window_left", "window_right", "softcap", "max_seqlen_q", "max_seqlen_k",
    "use_clc", "config", "backward_config", "num_splits", "backward_use_clc", "score_mod",
    "mask_mod", "listed_tiles",
)  # fmt: skip
_VALUES_WITHOUT_GRADIENTS = ForwardValues.beside(DIFFERENTIABLE_VALUES)


def check_differentiable(tensors: ForwardTensors, values: ForwardValues) -> None:
    """Raise NotImplementedError for a call without gradients. All calls with gradients come here,
    in mxfp8 with the tensors that gradients flow to in place of q, k and v and their scales."""
    refused = [name for name in _WITHOUT_GRADIENTS if getattr(tensors, name) is not None]
    refused += values.given(_VALUES_WITHOUT_GRADIENTS)
    if tensors.k.dtype in CACHE_DTYPES:
        refused.insert(0, "q, k and v in float8, k and v in NVFP4")
    if refused:
        raise NotImplementedError(
            f"{', '.join(map(checks.said, refused))}: no gradients flow through such calls; "
            "accepted: tensors that do not require gradients, or a call under torch.no_grad()"
        )
    if tensors.mask_steps is not None and tensors.mask_blocks is None:
        raise NotImplementedError(
            f"{MASK_STEPS} without {' and '.join(MASK_GRADIENTS)}, which gradients take; accepted: "
            "all of them, or tensors that do not require gradients"
        )


def resolve_call(tensors: Sequence[Any], facts: tuple[Any, ...]) -> ForwardValues:
    """Return the operator's values, checked. facts: begin with the fields of `Call`."""
    *inputs, out = tensors
    named = ForwardTensors(*inputs)
    values = Call(*facts[: len(Call._fields)]).values(named)
    if out is not None:
        memory.check_out(out, named.q)
        memory.check_writable(out, inputs)
    if checks.are_differentiated((named.q, named.k, named.v, named.sink, named.out_gate)):
        check_differentiable(named, values)
    return values


def check_operator(tensors: ForwardTensors, values: ForwardValues) -> None:
    """Check an operator's arguments as far as fake tensors allow."""
    others = tensors.others()
    check_forward_tensors(tensors.q, tensors.k, tensors.v, tensors.sink, others)
    functions_of_keys((values.score_mod, values.mask_mod), others, tensors.q)
    check_num_splits(values.num_splits)
