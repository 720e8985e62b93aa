"""flash-attn-4's score_mod, score_mod_bwd and mask_mod inside our kernels, and its block-sparse
tensors as masks of tiles.

Functions take values in vectors (`cute.TensorSSA`), which hold one score here. The key of a
translated function is derived from the meaning of the original one
(`fa4_hd256.call.functions.keys`).
"""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Uint32

from ..call.functions.state import FunctionState
from ..call.options import plain
from ..call.tile_mask import PARTIAL, WHOLE, TileMask, count_mask_tiles
from ..kernels.functions.user_functions import MOST_TENSORS
from ..kernels.mask.block_mask import MASK_TILE
from ..kernels.mask.windows import Window
from ..mask_mods import MaskMod
from ..masks import kinds_of_blocks
from ..run.kept_tensors import made_to_keep
from ..score_mods import ScoreMod
from ..words import shown
from .windows import seen_in_window

#: Dtypes of tensors that kernels read as copies in another dtype, with the same values.
COPIED = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.int32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
}
#: Cached translations of each kind.
MOST_TRANSLATIONS = 128
#: Keys of a word that a vectorised mask_mod returns.
WORD = 32


class SequenceLengths(NamedTuple):
    """Fields of `seqlen_info`, Int32: lengths of a sequence, and where its packed rows begin."""

    seqlen_q: Any
    seqlen_k: Any
    offset_q: Any
    offset_k: Any


class LengthsAlone(NamedTuple):
    """`seqlen_info` of packed sequences whose aux_tensors leave no room for cu_seqlens."""

    seqlen_q: Any
    seqlen_k: Any


_NO_OFFSETS = (
    "a score_mod of packed sequences reads offset_q or offset_k of seqlen_info, and aux_tensors "
    f"leave no room for cu_seqlens; accepted then: up to {MOST_TENSORS - 2} aux_tensors, or "
    f"{MOST_TENSORS - 1} where cu_seqlens_q is cu_seqlens_k itself or one of them is None; stack "
    "those of one shape"
)


def translate_score_mod(
    score_mod: Callable[..., Any],
    score_mod_bwd: Callable[..., Any] | None,
    aux: tuple[Any, Any],
    offsets: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> ScoreMod:
    """Return a score_mod of flash-attn-4 as one of ours.

    aux: (aux_tensors, aux_scalars). offsets: cu_seqlens_q and cu_seqlens_k, for functions that read
    where a sequence begins. Kernels get them if aux_tensors leave room; else a function that reads
    them raises NotImplementedError when it is compiled. Raises TypeError for a score_mod that is no
    function, and as `ScoreMod` does for tensors that kernels cannot read.
    """
    _check("score_mod", score_mod)
    tensors, scalars = _tensors_of(aux[0]), _scalars_of(aux[1])
    begins = [each for each in offsets if each is not None]
    if begins and begins[0] is begins[-1]:
        begins = begins[:1]
    packed = tuple(each is not None for each in offsets) if begins else None
    if len(tensors) + len(begins) > MOST_TENSORS:
        begins, packed = [], ()
    translated = _score_mods((score_mod, score_mod_bwd), scalars, len(tensors), packed)
    return translated.with_tensors((*tensors, *begins))


class _Translations:
    """Cache of translations, each valid until something that its functions read changes. make:
    translates a tuple of functions, which takes milliseconds. Its other arguments are what the
    translation also depends on."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._cached: dict[tuple[Any, ...], tuple[FunctionState, Any]] = {}

    def __call__(self, functions: tuple[Any, ...], *facts: Any) -> Any:
        sizes = [getattr(function, "__vec_size__", 1) for function in functions]
        # As text: equal numbers may differ in their types, and zeros in their signs.
        key = functions, repr((facts, sizes))
        bare = tuple(map(_bare, functions))
        known = self._cached.get(key)
        if known is not None and known[0].is_of(bare):
            return known[1]
        state = FunctionState.of(bare)
        translated = self._make(functions, *facts)
        with self._lock:
            self._cached.pop(key, None)
            if state is not None:
                while len(self._cached) >= MOST_TRANSLATIONS:
                    del self._cached[next(iter(self._cached))]
                self._cached[key] = state, translated
        return translated

    def forget(self) -> None:
        with self._lock:
            self._cached.clear()


def _bare(function: Any) -> Any:
    """Return a function as its user wrote it, before CuTe DSL rewrote it."""
    inner = inspect.unwrap(function) if callable(function) else function
    if not isinstance(inner, types.FunctionType):
        return inner
    code = vars(inner).get("_original_code", inner.__code__)
    about = inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__
    bare = types.FunctionType(code, *about)
    bare.__kwdefaults__ = inner.__kwdefaults__
    return bare


def _score_mod(
    functions: tuple[Callable[..., Any], Callable[..., Any] | None],
    scalars: tuple[tuple[str, Any], ...],
    count: int,
    packed: tuple[bool, ...] | None,
) -> ScoreMod:
    """Return a `ScoreMod` without tensors. functions: (score_mod, score_mod_bwd). count: of
    aux_tensors. packed: which sides have offsets behind them, None without packed sequences, empty
    where there is no room for offsets."""
    score_mod, score_mod_bwd = functions

    def given(place: Any, tensors: tuple[Any, ...]) -> dict[str, Any]:
        found = {
            "q_idx": _vector(place.query, Int32),
            "kv_idx": _vector(place.key, Int32),
            "seqlen_info": _lengths(place, tensors[count:], packed),
            "aux_tensors": list(tensors[:count]),
        }
        return {**found, "aux_scalars": _made(scalars)} if scalars else found

    def function(score: Any, place: Any, tensors: tuple[Any, ...]) -> Any:
        where = _vector(place.batch, Int32), _vector(place.head, Int32)
        return _scored(score_mod, _vector(score, Float32), *where, **given(place, tensors))

    def slope(score: Any, place: Any, tensors: tuple[Any, ...]) -> Any:
        if score_mod_bwd is None:
            raise ValueError(
                "gradients are requested with score_mod and score_mod_bwd=None; accepted: its "
                "derivative as score_mod_bwd, too"
            )
        where = _vector(place.batch, Int32), _vector(place.head, Int32)
        values = _vector(1.0, Float32), _vector(score, Float32), *where
        return _scored(score_mod_bwd, *values, **given(place, tensors))

    function.__name__ = getattr(score_mod, "__name__", "score_mod")
    return ScoreMod.of(function, slope)


def _scored(function: Callable[..., Any], *values: Any, **given: Any) -> Any:
    """Return the result of a score_mod or its derivative. Raises NotImplementedError where it reads
    offsets that kernels do not get."""
    try:
        return _first(function(*values, **given))
    except AttributeError as error:
        if error.name not in ("offset_q", "offset_k"):
            raise
        raise NotImplementedError(_NO_OFFSETS) from error


def translate_mask_mod(
    mask_mod: Callable[..., Any], aux: tuple[Any, Any], lengths: tuple[int, int], device: Any
) -> MaskMod:
    """Return a mask_mod of flash-attn-4 as one of ours.

    aux: (aux_tensors, aux_scalars). lengths: (seqlen_q, seqlen_k) of the call. They are in a tensor
    on `device` if aux_tensors leave room for one, else compiled in. A mask_mod with `__vec_size__`
    n above 1 is called for n keys at once and returns their bits. Raises as `translate_score_mod`.
    """
    _check("mask_mod", mask_mod)
    tensors, scalars = _tensors_of(aux[0]), _scalars_of(aux[1])
    has_room = len(tensors) < MOST_TENSORS
    fixed = None if has_room else tuple(map(int, lengths))
    translated = _mask_mods((mask_mod,), scalars, len(tensors), fixed)
    if has_room:
        tensors = (*tensors, _length_tensor(lengths, device))
    return translated.with_tensors(tensors)


def _mask_mod(
    functions: tuple[Callable[..., Any]],
    scalars: tuple[tuple[str, Any], ...],
    count: int,
    fixed: tuple[int, int] | None,
) -> MaskMod:
    """Return a `MaskMod` without tensors; fixed: lengths that are compiled in."""
    (mask_mod,) = functions
    size = getattr(mask_mod, "__vec_size__", 1)

    def function(batch: Any, head: Any, query: Any, key: Any, tensors: tuple[Any, ...]) -> Any:
        found = tensors[count] if fixed is None else fixed
        info = SequenceLengths(Int32(found[0]), Int32(found[1]), Int32(0), Int32(0))
        given = _vector(batch, Int32), _vector(head, Int32), _vector(query, Int32)
        more = (_made(scalars),) if scalars else ()
        first = key - key % size
        seen = mask_mod(*given, _range(first, size), info, list(tensors[:count]) or None, *more)
        return _first(seen) if size == 1 else _bit_of(seen, key - first)

    function.__name__ = getattr(mask_mod, "__name__", "mask_mod")
    return MaskMod.of(function)


_score_mods, _mask_mods = _Translations(_score_mod), _Translations(_mask_mod)


@lru_cache(maxsize=256)
def _length_tensor(lengths: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return lengths for all later calls, whatever mode this one runs in."""
    return made_to_keep(lambda: torch.tensor(lengths, dtype=torch.int32, device=device), device)


def _check(name: str, function: Any) -> None:
    if not callable(function):
        raise TypeError(f"{name} is {type(function).__name__}; accepted: a function, or None")


def _tensors_of(aux_tensors: Any) -> tuple[torch.Tensor, ...]:
    if not isinstance(aux_tensors, (list, tuple, type(None))):
        raise TypeError(
            f"aux_tensors is {shown(aux_tensors)}; accepted: a list or a tuple of tensors, or None"
        )
    return tuple(
        tensor.to(COPIED[tensor.dtype])
        if isinstance(tensor, torch.Tensor) and tensor.dtype in COPIED
        else tensor
        for tensor in aux_tensors or ()
    )


def _scalars_of(aux_scalars: Any) -> tuple[tuple[str, Any], ...]:
    """Return aux_scalars as (name of a type of CuTe DSL, Python number)."""
    scalars = []
    for scalar in aux_scalars or ():
        value = plain(getattr(scalar, "value", scalar))
        kind = next((kind for kind in _TYPES if isinstance(value, kind)), None)
        if kind is None:
            raise TypeError(
                f"aux_scalars holds {type(scalar).__name__}; accepted: numbers of Python, of NumPy "
                "or of CuTe DSL"
            )
        named = type(scalar).__name__
        is_typed = getattr(cutlass, named, None) is type(scalar)
        scalars.append((named if is_typed else _TYPES[kind], kind(value)))
    return tuple(scalars)


#: A bool is an int, too.
_TYPES = {bool: "Boolean", int: "Int32", float: "Float32"}


def _made(scalars: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
    return tuple(getattr(cutlass, name)(value) for name, value in scalars)


def _vector(value: Any, dtype: Any) -> Any:
    found = cute.make_rmem_tensor(1, dtype)
    found[0] = dtype(value)
    return found.load()


def _range(first: Any, size: int) -> Any:
    """Return a vector of numbers from the first one on."""
    found = cute.make_rmem_tensor(size, Int32)
    for i in range(size):
        found[i] = Int32(first + i)
    return found.load()


def _first(value: Any) -> Any:
    """Return the value of a vector of one; other values as they are."""
    return value[0] if isinstance(value, cute.TensorSSA) else value


def _bit_of(words: Any, number: Any) -> Any:
    word = Uint32(words[0])
    for i in range(1, cute.size(words.shape)):
        word = cutlass.select_(number >= i * WORD, Uint32(words[i]), word)
    return Boolean((word >> Uint32(number % WORD)) & Uint32(1))


def _lengths(place: Any, begins: tuple[Any, ...], packed: tuple[bool, ...] | None) -> Any:
    """Return the `seqlen_info` of a sequence. begins: offsets. packed: as of `_score_mod`."""
    of_q = of_k = Int32(0)
    if packed is not None and not packed:
        return LengthsAlone(place.seqlen_q, place.seqlen_k)
    if packed is not None:
        of_q = begins[0][place.batch] if packed[0] else of_q
        of_k = begins[-1][place.batch] if packed[1] else of_k
    return SequenceLengths(place.seqlen_q, place.seqlen_k, of_q, of_k)


def translate_blocks(
    blocks: Any, lengths: tuple[int, int], device: torch.device, has_mask_mod: bool, window: Window
) -> TileMask:
    """Return the mask of a call with block_sparse_tensors, or with a mask_mod alone.

    blocks: block_sparse_tensors, or None. lengths: (seqlen_q, seqlen_k). With a mask_mod the mask
    has no bits; without one all keys of a listed block are seen, within the window (left, right).

    Raises NotImplementedError for blocks of packed sequences and for a block_size that is no pair
    of multiples of 128.
    """
    if blocks is None:
        tiles = tuple(map(count_mask_tiles, lengths))
        kinds = torch.full((1, 1, *tiles), PARTIAL, dtype=torch.int8, device=device)
        return TileMask.of_kinds(lengths, kinds)
    kinds = _kinds(blocks, lengths)
    if has_mask_mod:
        return TileMask.of_kinds(lengths, kinds)
    if window == (None, None):
        kinds = torch.where(kinds == PARTIAL, WHOLE, kinds)
    else:
        kinds = kinds.clamp(max=PARTIAL)

    def evaluate(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return seen_in_window(key - query - (lengths[1] - lengths[0]), window)

    return TileMask.of(lengths, kinds.to(torch.int8), evaluate)


def _kinds(blocks: Any, lengths: tuple[int, int]) -> torch.Tensor:
    for name in ("cu_total_m_blocks", "cu_block_idx_offsets"):
        if getattr(blocks, name, None) is not None:
            raise NotImplementedError(
                f"block_sparse_tensors has {name}, of packed sequences; accepted: None. Use "
                "block_mask of fa4_hd256.flash_attn_varlen_func"
            )
    size = blocks.block_size
    if size is None or len(size) != 2 or any(side % MASK_TILE for side in size):
        raise NotImplementedError(
            f"block_sparse_tensors has block_size {size}; accepted: a pair of multiples of "
            f"{MASK_TILE}, (queries, keys)"
        )
    full = blocks.full_block_cnt, blocks.full_block_idx
    return kinds_of_blocks(
        (blocks.mask_block_cnt, blocks.mask_block_idx),
        None if full[0] is None else full,
        tuple(size),
        lengths,
    )
