"""Configurations named in operator calls.

An operator's schema admits no Python object, so a configuration travels as JSON of its fields;
`DEFAULT` is the default one. A name says everything, so that a graph compiled in one process runs
in another.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, is_dataclass
from typing import Any, get_type_hints

__all__ = ["DEFAULT", "decode", "encode"]

#: The name of the default configuration.
DEFAULT = ""


def encode(config: Any, kind: type) -> str:
    """The name of `config`, an instance of `kind` or None for the default one.

    Raises TypeError for anything else.
    """
    if config is None:
        return DEFAULT
    if not isinstance(config, kind):
        wanted, found = kind.__name__, type(config).__name__
        if wanted == found:
            wanted, found = (f"{t.__module__}.{t.__name__}" for t in (kind, type(config)))
        raise TypeError(f"config must be a {wanted} or None, got {found}")
    return _encode(config)


@functools.lru_cache
def _encode(config: Any) -> str:
    return json.dumps(asdict(config))


@functools.lru_cache
def decode(name: str, kind: type) -> Any:
    """The configuration of that kind and name; equal to the one that was encoded.

    Raises ValueError for a name that `encode` does not give for this kind.
    """
    if not name:
        return kind()
    try:
        return _from_fields(kind, json.loads(name))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{name!r} names no {kind.__name__}; accepted: the JSON of one's fields, or ''"
        ) from error


def _from_fields(kind: type, fields: dict[str, Any]) -> Any:
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in fields.items()})


def _value(hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and is_dataclass(hint):
        return _from_fields(hint, value)
    return tuple(value) if isinstance(value, list) else value
