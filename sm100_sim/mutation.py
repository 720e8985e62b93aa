"""Mutation score of the sanitizer on one kernel: would a missing instruction be noticed?

One at a time, each synchronisation instruction that a launch reaches is left out and the launch is
repeated under the sanitizer. A mutant is caught if there is a finding or an error. A mutant that is
not caught counts as redundant only if an edge can be named that implies the one left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import launcher
from .blas import single_threaded
from .errors import SimulationError
from .host import LaunchConfig
from .launcher import Options, make_machine, translated_kernel
from .memory import GlobalMemory
from .sanitizer import SanitizedMachine, StrictMachine
from .sanitizer.omission import machine_without

#: Opcodes (prefixes) that are left out. bar.warp.sync is not among them: it orders lanes of one
#: warp, which the sanitizer does not tell apart.
SYNCHRONISATION = (
    "mbarrier.try_wait", "mbarrier.test_wait", "mbarrier.arrive", "mbarrier.arrive_drop",
    "mbarrier.expect_tx", "mbarrier.complete_tx", "tcgen05.commit", "tcgen05.wait", "tcgen05.fence",
    "fence", "membar", "bar.sync", "bar.arrive", "bar.red", "bar.cta", "barrier",
    "cp.async.bulk.commit_group", "cp.async.bulk.wait_group",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One instruction left out, and what came of it.

    outcome: "caught", "redundant" or "survived". why: the first finding or error; the edge that
    implies the deleted one; or "".
    """

    instruction: Any
    outcome: str
    why: str

    def __str__(self) -> str:
        i = self.instruction
        source = f", {i.source[0]}:{i.source[1]}" if i.source else ""
        return f"{self.outcome:9} `{i.text}` (PTX line {i.line}{source}): {self.why}"


@dataclass
class Launch:
    """One launch that can be repeated.

    config, parameters, ranges: what `launcher.run_kernel` takes. memory: the bytes of the ranges
    before the launch.
    """

    config: LaunchConfig
    parameters: np.ndarray
    ranges: list[tuple[int, int, str]]
    memory: list[bytes]

    @classmethod
    def of(cls, config: LaunchConfig, parameters: np.ndarray, ranges: list) -> Launch:
        memory = [ctypes.string_at(low, high - low) for low, high, _ in ranges]
        return cls(config, parameters, ranges, memory)

    def restore(self) -> None:
        """Put the memory back."""
        for (low, high, _), content in zip(self.ranges, self.memory, strict=True):
            ctypes.memmove(low, content, high - low)

    def run(self, options: Options, without: int | None = None) -> tuple[list[str], Any]:
        """(findings and the error that ended the run, the machine); `without` an instruction."""
        self.restore()
        strict = options.sanitize == "strict"
        kind = StrictMachine if strict else SanitizedMachine
        if without is not None:
            kind = machine_without(without, strict)
        compiled = translated_kernel(self.config.ptx, self.config.kernel_name, True)
        memory = GlobalMemory(self.ranges, self.parameters)
        machine = make_machine(kind, compiled, self.config, memory, options)
        try:
            with single_threaded():
                machine.run()
        except SimulationError as error:
            return [f"{type(error).__name__}: {error.message}", *error.findings], machine
        return machine.all_findings(), machine


def synchronisation(compiled: Any, reached: set[int]) -> list[Any]:
    """The synchronisation instructions among the PTX lines that were executed."""
    return [
        i for i, execute in zip(compiled.instructions, compiled.executors, strict=True)
        if execute is not None and i.index in reached
        and any(i.name == p or i.name.startswith((f"{p}.", f"{p}::")) for p in SYNCHRONISATION)
    ]


def mutants(
    launch: Launch, options: Options, seeds: int = 20, only: Callable[[list], list] | None = None
) -> Iterator[Mutant]:
    """Try the mutants of a launch, first in the fixed schedule, then with seeds 1 to `seeds`.

    options: of the runs, their seed aside; sanitize True or "strict". only: chooses among the
        instructions, for a sample.
    Raises ValueError if the kernel itself is not clean.
    """
    findings, machine = launch.run(options)
    if findings:
        raise ValueError(f"the kernel is not clean, so no mutant means anything: {findings[0]}")
    compiled = translated_kernel(launch.config.ptx, launch.config.kernel_name, True)
    chosen = synchronisation(compiled, machine.executed_indices())
    for instruction in chosen if only is None else only(chosen):
        yield _try(launch, options, instruction, seeds)
    launch.restore()


def _try(launch: Launch, options: Options, instruction: Any, seeds: int) -> Mutant:
    edges: list[str] = []
    for seed in (None, *range(1, seeds + 1)):
        seeded = dataclasses.replace(options, seed=seed)
        findings, machine = launch.run(seeded, instruction.index)
        if findings:
            return Mutant(instruction, "caught", findings[0])
        edges.append(machine.sanitizer.implied())
    if all(edges):
        return Mutant(instruction, "redundant", edges[0])
    return Mutant(instruction, "survived", "nothing was found, and no edge implies it")


@contextlib.contextmanager
def captured(take: Callable[[Launch], None]) -> Iterator[None]:
    """While active, `take` gets each launch before it runs."""
    plain = launcher.run_kernel

    def run(config: LaunchConfig, parameters: np.ndarray, ranges: list, options: Any) -> Any:
        launcher.run_kernel = plain
        try:
            launch = Launch.of(config, parameters, ranges)
            take(launch)
            launch.restore()
        finally:
            launcher.run_kernel = run
        return plain(config, parameters, ranges, options)

    launcher.run_kernel = run
    try:
        yield
    finally:
        launcher.run_kernel = plain
