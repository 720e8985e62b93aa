"""Functions that users write in CuTe DSL and kernels evaluate score by score: by which names a
process finds them, and what of them is compiled in.

NOTE [functions by key].  A problem class names such a function by a key, which a torch operator and
the caches can carry; `FunctionKind.functions_of` finds the functions of a key in this process,
where `FunctionKind.register` has put them.  Keys with a prefix of `FunctionKind.derive` name
functions that are made of others, in any process that knows these; they read one more tensor, the
last, and are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from .kernel_functions import Functions, Scored

#: Tensors that such a function of the user's may read.
MOST_TENSORS = 4


class FunctionKind:
    """Kind of a user's function: score_mod or mask_mod.

    argument: the name that calls have for it, "score_mod"; title: of the users' class.  arguments:
    of the function, in words.  tensors: names of those that it may read, and of one more where it
    is derived, in the order in which kernels get them.
    """

    def __init__(self, argument: str, title: str, arguments: str) -> None:
        self.argument, self.title, self.arguments = argument, title, arguments
        what = argument.removesuffix("_mod")
        self.tensors = tuple(f"{what}_tensor_{i}" for i in range(MOST_TENSORS + 1))
        self._known: dict[str, Functions] = {}
        self._keys: dict[str, Callable[[Functions], str]] = {}
        self._derived: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {}

    def derive(self, prefix: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let keys that begin with a prefix name what is made of the functions of the rest."""
        self._derived[prefix] = make

    def users_key(self, key: str) -> str:
        """Return the key of the user's functions behind a key, perhaps derived."""
        prefix = self._prefix_of(key)
        return key if prefix is None else self.users_key(key.removeprefix(prefix))

    def most_tensors(self, key: str) -> int:
        """Return the most tensors that functions of a key may read: derived ones one more."""
        return MOST_TENSORS + (self._prefix_of(key) is not None)

    def known(self, key: str) -> Functions | None:
        """Return the functions that a key names so far, None where it names none. Raises ValueError
        for a key that would be of functions made of some that this process does not know."""
        is_made = self._prefix_of(key) is not None
        return self.functions_of(key) if is_made else self._known.get(key)

    def register(self, key: str, functions: Functions) -> None:
        """Let kernels find functions by a key (`call.functions.keys.register` checks it)."""
        if self._prefix_of(key) is None:
            self._known[key] = functions

    def note_derived(self, key: str, key_of: Callable[[Functions], str]) -> None:
        """A key was derived of functions. key_of: derives it again."""
        self._keys[key] = key_of

    def check_unchanged(self, key: str) -> None:
        """Functions that are about to be compiled are those that their key was derived of. Raises
        ValueError where what they close over, their defaults or globals changed since: caches would
        know what is compiled by another meaning."""
        key = self.users_key(key)
        if key in self._keys and self._keys[key](self.functions_of(key)) != key:
            raise ValueError(
                f"the {self.argument} {key!r} has changed since {self.title}.of was called: its "
                "defaults, what it closes over or a global that it reads; accepted: one that stays "
                f"as it was then. Call {self.title}.of again"
            )

    def _prefix_of(self, key: str) -> str | None:
        return next((prefix for prefix in self._derived if key.startswith(prefix)), None)

    def functions_of(self, key: str) -> Functions:
        prefix = self._prefix_of(key)
        if prefix is not None:
            make, (function, slope) = self._derived[prefix], self.functions_of(key[len(prefix) :])
            return Functions(make(function), None if slope is None else make(slope))
        if key not in self._known:
            raise ValueError(
                f"this process knows no {self.argument} {key!r}; make the {self.title} of this key "
                "first, as the process did whose call this was"
            )
        return self._known[key]


SCORE_MOD = FunctionKind("score_mod", "ScoreMod", "(score, place, tensors)")
MASK_MOD = FunctionKind("mask_mod", "MaskMod", "(batch, head, query, key, tensors)")
#: Kinds, and names of the tensors that their functions read, in the order in which kernels get
#: these.
FUNCTION_KINDS: tuple[FunctionKind, ...] = (SCORE_MOD, MASK_MOD)
FUNCTION_TENSORS = (*SCORE_MOD.tensors, *MASK_MOD.tensors)


def _alibi(score: Float32, place: Scored, tensors: tuple[cute.Tensor, ...]) -> Float32:
    """Less slope * |distance to the diagonal|; slopes of (heads,) or (batch, heads)."""
    slopes = tensors[0]
    which = place.head if cute.rank(slopes) == 1 else (place.batch, place.head)
    distance = Float32(place.query + place.seqlen_k - place.seqlen_q - place.key)
    return score - slopes[which] * cute.arch.fmax(distance, -distance)


#: The key of ALiBi (arXiv 2108.12409), as the alibi_slopes of flash-attention.
ALIBI = "alibi"
SCORE_MOD.register(ALIBI, Functions(_alibi))


def functions_in(problem_class: Any) -> tuple[Functions | None, ...]:
    """Return the functions of a problem class by `FUNCTION_KINDS`, None for none."""
    asked = ((kind, getattr(problem_class, kind.argument)) for kind in FUNCTION_KINDS)
    return tuple(None if one is None else kind.functions_of(one.key) for kind, one in asked)
