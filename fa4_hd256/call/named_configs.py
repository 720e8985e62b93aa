"""Configurations named in operator calls.

An operator's schema admits no Python object, so a configuration travels as JSON of the name of its
class and its fields; `DEFAULT` is the default one. A name says everything, so that a graph compiled
in one process runs in another.
"""

from __future__ import annotations

import functools
import json
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

#: The name of the default configuration.
DEFAULT = ""


def encode(config: Any, *kinds: type, said: str = "config") -> str:
    """The name of `config`, an instance of one of `kinds` or None for the default one. said: what
    users call it. Raises TypeError for anything else."""
    if config is None:
        return DEFAULT
    if not isinstance(config, kinds):
        *accepted, kind = (named.__name__ for named in (*kinds, type(config)))
        if kind in accepted:
            *accepted, kind = map(spelled, (*kinds, type(config)))
        raise TypeError(f"{said} must be a {', a '.join(accepted)} or None, got {kind}")
    return _encode(config)


def spelled(kind: type) -> str:
    """The class of a configuration with its module: architectures share names."""
    return f"{kind.__module__}.{kind.__name__}"


@functools.lru_cache
def _encode(config: Any) -> str:
    return json.dumps([type(config).__name__, _canonical(type(config), config)])


def _canonical(hint: Any, value: Any) -> Any:
    """A value as its field's type has it. Configurations are equal whose fields are 3, 3.0 or a
    NumPy integer (`check_fields`), and calls are known by them: equal ones need one name, which
    kernels can be made of."""
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        names = (field.name for field in fields_of(hint))
        return {name: _canonical(hints[name], getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        own, *_ = get_args(hint) or (None,)
        return [_canonical(own, part) for part in value]
    return hint(value) if hint in (bool, int, float) else value


@functools.lru_cache
def decode(name: str, *kinds: type) -> Any:
    """The configuration of that name and one of the kinds, which have names of their own; equal to
    the one that was encoded. Raises ValueError for a name that `encode` does not give for these
    kinds."""
    if not name:
        return kinds[0]()
    try:
        kind, fields = json.loads(name)
        return _from_fields({known.__name__: known for known in kinds}[kind], fields)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        named = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(
            f"{name!r} names no {named}; accepted: the JSON of its class and fields, or ''"
        ) from error


def _from_fields(kind: type, fields: dict[str, Any]) -> Any:
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in fields.items()})


def _value(hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and is_dataclass(hint):
        return _from_fields(hint, value)
    return tuple(value) if isinstance(value, list) else value
