"""Keys of functions that users write in CuTe DSL, made of what these mean."""

from __future__ import annotations

import builtins
import dis
import hashlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from .call.checks import are_differentiated
from .call.function_tensors import check_tensors
from .kernels.user_functions import FunctionKind

__all__ = ["check_function", "key_of", "read_of"]


def check_function(kind: FunctionKind, key: Any, function: Any, tensors: Any) -> None:
    """What a user gives to make one. Raises TypeError for another kind; as `check_tensors`."""
    if not isinstance(key, str) or not key:
        raise TypeError(f"key of a {kind.title} is {key!r}; accepted: a str that is not empty")
    if not callable(function):
        raise TypeError(
            f"function of a {kind.title} is {type(function).__name__}; accepted: a function of "
            f"{kind.arguments}"
        )
    check_tensors(kind, tensors, key)


def read_of(kind: FunctionKind, given: Any) -> tuple[dict[str, torch.Tensor], str]:
    """What a function that is given to a call reads, as an operator has it, and its key. Raises
    ValueError for tensors that require gradients."""
    if are_differentiated(given.tensors):
        raise ValueError(
            f"a tensor of {kind.argument} requires gradients, and there are none to it; accepted: "
            "tensors that do not (tensor.detach()), or a call under torch.no_grad()"
        )
    return dict(zip(kind.tensors, given.tensors)), given.key


def key_of(kind: FunctionKind, *functions: Any) -> str:
    """A key of functions, None for one that is not given: of their code, constants, defaults, what
    they close over and the globals that they read.

    These may be numbers, str, None, tuples of such, other functions of Python, and what CuTe DSL,
    `math` and Python itself offer. Raises ValueError for anything else, whose meaning another
    process could not tell.
    """
    digest = hashlib.sha256()
    for given in functions:
        for word in _described(given, ()):
            digest.update(f"{len(word)}:{word}".encode())
    name = getattr(functions[0], "__name__", kind.argument)
    key = f"{name}-{digest.hexdigest()[:32]}"
    count = len(functions)
    kind.note_derived(key, lambda traced: key_of(kind, *traced[:count]))
    return key


#: Packages whose functions, classes and modules mean the same wherever they have the same name: of
#: versions that a kernel's key has, or of Python.
_FIXED = ("cutlass", "math", "builtins", "operator", "fa4_hd256.kernels",
          "fa4_hd256.softmax_emu")
_PLAIN = (bool, int, float, str, bytes, type(None), type(Ellipsis))
#: Attributes that CuTe DSL gives to a function that it wraps.
_OF_WRAPPERS = ("__wrapped__", "_decorator_", "_dsl_", "_preprocess_", "set_name_prefix")
#: Python's own functions by which a function reads what its code does not name.
_UNNAMED = frozenset(
    ("__import__", "compile", "eval", "exec", "globals", "input", "locals", "open", "vars")
)


def _described(value: Any, inside: tuple[types.FunctionType, ...]) -> Iterator[str]:
    """Words that say all of what a value means. inside: of which functions it is a part."""
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
    elif isinstance(_own(value), types.FunctionType):
        yield from _described_function(value, inside)
    else:
        raise ValueError(
            f"a function reads {value!r:.80}, a {type(value).__name__}, which cannot be named by "
            "what it means; accepted: numbers, str, tuples, functions, and what CuTe DSL and math "
            "offer. Pass tensors as `tensors`, or give the function a key of your own"
        )


def _own(value: Any) -> Any:
    """The user's function of one that CuTe DSL wraps, as by cute.jit; else the value itself, since
    other wrappers do something of their own."""
    while hasattr(value, "__wrapped__") and _is_of(_FIXED[0], _home(value)):
        value = value.__wrapped__
    return value


def _home(value: Any) -> str:
    """The module in which a function, or the class of another callable, was written."""
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


def _described_function(
    value: Any, inside: tuple[types.FunctionType, ...]
) -> Iterator[str]:
    function = _own(value)
    # One that is wrapped, as by cute.jit, is traced in another way.
    yield "function" if function is value else "wrapped function"
    code = function.__code__
    # Functions of the same code may be of other ones: of a factory that is called twice.
    for place, outer in enumerate(inside):
        if outer is function:
            yield f"itself {place}"
            return
    inside = (*inside, function)
    yield from _described_code(code, inside)
    yield from _described(function.__defaults__, inside)
    named = function.__kwdefaults__ or {}
    yield from _described(tuple(sorted(named.items())), inside)
    for held in {id(one): vars(one) for one in (function, value)}.values():
        own = {name: held[name] for name in held if not name.startswith(_OF_WRAPPERS)}
        yield from _described(tuple(sorted(own.items())), inside)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name
        try:
            held = cell.cell_contents
        except ValueError:
            raise ValueError(
                f"a function reads {name!r}, which has no value yet; accepted: one that was "
                "assigned before"
            ) from None
        yield from _described(held, inside)
    for name in sorted(_globals_read(code)):
        # Others are Python's own, or there is no such name.
        if name in function.__globals__ or name in _UNNAMED:
            yield name
            yield from _described(function.__globals__.get(name, vars(builtins).get(name)), inside)


def _globals_read(code: types.CodeType) -> set[str]:
    """Names of globals that a function reads, or one inside it."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    found = {i.argval for i in dis.get_instructions(code) if i.opname in loads}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return found.union(*map(_globals_read, inner))


def _described_code(
    code: types.CodeType, inside: tuple[types.FunctionType, ...]
) -> Iterator[str]:
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    caught = getattr(code, "co_exceptiontable", b"").hex()  # from Python 3.11 on
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    for module in (i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"):
        if not any(_is_of(package, module) for package in _FIXED):
            raise ValueError(
                f"a function imports {module!r} when it runs, which cannot be named by what it "
                "means; accepted: an import outside of it, of numbers or functions, or a key of "
                "your own"
            )
    yield f"code {counts} {code.co_code.hex()} {caught} {names}"
    for constant in code.co_consts:
        yield from _described(constant, inside)
