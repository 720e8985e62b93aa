"""Calls of our kernels and of flash-attn-4's that reach every synchronisation instruction of them.

Each target calls a public function with small shapes; `sm100_sim.tools.mutants` leaves out the
instructions one by one.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import torch

from bench.peers import flash_attn_4
from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, get_scheduler_metadata, masks
from fa4_hd256.kernels.backward.ds_tiles import DS_BLOCK, DS_TILE
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.problem_class import DESCALES, E4M3
from fa4_hd256.mask_mods import MaskMod
from fa4_hd256.quantize import quantize_mxfp8
from fa4_hd256.score_mods import ScoreMod
from sm100_sim import Options, attached
from sm100_sim.tools import mutants

#: Name the GPU that the simulator stands for, and whose kernels CPU tensors take.
DEVICE, ARCHITECTURE = "SM100_SIM_DEVICE", "FA4_HD256_ARCH"
#: Keys of a step of Blackwell's kernels.
KEY_TILE = 128
#: GPUs of one CTA pair, and of one CTA, which do all tiles of a call.
BLACKWELL = {DEVICE: "b200:2", ARCHITECTURE: "sm_100a"}
HOPPER = {DEVICE: "h200:2", ARCHITECTURE: "sm_90a"}


@dataclass(frozen=True)
class Shape:
    """One call with heads_q query heads and one KV head."""

    seqlen_q: int
    seqlen_k: int
    heads_q: int = 1
    batch: int = 1

    def __str__(self) -> str:
        batch = f"batch {self.batch}, " if self.batch > 1 else ""
        return f"{batch}{self.seqlen_q} x {self.seqlen_k}, heads {self.heads_q}/1"


#: (queries, keys) of packed sequences.
Lengths = tuple[tuple[int, int], ...]
#: A pair works on several tiles each time, of one to three key tiles, masked and not.
SHAPES = (Shape(520, 300), Shape(300, 256), Shape(520, 100))
#: Between two tiles with keys is one that no row sees.
CAUSAL_SHAPES = (Shape(600, 300, batch=2),)
#: Shapes of flash-attn-4, which takes another kernel for one block of 128 queries. With more than
#: two key tiles every row has to move its maximum (`_flash_attention_4`), so there are no rows of
#: padding.
FLASH_ATTN_SHAPES = (Shape(512, 520, heads_q=2), Shape(300, 256), Shape(520, 100))
#: Under a block mask: tiles without keys between others, more than there are buffers of Q.
MASK_SHAPES = (Shape(520, 300, batch=2),)
#: Shapes of the backward: also key tiles of one step, and without queries, before and behind
#: others.
STEPS_OF_KEYS = (1, 0, 2, 1, 0, 1, 2, 0)
MASK_BACKWARD_SHAPES = (*MASK_SHAPES, Shape(256, len(STEPS_OF_KEYS) * DS_BLOCK))
#: Packed sequences: tiles without keys first, between others and last, and two with keys in
#: succession.
LENGTHS = ((50, 0), (270, 290), (0, 130), (260, 0), (70, 130), (40, 60), (30, 0))
#: Lengths of the backward: tiles of one step and of more; first, next to others, after tiles
#: without keys or without queries.
BACKWARD_LENGTHS = (
    (40, 60), (270, 290), (50, 0), (0, 50), (70, 100), (30, 60), (50, 0), (0, 50), (130, 290),
)  # fmt: skip
#: Lengths with a tile of one step first, as second blocks of queries come before first ones.
SHORT_LENGTHS = ((260, 100), (40, 60))
#: Lengths with a tile without queries first.
EMPTY_FIRST_LENGTHS = ((0, 50), (40, 60))
#: Rows of a page.
PAGE_SIZE = 64
#: Keys in use of a cache's sequences, those of two CTAs in turn: for each of them none first,
#: between others and last; one step and several, in succession and not.
USED = (0, 300, 60, 0, 0, 130, 300, 60, 130, 0, 40, 40, 0)
#: With a cache; of the kernel for a few query rows, and of several query tiles.
CACHE_SHAPES = (Shape(4, 5 * PAGE_SIZE, heads_q=8, batch=len(USED)),)
CACHE_TILES = (Shape(270, 5 * PAGE_SIZE, batch=len(USED)),)
#: Shapes of a few query rows, so many that two groups of the softmax share a tile.
TWO_GROUPS = (Shape(4, 5 * PAGE_SIZE, heads_q=16, batch=len(USED)),)
#: More parts of a row than a warp of the combining kernel adds up.
COMBINED_PARTS = 40
COMBINED_SHAPES = (Shape(4, 300, heads_q=8),)


def alternating(keys: torch.Tensor) -> torch.Tensor:
    """Scales of keys by their positions: every second tile has larger scores, so that the softmax
    moves its maximum and O is rescaled, in whichever order the tiles are visited."""
    return 1 + 6 * (keys // KEY_TILE % 2)


def falling(keys: torch.Tensor) -> torch.Tensor:
    """Visited from the last one, each key tile has larger scores than those before."""
    tiles = keys // KEY_TILE
    return 1 + 6 * (tiles.max() - tiles)


def falling_in_one_warp(keys: torch.Tensor) -> torch.Tensor:
    """Return keys that fall in 32 keys of each tile alone: warps that share a tile's keys do not
    agree whether the maximum moves."""
    tiles = keys // KEY_TILE
    return torch.where(keys % KEY_TILE // 32 == 1, 6 ** (tiles.max() - tiles), 1)


def inputs(
    shape: Shape, factors: Callable[[torch.Tensor], torch.Tensor] = alternating
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape.batch, rows, heads, HEAD_DIM, generator=generator)
        for rows, heads in (
            (shape.seqlen_q, shape.heads_q),
            (shape.seqlen_k, 1),
            (shape.seqlen_k, 1),
        )
    )
    k *= factors(torch.arange(shape.seqlen_k)).reshape(1, -1, 1, 1)
    return [t.bfloat16() for t in (q, k, v)]


@dataclass(frozen=True)
class Target:
    """A kernel, or the kernels of one call, to be scored.

    run: makes the call of a shape. reading: of the sanitizer, True or "strict". kernels: part of
    the names of those that are scored; the others only run. environment: variables of the run, the
    GPU among them.
    """

    name: str
    run: Callable[[Shape], Any]
    shapes: tuple[Shape, ...] = SHAPES
    reading: bool | str = "strict"
    kernels: str = ""
    environment: Mapping[str, str] = field(default_factory=lambda: BLACKWELL)


def _dense(tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
    q, k, v = tensors
    return cast(torch.Tensor, flash_attn_func(q, k, v, **options))


def _in_e4m3(tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
    scales = dict.fromkeys(DESCALES, torch.ones(1))
    return _dense([tensor.to(E4M3) for tensor in tensors], **scales, **options)


def _in_mxfp8(tensors: list[torch.Tensor], **options: Any) -> torch.Tensor:
    q, k, v, *scales = quantize_mxfp8(*tensors)
    return _dense([q, k, v], **dict(zip(DESCALES, scales, strict=True)), **options)


def _packed(
    tensors: list[torch.Tensor], lengths: tuple[Lengths, ...] = (LENGTHS,), **options: Any
) -> torch.Tensor:
    """The sequences are those of `lengths` that have as many queries as q has rows."""
    packed = next(one for one in lengths if _packed_shape(one).seqlen_q == tensors[0].shape[1])
    sizes = torch.tensor([[0, 0], *packed])
    offsets_q, offsets_k = sizes.cumsum(0).int().T.contiguous()
    q, k, v = (tensor[0] for tensor in tensors)
    longest_q, longest_k = sizes.amax(0).tolist()
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, max_seqlen_q=longest_q,
        max_seqlen_k=longest_k, **options,
    )  # fmt: skip
    return cast(torch.Tensor, out)


def _masked(
    tensors: list[torch.Tensor], mask_mod: MaskMod | None = None, **options: Any
) -> torch.Tensor:
    """Call attention under a block mask: of tiles of 128 x 128 every third is seen by nobody, rows
    behind 400 see nothing, others a random half, or what mask_mod says.  With more keys than
    queries: each block is seen from `STEPS_OF_KEYS` tiles of rows."""
    queries, keys = (tensors[i].shape[1] for i in (0, 1))
    rows, columns = torch.arange(queries)[:, None], torch.arange(keys)
    generator = torch.Generator().manual_seed(2)
    seen = torch.rand(queries, keys, generator=generator) < 0.5
    if keys > queries:
        seen &= rows // DS_TILE < torch.tensor(STEPS_OF_KEYS)[columns // DS_BLOCK]
    else:
        seen &= ((rows // KEY_TILE + columns // KEY_TILE) % 3 > 0) & (rows < 400)
    mask = masks.from_dense(seen)
    return _dense(tensors, block_mask=mask, mask_mod=mask_mod, **options)


def _tree(nodes: int) -> torch.Tensor:
    """A tree mask: each node's parent is the one before the last."""
    places = torch.arange(nodes)
    return (places[:, None] >= places) & ((places[:, None] - places) % 2 == 0)


def _cached(
    shape: Shape, pages: bool = False, e4m3: bool = False, listed: bool = False, **options: Any
) -> None:
    """K and V are a cache with `USED` keys.  pages: in pages, in reverse order.  e4m3: with scales
    of the sequences, or of the pages.  listed: KV splits are."""
    q, k, v = tensors = inputs(shape, falling_in_one_warp)
    used = torch.tensor(USED[: len(k)], dtype=torch.int32)
    if pages:
        k, v = (t.reshape(-1, PAGE_SIZE, *t.shape[2:]).flip(0).contiguous() for t in (k, v))
        numbers = torch.arange(len(k), dtype=torch.int32).flip(0)
        options["page_table"] = numbers.reshape(len(used), -1).contiguous()
    if e4m3:
        scales = torch.linspace(0.5, 1.5, len(k))[:, None].contiguous()
        options |= {"k_descale": scales, "v_descale": scales.flip(0).contiguous()}
        k, v = (t.to(torch.float8_e4m3fn) for t in (k, v))
    if listed:
        bounds = q.shape[1], tensors[1].shape[1], q.shape[2], tensors[1].shape[2]
        dtype = k.dtype if e4m3 else None
        options["scheduler_metadata"] = get_scheduler_metadata(used, *bounds, kv_dtype=dtype)
    flash_attn_varlen_func(q, k, v, seqused_k=used, **options)


def _biased(score: Any, place: Any, tensors: tuple) -> Any:
    return 0.5 * score + tensors[0][place.key]


def _before_limits(batch: Any, head: Any, query: Any, key: Any, tensors: tuple) -> Any:
    return (key < tensors[0][query]) & ((query + key) % 2 == 0)


#: A function that says what is seen, by a tensor.
_FUNCTION = MaskMod.of(_before_limits, (torch.arange(520, dtype=torch.int32) % 300,))

#: A score_mod that reads a tensor, with a slope.
_CHANGED: dict[str, Any] = {
    "causal": True,
    "score_mod": ScoreMod.of(
        _biased, lambda score, place, tensors: 0.5, (torch.linspace(-1.0, 1.0, 300),)
    ),
}


def _forward(shape: Shape, call: Callable, **options: Any) -> None:
    call(inputs(shape), **options)


def _backward(shape: Shape, call: Callable, wanted: str, **options: Any) -> None:
    """wanted: of "qkv", those whose gradients are computed."""
    named = zip("qkv", inputs(shape), strict=True)
    out = call([tensor.requires_grad_(name in wanted) for name, tensor in named], **options)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype))


def _flash_attention_4(shape: Shape, causal: bool) -> None:
    """flash-attn-4's public function on a GPU with two SMs, so that its persistent kernel gives one
    CTA pair several tiles. Its correction warps wait for O only to rescale it, so with scores that
    do not grow some phases are waited for by nobody (sm100_sim/docs/sanitizer.md)."""
    with attached(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q, k, v = inputs(shape, falling)
        flash_attn_4.attention(q, k, v, causal=causal)


def _packed_shape(lengths: Lengths) -> Shape:
    queries, keys = (sum(side) for side in zip(*lengths, strict=True))
    return Shape(queries, keys)


#: A forward's name, call, options and shapes; a kernel of the backward, a part of its name, and the
#: gradients that take it.
_Forward = tuple[str, Callable, dict[str, Any], tuple[Shape, ...]]
_Gradient = tuple[str, str, str]


def _targets() -> Iterator[Target]:
    of_blackwell: tuple[_Forward, ...] = (
        ("e4m3", _in_e4m3, {}, SHAPES), ("mxfp8", _in_mxfp8, {}, SHAPES),
        ("causal", _dense, {"causal": True}, CAUSAL_SHAPES),
    )  # fmt: skip
    yield from _of_gpu(
        "", BLACKWELL, (400, of_blackwell), (BACKWARD_LENGTHS, SHORT_LENGTHS, EMPTY_FIRST_LENGTHS),
        (("dK/dV", "DkdvKernel", "kv"), ("dQ", "DqKernel", "q")),
    )  # fmt: skip
    yield from _of_gpu(
        "Hopper ", HOPPER, (200, ()), (BACKWARD_LENGTHS, EMPTY_FIRST_LENGTHS),
        (("dK", "DkKernel", "k"), ("dV", "SingleDvKernel", "v"), ("dQ", "DqKernel", "q")),
    )  # fmt: skip
    parts = functools.partial(_forward, call=_dense, num_splits=COMBINED_PARTS)
    yield Target("forward combine", parts, COMBINED_SHAPES, kernels="CombineKernel")
    for causal in (False, True):
        name = f"{flash_attn_4.PACKAGE} forward, {'causal' if causal else 'full'}"
        run = functools.partial(_flash_attention_4, causal=causal)
        yield Target(name, run, FLASH_ATTN_SHAPES, reading=True)


def _of_gpu(
    prefix: str,
    environment: Mapping[str, str],
    forwards: tuple[int, tuple[_Forward, ...]],
    lengths: tuple[Lengths, ...],
    gradients: tuple[_Gradient, ...],
) -> Iterator[Target]:
    """Yield the targets of a GPU under both schedulers. forwards: left bound of the window, and
    forwards that it alone has; lengths, gradients: of its backward, beside those that all have."""
    packed, (left, more) = (_packed_shape(LENGTHS),), forwards
    every = {"window_size": (left, 64), "softcap": 30.0, "learnable_sink": torch.ones(1)}
    call, of_all = functools.partial(_packed, lengths=lengths), tuple(map(_packed_shape, lengths))
    for clc in (False, True):
        scheduler = "dynamic" if clc else "static"
        of_gpu = functools.partial(Target, environment=environment)
        known: tuple[_Forward, ...] = (
            ("full", _dense, {}, SHAPES),
            *more,
            ("varlen, causal", _packed, {"causal": True}, packed),
            ("varlen, window, softcap, sink", _packed, every, packed),
            ("varlen, causal, score_mod", _packed, _CHANGED, packed),
            ("block mask", _masked, {}, MASK_SHAPES),
            ("mask_mod", _masked, {"mask_mod": _FUNCTION}, MASK_SHAPES),
        )
        for name, function, options, shapes in known:
            run = functools.partial(_forward, call=function, **options, use_clc=clc)
            yield of_gpu(f"{prefix}forward, {name}, {scheduler}", run, shapes)
        yield from _of_caches(prefix, clc, environment)
        for name, kernel, wanted in (
            ("dV and dS", "DvKernel", "qkv"), ("dK and dQ from dS", "ProductsKernel", "qkv"),
            *gradients,
        ):  # fmt: skip
            run = functools.partial(_backward, call=call, wanted=wanted, causal=True, use_clc=clc)
            name = f"{prefix}{name}, varlen, causal, {scheduler}"
            yield of_gpu(name, run, of_all, kernels=kernel)
        run = functools.partial(_backward, call=call, wanted="qkv", **_CHANGED, use_clc=clc)
        name = f"{prefix}dV and dS, varlen, causal, score_mod, {scheduler}"
        yield of_gpu(name, run, of_all, kernels="DvKernel")
        yield from _masked_backwards(prefix, clc, environment)


def _of_caches(prefix: str, clc: bool, environment: Mapping[str, str]) -> Iterator[Target]:
    """Yield the targets of a cache with pages, and of KV splits; for a few query rows also in
    e4m3."""
    scheduler = "dynamic" if clc else "static"
    for name, few, options in (
        ("keys in pages", False, {"pages": True}),
        ("keys in parts", False, {"num_splits": 2}),
        ("few rows", True, {"causal": True}),
        ("few rows, tree mask", True, {"tree_mask": _tree(CACHE_SHAPES[0].seqlen_q)}),
        ("few rows, keys in pages", True, {"pages": True}),
        ("few rows, keys in parts", True, {"num_splits": 2}),
        ("few rows, listed parts", True, {"listed": True}),
        ("few rows, e4m3", True, {"e4m3": True, "causal": True}),
        ("few rows, e4m3, keys in pages", True, {"e4m3": True, "pages": True}),
    ):
        run = functools.partial(_cached, **options, use_clc=clc)
        # Hopper's kernel for a few rows is that for many but in e4m3. Under the strict reading
        # Blackwell's itself is not clean: its last loads of tensor memory have no wait::ld of their
        # own before that is freed.
        decodes = few and (environment is BLACKWELL or "e4m3" in options)
        reading = True if few and environment is BLACKWELL else "strict"
        yield Target(
            f"{prefix}forward, {name}, {scheduler}",
            run,
            CACHE_SHAPES if few else CACHE_TILES,
            reading,
            kernels="Decode" if decodes else "ForwardKernel",
            environment=environment,
        )
    if environment is not BLACKWELL:
        return
    for name, e4m3 in (("64 rows", False), ("64 rows, e4m3", True)):
        run = functools.partial(_cached, e4m3=e4m3, causal=True, use_clc=clc)
        yield Target(
            f"{prefix}forward, {name}, {scheduler}",
            run,
            TWO_GROUPS,
            True,
            kernels="Decode",
            environment=environment,
        )


def _masked_backwards(prefix: str, clc: bool, environment: Mapping[str, str]) -> Iterator[Target]:
    """Yield the backwards under a block mask, by bits and by a mask_mod."""
    scheduler = "dynamic" if clc else "static"
    for name, kernel, mask_mod in (
        ("dV and dS, block mask", "DvKernel", None),
        ("dK and dQ from dS, block mask", "ProductsKernel", None),
        ("dV and dS, mask_mod", "DvKernel", _FUNCTION),
    ):
        run = functools.partial(
            _backward, call=_masked, wanted="qkv", mask_mod=mask_mod, use_clc=clc
        )
        yield Target(
            f"{prefix}{name}, {scheduler}",
            run,
            MASK_BACKWARD_SHAPES,
            kernels=kernel,
            environment=environment,
        )


def targets() -> dict[str, Target]:
    return {target.name: target for target in _targets()}


def measure(
    target: Target,
    seeds: int = 20,
    confirm: int = 4,
    jobs: int = 1,
    write: Callable[[str], None] = lambda line: None,
) -> list[mutants.Score]:
    """Scores of the kernels of a target; one cluster does all tiles. Raises RuntimeError if it
    launched none of them."""
    with mock.patch.dict(os.environ, target.environment):
        found = mutants.scores(
            lambda: [target.run(shape) for shape in target.shapes],
            Options(clusters=1, sanitize=target.reading), seeds, confirm, jobs=jobs,
            launches=len(target.shapes), kernel=target.kernels, write=write,
        )  # fmt: skip
    if not found:
        named = f" with {target.kernels!r} in its name" if target.kernels else ""
        raise RuntimeError(f"target {target.name!r} launched no kernel{named}")
    return found
