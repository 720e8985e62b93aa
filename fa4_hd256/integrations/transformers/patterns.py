"""Bounds of a mask function, derived by calling it with symbolic positions.

transformers composes mask functions of (batch, head, query position, key position) from comparisons
of positions, `&` and `|`. Called with the symbols of this module, such a function returns a `Band`:
an interval of distances between query and key, and possibly a tensor that tells packed sequences
apart. Any other operation raises TypeError; the caller then evaluates the function.

torch.compile traces these calls. It could not trace an inspection of code objects or closures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Band:
    """Pairs of a query and a key with low <= query position - key position <= high. None is no
    bound. sequences: (batch, length) ids, equal for query and key. positions: (batch, length)
    positions to which the bounds apply; None: the indices. is_empty: there is no pair."""

    #: Mask functions move one result to the device of another.
    device = None

    def __init__(
        self,
        low: int | None = None,
        high: int | None = None,
        sequences: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        is_empty: bool = False,
    ) -> None:
        self.low, self.high = low, high
        self.sequences, self.positions, self.is_empty = sequences, positions, is_empty

    def to(self, *_: Any, **__: Any) -> Band:
        return self

    @property
    def is_bounded(self) -> bool:
        return self.low is not None or self.high is not None

    def __and__(self, other: Any) -> Band:
        _check_is_band(other)
        if self.is_empty or other.is_empty:
            return Band(is_empty=True)
        positions = _common_positions(self, other)
        sequences = self.sequences if self.sequences is not None else other.sequences
        if other.sequences is not None and other.sequences is not sequences:
            raise TypeError("two kinds of sequences")
        low = _of_both(max, self.low, other.low)
        high = _of_both(min, self.high, other.high)
        if low is not None and high is not None and low > high:
            return Band(is_empty=True)
        return Band(low, high, sequences, positions)

    def __or__(self, other: Any) -> Band:
        _check_is_band(other)
        if self.is_empty:
            return other
        if other.is_empty:
            return self
        if self.sequences is not other.sequences:
            raise TypeError("a union with other sequences")
        positions = _common_positions(self, other)
        for one, two in ((self, other), (other, self)):
            if one.low is not None and two.high is not None and one.low > two.high + 1:
                raise TypeError("a gap between two bands")
        low = None if self.low is None or other.low is None else min(self.low, other.low)
        high = None if self.high is None or other.high is None else max(self.high, other.high)
        return Band(low, high, self.sequences, positions)

    def __bool__(self) -> bool:
        raise TypeError("a band is no condition")


def _check_is_band(other: Any) -> None:
    if not isinstance(other, Band):
        raise TypeError("a value that is no band")


def _common_positions(one: Band, other: Band) -> torch.Tensor | None:
    if not one.is_bounded:
        return other.positions
    if other.is_bounded and other.positions is not one.positions:
        raise TypeError("bounds on two kinds of positions")
    return one.positions


def _of_both(choose: Callable[..., int], one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return choose(one, other)


class _Value:
    """Symbol for of_query * query position + of_key * key position + constant. table: the tensor
    whose entries at [batch, position] replace the positions, or None."""

    device = None

    def __init__(
        self, of_query: int, of_key: int, constant: int = 0, table: torch.Tensor | None = None
    ) -> None:
        self.of_query, self.of_key, self.constant, self.table = of_query, of_key, constant, table

    def to(self, *_: Any, **__: Any) -> _Value:
        return self

    def new_ones(self, *_: Any, **__: Any) -> Band:
        return Band()

    def new_zeros(self, *_: Any, **__: Any) -> Band:
        return Band(is_empty=True)

    def __add__(self, other: Any) -> _Value:
        return _sum(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> _Value:
        return _sum(self, other, -1)

    def __rsub__(self, other: Any) -> _Value:
        return _sum(-self, other, 1)

    def __neg__(self) -> _Value:
        return _Value(-self.of_query, -self.of_key, -self.constant, self.table)

    def __abs__(self) -> _Magnitude:
        return _Magnitude(self)

    abs = __abs__

    def __le__(self, other: Any) -> Band:
        return _at_most_zero(self - other)

    def __lt__(self, other: Any) -> Band:
        return _at_most_zero(self - other + 1)

    def __ge__(self, other: Any) -> Band:
        return _at_most_zero(-(self - other))

    def __gt__(self, other: Any) -> Band:
        return _at_most_zero(-(self - other) + 1)

    def __eq__(self, other: Any) -> Band:  # type: ignore[override]
        difference = self - other
        if difference.table is None:
            return _at_most_zero(difference) & _at_most_zero(-difference)
        is_distance = difference.of_query * difference.of_key == -1
        if not is_distance or difference.constant:
            raise TypeError("an equation of other values")
        return Band(sequences=difference.table)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("a position is no condition")


class _Magnitude:
    def __init__(self, value: _Value) -> None:
        self.value = value

    def __le__(self, other: Any) -> Band:
        return _at_most_zero(self.value - other) & _at_most_zero(-self.value - other)

    def __lt__(self, other: Any) -> Band:
        return self <= other - 1

    def __bool__(self) -> bool:
        raise TypeError("a distance is no condition")


def _sum(value: _Value, other: Any, sign: int) -> _Value:
    if type(other) is int:
        return _Value(value.of_query, value.of_key, value.constant + sign * other, value.table)
    if not isinstance(other, _Value) or value.table is not other.table:
        raise TypeError("values of different kinds")
    return _Value(
        value.of_query + sign * other.of_query,
        value.of_key + sign * other.of_key,
        value.constant + sign * other.constant,
        value.table,
    )


def _at_most_zero(value: _Value) -> Band:
    of_query, of_key, constant = value.of_query, value.of_key, value.constant
    if of_query == 1 and of_key == -1:
        return Band(high=-constant, positions=value.table)
    if of_query == -1 and of_key == 1:
        return Band(low=constant, positions=value.table)
    if of_query == 0 and of_key == 0:
        return Band(is_empty=constant > 0)
    # No index is below 0.
    if value.table is None and of_query <= 0 and of_key <= 0 and constant <= 0:
        return Band()
    raise TypeError("a condition on one position")


class _Batch:
    """Symbol for the index of a batch entry or of a head."""


class _Lookups(TorchFunctionMode):
    """Turns `tensor[batch, position]` into a `_Value` of the tensor's entries, and
    `torch.tensor(True)` into a `Band` of all pairs."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, (_Batch, _Value)) for part in index):
                return _looked_up(args[0], index)
        if func is torch.tensor and args and isinstance(args[0], bool):
            return Band(is_empty=not args[0])
        return func(*args, **(kwargs or {}))


def _looked_up(table: torch.Tensor, index: tuple[Any, ...]) -> _Value:
    is_pair = len(index) == 2 and isinstance(index[0], _Batch) and isinstance(index[1], _Value)
    if not is_pair or table.ndim != 2:
        raise TypeError("an entry at another index")
    position = index[1]
    is_one = position.of_query + position.of_key == 1 and position.of_query * position.of_key == 0
    if not is_one or position.constant or position.table is not None:
        raise TypeError("an entry at another position")
    return _Value(position.of_query, position.of_key, 0, table)


def band_of(mask_function: Callable[..., Any]) -> Band | None:
    """Return the pairs that a mask function of transformers accepts; None if it is no band."""
    try:
        with _Lookups():
            band = mask_function(_Batch(), _Batch(), _Value(1, 0), _Value(0, 1))
    except Exception:
        return None
    return band if isinstance(band, Band) else None
