"""Spans of roles from the events of their warps, made by hand: two tiles of two steps."""

from __future__ import annotations

from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from lab.pictures import spans
from lab.pictures.spans import Span
from sm100_sim.timing import Action

STEPS = 2


def event(action, issued, *, barrier="", started=0, done=0, last=0, key=None):
    return spans._Event(action, barrier, issued, started, done, last or done, key)


def test_loads_are_told_apart_by_their_tensors():
    """Each group begins with the arrival that expects its bytes; Q is loaded once a tile."""
    clock, events = 0, []
    for key in ("q", "k", "k", "v", "q", "k", "v"):
        clock += 100
        events.append(event(Action.ARRIVE, clock))
        events += [
            event(Action.TMA_LOAD, clock + 5 * n, done=clock + 50 + 9 * n, key=key)
            for n in range(2)
        ]
    found = list(spans._loads(events, STEPS))
    assert [(s.lane, s.tile, s.step) for s in found] == [
        ("load Q", 0, 0), ("load K", 0, 0), ("load K", 0, 1), ("load V", 0, 0),
        ("load Q", 1, 0), ("load K", 1, 0), ("load V", 0, 1),
    ]  # fmt: skip
    assert (found[0].begin, found[0].end) == (100, 159)


def test_products_end_with_the_commit_that_names_them():
    """The commit that frees an operand stands between, and ends nothing."""
    events = []
    for clock, barrier in ((0, "s_done"), (100, "s_done"), (200, "o_done")):
        events += [
            event(Action.MMA, clock, started=clock + 10 * n, last=clock + 10 * n + 20)
            for n in range(3)
        ]
        events.append(event(Action.COMMIT, clock, barrier="kv_free"))
        events.append(event(Action.COMMIT, clock, barrier=barrier))
    assert list(spans._products(events, STEPS)) == [
        Span("tensor core", "QK", 0, 0, 0, 40),
        Span("tensor core", "QK", 0, 1, 100, 140),
        Span("tensor core", "PV", 0, 0, 200, 240),
    ]


def test_softmax_ends_with_p_and_goes_on_with_the_sum():
    events = [
        event(Action.WAIT, 0, barrier="s_done", done=10),
        event(Action.WAIT, 20, barrier="scale_free", done=25),
        event(Action.ARRIVE, 60, barrier="p_last_done"),
        event(Action.WAIT, 70, barrier="s_done", done=90),
        event(Action.ARRIVE, 130, barrier="p_last_done"),
    ]
    assert list(spans._softmax(events, STEPS)) == [
        Span("softmax", "P", 0, 0, 10, 60),
        Span("softmax", "sum", 0, 0, 60, 70),
        Span("softmax", "P", 0, 1, 90, 130),
    ]


def test_correction_looks_then_drains():
    events = [
        event(Action.WAIT, 0, barrier="o_done", done=10),
        event(Action.ARRIVE, 15, barrier="o_free"),
        event(Action.WAIT, 20, barrier="o_done", done=100),
        event(Action.ARRIVE, 120, barrier="o_staged"),
        event(Action.ARRIVE, 150, barrier="o_free"),
        event(Action.ARRIVE, 160, barrier="o_staged"),
    ]
    assert list(spans._correction(events, STEPS, slices=2)) == [
        Span("correction", "rescale", 0, 0, 10, 15),
        Span("correction", "o_free", 0, 1, 100, 150),
        Span("correction", "drain", 0, 1, 100, 160),
    ]


def test_stores_of_a_tile_are_one_span():
    events = [event(Action.TMA_STORE, clock, done=clock + 30) for clock in (0, 10, 100, 110)]
    assert [(s.tile, s.begin, s.end) for s in spans._stores(events, STEPS, slices=2)] == [
        (0, 0, 40), (1, 100, 140)
    ]  # fmt: skip


def test_barriers_have_the_names_of_their_edges():
    """Names come in the order of the table, both CTAs' alike; what follows belongs to the
    scheduler."""
    edges = ForwardConfig().edges
    base, peer = 0x38600, 1 << 24
    behind = base + 8 * edges.num_barriers
    names = spans._barrier_names([base, base + 8, base + 16, peer | base, behind], edges)
    first, second = edges.edges[:2]
    assert names == [first.name, first.name, second.name, first.name, ""]
    assert first.stages == 2
