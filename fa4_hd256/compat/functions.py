"""Functions of flash-attn-4 inside our kernels: its score_mod, score_mod_bwd and mask_mod.

They take values in vectors (`cute.TensorSSA`), which hold one score here. A translated function is
made of one of theirs and named by what that means (`fa4_hd256.function_keys`).
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

from ..function_state import FunctionState
from ..kernels.functions.user_functions import MOST_TENSORS
from ..mask_mods import MaskMod
from ..run.kept_tensors import made_to_keep
from ..score_mods import ScoreMod

__all__ = ["SequenceLengths", "translate_mask_mod", "translate_score_mod"]

#: Dtypes that kernels read as copies of another one, which holds the same values.
COPIED = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.int32,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.int16: torch.int32,
}
#: Translations of each kind that are kept.
MOST_TRANSLATIONS = 128
#: Keys of a word that a vectorised mask_mod returns.
WORD = 32


class SequenceLengths(NamedTuple):
    """Lengths that functions read of `seqlen_info`, Int32, and the start of their rows in packed
    ones."""

    seqlen_q: Any
    seqlen_k: Any
    offset_q: Any
    offset_k: Any


def translate_score_mod(
    score_mod: Callable[..., Any],
    score_mod_bwd: Callable[..., Any] | None,
    aux: tuple[Any, Any],
    offsets: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> ScoreMod:
    """Return a score_mod of flash-attn-4 as one of ours.

    aux: (aux_tensors, aux_scalars) as given. offsets: cu_seqlens_q and cu_seqlens_k, for functions
    that read where a sequence begins. Raises TypeError for a score_mod that is no function, and as
    `ScoreMod` does for tensors that kernels cannot read.
    """
    _check("score_mod", score_mod)
    own, scalars = _tensors_of(aux[0]), _scalars_of(aux[1])
    begins = [each for each in offsets if each is not None]
    if begins and begins[0] is begins[-1]:
        begins = begins[:1]
    if len(own) + len(begins) > MOST_TENSORS:
        begins = []
    packed = tuple(each is not None for each in offsets) if begins else None
    found = _score_mods((score_mod, score_mod_bwd), scalars, len(own), packed)
    return found.with_tensors((*own, *begins))


class _Translations:
    """Translations of functions, until what they read changes: to make one takes milliseconds.

    make: of a tuple of functions, and of what else their translation depends on.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._kept: dict[tuple[Any, ...], tuple[FunctionState, Any]] = {}

    def __call__(self, functions: tuple[Any, ...], *facts: Any) -> Any:
        sizes = [getattr(function, "__vec_size__", 1) for function in functions]
        # As text: of equal numbers types differ, and signs of zeros.
        key = functions, repr((facts, sizes))
        own = tuple(map(_bare, functions))
        known = self._kept.get(key)
        if known is not None and known[0].is_of(own):
            return known[1]
        state = FunctionState.of(own)
        made = self._make(functions, *facts)
        with self._lock:
            self._kept.pop(key, None)
            if state is not None:
                while len(self._kept) >= MOST_TRANSLATIONS:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = state, made
        return made

    def forget(self) -> None:
        with self._lock:
            self._kept.clear()


def _bare(function: Any) -> Any:
    """Return a function as its user wrote it, without what CuTe DSL has made of it."""
    own = inspect.unwrap(function) if callable(function) else function
    if not isinstance(own, types.FunctionType):
        return own
    code = vars(own).get("_original_code", own.__code__)
    about = own.__globals__, own.__name__, own.__defaults__, own.__closure__
    found = types.FunctionType(code, *about)
    found.__kwdefaults__ = own.__kwdefaults__
    return found


def _score_mod(
    functions: tuple[Callable[..., Any], Callable[..., Any] | None],
    scalars: tuple[tuple[str, Any], ...],
    count: int,
    packed: tuple[bool, bool] | None,
) -> ScoreMod:
    """Return a `ScoreMod` without tensors.

    functions: (score_mod, score_mod_bwd). count: of aux_tensors. packed: which sides have offsets
    behind them.
    """
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
        return _first(score_mod(_vector(score, Float32), *where, **given(place, tensors)))

    def slope(score: Any, place: Any, tensors: tuple[Any, ...]) -> Any:
        if score_mod_bwd is None:
            raise ValueError(
                "gradients are requested with score_mod and score_mod_bwd=None; accepted: its "
                "derivative as score_mod_bwd, too"
            )
        where = _vector(place.batch, Int32), _vector(place.head, Int32)
        values = _vector(1.0, Float32), _vector(score, Float32), *where
        return _first(score_mod_bwd(*values, **given(place, tensors)))

    function.__name__ = getattr(score_mod, "__name__", "score_mod")
    return ScoreMod.of(function, slope)


def translate_mask_mod(
    mask_mod: Callable[..., Any], aux: tuple[Any, Any], lengths: tuple[int, int], device: Any
) -> MaskMod:
    """Return a mask_mod of flash-attn-4 as one of ours.

    aux: as of `translate_score_mod`. lengths: (seqlen_q, seqlen_k) of the call, in a tensor on
    `device` where aux_tensors leave room for one, else compiled in. A mask_mod with `__vec_size__`
    n above 1 is called for n keys at once and returns their bits. Raises as `translate_score_mod`.
    """
    _check("mask_mod", mask_mod)
    own, scalars = _tensors_of(aux[0]), _scalars_of(aux[1])
    has_room = len(own) < MOST_TENSORS
    fixed = None if has_room else tuple(map(int, lengths))
    found = _mask_mods((mask_mod,), scalars, len(own), fixed)
    return found.with_tensors((*own, _length_tensor(lengths, device)) if has_room else own)


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
    """Return lengths for all later calls, in whatever mode this one is."""
    return made_to_keep(lambda: torch.tensor(lengths, dtype=torch.int32, device=device), device)


def _check(name: str, function: Any) -> None:
    if not callable(function):
        raise TypeError(f"{name} is {type(function).__name__}; accepted: a function, or None")


def _tensors_of(aux_tensors: Any) -> tuple[torch.Tensor, ...]:
    """Return aux_tensors as kernels read them."""
    given = tuple(aux_tensors or ())
    return tuple(
        tensor.to(COPIED[tensor.dtype])
        if isinstance(tensor, torch.Tensor) and tensor.dtype in COPIED
        else tensor
        for tensor in given
    )


def _scalars_of(aux_scalars: Any) -> tuple[tuple[str, Any], ...]:
    """Return aux_scalars as (name of a type of CuTe DSL, Python number)."""
    found = []
    for scalar in aux_scalars or ():
        value = getattr(scalar, "value", scalar)
        if not isinstance(value, (bool, int, float)):
            raise TypeError(
                f"aux_scalars holds {type(scalar).__name__}; accepted: numbers of Python or of "
                "CuTe DSL"
            )
        named = type(scalar).__name__ if value is not scalar else _TYPES[type(value)]
        found.append((named, value))
    return tuple(found)


_TYPES = {bool: "Boolean", int: "Int32", float: "Float32"}


def _made(scalars: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
    return tuple(getattr(cutlass, name)(value) for name, value in scalars)


def _vector(value: Any, dtype: Any) -> Any:
    """Return a vector of one value."""
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
    """Return a bit of the words of a vectorised mask_mod."""
    word = Uint32(words[0])
    for i in range(1, cute.size(words.shape)):
        word = cutlass.select_(number >= i * WORD, Uint32(words[i]), word)
    return Boolean((word >> Uint32(number % WORD)) & Uint32(1))


def _lengths(place: Any, begins: tuple[Any, ...], packed: tuple[bool, bool] | None) -> Any:
    """Return what a function reads of a sequence. begins: its offsets; packed: which sides have."""
    of_q = of_k = Int32(0)
    if packed is not None:
        of_q = begins[0][place.batch] if packed[0] else of_q
        of_k = begins[-1][place.batch] if packed[1] else of_k
    return SequenceLengths(place.seqlen_q, place.seqlen_k, of_q, of_k)
