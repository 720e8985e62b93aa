"""Kernels that the calls of a model take, of any batch and any lengths.

One call of each kind that a model has is described here by its shapes, without a tensor, and
planned by what plans calls: its plan names the kernels. Kinds are tiles by the longest queries,
configurations by the keys, both schedulers, one KV split and several, chunks of the backward with
dS and without. More may be counted up than a model ever takes (KV splits where it has none), never
less.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...architectures import Architecture
from ...call.backward_problem import BackwardProblem
from ...call.checks import DTYPES, PAGE_TABLE
from ...call.chunks import BackwardDivision, Chunk
from ...call.forward_problem import (
    Problem,
    choose_tiles,
    is_masked,
    usable_tiles,
)
from ...call.memory import View
from ...call.mxfp8_gradients import CODES, SCALES
from ...call.mxfp8_scales import OF_ROWS
from ...call.operator_arguments import RAGGED
from ...call.options import Options, check_options
from ...call.tree_mask import WORD_NODES
from ...gpus.gpu import Gpu
from ...kernels.block_scales import ATOM_BLOCKS, ATOM_ROWS, ATOMS
from ...kernels.functions.user_functions import ALIBI
from ...kernels.kernel_set import kernels_of
from ...kernels.limits import HEAD_DIM
from ...kernels.mask.block_mask import MASK_BITS, MASK_GRADIENTS, MASK_STEPS
from ...kernels.nvfp4_format import CACHE_DTYPES, NVFP4, NVFP4_BLOCK, block_scales_of
from ...kernels.problem_class import (
    E4M3,
    GATE_OF_ELEMENTS,
    KV_DTYPES,
    OF_BLOCKS,
    OF_PAGES,
    OF_SEQUENCES,
    OUT_GATE,
    FunctionClass,
    result_dtypes,
)
from ...kernels.rows.sequences import (
    CACHE_BATCH_IDX,
    CACHE_LEFTPAD,
    DS_BEGINS,
    SCHEDULER_METADATA,
    TREE_WORDS,
)
from ...kernels.small.append_rows import AppendClass, RotaryClass
from ...kernels.small.combine_config import MOST_PARTS
from ...models import FULL, AttentionModel, Mask
from ...words import shown
from ..argument_types import table_rank
from ..backward import Wanted, add_division
from ..catalogue import KernelSpec, TuningKey, append_spec, tuning_key
from ..forward import add_combine, add_launches
from ..plan import PlanBuilder

#: (dtype, q_dtype, kv_dtype) of `ProblemClass`.
Dtypes = tuple[torch.dtype, torch.dtype | None, torch.dtype | None]

#: How sequences are given: name -> the ragged tensors of such calls.
FORMS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "packed": ("cu_seqlens_q", "cu_seqlens_k"),
    "padded": ("seqused_q", "seqused_k"),
    "cache": ("seqused_k",),
    "packed-cache": ("cu_seqlens_q", "seqused_k"),
    "paged": ("seqused_k", "page_table"),
    "packed-paged": ("cu_seqlens_q", "seqused_k", "page_table"),
    # Dense ones; nothing but the mask of tiles bounds the keys.
    "block-mask": (MASK_STEPS, MASK_BITS),
}

#: The tensor of which scheduler metadata is made.
_LISTS_OF = "seqused_k"
#: With which none is accepted.
_LISTLESS = "seqused_q"
#: Calls that have kernels of their own and no form: the length of all rows means the same.
_WITHOUT_LENGTHS = (
    ". Calls without cache_seqlens have no form: give them that of all rows, "
    "cache_seqlens=k_cache.shape[1], which takes the kernels of these"
)

#: ALiBi as it is compiled in.
_SLOPES = tuple(FunctionClass(ALIBI, (f"float32 {dimensions}",)) for dimensions in (1, 2))

#: What a model is used for: name -> the most queries of a sequence, None for any number. Training
#: takes the backward, too.
USES: dict[str, int | None] = {"decode": 16, "prefill": None, "training": None}
TRAINING = "training"

#: No rule asks for longer sequences than this, nor tells lengths apart that all of these are on
#: one side of: powers of two, one more, and every length below a few steps.
_LONGEST = 1 << 22
_LENGTHS = sorted(
    {1 << i for i in range(_LONGEST.bit_length())}
    | {(1 << i) + 1 for i in range(_LONGEST.bit_length())}
    | set(range(1, 1025))
)


#: The tensors of calls of a form that have gradients in mxfp8.
_TRAINED_MXFP8 = FORMS["dense"], FORMS["packed"]
#: Fields that only calls over a cache can have.
_OF_CACHES = ("scheduler_metadata", "rotary", CACHE_BATCH_IDX, CACHE_LEFTPAD)
#: Fields of `Needs` that are True or False, and options of the command.
FLAGS = (
    "batch_invariant",
    "scheduler_metadata",
    "tree_mask",
    "alibi",
    "rotary",
    "max_logits",
    CACHE_BATCH_IDX,
    CACHE_LEFTPAD,
    OUT_GATE,
    "mxfp8",
)


@dataclass(frozen=True)
class Needs:
    """Needs of a model: the calls whose kernels are made ahead of time.

    uses: "prefill" (any number of queries), "decode" (1 to 16), "training" (with the backward).
    forms: how sequences are given: "dense"; "packed" (cu_seqlens_q and _k); "padded" (seqused_q and
    _k: transformers' static cache and padding); "cache" (seqused_k, as of flash_attn_with_kvcache);
    "packed-cache" (cu_seqlens_q and seqused_k); "paged" and "packed-paged" (with a page_table);
    "block-mask" (dense ones with a block_mask, no mask_mod). dtypes: of q, where
    torch.float8_e4m3fn has k and v in it, too, and out in bfloat16, with every form of scales.
    use_clc: the requested
    tile scheduler, None for both. batch_invariant: whether it is requested, too. page_sizes: of the
    paged forms. kv_dtypes: of k and v, None for that of q, torch.float8_e4m3fn and torch.uint8
    (NVFP4, of forms with seqused_k but no seqused_q alone) with every form of scales; of q in
    bfloat16 or float16. scheduler_metadata: whether calls with seqused_k, but no
    seqused_q, are given one, too. tree_mask: whether calls of up to 64 queries are. alibi: whether
    calls, with k and v of q's dtype, have that as their score_mod, too. rotary: whether calls of
    flash_attn_with_kvcache give rotary_cos and rotary_sin, too. max_logits: calls with
    return_max_logits=True, too; k and v have q's dtype. cache_batch_idx, cache_leftpad: whether
    calls of flash_attn_with_kvcache with cache_seqlens give these, too, each by itself and both; a
    call without cache_seqlens takes the same kernels if it is given that of all rows,
    k_cache.shape[1]. out_gate: whether calls are given one shaped like q, too. mxfp8: calls with q,
    k and v in mxfp8, too, in forms without pages, with results of `dtypes` (float8_e4m3fn: in
    bfloat16); with "training" and the forms "dense" and "packed" their gradients, too. Blackwell
    alone has such kernels: NotImplementedError elsewhere.

    Lists become tuples. Raises ValueError for what is none of these.
    """

    uses: Sequence[str] = ("prefill", "decode")
    forms: Sequence[str] = ("dense", "packed", "cache")
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,)
    use_clc: bool | None = None
    batch_invariant: bool = False
    page_sizes: Sequence[int] = ()
    kv_dtypes: Sequence[torch.dtype | None] = (None,)
    scheduler_metadata: bool = False
    tree_mask: bool = False
    alibi: bool = False
    rotary: bool = False
    max_logits: bool = False
    cache_batch_idx: bool = False
    cache_leftpad: bool = False
    out_gate: bool = False
    mxfp8: bool = False

    def __post_init__(self) -> None:
        for name in ("uses", "forms", "dtypes", "page_sizes", "kv_dtypes"):
            given = getattr(self, name)
            if not isinstance(given, (tuple, list)):
                raise ValueError(f"{name} is {shown(given)}; accepted: a tuple or a list")
            object.__setattr__(self, name, tuple(given))
        self._check_values()
        self._check_together()

    def _check_values(self) -> None:
        for what, given, known in (
            ("use", self.uses, USES),
            ("form", self.forms, FORMS),
            ("dtype", self.dtypes, (*DTYPES, *KV_DTYPES)),
            ("kv_dtype", self.kv_dtypes, (None, *CACHE_DTYPES)),
        ):
            accepted = tuple(known)  # where what has no hash can be looked for, too
            for one in given:
                if one not in accepted:
                    listed = ", ".join(map(str, accepted))
                    raise ValueError(f"{what} is {shown(one)}; accepted: {listed}")
        for size in self.page_sizes:
            whole = isinstance(size, int) and not isinstance(size, bool)
            if not whole or size < 1:
                raise ValueError(f"page size is {shown(size)}; accepted: an int of 1 or more")
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {shown(getattr(self, name))}; accepted: True or False")
        if self.use_clc is not None and not isinstance(self.use_clc, bool):
            raise ValueError(
                f"use_clc is {shown(self.use_clc)}; accepted: True, False or None for both"
            )

    def _check_together(self) -> None:
        """Refuse needs that request nothing, or what no call is accepted with."""
        paged = any(PAGE_TABLE in FORMS[form] for form in self.forms)
        if paged != bool(self.page_sizes):
            raise ValueError(
                f"forms are {self.forms} with page sizes {self.page_sizes}; accepted: a form with "
                "pages, and the sizes of these, or neither"
            )
        if not (self.uses and self.forms and self.dtypes and self.kv_dtypes):
            several = ("uses", "forms", "dtypes", "kv_dtypes")
            empty = [name for name in several if not getattr(self, name)]
            raise ValueError(
                f"nothing is requested: {', '.join(empty)} empty; accepted: at least one of each"
            )
        of_cache = any(_takes_list(FORMS[form]) for form in self.forms)
        requested = {name: getattr(self, name) for name in _OF_CACHES}
        requested[f"kv_dtype {NVFP4} (NVFP4)"] = NVFP4 in self.kv_dtypes
        for name, is_requested in requested.items():
            if is_requested and not of_cache:
                listed = ", ".join(form for form, ragged in FORMS.items() if _takes_list(ragged))
                raise ValueError(
                    f"forms are {self.forms} with {name}; accepted: one of those with {_LISTS_OF}, "
                    f"as of a cache, and without {_LISTLESS}: {listed}"
                    + (_WITHOUT_LENGTHS if name in (CACHE_BATCH_IDX, CACHE_LEFTPAD) else "")
                )
        if self.mxfp8 and all(PAGE_TABLE in FORMS[form] for form in self.forms):
            raise ValueError(
                f"forms are {self.forms} with mxfp8, which pages are not offered with; accepted: a "
                "form without pages among them"
            )
        if TRAINING in self.uses and all(PAGE_TABLE in FORMS[form] for form in self.forms):
            raise ValueError(
                f"forms are {self.forms} with {TRAINING}, which keys and values in pages have no "
                "gradients for; accepted: a form without pages among them, or other uses"
            )
        for name in ("alibi", "max_logits"):
            if getattr(self, name) and None not in self.kv_dtypes:
                raise ValueError(
                    f"{name} with kv_dtypes {self.kv_dtypes}; accepted: None, the dtype of q, "
                    "among them"
                )
        if not self.half_dtypes and (TRAINING in self.uses or self.alibi or self.max_logits):
            raise ValueError(
                f"{TRAINING}, alibi or max_logits with dtypes {self.dtypes}; accepted: one of "
                f"{', '.join(map(str, DTYPES))} among them"
            )

    @property
    def half_dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(dtype for dtype in self.dtypes if dtype in DTYPES)

    @property
    def dtype_triples(self) -> tuple[Dtypes, ...]:
        found = [(dtype, None, of_kv) for dtype in self.half_dtypes for of_kv in self.kv_dtypes]
        e4m3 = [(result_dtypes(one)[0], one, one) for one in self.dtypes if one in KV_DTYPES]
        return *found, *e4m3

    @property
    def schedulers(self) -> tuple[bool, ...]:
        return (False, True) if self.use_clc is None else (self.use_clc,)


def _takes_list(ragged: Sequence[str]) -> bool:
    return _LISTS_OF in ragged and _LISTLESS not in ragged


def specs_of(
    model: AttentionModel, needs: Needs, architecture: Architecture, gpu: str
) -> list[KernelSpec]:
    """Every kernel that calls of a model take, each once, those that all calls take first. gpu: its
    rows of the tuning table (`Gpu.tuning_name`). Raises ValueError or TypeError for a model whose
    calls would."""
    if model.heads_q % model.heads_kv:
        raise ValueError(
            f"{model.heads_q} query heads over {model.heads_kv} key/value heads; accepted: a "
            "number of query heads that is a multiple of the number of key/value heads"
        )
    if needs.alibi and model.softcap:
        raise ValueError(
            f"softcap is {model.softcap} with alibi; accepted: one of them, as calls take one"
        )
    if needs.mxfp8 and TRAINING in needs.uses and (model.softcap or model.sink):
        raise ValueError(
            f"softcap {model.softcap} and sink {model.sink} with mxfp8 and {TRAINING}; accepted: "
            "neither, since such calls have no gradients, or other uses"
        )
    where, specs = _gpu_named(architecture, gpu), dict[KernelSpec, None]()
    for problem in _forward_problems(model, needs, architecture):
        for call in _divided(problem, where, needs):
            specs |= dict.fromkeys(_of_forward(call, model.heads_kv, where))
    forms = ("", GATE_OF_ELEMENTS) if needs.out_gate else ("",)
    of_out = dict.fromkeys(dtype for dtype, *_ in needs.dtype_triples)
    for dtype, form in itertools.product(of_out, forms):
        specs |= dict.fromkeys(_combines(dtype, architecture, form))
    specs |= dict.fromkeys(
        append_spec(append_class, architecture) for append_class in _appends(model, needs)
    )
    if TRAINING in needs.uses:
        trained = map(_of_one_row, _changed(_trained(model, needs, architecture), needs))
        for problem in (*dict.fromkeys(trained), *_trained_mxfp8(model, needs, architecture)):
            specs |= dict.fromkeys(_backwards(problem, model.heads_kv, where))
    return list(specs)


def _gpu_named(architecture: Architecture, name: str) -> Gpu:
    """A GPU of these rows of the tuning table, larger than any."""
    capability = next(c for c, names in architecture.gpus.items() if name in names)
    return Gpu(capability, 1 << 20, 1 << 19, 1 << 30, 1e12)


def _forward_problems(
    model: AttentionModel, needs: Needs, architecture: Architecture
) -> Iterator[Problem]:
    """Yield one of each kind of forward, trees among them where these are requested."""
    most = [USES[use] for use in needs.uses]
    longest = _LONGEST if None in most else max(m for m in most if m is not None)
    yield from _changed(_placed(_problems(model, needs, architecture, longest), needs), needs)
    if TRAINING in needs.uses and None not in needs.kv_dtypes:
        yield from _changed(_trained(model, needs, architecture), needs)
    if needs.max_logits:
        problems = _problems(model, needs, architecture, longest, True, max_logits=True)
        yield from _changed(problems, needs)
    if needs.tree_mask:
        for dtype, nodes in WORD_NODES.items():
            problems = _placed(_problems(model, needs, architecture, nodes), needs)
            for problem in _changed(problems, needs):
                if not is_masked(problem.ragged):
                    ragged, is_wide = _with(problem.ragged, TREE_WORDS), dtype == torch.int64
                    yield replace(problem, ragged=ragged, wide_tree=is_wide)
    if needs.mxfp8:
        yield from _changed(_problems(model, needs, architecture, longest, is_mxfp8=True), needs)


def _placed(problems: Iterable[Problem], needs: Needs) -> Iterator[Problem]:
    """Each, and those with tensors that say where in a cache keys lie, as far as calls have them.
    With page_table cache_batch_idx chooses rows of it, which no kernel knows of."""
    for problem in problems:
        yield problem
        if _takes_list(problem.ragged):
            entries = needs.cache_batch_idx and problem.page_size is None
            names = (CACHE_BATCH_IDX,) * entries + (CACHE_LEFTPAD,) * needs.cache_leftpad
            for more in dict.fromkeys((*((name,) for name in names), names)):
                if more:
                    yield replace(problem, ragged=_with(problem.ragged, *more))


def _with(ragged: Sequence[str], *more: str) -> tuple[str, ...]:
    return tuple(name for name in RAGGED if name in (*ragged, *more))


def _trained(model: AttentionModel, needs: Needs, architecture: Architecture) -> Iterator[Problem]:
    """One of each kind of forward that has gradients: without pages, k and v of q's dtype."""
    for problem in _problems(model, needs, architecture, _LONGEST, True):
        if problem.page_size is None:
            yield problem


def _trained_mxfp8(
    model: AttentionModel, needs: Needs, architecture: Architecture
) -> Iterator[Problem]:
    known = _problems(model, needs, architecture, _LONGEST, True) if needs.mxfp8 else ()
    for problem in dict.fromkeys(map(_of_one_row, known)):
        if problem.ragged in _TRAINED_MXFP8:
            yield replace(problem, q_dtype=E4M3, kv_dtype=E4M3, descale=OF_BLOCKS)


def _changed(problems: Iterable[Problem], needs: Needs) -> Iterator[Problem]:
    """Yield each, and where requested with ALiBi's slopes and with a gate of the result."""
    for problem in problems:
        yield problem
        if needs.alibi and problem.kv_dtype is None:
            for slopes in _SLOPES:
                yield replace(problem, options=replace(problem.options, score_mod=slopes))
        if needs.out_gate:
            yield replace(problem, out_gate=GATE_OF_ELEMENTS)


def _problems(
    model: AttentionModel,
    needs: Needs,
    architecture: Architecture,
    longest: int,
    only_half: bool = False,
    max_logits: bool = False,
    is_mxfp8: bool = False,
) -> Iterator[Problem]:
    """One of each kind of forward. longest: queries at most. only_half: q, k, v of 16 bits."""
    triples = needs.dtype_triples
    if only_half:
        triples = tuple((dtype, None, None) for dtype in needs.half_dtypes)
    if is_mxfp8:
        triples = tuple(dict.fromkeys((dtype, E4M3, E4M3) for dtype, *_ in triples))
    queries = [length for length in _LENGTHS if length <= longest]
    kernels, group = kernels_of(architecture), model.heads_q // model.heads_kv
    for form, (dtype, q_dtype, kv_dtype) in itertools.product(needs.forms, triples):
        ragged = FORMS[form]
        if kv_dtype == NVFP4 and not _takes_list(ragged):
            continue  # no such call is accepted
        if is_mxfp8 and PAGE_TABLE in ragged:
            continue  # likewise
        known = kernels.forward_tiles(None, kv_dtype, q_dtype, is_mxfp8)
        masks = model.masks
        if is_masked(ragged):
            if not any(tiles.takes_lists for tiles in known):
                continue  # no such call is accepted
            masks = (FULL,)
        known = usable_tiles(known, architecture, ragged, max_logits)
        pages = needs.page_sizes if PAGE_TABLE in ragged else (None,)
        descales = _descales(kv_dtype, PAGE_TABLE in ragged and q_dtype is None)
        descales = (OF_BLOCKS,) if is_mxfp8 else descales
        tilings: dict[Any, int] = {}
        for length in queries:
            tilings.setdefault(choose_tiles(known, group, length, ragged), length)
        choices = itertools.product(tilings.items(), masks, needs.schedulers, pages, descales)
        for ((tiles, packed), length), mask, use_clc, page_size, descale in choices:
            yield Problem(
                q_shape=(1, length, model.heads_q, HEAD_DIM),
                max_seqlen_q=length,
                max_seqlen_k=_LONGEST,
                sequences=1,
                dtype=dtype,
                device=torch.device("cpu"),
                options=replace(_options(model, mask, use_clc), max_logits=max_logits),
                sink=model.sink,
                ragged=ragged,
                architecture=architecture,
                tiles=tiles,
                packed_heads=packed,
                page_size=page_size,
                q_dtype=q_dtype,
                kv_dtype=kv_dtype,
                descale=descale,
            )


def _descales(kv_dtype: torch.dtype | None, paged: bool) -> tuple[str, ...]:
    """Return the forms of scales that k and v may have."""
    if kv_dtype is None:
        return ("",)
    return ("", OF_SEQUENCES, OF_PAGES) if paged else ("", OF_SEQUENCES)


def _options(model: AttentionModel, mask: Mask, use_clc: bool) -> Options:
    options = Options.check(
        model.softmax_scale, mask.causal, mask.window_size, model.softcap, use_clc
    )
    check_options(options.softmax_scale, options.softcap)
    return options


# ---------------------------------------------------------------- plans of described calls


def _divided(problem: Problem, gpu: Gpu, needs: Needs) -> Iterator[Problem]:
    """Yield a forward's divisions, in each configuration that a number of keys gets."""
    parts: list[dict[str, Any]] = [{"num_splits": 1}, {"num_splits": 2}]
    if needs.batch_invariant:
        parts.append({"num_splits": 2, "part_keys": 1})
    if needs.scheduler_metadata and _takes_list(problem.ragged) and problem.descale != OF_BLOCKS:
        parts.append({"ragged": _with(problem.ragged, SCHEDULER_METADATA), "num_splits": 2})
    for keys in _configured(tuning_key(problem, gpu.tuning_name)):
        for division in parts:
            yield replace(problem, max_seqlen_k=keys, **division)


@functools.cache
def _configured(key: TuningKey) -> tuple[int, ...]:
    return tuple({key.config(keys): keys for keys in _LENGTHS}.values())


def _of_forward(problem: Problem, heads_kv: int, gpu: Gpu) -> Sequence[KernelSpec]:
    builder = PlanBuilder(problem.device, {})
    k_shape = 1, problem.page_size or 1, heads_kv, HEAD_DIM
    add_launches(builder, (problem,), _views(problem, k_shape), gpu)
    return builder.plan().specs


def _views(problem: Problem, k_shape: Sequence[int]) -> dict[str, View]:
    """Views of the tensors of a described call, by name."""
    of_keys, k_shape = problem.kv_dtype or problem.dtype, tuple(k_shape)
    if of_keys == NVFP4:
        k_shape = (*k_shape[:-1], k_shape[-1] // 2)
    views = {
        "q": View.contiguous("q", problem.q_shape, problem.q_dtype or problem.dtype),
        "k": View.contiguous("k", k_shape, of_keys),
        "v": View.contiguous("v", k_shape, of_keys),
        "sink": View.contiguous("sink", problem.q_shape[2:3], torch.float32),
    }
    functions = problem.options.score_mod, problem.options.mask_mod
    forms = [
        form.split() for function in functions if function is not None for form in function.tensors
    ]
    for name, (kind, rank) in zip(problem.function_tensors, forms, strict=True):
        views[name] = View.contiguous(name, (1,) * int(rank), getattr(torch, kind))
    if problem.out_gate:
        views[OUT_GATE] = View.contiguous(OUT_GATE, problem.q_shape, problem.dtype)
    for name in problem.scales:
        views[name] = View.contiguous(name, (1, k_shape[2]), torch.float32)
        if problem.descale == OF_BLOCKS:
            views[name] = _block_scales(name, problem, k_shape)
    for name in block_scales_of(of_keys):
        views[name] = View.contiguous(name, (*k_shape[:-1], HEAD_DIM // NVFP4_BLOCK), E4M3)
    for name in problem.ragged:
        is_wide = name == TREE_WORDS and problem.wide_tree
        dtype = torch.int64 if is_wide else torch.int32
        views[name] = View.contiguous(name, (1,) * table_rank(name), dtype)
    return views


def _block_scales(name: str, problem: Problem, k_shape: Sequence[int]) -> View:
    side, shape = ("k", k_shape) if name[0] in "kv" else ("q", problem.q_shape)
    outer = () if f"cu_seqlens_{side}" in problem.ragged else (1,)
    rows, blocks = (HEAD_DIM, 1) if name in OF_ROWS else (ATOM_ROWS, ATOMS)
    return View.contiguous(name, (*outer, shape[2], rows, blocks * ATOM_BLOCKS), torch.uint8)


@functools.cache
def _combines(
    dtype: torch.dtype, architecture: Architecture, out_gate: str
) -> tuple[KernelSpec, ...]:
    """Return the combining kernels of any number of splits and rows. out_gate: as of
    `ProblemClass`."""
    kernels = kernels_of(architecture)
    rule = kernels.combine
    bounds = sorted(
        {max(1, (rule.ctas << i) // n + one) for i in range(6) for n in (1, 2, 4) for one in (0, 1)}
        | {1}
    )
    builder = PlanBuilder(torch.device("cpu"), {})
    whole = Problem(
        (1, 1, 1, HEAD_DIM), 1, 1, 1, dtype, builder.device, Options(1.0), False, (), architecture,
        kernels.forward_tiles()[0], out_gate=out_gate,
    )  # fmt: skip
    gate = View.contiguous(OUT_GATE, whole.q_shape, dtype) if out_gate else None
    results = (
        View.contiguous("out", whole.q_shape, torch.float32),
        View.contiguous("lse", whole.lse_shape, torch.float32),
    )
    for parts in range(2, MOST_PARTS + 1):
        for rows in (*bounds, bounds[-1] << 8):
            problem = replace(whole, q_shape=(1, rows, 1, HEAD_DIM), num_splits=parts)
            add_combine(builder, problem, results, results, {}, gate)
    return builder.plan().specs


def _appends(model: AttentionModel, needs: Needs) -> Iterator[AppendClass]:
    """Yield the classes of new rows that calls with lengths of the keys may have."""
    forms = [FORMS[form] for form in needs.forms if _takes_list(FORMS[form])]
    choices = itertools.product(forms, needs.dtype_triples, (False, True))
    for ragged, (dtype, q_dtype, kv_dtype), packed in choices:
        paged = PAGE_TABLE in ragged
        # Rows come as codes of NVFP4 in no call.
        classes = [AppendClass(kv_dtype or dtype, packed, paged)] if kv_dtype != NVFP4 else []
        for descale in () if kv_dtype is None else _descales(kv_dtype, paged and q_dtype is None):
            classes.append(AppendClass(dtype, packed, paged, kv_dtype, descale))
        if needs.cache_batch_idx and not paged:
            # An entry of the cache is a page of all its rows.
            classes += [replace(append_class, paged=True) for append_class in classes]
        for append_class in classes:
            yield append_class
            # Rows that are in e4m3 already are rotated in no call.
            rotated = needs.rotary and q_dtype is None and append_class.dtype == dtype
            for rotary in _rotaries(model, dtype, ragged) if rotated else ():
                yield replace(append_class, rotary=rotary)


def _rotaries(
    model: AttentionModel, dtype: torch.dtype, ragged: Sequence[str]
) -> Iterator[RotaryClass]:
    """Rotary embedding of calls in a form: of either kind of pairs and of tables."""
    masks = [Options.check(None, mask.causal, mask.window_size, 0.0) for mask in model.masks]
    ordered = sorted({mask.window != (None, None) for mask in masks})
    for choice in itertools.product((dtype, torch.float32), (False, True), ordered):
        yield RotaryClass(*choice, packed="cu_seqlens_q" in ragged)


#: Gradients of calls whose kernels store no dS: those of q, of k and v, or all.
_WANTED = Wanted(dkdv=False), Wanted(dq=False), Wanted()


def _of_one_row(forward: Problem) -> Problem:
    """Return a forward as its gradients have it, which know nothing of its tiles."""
    return replace(
        forward,
        q_shape=(1, 1, *forward.q_shape[2:]),
        max_seqlen_q=1,
        max_seqlen_k=1,
        ragged=MASK_GRADIENTS if is_masked(forward.ragged) else forward.ragged,
        tiles=forward.kernels.forward_tiles()[0],
        packed_heads=1,
    )


def _backwards(forward: Problem, heads_kv: int, gpu: Gpu) -> Iterator[KernelSpec]:
    """Yield the kernels with a stored dS and without, where a block mask or mxfp8 does not require
    one, that of packed sequences by lengths that are known, too; dK and dV in parts and not, the
    LSE's gradient given or not."""
    is_mxfp8 = forward.descale == OF_BLOCKS
    config = forward.kernels.config("mxfp8_backward" if is_mxfp8 else "backward")()
    stored = (True,) if is_mxfp8 or is_masked(forward.ragged) else (True, False)
    choices = itertools.product(stored, (1, 2), (False, True))
    for keeps_ds, head_parts, lse_gradient in choices:
        has_begins = keeps_ds and not is_mxfp8 and forward.ragged == FORMS["packed"]
        for more in ((), (DS_BEGINS,)) if has_begins else ((),):
            ragged_forward = replace(forward, ragged=(*forward.ragged, *more))
            form = lse_gradient, head_parts, keeps_ds
            division = _whole_division(ragged_forward, heads_kv, *form)
            problem = division.problem
            for wanted in (Wanted(),) if keeps_ds else _WANTED:
                builder = PlanBuilder(forward.device, {})
                has_batch = dict.fromkeys("qkv", True)
                views = _views(ragged_forward, problem.k_shape) | _of_gradients(problem)
                add_division(builder, division, wanted, has_batch, views, config, gpu)
                yield from builder.plan().specs


def _whole_division(
    forward: Problem, heads_kv: int, lse_gradient: bool, head_parts: int, keeps_ds: bool
) -> BackwardDivision:
    """Return a backward of one row and one key, in one chunk."""
    heads, k_shape, one = forward.q_shape[2], (1, 1, heads_kv, HEAD_DIM), range(1)
    problem = BackwardProblem(
        forward, k_shape, lse_gradient, head_parts, keeps_ds=keeps_ds, listed_tiles=1
    )
    chunk = Chunk(problem, range(heads), range(heads_kv), one, one, one)
    return BackwardDivision(problem, (chunk,))


def _of_gradients(problem: BackwardProblem) -> dict[str, View]:
    """Views of the tensors that gradients take beside those of the forward, by name."""
    forward = problem.forward
    of_rows = "out", "dout"
    views = {name: View.contiguous(name, forward.q_shape, forward.dtype) for name in of_rows}
    for name in ("lse", "dlse") if problem.lse_gradient else ("lse",):
        views[name] = View.contiguous(name, forward.lse_shape, torch.float32)
    if problem.is_mxfp8:
        for name in CODES:
            shape = problem.k_shape if name[0] in "kv" else forward.q_shape
            views[name] = View.contiguous(name, shape, E4M3)
        views |= {name: _block_scales(name, forward, problem.k_shape) for name in SCALES}
    return views
