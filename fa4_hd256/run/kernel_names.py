"""Names of kernels in text, so that a missing one can be built from a command line.

The text is JSON: kind, architecture, and the two dataclasses of a `KernelSpec`, each as its class
and those of its fields that are no defaults.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from typing import Any

import torch

from ..architectures import named
from ..package_name import canonical, loaded
from .catalogue import KernelSpec

#: Package whose classes a name may have. Copies under other names give and read the same text.
_PACKAGE = "fa4_hd256."
_CLASS = "class"


def name_of(spec: KernelSpec) -> str:
    return json.dumps(
        {
            "kind": spec.kind,
            "architecture": spec.architecture.name,
            "problem": _plain(spec.problem_class),
            "config": _plain(spec.config),
        }
    )


def kernel_named(name: str) -> KernelSpec:
    """The kernel of a text that `name_of` gave. Raises ValueError for any other."""
    try:
        read = json.loads(name)
        if set(read) != {"kind", "architecture", "problem", "config"}:
            raise ValueError("it has other parts")
        return KernelSpec(
            read["kind"],
            _value(read["config"]),
            _value(read["problem"]),
            named(read["architecture"]),
        )
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name!r} names no kernel: {error}; accepted: the text of an error that misses one"
        ) from error


def described(spec: KernelSpec) -> str:
    """Return a kernel for people: its kind, and what of it is not the default. "forward for sm_90a
    (dtype bfloat16, causal; block_kv 64)"."""
    parts = [told for told in map(in_words, (spec.problem_class, spec.config)) if told]
    return f"{spec.kind} for {spec.architecture.name} ({'; '.join(parts) or 'defaults'})"


def in_words(value: Any) -> str:
    """Return a value in words; of a dataclass those of its fields that are no defaults."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)
        return ", ".join(_told_field(f.name, v) for f, v in fields if v != _default(f))
    if isinstance(value, (list, tuple)):
        return " and ".join(map(in_words, value))
    return str(value).removeprefix("torch.")


def _told_field(name: str, value: Any) -> str:
    if value is True:
        return name
    told = in_words(value)
    return f"{name} ({told})" if dataclasses.is_dataclass(value) else f"{name} {told}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        plain = {_CLASS: f"{canonical(kind.__module__)}:{kind.__qualname__}"}
        for field in dataclasses.fields(value):
            argument = getattr(value, field.name)
            if field.init and argument != _default(field):
                plain[field.name] = _plain(argument)
        return plain
    if isinstance(value, torch.dtype):
        return {_CLASS: str(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{value!r} of a kernel has no text")


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(_value(part) for part in plain)
    if not isinstance(plain, dict):
        return plain
    fields = dict(plain)
    name = fields.pop(_CLASS)
    if name.startswith("torch."):
        dtype = getattr(torch, name.removeprefix("torch."))
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is no dtype")
        return dtype
    module, _, path = name.partition(":")
    if not module.startswith(_PACKAGE):
        raise ValueError(f"{name} is no class of this package")
    kind = getattr(importlib.import_module(loaded(module)), path)
    make: Any = kind
    if not dataclasses.is_dataclass(kind):
        raise ValueError(f"{name} is no configuration")
    return make(**{field: _value(argument) for field, argument in fields.items()})
