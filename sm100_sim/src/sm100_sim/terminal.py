"""Text for people: colours where a terminal shows them, and names of kernels of a bearable
length."""

from __future__ import annotations

import os
import re
from typing import TextIO

_STYLES = {"bold": "1", "red": "1;31", "yellow": "33", "cyan": "36", "dim": "2"}
#: Longest name that is printed whole.
LONGEST = 60
#: What the compilers put in front of a function's name, and where the types of its arguments begin.
_PREFIX = re.compile(r"^kernel_cutlass_(?:kernel_)?")
_TYPES = re.compile(
    r"_(?:tensor(?:ptr)?|Tensor|TiledMMA|TiledCopy|CopyAtom|ptr|object_at|FakeTensor)"
)
_PART = re.compile(r"(\d+)([A-Za-z_].*)")


def wants_colour(stream: TextIO) -> bool:
    """Return True if colours are shown there: a terminal, unless NO_COLOR says otherwise."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


def painted(text: str, style: str, colour: bool) -> str:
    """Return the text in a style, if `colour` is wanted."""
    return f"\033[{_STYLES[style]}m{text}\033[0m" if colour else text


def short_name(name: str) -> str:
    """Return a kernel's name as its author knows it: C++ names demangled, without types, the middle
    of longer ones left out."""
    found = _demangled(name)
    plain = _PREFIX.sub("", found)
    cut = _TYPES.search(plain, 1)
    found = plain[: cut.start()] if cut else plain
    # A kernel that is a method: its module, then its class, without a mark between.
    method = re.search(r"(?<=[a-z0-9_])[A-Z]\w*$", found) if plain != name else None
    found = method[0] if method else found
    if len(found) > LONGEST:
        found = f"{found[: LONGEST - 20]}...{found[-17:]}"
    return found


def _demangled(name: str) -> str:
    """The qualified name in an Itanium-mangled one, without its arguments."""
    match = re.match(r"_Z(N?)(?=\d)", name)
    if match is None:
        return name
    parts: list[str] = []
    rest = name[match.end() :]
    while (part := _PART.match(rest)) is not None:
        size = int(part[1])
        if not parts or part[2][:size].isidentifier():
            parts.append(part[2][:size])
        rest = part[2][size:]
        if not match[1]:
            break
    return "::".join(part for part in parts if not part.startswith("_GLOBAL__N")) or name
