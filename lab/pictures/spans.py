"""Spans of every role of the forward kernel, read from a replay on the timing model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.plan.edges import EdgeTable
from sm100_sim.timing import Action, Prediction

#: Lanes of the timeline from top to bottom.
LANES = ("load Q", "load K", "load V", "tensor core", "softmax", "correction", "epilogue")


class Span(NamedTuple):
    """Something that lasts: of a step of a tile, both counted from 0, in clocks of the replay."""

    lane: str
    what: str
    tile: int
    step: int
    begin: int
    end: int


class _Event(NamedTuple):
    """An event of one warp. barrier: name of the edge that it waits for or signals, "" for none.
    key: of a load, which tensor."""

    action: Action
    barrier: str
    issued: int
    started: int
    done: int
    last: int
    key: Any


def forward_spans(prediction: Prediction, config: ForwardConfig, steps: int) -> list[Span]:
    """Spans of the leader CTA, by lane and time. steps: of each tile, all tiles alike."""
    warps = config.warps
    events = {
        warp: list(_events(prediction, config.edges, warp))
        for warp in (warps.load, warps.mma, warps.softmax[0], warps.correction[0], warps.epilogue)
    }
    return [
        *_loads(events[warps.load], steps),
        *_products(events[warps.mma], steps),
        *_softmax(events[warps.softmax[0]], steps),
        *_correction(events[warps.correction[0]], steps, config.o_slices),
        *_stores(events[warps.epilogue], steps, config.o_slices),
    ]


def _events(prediction: Prediction, edges: EdgeTable, warp: int) -> Iterator[_Event]:
    """Yield the events of a warp of the first CTA, in program order."""
    compiled, run = prediction.compiled, prediction.central
    program, names = compiled.program, _barrier_names(compiled.barrier_names, edges)
    row = compiled.warps.index((0, warp))
    for place in range(int(program.first[row]), int(program.last[row])):
        event = int(program.event[place])
        if event < 0:
            continue
        kind, first, second, *_ = (int(value) for value in program.action[event])
        barrier, key = "", None
        if kind == Action.WAIT:
            barrier = names[first]
        elif kind in (Action.ARRIVE, Action.COMMIT, Action.TMA_LOAD) and second > first:
            barrier = names[int(program.targets[first][0])]
        started, done = int(run.started[event]), int(run.done[event])
        last = done
        if kind == Action.MMA:
            last = started + compiled.mma[event].compute
        elif kind == Action.TMA_LOAD:
            key = compiled.entries[event].operands[1][0]
        yield _Event(Action(kind), barrier, int(run.issued[place]), started, done, last, key)


def _barrier_names(addresses: list[int], edges: EdgeTable) -> list[str]:
    """The edge of each mbarrier of a replay; "" for those of the scheduler."""
    own = [edge.name for edge in edges.edges for _ in range(edge.stages)]
    first = min(address & 0xFFFFFF for address in addresses)
    places = [((address & 0xFFFFFF) - first) // 8 for address in addresses]
    return [own[place] if place < len(own) else "" for place in places]


def _loads(events: list[_Event], steps: int) -> Iterator[Span]:
    """One span for each operand tile: from its first TMA instruction to its last byte."""
    groups: list[list[_Event]] = []
    for event in events:
        if event.action == Action.ARRIVE:
            groups.append([])
        elif event.action == Action.TMA_LOAD:
            groups[-1].append(event)
    # Q, K and V are first loaded in this order.
    names: dict[Any, str] = {}
    counts = dict.fromkeys("QKV", 0)
    for group in groups:
        if not group:
            continue
        name = names.setdefault(group[0].key, "QKV"[len(names)] if len(names) < 3 else "")
        number = counts[name]
        counts[name] += 1
        tile, step = (number, 0) if name == "Q" else divmod(number, steps)
        yield Span(f"load {name}", name, tile, step, group[0].issued, max(e.done for e in group))


def _products(events: list[_Event], steps: int) -> Iterator[Span]:
    """QK ends with the commit of s_done, PV with that of o_done."""
    chain: list[_Event] = []
    counts = {"QK": 0, "PV": 0}
    for event in events:
        if event.action == Action.MMA:
            chain.append(event)
        elif event.action == Action.COMMIT and event.barrier in ("s_done", "o_done"):
            what = "QK" if event.barrier == "s_done" else "PV"
            tile, step = divmod(counts[what], steps)
            counts[what] += 1
            yield Span("tensor core", what, tile, step, chain[0].started, chain[-1].last)
            chain = []


def _softmax(events: list[_Event], steps: int) -> Iterator[Span]:
    """Yield the spans from S in TMEM to P in TMEM, then the row sum until the next wait."""
    begin = given = -1
    count = 0
    for event in events:
        if event.action == Action.WAIT and given >= 0:
            tile, step = divmod(count, steps)
            yield Span("softmax", "sum", tile, step, given, event.issued)
            given, count = -1, count + 1
        if event.action == Action.WAIT and event.barrier == "s_done":
            begin = event.done
        elif event.action == Action.ARRIVE and event.barrier == "p_last_done":
            given = event.issued
            yield Span("softmax", "P", *divmod(count, steps), begin, given)


def _correction(events: list[_Event], steps: int, slices: int) -> Iterator[Span]:
    """O in hand, from its product's end: looked at or rescaled, or drained at the tile's end;
    "o_free" ends when the accumulator is given back."""
    begin, count, staged = -1, 0, 0
    for event in events:
        if event.action == Action.WAIT and event.barrier == "o_done":
            begin, count = event.done, count + 1
        elif event.action == Action.ARRIVE and event.barrier == "o_free":
            tile, step = divmod(count - 1, steps)
            what = "o_free" if step == steps - 1 else "rescale"
            yield Span("correction", what, tile, step, begin, event.issued)
        elif event.action == Action.ARRIVE and event.barrier == "o_staged":
            staged += 1
            if staged % slices == 0:
                tile, step = divmod(count - 1, steps)
                yield Span("correction", "drain", tile, step, begin, event.issued)


def _stores(events: list[_Event], steps: int, slices: int) -> Iterator[Span]:
    found = [event for event in events if event.action == Action.TMA_STORE]
    for tile in range(len(found) // slices):
        part = found[tile * slices : (tile + 1) * slices]
        last = max(event.done for event in part)
        yield Span("epilogue", "store O", tile, steps - 1, part[0].issued, last)
