"""Errors of a simulated kernel, as exceptions that say where it went wrong.

Every error names, as far as known, the instruction (PTX text and source line), the CTA, the warp
and the lane. Code that detects an error deep inside raises it with the message alone; the run loop
adds the place through `at`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .causes import causes_of, listed

P = ParamSpec("P")
R = TypeVar("R")


class SimulationError(Exception):
    """Base of all errors of a simulated launch.

    instruction: the `ptx.Instruction` at fault; cta: "(x, y, z)" or the CTA's index tuple;
    warp: warp index in the CTA; lane: lane index or None for the whole warp. findings: what the
    sanitizer had found until then, all of it; the text of the error has it by cause (`causes`).
    kernel: name of the kernel that was launched, None until that is known.
    """

    findings: tuple[str, ...] = ()
    kernel: str | None = None

    def __init__(
        self,
        message: str,
        *,
        instruction: Any = None,
        cta: Any = None,
        warp: int | None = None,
        lane: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.instruction = instruction
        self.cta = cta
        self.warp = warp
        self.lane = lane

    def at(
        self,
        instruction: Any = None,
        cta: Any = None,
        warp: int | None = None,
        lane: int | None = None,
    ) -> SimulationError:
        """Fill in what is not yet known of the place; returns self."""
        if self.instruction is None:
            self.instruction = instruction
        if self.cta is None:
            self.cta = cta
        if self.warp is None:
            self.warp = warp
        if self.lane is None:
            self.lane = lane
        return self

    def place(self) -> str:
        """Instruction, source line, CTA, warp and lane in one line; empty if nothing is known."""
        parts = []
        if self.instruction is not None:
            parts.append(f"at `{self.instruction.text}` (PTX line {self.instruction.line})")
            if self.instruction.source is not None:
                file, line = self.instruction.source
                parts.append(f"from {file}:{line}")
        for name in ("cta", "warp", "lane"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name.upper() if name == 'cta' else name} {value}")
        return ", ".join(parts)

    def __str__(self) -> str:
        place = self.place()
        text = f"{self.message}\n  {place}" if place else self.message
        if self.findings:
            text += "\nFound by the sanitizer before this:\n" + listed(causes_of(self.findings))
        return text


def in_plain(function: Callable[P, R]) -> Callable[P, R]:
    """Let errors of a launch come without the simulator's own frames: they say nothing of the
    kernel that is wrong."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except SimulationError as error:
            raise error.with_traceback(None) from None

    return call


class CompileError(ValueError):
    """A source that its compiler refuses; the text has the compiler's messages."""


class MissingExtra(ImportError):
    """A package is not installed that an extra of this distribution brings."""

    def __init__(self, what: str, extra: str, error: ImportError) -> None:
        """Make the error. what: needs the extra ("attached()"). error: of the import."""
        super().__init__(
            f"{what} needs {error.name}, which is not installed; pip install "
            f"'./sm100_sim[{extra}]' in a checkout of fa4-hd256, or of its wheel 'FILE[{extra}]', "
            "installs all that it needs",
            name=error.name,
        )
        self._made_of = what, extra, error

    def __reduce__(self) -> tuple:
        return type(self), self._made_of


class UnknownInstruction(SimulationError):
    """An opcode, modifier or operand form the simulator does not implement."""


class MemoryFault(SimulationError):
    """An access outside the tensors passed in, or outside allocated shared memory."""


class CtaExited(MemoryFault):
    """An access to a CTA of the cluster that has exited: its shared memory is gone.

    A GPU may stop the launch there ("cluster target block not present"), or give the memory to
    another CTA first (PTX ISA, shared::cluster: the CTA must exist while it is accessed).
    """


class Misaligned(SimulationError):
    """An address, coordinate or descriptor field that is not aligned as the instruction
    requires."""


class BarrierError(SimulationError):
    """Misuse of an mbarrier, a named barrier or the cluster barrier."""


class TmemError(SimulationError):
    """Misuse of tensor memory: allocation rules, unallocated columns, addresses out of range."""


class ClcError(SimulationError):
    """Misuse of cluster launch control."""


class DivergenceError(SimulationError):
    """Lanes of a warp wait for each other at different aligned instructions."""


class LaunchError(SimulationError):
    """A launch that the hardware, or the simulator, does not accept."""


class Hang(SimulationError):
    """No warp can run and nothing is in flight: the report lists who waits for what."""
