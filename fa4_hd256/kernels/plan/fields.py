"""Kinds of a configuration's fields, checked before anything is derived from them."""

from __future__ import annotations

import functools
import math
import numbers
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

from ...words import one_of, shown

__all__ = ["check_fields"]

_ACCEPTED = {int: "an int", float: "a number", bool: "True or False", str: "a str"}


def check_fields(config: Any) -> None:
    """Raise TypeError for a field of a frozen dataclass whose value is not of the field's type.

    Numbers of another type pass where they are equal to one of it: 3.0 and NumPy's 3 for an int,
    but not True.
    """
    kind: Any = type(config)
    hints = _hints(kind)
    for field in fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if not _fits(hint, value):
            accepted, given = _in_words(hint), shown(value)
            if given == accepted:
                accepted, given = map(_spelled, (hint, type(value)))
            raise TypeError(f"{field.name} is {given}; accepted: {accepted}")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(get_args(hint)[0], one) for one in value)
    if get_args(hint):
        return any(_fits(kind, value) for kind in get_args(hint))
    if hint is bool:
        return isinstance(value, numbers.Real) and value in (0, 1)
    if hint in (int, float):
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return is_number and (hint is float or math.isfinite(value) and int(value) == value)
    return isinstance(value, hint)


def _in_words(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a tuple, each {_in_words(get_args(hint)[0])}"
    if get_args(hint):
        return " or ".join(map(_in_words, get_args(hint)))
    if hint is type(None):
        return "None"
    return _ACCEPTED.get(hint) or one_of(hint)


def _spelled(kind: type) -> str:
    """The class with its module: classes of several architectures have the same name."""
    return f"a {kind.__module__}.{kind.__name__}"
