"""Plan of a call: its launches as data; `print(plan)` says it.

A plan is made from the description of a call (`call.forward_problem.Problem`,
`call.backward_problem.BackwardProblem`), from how its tensors lie in memory (`View`), for a GPU
(`Gpu`) and under an environment. Tensors' contents are looked at to check them alone. A plan holds
no tensor, no address and no function but those of `Operation`. So whatever guards find equal shares
a plan, and `execute` runs it on any tensors that lie like those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..call.descales import scale_layout
from ..call.memory import View, contiguous_strides, tma_can_take, without_loose_strides
from ..call.mxfp8_scales import words_of
from ..kernels.limits import TMA_ALIGNMENT
from ..kernels.problem_class import OF_BLOCKS
from .arguments import Number, Slot, aligned_view, leaves, mapped
from .catalogue import KernelSpec


@dataclass(frozen=True)
class Allocation:
    """Contiguous memory that a call needs. fills: (first element, past the last one, value).
    may_be_shared: where no caller reads it, a GPU's may be flat memory of another shape, to which
    kernels of all calls write at any time (`execute`). So kernels alone get it, to write to it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fills: tuple[tuple[int, int, float], ...] = ()
    may_be_shared: bool = False

    def __str__(self) -> str:
        filled = ", ".join(f"{value:g} in {begin}..{end}" for begin, end, value in self.fills)
        what = f"{View.contiguous(self.name, self.shape, self.dtype)}"
        what += ", shared where unread" if self.may_be_shared else ""
        return f"{what}, filled: {filled}" if filled else what


@dataclass(frozen=True)
class Operation:
    """Work of PyTorch's on tensors named by `reads`; its result is `result`, None in place."""

    what: str
    reads: tuple[str, ...]
    run: Callable[..., torch.Tensor | None]
    result: str | None = None

    def __str__(self) -> str:
        given = f"{self.what} of {', '.join(self.reads)}"
        return f"{given} -> {self.result}" if self.result else given


@dataclass(frozen=True)
class Launch:
    """A kernel and its arguments: nested `Slot`s, None for what it does not take."""

    spec: KernelSpec
    arguments: tuple[Any, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(leaves(self.arguments))

    @property
    def views(self) -> tuple[View, ...]:
        return tuple(slot for slot in self.slots if isinstance(slot, View))

    def __str__(self) -> str:
        lines = [f"launch {self.spec.kind} {self.spec.config}"]
        lines += [f"    {view}" for view in self.views]
        numbers = ", ".join(f"{name} {number}" for name, number in _numbers(self.arguments))
        return "\n".join([*lines, f"    {numbers}"] if numbers else lines)


@dataclass(frozen=True)
class LaunchPlan:
    """All that a call does on its device, in order.

    inputs: names of the tensors that callers pass, in their order. results: names of what they get,
    None for a result that was not requested. other_lengths: kernels that none of these launches
    runs, but plans of the same call with other lengths do.
    """

    device: torch.device
    inputs: tuple[str, ...]
    allocations: tuple[Allocation, ...]
    steps: tuple[Launch | Operation, ...]
    results: tuple[str | None, ...]
    other_lengths: tuple[KernelSpec, ...] = ()

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(step for step in self.steps if isinstance(step, Launch))

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        return tuple(dict.fromkeys(launch.spec for launch in self.launches))

    def allocation(self, name: str) -> Allocation | None:
        return next((one for one in self.allocations if one.name == name), None)

    def __str__(self) -> str:
        lines = [f"on {self.device}, given {', '.join(self.inputs)}"]
        lines += [f"allocate {allocation}" for allocation in self.allocations]
        lines += map(str, self.steps)
        lines += [f"with other lengths {spec.kind} {spec.config}" for spec in self.other_lengths]
        return "\n".join([*lines, f"return {', '.join(map(str, self.results))}"])


def whole(shape: Sequence[int], value: float) -> tuple[tuple[int, int, float], ...]:
    return ((0, math.prod(shape), value),)


def aligned(views: Any) -> Any:
    """Return nested views, all checked as `aligned_view` does."""

    def checked(view: Any) -> Any:
        return aligned_view(view, TMA_ALIGNMENT if view.ndim == 4 else view.element_size())

    return mapped(views, checked)


def _numbers(arguments: Any, name: str = "scalar") -> Iterator[tuple[str, Number]]:
    if isinstance(arguments, Number):
        yield name, arguments
    elif isinstance(arguments, tuple):
        names = getattr(arguments, "_fields", (name,) * len(arguments))
        for field_name, part in zip(names, arguments, strict=True):
            yield from _numbers(part, field_name)


@dataclass
class PlanBuilder:
    """Collects what a call does. inputs: of its tensors, by name in the order of its arguments."""

    device: torch.device
    inputs: Mapping[str, View]
    _allocations: dict[str, Allocation] = field(default_factory=dict)
    _steps: list[Launch | Operation] = field(default_factory=list)
    _results: int = 0
    _other_lengths: dict[KernelSpec, None] = field(default_factory=dict)

    @classmethod
    def for_tensors(
        cls, device: torch.device, names: Sequence[str], tensors: Sequence[torch.Tensor | None]
    ) -> PlanBuilder:
        given = zip(names, tensors, strict=True)
        return cls(device, {n: View.of(n, t) for n, t in given if t is not None})

    def allocate(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        fills: Sequence[tuple[int, int, float]] = (),
        may_be_shared: bool = False,
    ) -> View:
        """Memory of every call. On the CPU what is not filled is NaN, so that an element which no
        kernel writes shows."""
        fills = tuple(fills)
        if not fills and self.device.type == "cpu" and dtype.is_floating_point:
            fills = whole(shape, math.nan)
        if not math.prod(shape):
            fills = ()
        self._allocations[name] = Allocation(name, tuple(shape), dtype, fills, may_be_shared)
        return View.contiguous(name, shape, dtype)

    def result(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        fill: float | None,
        has_batch: bool,
        may_be_shared: bool = False,
    ) -> View:
        """Memory of a result as kernels write it. fill: its value before, None for any. has_batch:
        False where callers have packed sequences without a batch, and get them so."""
        fills = () if fill is None else whole(shape, fill)
        made = self.allocate(name, shape if has_batch else shape[1:], dtype, fills, may_be_shared)
        return made if has_batch else made.unsqueeze(0)

    def operate(
        self, what: str, reads: Sequence[str], run: Callable[..., Any], like: View | None = None
    ) -> View | None:
        """Let PyTorch do something; like: its result under the name that this gets, else None."""
        self._steps.append(Operation(what, tuple(reads), run, None if like is None else like.name))
        return like

    def launch(self, spec: KernelSpec, arguments: tuple[Any, ...]) -> None:
        self._steps.append(Launch(spec, arguments))

    def with_other_lengths(self, specs: Iterable[KernelSpec]) -> None:
        self._other_lengths |= dict.fromkeys(specs)

    def plan(self, *results: View | None) -> LaunchPlan:
        names = tuple(None if view is None else view.name for view in results)
        allocations, steps = tuple(self._allocations.values()), tuple(self._steps)
        unread = {one.name for one in allocations if one.may_be_shared}
        for step in steps:
            read = unread & {*step.reads} if isinstance(step, Operation) else None
            assert not read, (
                f"{step} has memory that other calls write to; allocate it without may_be_shared"
            )
        launched = {step.spec for step in steps if isinstance(step, Launch)}
        others = tuple(spec for spec in self._other_lengths if spec not in launched)
        return LaunchPlan(self.device, tuple(self.inputs), allocations, steps, names, others)

    # ------------------------------------------------------------ tensors as kernels read them

    def copied(self, view: View) -> View:
        self._results += 1
        like = View.contiguous(f"{view.name} copied {self._results}", view.shape, view.dtype)

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            return view.in_memory(tensor).clone(memory_format=torch.contiguous_format)

        self.operate("contiguous copy", (view.name,), copy, like)
        return like

    def operand(self, view: View) -> View:
        return without_loose_strides(view) if tma_can_take(view) else self.copied(view)

    def rows(self, view: View) -> View:
        """One float of each row. CuTe DSL 4.8 takes a stride of 0 for a static one."""
        return self.copied(view) if 0 in view.strides else view

    def table(self, view: View) -> View:
        """A table with a last stride of 1, whose rows may be one expanded row."""
        return without_loose_strides(self.rows(view))

    def scale(self, view: View, descale: str) -> View:
        """Descales as (entries, heads_kv); in place but where heads have a stride.  Those of blocks
        as words, in place where they are contiguous."""
        if descale == OF_BLOCKS:
            dense = self.dense(view)
            unaligned = dense.data_ptr() % TMA_ALIGNMENT != 0
            return words_of(self.copied(dense) if unaligned else dense, view.name)
        found = scale_layout(view, descale)
        rows, heads = found.shape
        if heads > 1 and found.strides[1] != 1:
            return self.copied(found)
        # Dimensions of size 1 may carry any stride.
        return found.as_strided((rows, heads), (found.strides[0] if rows > 1 else heads, 1))

    def dense(self, view: View) -> View:
        """A contiguous tensor, in place where it is one; dimensions of 1 may carry any stride."""
        if not view.is_contiguous():
            return self.copied(view)
        return view.as_strided(view.shape, contiguous_strides(view.shape))
