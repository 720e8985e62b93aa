"""Notice that a Python function may now give another result, since what it reads has changed.

NOTE [state of a function].  The state holds the code of a function, its defaults, what it closes
over, the globals that its code names, and the same of functions that these hold.  Of an object the
state holds the attributes whose names occur in that code: buffers of a module among them.  Numbers
and strings count by value, tensors by identity, memory, version and, on the CPU, contents.

There is no state of a function whose reads cannot be known: it calls `eval`, `getattr` or the like,
holds an object of an extension module, or reads a tensor of a GPU that was made under
inference_mode, whose changes PyTorch does not count.  Such a function is evaluated again at every
call.

PyTorch does not count writes of collectives, of kernels of the user, of `.data`, and of replays of
CUDA graphs.  On the CPU the contents show them; on a GPU nothing does.
"""

from __future__ import annotations

import abc
import builtins
import dis
import enum
import functools
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...private_torch import is_wrapped
from ..process import without_modes

#: Packages whose functions, classes and modules stay what they are.
_FIXED = ("torch", "cutlass", "math", "cmath", "builtins", "operator", "functools", "numpy")
_PLAIN = (bool, int, float, complex, str, bytes, range, type(None), type(Ellipsis))
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
#: Functions that are not written in Python.
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)
#: Functions of Python by which code reads what it does not name.
_UNNAMED = frozenset((
    "__import__", "compile", "eval", "exec", "getattr", "globals", "input", "locals", "next",
    "open", "vars",
))  # fmt: skip
#: Attributes that code reads of an object without naming them: by calls, indexing, comparisons.
_IMPLIED = frozenset((
    "__call__", "forward", "__getitem__", "__contains__", "__len__", "__iter__", "__bool__",
    "__int__", "__float__", "__index__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
    *(f"__{side}{name}__" for side in ("", "r") for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
        "rshift",
    )),
    "__neg__", "__invert__", "__abs__",
))  # fmt: skip
#: Types of tensors whose changes are counted.
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class _UnknownError(Exception):
    """Reads of a function cannot be known."""


class TensorStates:
    """The state of some tensors: identity, memory, version and, on the CPU, contents. Of tensors of
    a GPU that were made under inference_mode no change is noticed."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._known = [
            None if tensor is None else (weakref.ref(tensor), _facts(tensor), _contents(tensor))
            for tensor in tensors
        ]

    def are_of(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        if len(tensors) != len(self._known):
            return False
        for known, tensor in zip(self._known, tensors, strict=True):
            if known is None or tensor is None:
                if known is not tensor:
                    return False
                continue
            reference, facts, contents = known
            if reference() is not tensor or facts != _facts(tensor):
                return False
            if contents is not None and not _holds(tensor, contents):
                return False
        return True


class FunctionState:
    """Everything that the results of a function depend on: NOTE [state of a function]."""

    def __init__(self, words: list[Any], tensors: list[torch.Tensor]) -> None:
        self._words, self._tensors = words, TensorStates(tensors)

    @classmethod
    def of(cls, function: Any) -> FunctionState | None:
        found = _read(function)
        return None if found is None else cls(*found)

    def is_of(self, function: Any) -> bool:
        found = _read(function)
        return found is not None and found[0] == self._words and self._tensors.are_of(found[1])


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _contents(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of what a tensor of the CPU holds, None of others."""
    if tensor.device.type != "cpu":
        return None
    with without_modes():
        return _bytes_of(tensor).clone()


def _holds(tensor: torch.Tensor, contents: torch.Tensor) -> bool:
    with without_modes():
        return torch.equal(contents, _bytes_of(tensor))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as bytes, so that NaN equals itself."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _read(function: Any) -> tuple[list[Any], list[torch.Tensor]] | None:
    """Return (words, tensors) of the state of a function, None where it cannot be known."""
    names = _IMPLIED
    try:
        while True:
            reader = _Reader(names)
            reader.read(function)
            # Code that was met later may name attributes of objects that were met before.
            if not reader.met_objects or reader.names == names:
                return reader.words, reader.tensors
            names = frozenset(reader.names)
    except (_UnknownError, RecursionError):
        return None


class _Reader:
    """Walks through values. names: of attributes that are read of objects."""

    def __init__(self, names: frozenset[str]) -> None:
        self.words: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.names, self.met_objects = set(names), False
        self._attributes = sorted(names)
        #: Place by identity; the values are held, so that no other one gets the same identity.
        self._met: dict[int, tuple[int, Any]] = {}

    def read(self, value: Any) -> None:
        """Add the state of a value."""
        if isinstance(value, _PLAIN):
            # Equal numbers may differ in type, and zeros in sign.
            self.words += (type(value), repr(value) if isinstance(value, float) else value)
        elif isinstance(value, (*_PLAIN_OF_TORCH, enum.Enum)) or _is_fixed(value):
            self.words.append(value)
        elif not self._is_met(value):
            self._read_new(value)

    def _is_met(self, value: Any) -> bool:
        count = len(self._met)
        place, _ = self._met.setdefault(id(value), (count, value))
        self.words.append(place)
        return place != count

    def _read_new(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._read_tensor(value)
        elif isinstance(value, types.FunctionType):
            self._read_function(value)
        elif isinstance(value, types.MethodType):
            self._read_all((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            self._read_all((value.func, value.args, value.keywords))
        elif isinstance(value, (tuple, list)):
            self._read_all(value)
        elif type(value) in (set, frozenset):
            self._read_all(sorted(value, key=repr))
        elif type(value) is dict:
            self._read_all((*value.keys(), *value.values()))
        else:
            self._read_object(value)

    def _read_all(self, values: Any) -> None:
        self.words.append(len(values))
        for value in values:
            self.read(value)

    def _read_tensor(self, tensor: torch.Tensor) -> None:
        is_counted = tensor.device.type == "cpu" or not tensor.is_inference()
        if (
            type(tensor) not in _TENSORS
            or tensor.layout is not torch.strided
            or is_wrapped(tensor)
            or not is_counted
        ):
            raise _UnknownError
        self.tensors.append(tensor)

    def _read_function(self, function: types.FunctionType) -> None:
        code = function.__code__
        names_read, names = _names_of(code)
        self.names |= names
        self.words.append(code)
        self.read(function.__defaults__)
        self.read(function.__kwdefaults__)
        self.read(vars(function))
        for cell in function.__closure__ or ():
            try:
                held_value = cell.cell_contents
            except ValueError:
                self.words.append("empty cell")
            else:
                self.read(held_value)
        for name in names_read:
            if name in function.__globals__:
                self.words.append(name)
                self.read(function.__globals__[name])
            elif name in _UNNAMED:
                raise _UnknownError

    def _read_object(self, value: Any) -> None:
        """Add attributes of an object, a module or a class whose names code has."""
        kind = type(value)
        if not isinstance(value, (types.ModuleType, type)) and not _is_of_python(value):
            raise _UnknownError
        self.met_objects = True
        self.words.append(kind.__qualname__)
        for name in self._attributes:
            for found in _attribute(value, name):
                self.words.append(name)
                self.read(found)


def _attribute(value: Any, name: str) -> Iterator[Any]:
    """Yield what may answer to a name of an object: its own value, and that of its class."""
    places = [getattr(value, "__dict__", {})]
    places += [places[0].get(group) or {} for group in ("_buffers", "_parameters", "_modules")]
    if isinstance(value, type):
        places += [vars(base) for base in value.__mro__[1:-1]]
    elif not isinstance(value, types.ModuleType):
        places += [vars(base) for base in type(value).__mro__[:-1]]
    for place in places:
        if name in place:
            found = place[name]
            if isinstance(found, (staticmethod, classmethod)):
                found = found.__func__
            elif isinstance(found, property):
                found = found.fget
            elif isinstance(found, types.MemberDescriptorType):  # of __slots__
                found = getattr(value, name, None)
            yield found
            return


def _is_of_python(value: Any) -> bool:
    """Return True for an object whose attributes are where `_attribute` looks."""
    for base in type(value).__mro__[:-1]:
        own = vars(base)
        if base is torch.nn.Module or base.__module__ in ("abc", "typing"):
            continue
        if not base.__flags__ & _OF_HEAP or type(base) not in (type, abc.ABCMeta):
            return False
        if own.keys() & {"__getattr__", "__getattribute__"}:
            return False
        if not hasattr(value, "__dict__") and "__slots__" not in own:
            return False
    return True


#: Flag of classes that Python code defines (Py_TPFLAGS_HEAPTYPE).
_OF_HEAP = 1 << 9


def _is_fixed(value: Any) -> bool:
    """Return True for what has no state: of Python, of PyTorch, and made by no other function."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _FIXED
    if isinstance(value, _BUILTIN):
        name = getattr(value, "__name__", "")
        if vars(builtins).get(name) is value and name in _UNNAMED:
            raise _UnknownError
        owner = getattr(value, "__self__", None)
        return owner is None or _is_fixed(owner)
    if isinstance(value, (type, types.FunctionType)):
        package = (value.__module__ or "").partition(".")[0]
        return package in _FIXED and "<" not in value.__qualname__
    return type(value).__module__.startswith("torch._ops")


@functools.lru_cache(1024)
def _names_of(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return (names of globals that code reads, all names in it); of functions inside, too."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    read = {i.argval for i in dis.get_instructions(code) if i.opname in loads}
    names = set(code.co_names)
    if any(i.opname == "IMPORT_NAME" for i in dis.get_instructions(code)):
        read.add("__import__")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_read, inner_names = _names_of(constant)
            read.update(inner_read)
            names |= inner_names
    return tuple(sorted(read)), frozenset(names)
