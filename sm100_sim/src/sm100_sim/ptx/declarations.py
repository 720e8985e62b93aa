"""Declarations of a PTX module: its device functions, initialised bytes and dimensions of kernels.

Each call of a function is replaced by its body, with registers, labels and local memory of its own
(PTX ISA, ".func" and "call"). So a recursive function, or a call through a pointer, is an error.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_FUNCTION = re.compile(
    r"\.func\s+(?:\(\s*(?P<result>[^)]*)\)\s*)?(?P<name>[\w$]+)\s*\((?P<formals>[^)]*)\)"
    r"[^{};]*(?P<end>[{;])"
)
_BYTES = re.compile(
    r"\.(?:global|const)\s+(?:\.align\s+\d+\s+)?\.b8\s+([\w$]+)\[\d+\]\s*="
    r"\s*\{([\d,\s]*)\}\s*;"
)
_FORMAL_NAME = re.compile(r"([\w$%]+)\s*(?:\[\d*\])?\s*$")
#: Calls within calls, and instructions of a kernel, beyond which inlining stops with an error.
MAX_DEPTH, MAX_INSTRUCTIONS = 64, 1_000_000


class Function(NamedTuple):
    """A device function: names of its result (if any) and formal parameters, and where its body
    begins in the module's text."""

    name: str
    formals: tuple[str, ...]
    body: int


def functions_of(text: str) -> dict[str, Function]:
    """Return the functions that a module defines, by name. Declarations count for nothing."""
    found = {}
    for match in _FUNCTION.finditer(text):
        if match["end"] == "{":
            declared = [*(match["result"] or "").split(","), *match["formals"].split(",")]
            names = [_FORMAL_NAME.search(part) for part in declared if part.strip()]
            formals = tuple(name[1] for name in names if name)
            found[match["name"]] = Function(match["name"], formals, match.end())
    return found


def moved(access: str, declared: int, is_load: bool) -> tuple[str, list[str]]:
    """Return opcode and modifiers that move a scalar call parameter to or from a register.

    access: type of the ld.param or st.param. declared: bytes of the parameter. Narrower types
    travel in parameters of 32 bits; a load extends by its own type.
    """
    bits = int(re.sub(r"\D", "", access.partition("x")[0]) or 32)
    if bits == 8 * declared or access.endswith("x2"):
        return "mov", [access]
    letter = access[0] if access[0] in "su" else "u"
    narrow, wide = f"{letter}{bits}", f"{letter}{8 * declared}"
    return "cvt", [narrow, wide] if is_load else [wide, narrow]


def module_data(text: str) -> dict[str, bytes]:
    """Initialised byte arrays of a module by name."""
    return {
        name: bytes(int(value) for value in values.split(",") if value.strip())
        for name, values in _BYTES.findall(text)
    }


def dimensions(directives: str, name: str) -> tuple[int, int, int] | None:
    match = re.search(rf"\.{name}\s+([\d,\s]+)", directives)
    if match is None:
        return None
    x, y, z = ([int(part) for part in match[1].split(",")] + [1, 1])[:3]
    return x, y, z
