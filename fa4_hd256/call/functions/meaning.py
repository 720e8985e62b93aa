"""Say what functions of users mean, by which caches of compiled kernels know them.

NOTE [meaning of a function].  The meaning is that of its code, constants, defaults, attributes,
what it closes over, and the globals that it reads.  A key that `ScoreMod.of` derives is a digest of
it, and accepts what is sure to mean the same in another process.  A key of the user's own says
nothing, so caches add the meaning to it: there lists, tensors and objects count by their contents.
Where even that is not enough (an object of an extension module, an import inside the function)
kernels of the function are kept in the process alone.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import hashlib
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...kernels.functions.user_functions import FunctionKind
from ...package_name import canonical, loaded


class SelfDescribed:
    """Object that a function may hold and whose `text` says all that it computes."""

    @property
    def text(self) -> str:
        raise NotImplementedError


class UnnamedError(ValueError):
    """A function reads something that cannot be named by what it means."""


def digest_of(functions: Sequence[Any], *, contents: bool = False) -> str:
    """Return a digest of the meaning of functions, None for one that is not given. contents: count
    lists, tensors and objects by what they hold now. Raises UnnamedError for what another process
    could not tell."""
    digest = hashlib.sha256()
    for function in functions:
        for word in _Words(contents).of(function, ()):
            digest.update(f"{len(word)}:{word}".encode())
    return digest.hexdigest()[:32]


#: Meanings of functions by (argument, key): when their key was registered.
_noted: dict[tuple[str, str], str | None] = {}


def note_meaning(kind: FunctionKind, key: str, functions: Sequence[Any]) -> None:
    """Keep what functions mean as they get a key of the user's own. Raises ValueError for a key
    that was given to them when they meant something else."""
    meaning = _meaning(functions)
    if _noted.setdefault((kind.argument, key), meaning) != meaning:
        raise ValueError(
            f"the key {key!r} of a {kind.argument} names other functions already: what they read "
            f"has changed; accepted: a key for each, as {kind.title}.of derives it"
        )


def is_derived_of(functions: Sequence[Any], key: str) -> bool:
    with contextlib.suppress(UnnamedError):
        # Of a mask_mod alone, of a score_mod with its slope.
        return key.endswith((digest_of(functions[:1]), digest_of(functions)))
    return False


def mean_the_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True for functions that are, or certainly mean, the same."""
    if all(one is other for one, other in zip(some, others, strict=True)):
        return True
    meaning = _meaning(some)
    return meaning is not None and meaning == _meaning(others)


def described_meaning(kind: FunctionKind, key: str) -> tuple[str | None, bool]:
    """Return (what caches add to a key of functions, whether another process may know them by it);
    (None, True) where the key says all. Raises ValueError where functions have changed since they
    got a key of the user's own."""
    own = kind.users_key(key)
    functions = kind.functions_of(own)
    if all(function is None or _is_fixed(function) for function in functions):
        return None, True
    if is_derived_of(functions, own):
        return None, True
    meaning = _meaning(functions)
    if _noted.get((kind.argument, own), meaning) != meaning:
        raise ValueError(
            f"the {kind.argument} {own!r} has changed since its {kind.title} was made: its code, "
            "what it closes over or a global that it reads; accepted: one that stays as it was "
            f"then. Make a {kind.title} of another key"
        )
    return meaning, meaning is not None


def _meaning(functions: Sequence[Any]) -> str | None:
    """Return the digest with contents, None where there is none."""
    try:
        return digest_of(functions, contents=True)
    except (UnnamedError, RecursionError):
        return None


#: Packages whose functions, classes and modules mean the same wherever they have the same name: of
#: versions that a kernel's key has, or of Python.
_FIXED = (
    "cutlass",
    "math",
    "builtins",
    "operator",
    loaded("fa4_hd256.kernels"),
    loaded("fa4_hd256.softmax_emu"),
)
_PLAIN = (bool, int, float, complex, str, bytes, range, type(None), type(Ellipsis))
#: Attributes that CuTe DSL gives to a function that it wraps.
_OF_WRAPPERS = (
    "__pyir_",
    "__wrapped__",
    "_decorator_",
    "_dsl_",
    "_original_code",
    "_preprocess",
    "set_name_prefix",
)
#: Python's own functions by which a function reads what its code does not name.
_UNNAMED = frozenset((
    "__import__", "compile", "eval", "exec", "globals", "input", "locals", "open", "vars",
))  # fmt: skip


class _Words:
    """Words that say all of what a value means. contents: whether lists, tensors and objects count
    by what they hold, instead of being refused. In methods `inside` has the values of which a value
    is a part."""

    def __init__(self, contents: bool) -> None:
        self._contents = contents

    def of(self, value: Any, inside: tuple[Any, ...]) -> Iterator[str]:
        if isinstance(value, _PLAIN):
            yield f"{type(value).__name__} {value!r}"
        elif isinstance(value, (tuple, frozenset)):
            yield from self._of_parts(value, inside)
        elif isinstance(value, types.CodeType):
            yield from self._of_code(value, inside)
        elif _is_fixed(value):
            name = getattr(value, "__qualname__", "")
            home = canonical(str(getattr(value, "__module__", "")))
            yield f"{home} {name or canonical(value.__name__)}"
        elif any(outer is value for outer in inside):
            # Functions of the same code may be of other ones: of a factory that is called twice.
            yield f"itself {[outer is value for outer in inside].index(True)}"
        elif isinstance(_own(value), types.FunctionType):
            yield from self._of_function(value, inside)
        elif _is_named_tuple(value):
            yield f"named tuple {value.__name__}"
            yield from self.of((value._fields, *value._field_defaults.items()), inside)
        elif self._contents:
            yield from self._of_contents(value, (*inside, value))
        else:
            raise UnnamedError(
                f"a function reads {value!r:.80}, a {type(value).__name__}, which cannot be named "
                "by what it means; accepted: numbers, str, tuples, functions, and what CuTe DSL "
                "and math offer. Pass tensors as `tensors`, or give the function a key of your own"
            )

    def _of_parts(self, value: Any, inside: tuple[Any, ...]) -> Iterator[str]:
        is_sorted = isinstance(value, (set, frozenset))
        yield f"{type(value).__name__} of {len(value)}"
        for part in sorted(value, key=repr) if is_sorted else value:
            yield from self.of(part, inside)

    def _of_function(self, value: Any, inside: tuple[Any, ...]) -> Iterator[str]:
        function = _own(value)
        # One that is wrapped, as by cute.jit, is traced in another way.
        yield "function" if function is value else "wrapped function"
        if function is not value and function in inside:
            yield f"itself {inside.index(function)}"
            return
        # CuTe DSL replaces the code of a wrapped function when it traces it.
        code = vars(function).get("_original_code", function.__code__)
        inside = (*inside, function)
        yield from self._of_code(code, inside)
        yield from self.of(function.__defaults__, inside)
        named = function.__kwdefaults__ or {}
        yield from self.of(tuple(sorted(named.items())), inside)
        for held in {id(one): vars(one) for one in (function, value)}.values():
            own = {name: held[name] for name in held if not name.startswith(_OF_WRAPPERS)}
            yield from self.of(tuple(sorted(own.items())), inside)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield name
            try:
                held = cell.cell_contents
            except ValueError:
                raise UnnamedError(
                    f"a function reads {name!r}, which has no value yet; accepted: one that was "
                    "assigned before"
                ) from None
            yield from self._of_read(held, code, inside)
        for name in sorted(_globals_read(code)):
            # Others are Python's own, or there is no such name.
            if name in function.__globals__ or name in _UNNAMED:
                yield name
                found = function.__globals__.get(name, vars(builtins).get(name))
                yield from self._of_read(found, code, inside)

    def _of_read(self, value: Any, code: types.CodeType, inside: tuple[Any, ...]) -> Iterator[str]:
        """Words of what code reads by a name; of a user's module the attributes that it names."""
        if not isinstance(value, types.ModuleType) or _is_fixed(value):
            yield from self.of(value, inside)
            return
        yield f"module {canonical(value.__name__)}"
        for name in sorted(_attributes_read(code)):
            if hasattr(value, name):
                yield name
                yield from self._of_read(getattr(value, name), code, inside)

    def _of_code(self, code: types.CodeType, inside: tuple[Any, ...]) -> Iterator[str]:
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        caught = getattr(code, "co_exceptiontable", b"").hex()  # from Python 3.11 on
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        for module in _imports_of(code):
            if not any(_is_of(package, module) for package in _FIXED):
                raise UnnamedError(
                    f"a function imports {module!r} when it runs, which cannot be named by what it "
                    "means; accepted: an import outside of it, of numbers or functions, or a key "
                    "of your own"
                )
        yield f"code {counts} {code.co_code.hex()} {caught} {names}"
        for constant in code.co_consts:
            yield from self.of(constant, inside)

    def _of_contents(self, value: Any, inside: tuple[Any, ...]) -> Iterator[str]:
        """Words of what has no name. Raises UnnamedError for what keeps its state elsewhere."""
        kind = type(value)
        yield f"{canonical(kind.__module__)} {kind.__qualname__}"
        if isinstance(value, SelfDescribed):
            yield value.text
        elif isinstance(value, (list, set)):
            yield from self._of_parts(value, inside)
        elif isinstance(value, dict):
            yield from self.of(tuple(value.items()), inside)
        elif isinstance(value, types.MethodType):
            yield from self.of((value.__func__, value.__self__), inside)
        elif isinstance(value, functools.partial):
            yield from self.of((value.func, value.args, value.keywords), inside)
        elif kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            array = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(array).hexdigest()}"
        elif isinstance(value, type) and value.__flags__ & _OF_HEAP:
            own = (found for found in vars(value).items() if found[0] not in _OF_CLASSES)
            yield from self.of((value.__bases__, *sorted(own)), inside)
        elif isinstance(value, property):
            yield from self.of((value.fget,), inside)
        elif isinstance(value, (staticmethod, classmethod)):
            yield from self.of(value.__func__, inside)
        elif hasattr(value, "__dict__") and all(
            base.__flags__ & _OF_HEAP and type(base) is type for base in kind.__mro__[:-1]
        ):
            yield from self.of((kind, *sorted(vars(value).items())), inside)
        else:
            raise UnnamedError(f"a function reads {value!r:.80}, a {kind.__name__}")


#: Flag of classes that Python code defines (Py_TPFLAGS_HEAPTYPE).
_OF_HEAP = 1 << 9
#: Of a class what does not say how its objects compute.
_OF_CLASSES = frozenset(("__dict__", "__doc__", "__module__", "__weakref__"))


def _own(value: Any) -> Any:
    """Return the user's function of one that CuTe DSL wraps, as by cute.jit; else the value itself,
    since other wrappers do something of their own."""
    while hasattr(value, "__wrapped__") and _is_of(_FIXED[0], _home(value)):
        value = value.__wrapped__
    return value


def _home(value: Any) -> str:
    names = value.__globals__ if isinstance(value, types.FunctionType) else vars(type(value))
    return str(names.get("__name__" if isinstance(value, types.FunctionType) else "__module__", ""))


def _is_of(package: str, module: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _is_fixed(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        own = value.__name__
    elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        if "<" in value.__qualname__:  # made inside a function, perhaps of what that was given
            return False
        own = value.__module__ or ""
    else:
        return False
    if own == "builtins" and value.__name__ in _UNNAMED:
        return False
    return any(_is_of(package, own) for package in _FIXED)


class _Example(NamedTuple):
    """Any named tuple, for the names that every one has."""

    name: Any


def _is_named_tuple(value: Any) -> bool:
    """Return True for a class of named tuples that has nothing but its fields."""
    if not (isinstance(value, type) and value.__bases__ == (tuple,) and hasattr(value, "_fields")):
        return False
    return set(vars(value)) - set(value._fields) <= set(vars(_Example)) - {"name"}


def _imports_of(code: types.CodeType) -> Iterator[str]:
    found = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    for place, instruction in enumerate(found):
        if instruction.opname == "IMPORT_NAME":
            # Before it the level and the names are loaded.
            yield "." * found[place - 2].argval + instruction.argval


def _attributes_read(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_attributes_read, inner))


def _globals_read(code: types.CodeType) -> set[str]:
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    found = {i.argval for i in dis.get_instructions(code) if i.opname in loads}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return found.union(*map(_globals_read, inner))
