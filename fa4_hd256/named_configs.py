"""Configurations named in operator calls.

An operator's schema admits no Python object, so a configuration travels as its repr, which names
all its fields; "" is the default one.
"""

from __future__ import annotations

from typing import Any

__all__ = ["find", "register"]

_configs: dict[tuple[type, str], Any] = {}


def register(config: Any, kind: type) -> str:
    """The name of `config`, an instance of `kind` or None for the default one.

    Raises TypeError for anything else.
    """
    if config is None:
        return ""
    if not isinstance(config, kind):
        raise TypeError(f"config must be a {kind.__name__} or None, got {type(config).__name__}")
    name = repr(config)
    _configs[kind, name] = config
    return name


def find(name: str, kind: type) -> Any:
    """The configuration of that kind and name."""
    return _configs[kind, name] if name else kind()
