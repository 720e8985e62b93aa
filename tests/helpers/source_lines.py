"""Source lines of traced kernels, looked up once per instruction.

CuTe DSL looks up the frame of the user's code and its line for each operation that it traces, a
third of what tracing takes. The same instruction of the same code has the same line, so each is
looked up once. PTX and its line numbers stay as they are (`test_source_lines`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from fa4_hd256.run import tracing


def once_per_code(of_frame: Callable[[FrameType], Any]) -> Callable[[FrameType], Any]:
    """Return `of_frame`, called once for all frames of one code object."""
    # The key holds the code: the number of one that is gone may be that of another. Codes are not
    # keys by themselves, since equal ones may lie in different files.
    found: dict[int, tuple[CodeType, Any]] = {}

    @functools.wraps(of_frame)
    def look_up(frame: FrameType) -> Any:
        code = frame.f_code
        known = found.get(id(code))
        if known is None:
            known = found[id(code)] = code, of_frame(frame)
        return known[1]

    return look_up


def once_per_instruction(of_frame: Callable[[FrameType], Any]) -> Callable[[FrameType], Any]:
    """Return `of_frame`, called once for all frames that stand at one instruction."""
    lines_of = once_per_code(lambda frame: {})

    @functools.wraps(of_frame)
    def look_up(frame: FrameType) -> Any:
        lines, at = lines_of(frame), frame.f_lasti
        if at not in lines:
            lines[at] = of_frame(frame)
        return lines[at]

    return look_up


@functools.cache
def look_up_once() -> bool:
    """Replace both look-ups in CuTe DSL. Return False for a version that has others."""
    from cutlass._mlir_helpers import op

    if not (hasattr(op, "_fast_frameinfo") and hasattr(op, "_is_framework_stack_frame")):
        return False
    op._fast_frameinfo = once_per_instruction(op._fast_frameinfo)
    op._is_framework_stack_frame = once_per_code(op._is_framework_stack_frame)
    return True


def trace_quickly() -> None:
    """Look up once in whatever is traced from now on. CuTe DSL is imported then, not now."""
    plain = tracing.targeting

    @contextlib.contextmanager
    def targeting(target: str) -> Iterator[None]:
        look_up_once()
        with plain(target):
            yield

    tracing.targeting = targeting
