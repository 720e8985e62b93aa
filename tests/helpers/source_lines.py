"""Source lines, locations and types of traced kernels, looked up once.

For each operation that it traces, CuTe DSL looks up the frame of the user's code and its line,
makes a location of these, and wraps values and types: half of what tracing takes. The same
instruction of the same code has the same line, so each is looked up once; a value that is wrapped
needs no line. PTX and its line numbers stay as they are (`test_source_lines`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from fa4_hd256.run import tracing


def once_per_code(of_frame: Callable[[FrameType], Any]) -> Callable[[FrameType], Any]:
    """Return `of_frame`, called once for all frames of one code object."""
    # The key holds the code: the number of one that is gone may be that of another. Codes are not
    # keys by themselves, since equal ones may lie in different files.
    found: dict[int, tuple[CodeType, Any]] = {}

    @functools.wraps(of_frame)
    def look_up(frame: FrameType) -> Any:
        code = frame.f_code
        known = found.get(id(code))
        if known is None:
            known = found[id(code)] = code, of_frame(frame)
        return known[1]

    return look_up


def once_per_instruction(of_frame: Callable[[FrameType], Any]) -> Callable[[FrameType], Any]:
    """Return `of_frame`, called once for all frames that stand at one instruction."""
    lines_of = once_per_code(lambda frame: {})

    @functools.wraps(of_frame)
    def look_up(frame: FrameType) -> Any:
        lines, at = lines_of(frame), frame.f_lasti
        if at not in lines:
            lines[at] = of_frame(frame)
        return lines[at]

    return look_up


class OncePerContext:
    """A function called once for each argument while one MLIR context is current."""

    def __init__(self, function: Callable[[Any], Any], key: Callable[[Any], Any] | None) -> None:
        """key: what stands for an argument; None for the argument itself."""
        from cutlass._mlir import ir

        self.__wrapped__ = function
        self._contexts, self._key = ir.Context, key
        self._context: Any = None
        # Arguments are held: the number of one that is gone may be that of another.
        self._found: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, argument: Any) -> Any:
        context = self._contexts.current
        if context is not self._context:
            self.forget()
            self._context = context
        key = argument if self._key is None else self._key(argument)
        known = self._found.get(key)
        if known is None:
            known = self._found[key] = argument, self.__wrapped__(argument)
        return known[1]

    def forget(self) -> None:
        """Drop the results, and the context that they belong to."""
        self._found, self._context = {}, None


def _without_line(init: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of values without the look-up of a line, which constants alone use."""
    plain: Callable[..., None] = vars(init)["__wrapped__"]

    @functools.wraps(init)
    def construct(self: Any, value: Any, *arguments: Any, **named: Any) -> None:
        (init if isinstance(value, int) else plain)(self, value, *arguments, **named)

    return construct


#: What is replaced, by module and name in it, and by what; `__wrapped__` is the plain one.
REPLACED: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("cutlass._mlir_helpers.op", "_fast_frameinfo", once_per_instruction),
    ("cutlass._mlir_helpers.op", "_is_framework_stack_frame", once_per_code),
    ("cutlass._mlir_helpers.op", "_get_location_from_frame_info", lambda f: OncePerContext(f, id)),
    ("cutlass._mlir_helpers.arith", "ArithValue.__init__", _without_line),
    ("cutlass.base_dsl.typing", "Numeric.from_mlir_type", lambda f: OncePerContext(f, None)),
)


def place_of(module: str, name: str) -> tuple[Any, str]:
    """Return (module or class, name in it) of an entry of `REPLACED`."""
    home, _, name = name.rpartition(".")
    found = importlib.import_module(module)
    return (getattr(found, home) if home else found), name


@functools.cache
def look_up_once() -> bool:
    """Replace the look-ups in CuTe DSL. Return False for a version that has others."""
    places = [place_of(module, name) for module, name, _ in REPLACED]
    if not all(hasattr(home, name) for home, name in places):
        return False
    if not hasattr(places[3][0].__init__, "__wrapped__"):
        return False
    for (home, name), (_, _, quick) in zip(places, REPLACED, strict=True):
        setattr(home, name, quick(getattr(home, name)))
    return True


def forget() -> None:
    """Drop what belongs to the context of the last trace, which would stay alive."""
    for module, name, _ in REPLACED:
        home, name = place_of(module, name)
        if isinstance(found := getattr(home, name), OncePerContext):
            found.forget()


def trace_quickly() -> None:
    """Look up once in whatever is traced from now on. CuTe DSL is imported then, not now."""
    plain = tracing.targeting

    @contextlib.contextmanager
    def targeting(target: str) -> Iterator[None]:
        look_up_once()
        try:
            with plain(target):
                yield
        finally:
            forget()

    tracing.targeting = targeting
