"""CUDA graphs by cuda.bindings: the capture of a stream, executable graphs and their launches.

Both modules, driver and runtime, share these functions, whose names differ in their prefix. A
replay runs the steps of a graph one after another, in the order of the capture.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from . import graphs, streams

_handles = itertools.count(0x1000, 0x10)
_graphs: dict[int, graphs.Graph] = {}
_executables: dict[int, graphs.Graph] = {}


def calls(
    prefix: str, graph_type: type, executable_type: type, status_type: Any
) -> dict[str, Callable[..., Any]]:
    """Return the functions of a module by name, without the status in their results.

    prefix: of the names. graph_type, executable_type: of the handles. status_type: the enumeration
    of capture states.
    """
    inactive, active, _ = status_type

    def named(name: str, function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        return {f"{prefix}{name}": lambda *args: function(f"{prefix}{name}", *args)}

    def end(name: str, stream: Any) -> Any:
        return graph_type(_end(name, streams.handle(stream)))

    def is_capturing(_: str, stream: Any) -> Any:
        return active if graphs.takes(streams.handle(stream)) else inactive

    def instantiate(name: str, graph: Any, flags: int = 0) -> Any:
        return executable_type(_instantiate(name, graph, int(flags)))

    found = named("StreamBeginCapture", _begin) | named("StreamEndCapture", end)
    found |= named("StreamIsCapturing", is_capturing) | named("GraphInstantiate", instantiate)
    found |= named("GraphGetNodes", _nodes) | named("GraphDestroy", _destroy)
    found |= named("GraphLaunch", _launch) | named("GraphExecDestroy", _destroy_executable)
    found |= named("GraphUpload", lambda name, executable, stream: _upload(name, executable))
    return found | (named("GraphInstantiateWithFlags", instantiate) if prefix == "cuda" else {})


def forget() -> None:
    """Let go of all graphs, and of the memory they keep."""
    _graphs.clear()
    _executables.clear()


def _of(name: str, kind: str, known: dict[int, graphs.Graph], handle: Any) -> graphs.Graph:
    """Return the graph of a handle. Raises RuntimeError for one that is destroyed or unknown."""
    graph = known.get(int(handle))
    if graph is None:
        raise RuntimeError(f"{name}: {int(handle):#x} is no {kind}")
    return graph


def _begin(name: str, stream: Any, _mode: Any = None) -> None:
    handle = streams.handle(stream)
    if handle in streams.DEFAULTS:
        raise RuntimeError(f"{name}: the default stream cannot be captured; make a stream for it")
    graphs.Graph(stream=handle).capture_begin()


def _end(name: str, stream: int) -> int:
    graph = graphs.open_capture()
    if graph is None or graph.stream != stream:
        raise RuntimeError(f"{name}: {stream:#x} is not being captured")
    graph.capture_end()
    number = next(_handles)
    _graphs[number] = graph
    return number


def _nodes(name: str, graph: Any, count: int = 0) -> tuple[list[Any], int]:
    """Return how many nodes a graph has: its launches, copies and operators."""
    if count:
        raise NotImplementedError(f"{name}: nodes are counted, but have no handles")
    return [], len(_of(name, "graph", _graphs, graph))


def _instantiate(name: str, graph: Any, flags: int) -> int:
    if flags:
        raise NotImplementedError(f"{name}: flags {flags} are not simulated, 0 is")
    number = next(_handles)
    _executables[number] = _of(name, "graph", _graphs, graph).copy()
    return number


def _launch(name: str, executable: Any, stream: Any = None) -> None:
    graph = _of(name, "executable graph", _executables, executable)
    if graphs.takes(streams.handle(stream)):
        graphs.record(graph.replay, graph)
    else:
        graph.replay()


def _upload(name: str, executable: Any) -> None:
    _of(name, "executable graph", _executables, executable)


def _destroy(name: str, graph: Any) -> None:
    _of(name, "graph", _graphs, graph)
    del _graphs[int(graph)]


def _destroy_executable(name: str, executable: Any) -> None:
    _of(name, "executable graph", _executables, executable)
    del _executables[int(executable)]
