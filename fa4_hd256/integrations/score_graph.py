"""FlexAttention's score_mods and mask_mods as functions of the kernels.

PyTorch traces such a function, and its derivative, to ATen operators on single numbers; kernels
evaluate these by the rows of `OPERATIONS`, in float32, int32 and bool.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from ..call.functions.meaning import SelfDescribed

#: Kind of a function, and its name where it is refused.
SCORE, MASK = "score_mod", "mask_mod"


class TranslationError(NotImplementedError):
    """Refusal of a function that kernels cannot evaluate."""


#: Types of Python numbers -> the kernels' types.
_KINDS: dict[type, Any] = {bool: Boolean, int: Int32, float: Float32}


@dataclass(frozen=True)
class GraphOperation:
    """Implementation of an ATen operator in kernels.

    emit: computes the result from operands, numbers of the DSL or of Python, and keywords.
    operands: the type to which operands are converted: that of the "result"; the same for all but
    the first operand ("branches"); or the "common" type of all operands.
    """

    emit: Callable[..., Any]
    operands: str = "result"


def _select(condition: Any, then: Any, otherwise: Any) -> Any:
    if isinstance(condition, bool):
        return then if condition else otherwise
    kind = next((type(x) for x in (then, otherwise) if isinstance(x, cutlass.Numeric)), None)
    kind = kind or _KINDS[type(then)]
    return kind(cutlass.select_(condition, kind(then), kind(otherwise)))


def _minimum(a: Any, b: Any) -> Any:
    if isinstance(a, Float32) or isinstance(b, Float32):
        return cute.arch.fmin(Float32(a), Float32(b), nan=True)
    return cutlass.min(a, b)


def _maximum(a: Any, b: Any) -> Any:
    if isinstance(a, Float32) or isinstance(b, Float32):
        return cute.arch.fmax(Float32(a), Float32(b), nan=True)
    return cutlass.max(a, b)


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else _maximum(x, low)
    return x if high is None else _minimum(x, high)


def _absolute(x: Any) -> Any:
    return _maximum(x, -x)


def _sign(x: Any) -> Any:
    one, zero = type(x)(1), type(x)(0)
    return _select(x > zero, one, _select(x < zero, -one, zero))


def _floor_quotient(a: Any, b: Any) -> Any:
    """Return a / b rounded down, for integers too."""
    if isinstance(a, Float32) or isinstance(b, Float32):
        return cute.math.floor(Float32(a) / Float32(b))
    a, b = Int32(a), Int32(b)
    quotient = _towards_zero(a, b)
    is_below = (quotient * b != a) & ((a < 0) != (b < 0))
    return quotient - _select(is_below, Int32(1), Int32(0))


def _towards_zero(a: Int32, b: Int32) -> Int32:
    magnitude = _absolute(a) // _absolute(b)
    return _select((a < 0) != (b < 0), -magnitude, magnitude)


def _divide(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "floor":
        return _floor_quotient(a, b)
    if rounding_mode == "trunc":
        if isinstance(a, Float32) or isinstance(b, Float32):
            return cute.math.trunc(Float32(a) / Float32(b))
        return _towards_zero(Int32(a), Int32(b))
    return Float32(a) / Float32(b)


def _remainder(a: Any, b: Any) -> Any:
    return a - _floor_quotient(a, b) * b


def _shifted_left(a: Any, b: Any) -> Int32:
    """Shift left; 0 where b is no bit number, for which the instruction's result is undefined."""
    a, b = Int32(a), Int32(b)
    return _select((b >= 0) & (b < _BITS), a << (b & (_BITS - 1)), Int32(0))


def _shifted_right(a: Any, b: Any) -> Int32:
    """Shift right with the sign of a; the sign alone where b is no bit number."""
    a, b = Int32(a), Int32(b)
    return a >> _select((b >= 0) & (b < _BITS), b, Int32(_BITS - 1))


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, (int, float)) and exponent == int(exponent) and 0 < exponent <= 4:
        product = base
        for _ in range(int(exponent) - 1):
            product = product * base
        return product
    return cute.math.pow(Float32(base), Float32(exponent))


def _sigmoid(x: Float32) -> Float32:
    return Float32(1.0) / (Float32(1.0) + cute.math.exp(-x))


#: 2 pi in two parts. The first has so few bits that its multiples below 2^16 are exact.
_TURN = 6.28125, 2 * math.pi - 6.28125


def _of_angle(function: Callable[..., Any]) -> Callable[[Float32], Float32]:
    """Return sin or cos by the hardware's approximation, within a few 2^-20 for angles up to 2^16:
    it is that exact from -pi to pi, so whole turns go first. Exact ones need a stack."""

    def computed(x: Float32) -> Float32:
        turns = cute.math.floor(x * Float32(0.5 / math.pi) + Float32(0.5))
        reduced = x - turns * Float32(_TURN[0]) - turns * Float32(_TURN[1])
        return Float32(function(reduced, approx=True))

    return computed


def _negated(x: Any) -> Any:
    return _select(x, Boolean(False), Boolean(True))


def _first(x: Any, *_: Any, **__: Any) -> Any:
    return x


#: Bits of an Int32.
_BITS = 32

_LOGICAL_AND, _LOGICAL_OR = GraphOperation(operator.and_), GraphOperation(operator.or_)
_LOGICAL_XOR = GraphOperation(operator.xor)
_SHIFT_LEFT, _SHIFT_RIGHT = GraphOperation(_shifted_left), GraphOperation(_shifted_right)
_SAME = GraphOperation(_first)

#: Operators by name. An operator without a row here is refused.
OPERATIONS: dict[str, GraphOperation] = {
    "add": GraphOperation(lambda a, b, alpha=1: a + b * alpha if alpha != 1 else a + b),
    "sub": GraphOperation(lambda a, b, alpha=1: a - b * alpha if alpha != 1 else a - b),
    "mul": GraphOperation(operator.mul),
    "div": GraphOperation(_divide, "common"),
    "remainder": GraphOperation(_remainder),
    "neg": GraphOperation(operator.neg),
    "abs": GraphOperation(_absolute),
    "sign": GraphOperation(_sign),
    "minimum": GraphOperation(_minimum),
    "maximum": GraphOperation(_maximum),
    "clamp": GraphOperation(_clamp),
    "relu": GraphOperation(lambda x: _maximum(x, type(x)(0))),
    "reciprocal": GraphOperation(lambda x: Float32(1.0) / x),
    "pow": GraphOperation(_power),
    "sqrt": GraphOperation(cute.math.sqrt),
    "rsqrt": GraphOperation(cute.math.rsqrt),
    "exp": GraphOperation(cute.math.exp),
    "exp2": GraphOperation(cute.math.exp2),
    "log": GraphOperation(cute.math.log),
    "log1p": GraphOperation(cute.math.log1p),
    "log2": GraphOperation(cute.math.log2),
    "sin": GraphOperation(_of_angle(cute.math.sin)),
    "cos": GraphOperation(_of_angle(cute.math.cos)),
    "tanh": GraphOperation(cute.math.tanh),
    "erf": GraphOperation(cute.math.erf),
    "sigmoid": GraphOperation(_sigmoid),
    "floor": GraphOperation(lambda x: cute.math.floor(x) if isinstance(x, Float32) else x),
    "ceil": GraphOperation(lambda x: cute.math.ceil(x) if isinstance(x, Float32) else x),
    "eq": GraphOperation(operator.eq, "common"),
    "ne": GraphOperation(operator.ne, "common"),
    "lt": GraphOperation(operator.lt, "common"),
    "le": GraphOperation(operator.le, "common"),
    "gt": GraphOperation(operator.gt, "common"),
    "ge": GraphOperation(operator.ge, "common"),
    "logical_and": _LOGICAL_AND,
    "logical_or": _LOGICAL_OR,
    "logical_xor": _LOGICAL_XOR,
    "logical_not": GraphOperation(_negated),
    "bitwise_and": _LOGICAL_AND,
    "bitwise_or": _LOGICAL_OR,
    "bitwise_xor": _LOGICAL_XOR,
    "bitwise_left_shift": _SHIFT_LEFT,
    "bitwise_right_shift": _SHIFT_RIGHT,
    "__lshift__": _SHIFT_LEFT,
    "__rshift__": _SHIFT_RIGHT,
    "bitwise_not": GraphOperation(lambda x: _negated(x) if isinstance(x, Boolean) else -x - 1),
    "where": GraphOperation(_select, "branches"),
    "_to_copy": _SAME,
    "alias": _SAME,
    "clone": _SAME,
}

#: Operators whose result is a number that does not depend on their operand's value.
_NUMBERS: dict[str, Callable[..., Any]] = {
    "full_like": lambda _, value, **__: value,
    "ones_like": lambda _, **__: 1,
    "zeros_like": lambda _, **__: 0,
    "scalar_tensor": lambda value, **_: value,
    "full": lambda _, value, **__: value,
}


@functools.cache
def _source() -> str:
    """Return a digest of the rows above, which caches of kernels do not look into."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


#: Operators that index a tensor.
_INDEXING = ("index", "select")


@dataclass(frozen=True)
class _Elements:
    number: int
    indices: tuple[Any, ...] = ()


class _Captured(NamedTuple):
    """Tensor that a function reads. number: its index among all tensors of a call."""

    number: int
    dtype: str
    ndim: int


class ScoreGraph(SelfDescribed):
    """Traced score_mod of (score, batch, head, query, key), or mask_mod without the score; all are
    tensors of no dimension. tensors: those that functions read, in the order in which kernels get
    them. Several graphs share the list. kind: `SCORE` or `MASK`."""

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        device: torch.device,
        tensors: list[torch.Tensor],
        kind: str = SCORE,
    ) -> None:
        """Raises TranslationError for a function that branches on a value, has an operator without
        a row in `OPERATIONS`, or indexes a tensor by anything but one number per dimension."""
        self._kind = kind
        self._module = _traced(function, device, kind)
        self._captured: dict[str, _Captured] = {}  # by name in the graph
        self._numbers: dict[Any, bool | int | float] = {}
        for node in self._module.graph.nodes:
            self._take_in(node, tensors)
            if node.op == "output":
                (self._result,) = node.all_input_nodes
        # A process knows a function as long as it lives, tensors as long as users do.
        for name in self._captured:
            delattr(self._module, name)

    @property
    def text(self) -> str:
        return f"{self._kind} {self._module.code} {self._captured} {_source()}"

    @property
    def number(self) -> bool | int | float | None:
        return self._numbers.get(self._result)

    def __call__(self, arguments: Sequence[Any], tensors: Sequence[cute.Tensor]) -> Any:
        """Evaluate the graph for one score in a kernel. Return a Float32, of a mask a Boolean.
        arguments: Float32 and Int32 numbers."""
        values: dict[Any, Any] = dict(self._numbers)
        remaining = iter(arguments)
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(remaining)
            elif node.op == "get_attr":
                captured = self._captured[node.target]
                values[node] = _Elements(captured.number)
                if captured.ndim == 0:
                    values[node] = _typed(tensors[captured.number][0], _dtype(node))
            elif node.op == "call_function" and node not in self._numbers:
                values[node] = _computed(node, values, tensors)
        result = values[self._result]
        return Float32(result) if self._kind == SCORE else _typed(result, torch.bool)

    def _take_in(self, node: Any, tensors: list[torch.Tensor]) -> None:
        if node.op == "get_attr":
            tensor = getattr(self._module, node.target)
            known = [i for i, other in enumerate(tensors) if other is tensor]
            number = known[0] if known else len(tensors)
            self._captured[node.target] = _Captured(number, str(tensor.dtype), tensor.ndim)
            if not known:
                tensors.append(tensor)
        if node.op != "call_function":
            return
        name = _name(node)
        if name in _NUMBERS:
            kind = _python_type(_dtype(node))
            self._numbers[node] = kind(_NUMBERS[name](*node.args, **node.kwargs))
        elif name in _INDEXING:
            _check_index(node, self._kind)
        elif name not in OPERATIONS:
            raise TranslationError(
                f"{self._kind} computes {node.target}; accepted: indexing by one number per "
                f"dimension, and {', '.join(sorted(OPERATIONS))}"
            )
        elif all(operand in self._numbers for operand in node.all_input_nodes):
            self._numbers[node] = self._folded(node)

    def _folded(self, node: Any) -> bool | int | float:
        def tensor_of(operand: Any) -> torch.Tensor:
            return torch.tensor(self._numbers[operand], dtype=_dtype(operand))

        args, kwargs = _mapped(node, tensor_of)
        folded: bool | int | float = node.target(*args, **kwargs).item()
        return folded


def _traced(function: Callable[..., torch.Tensor], device: torch.device, kind: str) -> Any:
    place = [torch.zeros((), dtype=torch.int32, device=device) for _ in range(4)]

    # Parameters with defaults would be arguments of the graph, too.
    def of_five(score: Any, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return function(score, batch, head, query, key)

    def of_four(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return function(batch, head, query, key)

    arguments = place if kind == MASK else [torch.zeros((), device=device), *place]
    decompositions: Any = torch._decomp.core_aten_decompositions()
    try:
        with _OneElementEach():
            plain = of_four if kind == MASK else of_five
            functional = torch.func.functionalize(plain, remove="mutations")
            module = make_fx(functional, decompositions)(*arguments)
    except RuntimeError as error:
        advice = str(error)
        if "data-dependent" in advice:
            advice = (
                "it branches on a value, or converts it to a Python number; choose between values "
                "by torch.where, and index tensors by one number per dimension"
            )
        what = kind if kind == MASK else f"{kind}, or not its derivative"
        raise TranslationError(f"PyTorch cannot trace {what}: {advice}") from error
    module.graph.eliminate_dead_code()
    return module


class _OneElementEach(TorchFunctionMode):
    """Traces indexing by numbers as reading an element, whose value PyTorch alone would read."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        if function is torch.Tensor.__getitem__:
            tensor, indices = args
            indices = indices if isinstance(indices, tuple) else (indices,)
            if all(map(_is_number, indices)):
                for index in indices:
                    tensor = _at(tensor, index)
                return tensor
        return function(*args, **(kwargs or {}))


def _is_number(index: Any) -> bool:
    if isinstance(index, torch.Tensor):
        return index.ndim == 0 and index.dtype != torch.bool
    return isinstance(index, int) and not isinstance(index, bool)


def _at(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    if isinstance(index, torch.Tensor):
        return torch.ops.aten.index.Tensor(tensor, [index])
    return torch.ops.aten.select.int(tensor, 0, index)


def _check_index(node: Any, kind: str) -> None:
    indices = node.args[1] if _name(node) == "index" else node.args[2:]
    is_whole = _name(node) == "index" or node.args[1] == 0
    if not is_whole or not all(isinstance(i, (int, torch.fx.Node)) for i in indices):
        raise TranslationError(
            f"{kind} takes more than one element of a tensor; accepted: one number per dimension"
        )


def _computed(node: Any, values: dict, tensors: Sequence[cute.Tensor]) -> Any:
    args, kwargs = _mapped(node, values.__getitem__)
    if _name(node) in _INDEXING:
        of, indices = args[0], args[1] if _name(node) == "index" else args[2:]
        tensor, first = tensors[of.number], len(of.indices)
        within = (
            _within(index, cute.size(tensor, mode=[first + i])) for i, index in enumerate(indices)
        )
        elements = _Elements(of.number, (*of.indices, *within))
        if len(elements.indices) < cute.rank(tensor):
            return elements
        return _typed(tensor[elements.indices], _dtype(node))
    operation, dtype = OPERATIONS[_name(node)], _dtype(node)
    operand_dtype = dtype
    if operation.operands == "common":
        known = [_dtype(operand) for operand in node.all_input_nodes]
        known += [_DTYPES[type(a)] for a in args if type(a) in _DTYPES]
        operand_dtype = max(known, key=_order)
    first = 1 if operation.operands == "branches" else 0
    operands = [*args[:first], *(_typed(operand, operand_dtype) for operand in args[first:])]
    named = {name: value for name, value in kwargs.items() if name in _KEYWORDS}
    return _typed(operation.emit(*operands, **named), dtype)


def _within(index: Any, size: Any) -> Int32:
    """Return an index of a dimension; a negative one counts from its end. An index beyond becomes
    the nearest one: keys that a query does not see may have such indices."""
    index = Int32(index)
    index = _select(index < 0, index + size, index)
    return cutlass.max(cutlass.min(index, size - 1), 0)


def _mapped(node: Any, value_of: Callable[[Any], Any]) -> Any:
    return torch.fx.map_arg((node.args, node.kwargs), value_of)


#: Keywords that change a value.
_KEYWORDS = ("alpha", "rounding_mode")
_DTYPES = {bool: torch.bool, int: torch.int32, float: torch.float32}


def _order(dtype: torch.dtype) -> int:
    """Return the rank of a dtype: operands are converted to the highest one."""
    return 2 if dtype.is_floating_point else int(dtype != torch.bool)


def _python_type(dtype: torch.dtype) -> type:
    return (bool, int, float)[_order(dtype)]


def _typed(value: Any, dtype: torch.dtype) -> Any:
    """Convert a number of the kernel or of Python; None stays."""
    kind = _python_type(dtype)
    if value is None or isinstance(value, (bool, int, float)):
        return value if value is None else kind(value)
    of_kernel = _KINDS[kind]
    if of_kernel is Boolean and not isinstance(value, Boolean):
        return Boolean(value != 0)
    return value if isinstance(value, of_kernel) else of_kernel(value)


def _dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _name(node: Any) -> str:
    return str(node.target.__name__).split(".")[0]
