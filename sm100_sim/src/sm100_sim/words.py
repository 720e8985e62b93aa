"""Values as errors tell them: what a user gave, never an object's insides."""

from __future__ import annotations

from typing import Any

__all__ = ["one_of", "shown"]

#: Types whose values are told as Python writes them.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: Longer texts are cut.
_LONGEST = 200


def shown(value: Any) -> str:
    """Return numbers, texts, dtypes, devices and sequences of these as Python writes them; of a
    tensor or an array the shape and dtype; of any other object the kind."""
    if isinstance(value, _PLAIN):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    if type(value) in (tuple, list):
        told = ", ".join(map(shown, value[:8])) + (", ..." if len(value) > 8 else "")
        if isinstance(value, list):
            return f"[{told}]"
        return f"({told},)" if len(value) == 1 else f"({told})"
    if type(value) is dict:
        pairs = ", ".join(f"{shown(key)}: {shown(value[key])}" for key in list(value)[:8])
        return "{" + pairs + (", ..." if len(value) > 8 else "") + "}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"a {type(value).__name__} of shape {tuple(shape)} and {dtype}"
    if type(value).__module__ == "torch":
        return str(value)
    return one_of(type(value))


def one_of(kind: type) -> str:
    """Return the name of a class with its article."""
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
