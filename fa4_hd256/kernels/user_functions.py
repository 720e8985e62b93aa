"""Functions that users write in CuTe DSL and kernels evaluate score by score: by which names a
process finds them, and what of them is compiled in.

NOTE [functions by key].  A problem class names such a function by a key, which a torch operator and
the caches can carry; `FunctionKind.functions_of` finds the functions of a key in this process,
where `FunctionKind.register` has put them.  Keys with a prefix of `FunctionKind.derive` name
functions that are made of others, in any process that knows these; they read one more tensor, the
last.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["FunctionClass", "FunctionKind", "Functions", "SelfDescribed"]

#: That such a function of the user's may read.
MOST_TENSORS = 4


class Functions(NamedTuple):
    """What a key names.  slope: of a function of scores its derivative, None where it is 1
    everywhere."""

    function: Callable[..., Any]
    slope: Callable[..., Any] | None = None


class SelfDescribed:
    """What a function may hold that says itself all that it computes."""

    @property
    def text(self) -> str:
        """All of that; of others that compute the same, the same."""
        raise NotImplementedError


@dataclass(frozen=True)
class FunctionClass:
    """What of such a function is compiled in.  key: of it.  tensors: dtype and dimensions of each
    that it reads, such as "float32 1"."""

    key: str
    tensors: tuple[str, ...] = ()


class FunctionKind:
    """What a function is for.

    argument: the name that calls have for it, "score_mod"; title: of the users' class.  arguments:
    of the function, in words.  tensors: names of those that it may read, and of one more where it
    is derived, in the order in which kernels get them.
    """

    def __init__(self, argument: str, title: str, arguments: str) -> None:
        self.argument, self.title, self.arguments = argument, title, arguments
        what = argument.removesuffix("_mod")
        self.tensors = tuple(f"{what}_tensor_{i}" for i in range(MOST_TENSORS + 1))
        self._known: dict[str, Functions] = {}
        self._derived: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {}

    def derive(
        self, prefix: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Let keys that begin with a prefix name what is made of the functions of the rest."""
        self._derived[prefix] = make

    def most_tensors(self, key: str) -> int:
        """That functions of a key may read."""
        return MOST_TENSORS + any(key.startswith(prefix) for prefix in self._derived)

    def register(self, key: str, functions: Functions) -> None:
        """Let kernels find functions by a key, which names them.

        Raises ValueError for a key that has other functions already.
        """
        known = self._known.get(key)
        if known is not None and [_code(f) for f in known] != [_code(f) for f in functions]:
            raise ValueError(
                f"the key {key!r} of a {self.argument} names other functions already; accepted: a "
                f"key for each, as {self.title}.of derives it"
            )
        self._known[key] = functions

    def functions_of(self, key: str) -> Functions:
        """Those of a key.  Raises ValueError for one that this process does not know."""
        for prefix, make in self._derived.items():
            if key.startswith(prefix):
                function, slope = self.functions_of(key.removeprefix(prefix))
                return Functions(make(function), None if slope is None else make(slope))
        if key not in self._known:
            raise ValueError(
                f"this process knows no {self.argument} {key!r}; make the {self.title} of this key "
                "first, as the process did whose call this was"
            )
        return self._known[key]


def _code(function: Any, inside: tuple[Any, ...] = ()) -> Any:
    """What tells functions apart that a user gave one key: code, constants, and what they hold.
    inside: of which functions it is held."""
    code = getattr(function, "__code__", None)
    if code is None or any(outer is function for outer in inside):
        return None
    held = (cell.cell_contents for cell in function.__closure__ or ())
    values = (*(function.__defaults__ or ()), *held)
    return _of_code(code), tuple(_of_value(value, (*inside, function)) for value in values)


def _of_code(code: types.CodeType) -> Any:
    inner = (_of_code(c) if isinstance(c, types.CodeType) else (type(c), c) for c in code.co_consts)
    return code.co_code, code.co_names, tuple(inner)


def _of_value(value: Any, inside: tuple[Any, ...]) -> Any:
    """Of plain values what they are, of functions their code, of others which they are."""
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return type(value), value
    if isinstance(value, SelfDescribed):
        return type(value), value.text
    return _code(value, inside) if hasattr(value, "__code__") else id(value)
