"""The types and markers of native routines: a small typed subset of Python.

A function decorated with `@native` is not run by Python. `compiler` turns its source into LLVM IR:
annotated parameters and result, local variables of one type each, integer and float arithmetic,
comparisons, `and`, `or`, `not`, conditional expressions, `if`, `while`, `for ... in range(...)`,
`break`, `continue`, `return`, pointers and fields of `ctypes` structures. Types never mix: a cast
is a call of the type, `u64(x)`; a literal takes the type of what it meets. Integer constants of the
module may be named.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar


@dataclass(frozen=True)
class Scalar:
    """A number: its LLVM type, bits and kind ("signed", "unsigned", "float" or "bool")."""

    llvm: str
    bits: int
    kind: str

    def __call__(self, value: Any) -> Any:
        raise TypeError("casts exist in native routines only")


if TYPE_CHECKING:
    # Types for type checkers: numbers mix for them, and what a pointer points to has any field. The
    # compiler of the routines is stricter.
    boolean: TypeAlias = bool
    u8: TypeAlias = int
    u16: TypeAlias = int
    u32: TypeAlias = int
    u64: TypeAlias = int
    i32: TypeAlias = int
    i64: TypeAlias = int
    f32: TypeAlias = float
else:
    boolean = Scalar("i1", 1, "bool")
    u8, u16, u32, u64 = (Scalar(f"i{bits}", bits, "unsigned") for bits in (8, 16, 32, 64))
    i32, i64 = (Scalar(f"i{bits}", bits, "signed") for bits in (32, 64))
    f32 = Scalar("float", 32, "float")

_BY_CTYPE: dict[Any, Any] = {
    ctypes.c_uint8: u8, ctypes.c_uint16: u16, ctypes.c_uint32: u32, ctypes.c_uint64: u64,
    ctypes.c_int32: i32, ctypes.c_int64: i64, ctypes.c_float: f32,
}  # fmt: skip


@dataclass(frozen=True)
class Pointer:
    """Address of one or more values: `target` is a Scalar, Pointer, or ctypes structure."""

    target: Any

    @property
    def llvm(self) -> str:
        return "ptr"

    @property
    def size(self) -> int:
        """Bytes from one element to the next."""
        if isinstance(self.target, Scalar):
            return max(self.target.bits // 8, 1)
        return 8 if isinstance(self.target, Pointer) else ctypes.sizeof(self.target)


class _PointerTo:
    """`ptr[T]` is the type, `ptr[T](x)` in a routine the cast of a pointer or u64 to it."""

    def __getitem__(self, target: Any) -> Pointer:
        return Pointer(target)


if TYPE_CHECKING:
    _Target = TypeVar("_Target")

    class ptr(Generic[_Target]):
        def __init__(self, address: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...
        def __getitem__(self, index: Any) -> Any: ...
        def __setitem__(self, index: Any, value: Any) -> None: ...
        def __add__(self, elements: Any) -> ptr[_Target]: ...
        def __sub__(self, elements: Any) -> ptr[_Target]: ...
else:
    ptr = _PointerTo()


@dataclass(frozen=True)
class Signature:
    """Type of a function behind a pointer, for `invoke`; result None for none."""

    result: Any
    parameters: tuple[Any, ...]


def field_type(structure: type[ctypes.Structure], name: str) -> tuple[int, Any, bool]:
    """Return (offset, type, whether it lies in place) of a field.

    Fields that are pointers are c_uint64 and named in the structure's `pointers`, with the target
    type or a function that returns it. Arrays and structures in place give their address.
    """
    ctypes_of: dict[str, Any] = {field[0]: field[1] for field in structure._fields_}
    ctype = ctypes_of[name]
    offset = getattr(structure, name).offset
    pointers = getattr(structure, "pointers", {})
    if name in pointers:
        target = pointers[name]
        is_type = isinstance(target, (Scalar, Pointer, type))
        return offset, Pointer(target if is_type else target()), False
    if ctype in _BY_CTYPE:
        return offset, _BY_CTYPE[ctype], False
    if issubclass(ctype, ctypes.Array):
        element = ctype._type_
        return offset, Pointer(_BY_CTYPE.get(element, element)), True
    return offset, Pointer(ctype), True


@dataclass(frozen=True)
class Native:
    """A native routine: its Python source and the symbol of its code."""

    function: Callable

    @property
    def name(self) -> str:
        return self.function.__name__

    def __call__(self, *arguments: Any) -> Any:
        raise TypeError(f"{self.name} is compiled; call its code by address")


def native(function: Callable) -> Native:
    """Decorator of native routines."""
    return Native(function)


@dataclass(frozen=True)
class External:
    """A routine written in LLVM IR elsewhere in the same module."""

    name: str
    result: Any
    parameters: tuple[Any, ...]

    def __call__(self, *arguments: Any) -> Any:
        raise TypeError(f"{self.name} is compiled; call its code by address")


# Known to the compiler by name; here for readers and linters.


def _only_native(*arguments: Any) -> Any:
    raise TypeError("this exists in native routines only")


#: popcount(x), trailing_zeros(x): of an unsigned integer, in its type.
popcount = trailing_zeros = _only_native
#: copy(target, source, bytes: u64) of memory that does not overlap; fill(target, byte: u8, bytes).
copy = fill = _only_native
#: stack(T, count): address of `count` values in the routine's frame, not initialised.
stack = _only_native
#: invoke(signature, address, *arguments): call a function by address.
invoke = _only_native
#: cycles(): a clock of the processor, u64, in ticks of unknown length.
cycles = _only_native
#: bits_of(f32 or u32): the same bits as the other type; half_to_float(u16): exact widening.
bits_of = half_to_float = _only_native
#: widen_bf16(target: ptr[f32], source: ptr[u16]) and widen_f16: exact widening of 8 elements.
widen_bf16 = widen_f16 = _only_native
