"""CUDA graphs over CPU tensors: a capture records launches and operators, a replay runs them.

As on a GPU, a capture computes nothing: results of operators have their shapes, and operators that
write into tensors wait for the replay. Tensors of a capture keep their memory as long as the graph.
A capture by torch.cuda.graph takes the work of all streams but the default one, a capture by
cuda.bindings that of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sm100_sim.errors import LaunchError
from sm100_sim.host import LaunchConfig
from sm100_sim.launcher import parsed_kernel

from . import streams

#: Operators that need a value on the host, which a capture has not got.
_SYNCHRONISING = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::nonzero",
                            "aten::is_nonzero", "aten::masked_select"})  # fmt: skip
#: Operators that give a tensor its memory or leave memory as it is: done in the capture alone.
_AT_ONCE = ("aten::empty", "aten::new_empty", "aten::set_", "aten::detach", "aten::lift_fresh")

_open: list[Graph] = []
#: Whether launches are left out: operators run in a capture for the shapes of their results.
_shapes_only = [False]


class Graph:
    """torch.cuda.CUDAGraph.

    stream: handle of the stream whose work is captured; None for that of all but the default one.
    """

    def __init__(self, keep_graph: bool = False, stream: int | None = None) -> None:
        self.stream = stream
        self._steps: list[tuple[Callable[[], Any], Any]] | None = None
        self._recorder: Any = None
        self._alive: list[Any] = []

    def __len__(self) -> int:
        return len(self._steps or ())

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Record what follows. Raises RuntimeError inside another capture, and on the default
        stream."""
        if _open:
            raise RuntimeError("a CUDA graph is being captured already; captures do not nest")
        if self.stream is None and streams.current() in streams.DEFAULTS:
            raise RuntimeError("CUDAGraph.capture_begin: the default stream cannot be captured")
        self._steps = []
        _open.append(self)
        self._recorder = _Recorder(self)
        self._recorder.__enter__()

    def capture_end(self) -> None:
        """End the capture."""
        self._recorder.__exit__(None, None, None)
        _open.remove(self)

    def copy(self) -> Graph:
        """Return a graph of the same steps."""
        made = Graph(stream=self.stream)
        made._steps = None if self._steps is None else list(self._steps)
        return made

    def add(self, step: Callable[[], Any], alive: Any = None) -> None:
        """Record a step. alive: what must live as long as the graph."""
        assert self._steps is not None
        self._steps.append((step, alive))

    def keep(self, made: Any) -> None:
        """Keep memory that the capture made: PyTorch's captures have a pool of their own."""
        if self.stream is None:
            self._alive.append(made)

    def replay(self) -> None:
        """Run the steps in their order. Raises RuntimeError where nothing was captured."""
        if self._steps is None or self in _open:
            raise RuntimeError("CUDAGraph.replay: no capture of this graph has ended")
        for step, _ in self._steps:
            step()

    def reset(self) -> None:
        """Let go of the steps and their tensors."""
        self._steps, self._alive = None, []

    def pool(self) -> tuple[int, int]:
        """Return the handle of the memory pool, which is ordinary memory."""
        return 0, 0


def open_capture() -> Graph | None:
    """Return the graph that is being captured, if any."""
    return _open[0] if _open else None


def takes(stream: int) -> bool:
    """Return True if work on a stream is left to the replay of the graph that is being captured."""
    if not _open:
        return False
    captured = _open[0].stream
    return stream == captured if captured is not None else stream not in streams.DEFAULTS


def is_capturing() -> bool:
    """Return True in a capture of PyTorch's current stream."""
    return takes(streams.current())


def abandon() -> None:
    """End the capture that a program left open."""
    if _open:
        _open[0].capture_end()


def refuse_waiting(name: str, stream: int | None = None) -> None:
    """Raise RuntimeError if the host would wait for a stream that cuda.bindings capture.

    name: the function that waits. stream: the stream; None for all of the device.
    """
    captured = _open[0].stream if _open else None
    if captured is not None and stream in (None, captured):
        raise RuntimeError(f"{name}: not permitted while stream {captured:#x} is captured")


def refuse_joining(name: str, stream: int, inside: bool, recorded: bool = True) -> None:
    """Raise for a stream that waits for an event of the capture, or the capture's for one of
    another stream. A capture by torch.cuda.graph has all streams but the default one.

    name: the function that waits. inside: whether the event was recorded in a capture.
    recorded: whether it was recorded at all.
    """
    if inside and not takes(stream):
        raise NotImplementedError(
            f"{name}: a stream that waits for an event of a captured stream joins a capture, which "
            "is not simulated; launch on the captured stream"
        )
    if takes(stream) and _open[0].stream is not None and recorded and not inside:
        raise RuntimeError(f"{name}: the captured stream waits for an event from outside")


def refuse_default(kernel: str, stream: int) -> None:
    """Raise LaunchError for a launch on the default stream while torch.cuda.graph captures another:
    a GPU runs it at once, and no replay has it."""
    if _open and _open[0].stream is None and stream in streams.DEFAULTS:
        raise LaunchError(
            f"{kernel} is launched on the default stream, which torch.cuda.graph does not capture; "
            "launch on torch.cuda.current_stream()"
        )


def record(launch: Callable[[], Any], alive: Any) -> None:
    """Leave a launch to the replay of the graph that is being captured. One of an operator that
    runs for the shapes of its results is left out: the operator is what is replayed.

    alive: what must live as long as the graph.
    """
    if not _shapes_only[0]:
        _open[0].add(launch, alive)


def kept(config: LaunchConfig) -> tuple[LaunchConfig, list[Any]]:
    """Return a launch with parameters of its own, and the buffers that hold them."""
    parameters = parsed_kernel(config.ptx, config.kernel_name).params
    buffers = [
        ctypes.create_string_buffer(ctypes.string_at(pointer, parameter.size), parameter.size)
        for parameter, pointer in zip(parameters, config.param_pointers, strict=True)
    ]
    pointers = tuple(ctypes.addressof(buffer) for buffer in buffers)
    return dataclasses.replace(config, param_pointers=pointers), buffers


@contextlib.contextmanager
def _shapes() -> Iterator[None]:
    _shapes_only[0] = True
    try:
        yield
    finally:
        _shapes_only[0] = False


class _Recorder(TorchDispatchMode):
    """Sees PyTorch's operators in a capture."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        if not takes(streams.current()):
            return func(*args, **kwargs)
        if name in _SYNCHRONISING:
            raise RuntimeError(
                f"{name} needs a value of the device on the host: not permitted while a CUDA graph "
                "is captured"
            )
        if func.is_view or name.startswith(_AT_ONCE):
            made = func(*args, **kwargs)
            self._graph.keep(made)
            return made
        if func._schema.is_mutable:
            self._graph.add(lambda: func(*args, **kwargs))
            return _written(func._schema, args, kwargs)
        with _shapes():
            results = func(*args, **kwargs)

        def again() -> None:
            fresh = func(*args, **kwargs)
            for old, new in zip(_tensors(results), _tensors(fresh), strict=True):
                old.copy_(new)

        self._graph.add(again)
        return results


def _tensors(results: Any) -> list[torch.Tensor]:
    several = results if isinstance(results, (tuple, list)) else [results]
    return [one for one in several if isinstance(one, torch.Tensor)]


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator returns that writes into arguments: these arguments.

    Raises NotImplementedError for one that returns new tensors besides.
    """
    named = {a.name: value for a, value in zip(schema.arguments, args)} | kwargs
    by_alias = {
        alias: named.get(a.name)
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
        for alias in a.alias_info.before_set
    }
    found = []
    for returned in schema.returns:
        aliases = () if returned.alias_info is None else returned.alias_info.before_set
        if not any(alias in by_alias for alias in aliases):
            raise NotImplementedError(
                f"{schema.name} writes into arguments and returns new tensors; a captured CUDA "
                "graph takes operators that do one of the two"
            )
        found.append(next(by_alias[alias] for alias in aliases if alias in by_alias))
    return None if not found else found[0] if len(found) == 1 else tuple(found)
