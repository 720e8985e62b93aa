"""Functions of scores for `score_mod=` of `flash_attn_func` and `flash_attn_varlen_func`.

A score_mod is written in CuTe DSL and compiled into the kernels, with its derivative where it has
one: see docs/score_mods.md. By name: `alibi`.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .call.checks import are_differentiated
from .call.score_tensors import check_tensors
from .kernels.score_change import (
    ALIBI,
    SCORE_TENSORS,
    Functions,
    Scored,
    functions_of,
    key_in_part,
    register,
)

__all__ = ["ScoreMod", "Scored", "alibi"]


@dataclass(frozen=True)
class ScoreMod:
    """A function of scores, with the tensors that it reads.

    function: (score, place, tensors) -> score, in CuTe DSL: a Float32, softmax_scale * q k; a
    `Scored`; a tuple of cute.Tensor, as many as `tensors`. What it returns goes into the mask and
    the softmax. slope: its derivative with respect to score, of the same arguments; None where that
    is 1 everywhere, since something is added. key: names both: what is compiled into a kernel, by
    which caches in memory and on disk know it; `of` derives one. tensors: up to four, of float32 or
    int32, of any shape; there are no gradients to them. Copies are made of those that are not
    contiguous, at every call.

    Raises TypeError or ValueError for other kinds, and for a key that names other functions.
    """

    function: Callable[..., Any]
    slope: Callable[..., Any] | None
    key: str
    tensors: tuple[torch.Tensor, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key:
            raise TypeError(f"key of a ScoreMod is {self.key!r}; accepted: a str that is not empty")
        for name, given in (("function", self.function), ("slope", self.slope)):
            if not callable(given) and (name == "function" or given is not None):
                raise TypeError(
                    f"{name} of a ScoreMod is {type(given).__name__}; accepted: a function of "
                    "(score, place, tensors)"
                )
        check_tensors(self.tensors, self.key)
        register(self.key, Functions(self.function, self.slope))

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        slope: Callable[..., Any] | None = None,
        tensors: tuple[torch.Tensor, ...] = (),
    ) -> ScoreMod:
        """The same with a key made of the functions: their code, constants, defaults, what they
        close over and the globals that they read.

        These may be numbers, str, None, tuples of such, other functions of Python, and what CuTe
        DSL, `math` and Python itself offer. Raises ValueError for anything else, whose meaning
        another process could not tell: give such a function a key of your own.
        """
        digest = hashlib.sha256()
        for given in (function, slope):
            for word in _described(given, ()):
                digest.update(f"{len(word)}:{word}".encode())
        name = getattr(function, "__name__", "score_mod")
        return cls(function, slope, f"{name}-{digest.hexdigest()[:32]}", tensors)


def read_by(score_mod: Any) -> tuple[dict[str, torch.Tensor], str]:
    """What a score_mod that is given to a call reads, as an operator has it, and its key.

    Raises TypeError for another kind, ValueError for tensors that require gradients.
    """
    if not isinstance(score_mod, ScoreMod):
        raise TypeError(
            f"score_mod is {type(score_mod).__name__}; accepted: a ScoreMod of "
            "fa4_hd256.score_mods, such as alibi(slopes)"
        )
    tensors = score_mod.tensors
    if are_differentiated(tensors):
        raise ValueError(
            "a tensor of score_mod requires gradients, and there are none to it; accepted: "
            "tensors that do not (tensor.detach()), or a call under torch.no_grad()"
        )
    return dict(zip(SCORE_TENSORS, tensors)), score_mod.key


def in_part(score_mod: ScoreMod, origins: torch.Tensor) -> ScoreMod:
    """The same in a call that is a part of another one, with the places of that (`key_in_part`).

    origins: int32 fields of `ScoreOrigin`: where the part lies, (6,), or of each of its sequences,
    (sequences, 6).
    """
    key = key_in_part(score_mod.key)
    return ScoreMod(*functions_of(key), key, (*score_mod.tensors, origins))


def alibi(slopes: torch.Tensor) -> ScoreMod:
    """ALiBi (arXiv 2108.12409): -slope * |query + seqlen_k - seqlen_q - key| is added to a score,
    as flash-attention's alibi_slopes do.

    slopes: (heads,) or (batch, heads) float32, of the query heads. Raises TypeError for another
    dtype, ValueError for other dimensions.
    """
    if not isinstance(slopes, torch.Tensor) or slopes.dtype != torch.float32:
        kind = slopes.dtype if isinstance(slopes, torch.Tensor) else type(slopes).__name__
        raise TypeError(f"slopes is {kind}; accepted: a float32 tensor")
    if slopes.ndim not in (1, 2):
        raise ValueError(
            f"slopes has shape {tuple(slopes.shape)}; accepted: (heads,) or (batch, heads)"
        )
    return ScoreMod(*functions_of(ALIBI), ALIBI, (slopes,))


#: Packages whose functions, classes and modules mean the same wherever they have the same name: of
#: versions that a kernel's key has, or of Python.
_FIXED = ("cutlass", "math", "builtins", "operator", "fa4_hd256.kernels", "softmax_emu")
_PLAIN = (bool, int, float, str, bytes, type(None), type(Ellipsis))


def _described(value: Any, inside: tuple[types.CodeType, ...]) -> Iterator[str]:
    """Words that say all of what a value means. inside: of which functions it is."""
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, (tuple, frozenset)):
        parts = value if isinstance(value, tuple) else sorted(value, key=repr)
        yield f"{type(value).__name__} of {len(parts)}"
        for part in parts:
            yield from _described(part, inside)
    elif isinstance(value, types.CodeType):
        yield from _described_code(value, inside)
    elif _is_fixed(value):
        name = getattr(value, "__qualname__", "")
        yield f"{getattr(value, '__module__', '')} {name or value.__name__}"
    elif isinstance(inspect.unwrap(value) if callable(value) else value, types.FunctionType):
        yield from _described_function(value, inside)
    else:
        raise ValueError(
            f"a score_mod reads {value!r:.80}, a {type(value).__name__}, which cannot be named by "
            "what it means; accepted: numbers, str, tuples, functions, and what CuTe DSL and math "
            "offer. Pass tensors as `tensors`, or make a ScoreMod with a key of your own"
        )


def _is_fixed(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        own = value.__name__
    elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        if "<" in value.__qualname__:  # made inside a function, perhaps of what that was given
            return False
        own = value.__module__ or ""
    else:
        return False
    return any(own == package or own.startswith(f"{package}.") for package in _FIXED)


def _described_function(value: Any, inside: tuple[types.CodeType, ...]) -> Iterator[str]:
    function = inspect.unwrap(value)
    # One that is wrapped, as by cute.jit, is traced in another way.
    yield "function" if function is value else "wrapped function"
    code = function.__code__
    if code in inside:
        yield f"itself {inside.index(code)}"
        return
    inside = (*inside, code)
    yield from _described_code(code, inside)
    yield from _described(function.__defaults__, inside)
    named = function.__kwdefaults__ or {}
    yield from _described(tuple(sorted(named.items())), inside)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name
        yield from _described(cell.cell_contents, inside)
    for name in sorted(_globals_read(code)):
        # Others are Python's own, or there is no such name.
        if name in function.__globals__:
            yield name
            yield from _described(function.__globals__[name], inside)


def _globals_read(code: types.CodeType) -> set[str]:
    """Names of globals that a function reads, or one inside it."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    found = {i.argval for i in dis.get_instructions(code) if i.opname in loads}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return found.union(*map(_globals_read, inner))


def _described_code(code: types.CodeType, inside: tuple[types.CodeType, ...]) -> Iterator[str]:
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    caught = getattr(code, "co_exceptiontable", b"").hex()  # from Python 3.11 on
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    yield f"code {counts} {code.co_code.hex()} {caught} {names}"
    for constant in code.co_consts:
        yield from _described(constant, inside)
