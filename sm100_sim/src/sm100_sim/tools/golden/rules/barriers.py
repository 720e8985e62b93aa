"""Golden cases of named barriers and of the cluster barrier: counts, mixes, exited threads."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases import Case
from .scripts import EXIT, SLEEP, scripted, store, when

_NAMED = "a named barrier completes when as many threads as its count have arrived"
_EXITED = "threads that have exited, at a barrier"
_ALIGNED = "an aligned barrier executed by some lanes of a warp"
_COUNTS = "warps that name different thread counts for one barrier"


def _sync(number: int | str, count: int | str = "") -> str:
    return f"bar.sync {number}{f', {count}' if count else ''};"


def _arrive(number: int | str, count: int | str) -> str:
    return f"bar.arrive {number}, {count};"


def cases() -> Iterator[Case]:
    """All cases of this module."""
    yield from _counts()
    yield from _numbers()
    yield from _named_exits()
    yield from _lanes()
    yield from _cluster()
    yield from _cluster_turns()


def _case(name: str, rule: str, scripts, **options) -> Case:
    return scripted(f"barrier/{name}", rule, scripts, **options)


def _counts() -> Iterator[Case]:
    pair = _sync(1, 64)
    yield _case("two of two warps", _NAMED, {0: [pair], 1: [pair]})
    yield _case("two of two warps, twice", _NAMED, {0: [pair, pair], 1: [pair, pair]})
    yield _case("one of two warps", _NAMED, {0: [pair]})
    yield _case(
        "three warps where two are wanted",
        _NAMED,
        {0: [pair], 1: [SLEEP, pair], 2: [SLEEP + SLEEP, pair]},
    )
    yield _case("four warps where two are wanted", _NAMED, {w: [pair] for w in range(4)})
    yield _case("arrive, then sync", _NAMED, {0: [_arrive(1, 64)], 1: [SLEEP, pair]})
    yield _case("sync, then arrive", _NAMED, {0: [SLEEP, _arrive(1, 64)], 1: [pair]})
    yield _case(
        "arrivals alone complete a round",
        _NAMED,
        {0: [_arrive(1, 64), _arrive(1, 64)], 1: [SLEEP, pair]},
    )
    yield _case(
        "one warp arrives twice for two",
        _NAMED,
        {0: [_arrive(1, 96), _arrive(1, 96)], 1: [SLEEP, _sync(1, 96)]},
    )
    yield _case("sync of one warp alone", _NAMED, {0: [_sync(1, 32), _sync(1, 32)]})
    yield _case(
        "arrive and sync with different counts",
        _NAMED,
        {0: [_arrive(1, 96)], 1: [SLEEP, pair]},
        undefined=_COUNTS,
    )
    yield _case(
        "sync with 64 and with 96", _NAMED, {0: [pair], 1: [SLEEP, _sync(1, 96)]}, undefined=_COUNTS
    )
    yield _case(
        "sync with 96 and with 64", _NAMED, {0: [_sync(1, 96)], 1: [SLEEP, pair]}, undefined=_COUNTS
    )
    for count in (48, 16):
        threads = f"mov.u32 %r1, {count};\nbar.sync 1, %r1;"
        yield _case(
            f"count of {count}",
            _NAMED,
            {0: [threads], 1: [SLEEP, threads]},
            undefined="a thread count that is not a multiple of the warp's size",
        )
    yield _case("whole block", _NAMED, {w: [_sync(0)] for w in range(4)})
    yield _case(
        "whole block with its count, mixed",
        _NAMED,
        {0: [_sync(0)], 1: [_sync(0)], 2: [_sync(0, 128)], 3: [_sync(0, 128)]},
        undefined=_COUNTS,
    )
    yield _case("block of 48 threads", _NAMED, {0: [_sync(0)], 1: [_sync(0)]}, block=48)


def _numbers() -> Iterator[Case]:
    rule = "a CTA has the named barriers 0 to 15, independent of each other"
    yield _case(
        "sixteen at a time",
        rule,
        {
            0: ["\n".join(_arrive(n, 64) for n in range(16))],
            1: [SLEEP, "\n".join(_sync(n, 64) for n in reversed(range(16)))],
        },
    )
    for number in (15, 16, 17):
        text = f"mov.u32 %r1, {number};\nbar.sync %r1, 64;"
        yield _case(
            f"number {number}",
            rule,
            {0: [text], 1: [text]},
            undefined="" if number < 16 else "a barrier's number above 15",
        )


def _named_exits() -> Iterator[Case]:
    everyone = _sync(1, 128)
    yield _case(
        "exited warp, no count", _EXITED, {**{w: [_sync(0)] for w in range(3)}, 3: [SLEEP, EXIT]}
    )
    yield _case(
        "exited warp before, no count",
        _EXITED,
        {**{w: [SLEEP, _sync(0)] for w in range(3)}, 3: [EXIT]},
    )
    yield _case(
        "exited warp, counted", _EXITED, {**{w: [everyone] for w in range(3)}, 3: [SLEEP, EXIT]}
    )
    yield _case(
        "exited warp before, counted",
        _EXITED,
        {**{w: [SLEEP, everyone] for w in range(3)}, 3: [EXIT]},
    )
    half = when("%lane", "lt", 16, EXIT)
    yield _case(
        "exited lanes, counted", _EXITED, {**{w: [everyone] for w in range(3)}, 3: [half, everyone]}
    )
    yield _case(
        "exited lanes, no count",
        _EXITED,
        {**{w: [_sync(0)] for w in range(3)}, 3: [half, _sync(0)]},
    )
    yield _case(
        "arrived, then exited", _EXITED, {0: [_arrive(2, 64), EXIT], 1: [SLEEP, _sync(2, 64)]}
    )
    votes = "setp.ge.u32 %p0, %lane, 8;\nbarrier.cta.red.popc.aligned.u32 %r1, 0, %p0;\n" + store(
        0, "%r1"
    )
    yield _case(
        "votes of a block with exited lanes",
        _EXITED,
        {**{w: [votes] for w in range(3)}, 3: [half, votes]},
    )


def _lanes() -> Iterator[Case]:
    one_by_one = "".join(when("%lane", half, 16, "barrier.sync 1, 64;") for half in ("lt", "ge"))
    yield _case("lanes come one by one", _NAMED, {0: [one_by_one], 1: ["barrier.sync 1, 64;"]})
    yield _case(
        "half of a warp, not aligned",
        _NAMED,
        {0: [when("%lane", "lt", 16, "barrier.sync 1, 64;")], 1: [SLEEP, "barrier.sync 1, 64;"]},
    )
    apart = when("%lane", "lt", 16, "barrier.sync 1, 64;") + when(
        "%lane", "ge", 16, "barrier.sync 2, 64;"
    )
    yield _case(
        "halves of a warp at two barriers",
        _NAMED,
        {0: [apart], 1: ["barrier.sync 1, 64;"], 2: ["barrier.sync 2, 64;"]},
    )
    yield _case(
        "half of a warp, aligned",
        _NAMED,
        {0: [when("%lane", "lt", 16, _sync(1, 64))], 1: [SLEEP, _sync(1, 64)]},
        undefined=_ALIGNED,
    )
    yield _case(
        "two halves, aligned",
        _NAMED,
        {
            0: [when("%lane", "lt", 16, _sync(1, 64)) + when("%lane", "ge", 16, _sync(1, 64))],
            1: [SLEEP, _sync(1, 64)],
        },
        undefined=_ALIGNED,
    )


_CLUSTER = "the cluster barrier waits for every thread of the cluster that has not exited"
_BOTH = "barrier.cluster.arrive.aligned;"
_WAIT = "barrier.cluster.wait.aligned;"
_TURNS = "each thread waits once between two arrivals, and arrives before it waits"


def _pair(name: str, rule: str, scripts, undefined: str = "") -> Case:
    return scripted(
        f"cluster barrier/{name}",
        rule,
        scripts,
        block=64,
        grid=2,
        cluster=2,
        undefined=undefined,
    )


def _cluster() -> Iterator[Case]:
    met = [_BOTH, _WAIT]
    yield _pair("all meet", _CLUSTER, dict.fromkeys(range(4), met * 2))
    yield _pair("one comes late", _CLUSTER, {**dict.fromkeys(range(3), met), 3: [SLEEP, *met]})
    yield _pair(
        "one stays away", _CLUSTER, {**dict.fromkeys(range(3), met), 3: ["bar.sync 1, 64;"]}
    )
    yield _pair("nobody waits", _CLUSTER, {w: [_BOTH] for w in range(4)})
    yield _pair("some do not wait", _CLUSTER, {0: met, 1: [_BOTH], 2: met, 3: [_BOTH]})
    yield _pair(
        "relaxed arrivals",
        _CLUSTER,
        {w: ["barrier.cluster.arrive.relaxed.aligned;", _WAIT] for w in range(4)},
    )
    yield _pair("a CTA exits first", _CLUSTER, {0: [SLEEP, *met], 1: met, 2: [EXIT], 3: [EXIT]})
    yield _pair("a warp exits late", _CLUSTER, {0: met, 1: met, 2: met, 3: [SLEEP, EXIT]})
    yield _pair(
        "lanes exit", _CLUSTER, {0: met, 1: met, 2: met, 3: [when("%lane", "lt", 8, EXIT), *met]}
    )
    halves = when("%lane", "lt", 16, "barrier.cluster.arrive;") + when(
        "%lane", "ge", 16, "barrier.cluster.arrive;"
    )
    yield _pair(
        "lanes arrive one by one",
        _CLUSTER,
        {0: [halves, "barrier.cluster.wait;"], 1: met, 2: met, 3: met},
    )
    half = when("%lane", "lt", 16, "barrier.cluster.arrive;")
    yield _pair("half of a warp arrives", _CLUSTER, {0: [half], 1: met, 2: met, 3: met})
    yield _pair(
        "half of a warp arrives, aligned",
        _CLUSTER,
        {0: [when("%lane", "lt", 16, _BOTH)], 1: met, 2: met, 3: met},
        _ALIGNED,
    )


def _cluster_turns() -> Iterator[Case]:
    met = [_BOTH, _WAIT]
    yield _pair("wait without an arrival", _TURNS, {0: [_WAIT], 1: met, 2: met, 3: met}, _TURNS)
    yield _pair(
        "first wait without an arrival, all", _TURNS, {w: [_WAIT, *met] for w in range(4)}, _TURNS
    )
    yield _pair("two waits", _TURNS, {w: [_BOTH, _WAIT, _WAIT] for w in range(4)}, _TURNS)
    yield _pair(
        "two arrivals at once",
        _TURNS,
        {0: [_BOTH, _BOTH, _WAIT], 1: [SLEEP, *met], 2: [SLEEP, *met], 3: [SLEEP, *met]},
        _TURNS,
    )
    yield _pair(
        "two arrivals for an absent warp",
        _TURNS,
        {0: [_BOTH, _BOTH, _WAIT], 1: met, 2: met, 3: ["bar.sync 1, 64;"]},
        _TURNS,
    )
    yield _pair("two arrivals of all", _TURNS, {w: [_BOTH, _BOTH, _WAIT] for w in range(4)}, _TURNS)
