"""Golden cases of what CTAs of a cluster do to each other: remote arrivals, copies, early exits."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases import Case
from .scripts import EXIT, MEET_CLUSTER, SLEEP, asked, peer_address, scripted, store, when

_SHARED = (
    ".shared .align 128 .b8 tile[1024];\n.shared .align 8 .b64 bar;\n.shared .align 8 .b64 other;\n"
)
_ARRIVAL = "an arrival on a peer's barrier counts there, whatever its semantics and scope say"
_GONE = "shared memory of a CTA that has exited"
_FLIGHT = "what a CTA has in flight when it exits"
_DESTINATION = "the barrier of a copy is in the CTA of its destination"
_REDUCED = "a bulk reduction between shared memories"
#: Operations and types of cp.reduce.async.bulk in shared memory (PTX ISA, "cp.reduce.async.bulk").
BULK_REDUCTIONS = (
    "add.u32",
    "add.s32",
    "min.u32",
    "min.s32",
    "max.u32",
    "max.s32",
    "and.b32",
    "or.b32",
    "xor.b32",
    "inc.u32",
    "dec.u32",
    "add.u64",
)
_ALONE = "shared::cluster in a CTA that has no other"
_CONTENTS = "what an mbarrier is given beyond its range"


def _once(text: str) -> str:
    return when("%lane", "eq", 0, text) + "bar.warp.sync 0xffffffff;"


def _start(count: int = 1) -> str:
    """Thread 0 of each CTA initialises `bar`, word t of `tile` is 1000 rank + t; all meet."""
    return (
        "setp.eq.u32 %first, %t, 0;\n"
        f"@%first mbarrier.init.shared::cta.b64 [bar], {count};\n"
        "@%first mbarrier.init.shared::cta.b64 [other], 1;\n"
        "mad.lo.u32 %r10, %rank, 1000, %t;\nshl.b32 %r11, %t, 2;\nmov.u32 %r12, tile;\n"
        "add.u32 %r12, %r12, %r11;\nst.shared.u32 [%r12], %r10;\nmov.u32 %r10, 0xEEEEEEEE;\n"
        "st.shared.u32 [%r12+512], %r10;\n"
        f"fence.mbarrier_init.release.cluster;\nfence.proxy.async;\n{MEET_CLUSTER}\n"
    )


def _pair(name: str, rule: str, scripts, undefined: str = "", count: int = 1, **options) -> Case:
    """Two CTAs of 64 threads; warp 0 and 1 are the first's, 2 and 3 the second's."""
    options.setdefault("start", _start(count))
    return scripted(
        f"cluster/{name}",
        rule,
        scripts,
        block=64,
        grid=2,
        cluster=2,
        shared=_SHARED,
        undefined=undefined,
        **options,
    )


def cases() -> Iterator[Case]:
    """All cases of this module."""
    yield from _arrivals()
    yield from _copies()
    yield from _copy_sizes()
    yield from _reductions()
    yield from _exits()
    yield from _ranges()


def _remote(modifiers: str, extra: str = "") -> str:
    return _once(
        peer_address("bar") + f"\nmbarrier.arrive{modifiers}.shared::cluster.b64 _, [%far]{extra};"
    )


def _arrivals() -> Iterator[Case]:
    for modifiers in ("", ".release.cta", ".release.cluster", ".relaxed.cta", ".relaxed.cluster"):
        yield _pair(
            f"remote arrive{modifiers}",
            _ARRIVAL,
            {0: [asked(0)], 2: [SLEEP, _remote(modifiers)]},
            end=MEET_CLUSTER,
        )
    yield _pair(
        "remote arrive of one where two are wanted",
        _ARRIVAL,
        {0: [asked(0)], 2: [_remote("")]},
        count=2,
        end=MEET_CLUSTER,
    )
    yield _pair(
        "remote arrive with a count",
        _ARRIVAL,
        {0: [asked(0)], 2: [_remote("", ", 2")]},
        count=2,
        end=MEET_CLUSTER,
    )
    yield _pair(
        "remote arrive.expect_tx",
        _ARRIVAL,
        {0: [asked(0)], 2: [_remote(".expect_tx", ", 64")]},
        end=MEET_CLUSTER,
    )
    lanes = peer_address("bar") + "\nmbarrier.arrive.shared::cluster.b64 _, [%far];"
    yield _pair(
        "remote arrive of 32 lanes",
        _ARRIVAL,
        {0: [asked(0)], 2: [lanes]},
        count=32,
        end=MEET_CLUSTER,
    )
    yield _pair(
        "remote arrive of 31 wanted lanes",
        _ARRIVAL,
        {0: [asked(0), asked(1, parity=1)], 2: [lanes]},
        count=31,
        end=MEET_CLUSTER,
    )


def _push(
    size: int | str, source: str = "tile", target: str = "%far", barrier: str = "%near"
) -> str:
    return (
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        f"[{target}], [{source}], {size}, [{barrier}];"
    )


def _seen() -> str:
    """The first words of what a copy brings: lane l reads word 128 + l of the tile."""
    return (
        "shl.b32 %r13, %lane, 2;\nmov.u32 %r14, tile;\nadd.u32 %r13, %r13, %r14;\n"
        "ld.shared.u32 %r15, [%r13+512];\nmul.wide.u32 %rd2, %lane, 4;\n"
        "add.u64 %rd2, %rd2, %out;\nst.global.u32 [%rd2+640], %r15;"
    )


_EXPECT = _once("mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 128;")
#: The peer's second half of the tile, and its barrier.
_PLACES = (
    f"{peer_address('tile')}\nadd.u32 %far, %far, 512;\n{peer_address('bar', '%near')}\n"
    "mov.u32 %r16, tile;\n"
)


def _copies() -> Iterator[Case]:
    good = _once(_PLACES + _push(128, "%r16"))
    yield _pair(
        "copy to the peer",
        _DESTINATION,
        {0: [_EXPECT, asked(0), _seen()], 2: [good]},
        end=MEET_CLUSTER,
    )
    own = _once(_PLACES + "mov.u32 %near, bar;\n" + _push(128, "%r16"))
    yield _pair(
        "copy to the peer, own barrier",
        _DESTINATION,
        {0: [SLEEP, SLEEP, _seen()], 2: [_EXPECT, own, asked(0)]},
        _DESTINATION,
        end=MEET_CLUSTER,
    )
    back = _once(
        _PLACES + "mov.u32 %r17, tile;\nadd.u32 %r17, %r17, 512;\n"
        "mov.u32 %far, tile;\nmapa.shared::cluster.u32 %far, %far, %peer;\n"
        "mov.u32 %near, bar;\n" + _push(128, "%far", "%r17")
    )
    yield _pair(
        "copy from the peer",
        "the source of a copy is the own CTA's shared memory",
        {0: [_EXPECT, back, asked(0), _seen()]},
        "cp.async.bulk with a source in another CTA's shared memory",
        end=MEET_CLUSTER,
    )
    store_async = _once(
        _PLACES + "mov.u32 %r18, 4711;\nst.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
        ".u32 [%far], %r18, [%near];"
    )
    four = _once("mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 4;")
    yield _pair(
        "st.async to the peer",
        _DESTINATION,
        {0: [four, asked(0), _seen()], 2: [store_async]},
        end=MEET_CLUSTER,
    )
    astray = store_async.replace("[%near];", "[%r19];").replace(
        "mov.u32 %r18", "mov.u32 %r19, bar;\nmov.u32 %r18"
    )
    yield _pair(
        "st.async to the peer, own barrier",
        _DESTINATION,
        {0: [SLEEP, SLEEP, _seen()], 2: [four, astray, asked(0)]},
        _DESTINATION,
        end=MEET_CLUSTER,
    )


def _copy_sizes() -> Iterator[Case]:
    yield _pair(
        "copy of nothing",
        "a bulk copy of no bytes",
        {
            0: [_once("mbarrier.arrive.shared::cta.b64 _, [bar];"), asked(0), _seen()],
            2: [_once(_PLACES + "mov.u32 %r19, 0;\n" + _push("%r19", "%r16"))],
        },
        end=MEET_CLUSTER,
    )
    yield _pair(
        "copy of 24 bytes",
        "sizes of bulk copies are multiples of 16",
        {
            0: [_EXPECT, asked(0), _seen()],
            2: [_once(_PLACES + "mov.u32 %r19, 24;\n" + _push("%r19", "%r16"))],
        },
        "a size that is not a multiple of 16",
        end=MEET_CLUSTER,
    )


def _reduce(form: str, target: str, barrier: str) -> str:
    return _once(
        _PLACES + "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx"
        f"::bytes.{form} [{target}], [%r16], 128, [{barrier}];"
    )


def _reductions() -> Iterator[Case]:
    for form in BULK_REDUCTIONS:
        yield _pair(
            f"bulk {form} into the peer",
            _REDUCED,
            {0: [_EXPECT, asked(0), _seen()], 2: [_reduce(form, "%far", "%near")]},
            end=MEET_CLUSTER,
        )
    own = "mov.u32 %far, tile;\nadd.u32 %far, %far, 512;\nmov.u32 %near, bar;\n"
    mapped = own + (
        "mapa.shared::cluster.u32 %far, %far, %rank;\n"
        "mapa.shared::cluster.u32 %near, %near, %rank;\n"
    )
    for name, place in (("itself", own), ("itself, by mapa", mapped)):
        for launch, directives in (
            ("without a cluster", ""),
            ("in a cluster of one", ".reqnctapercluster 1, 1, 1"),
        ):
            yield from _alone(f"{name}, {launch}", place, directives)
        for (kind, script), rule in zip(
            _into(place).items(), (_REDUCED, _DESTINATION), strict=True
        ):
            yield _pair(f"{kind} into {name}", rule, {0: script}, end=MEET_CLUSTER)


def _into(place: str) -> dict[str, list[str]]:
    """A bulk reduction and a copy to where `place` puts %far, with their barrier at %near."""
    reduced = _reduce("add.u32", "%far", "%near").replace("cp.reduce", f"{place}cp.reduce")
    copied = _once(_PLACES + place + _push(128, "%r16"))
    return {
        "bulk add.u32": [_EXPECT, reduced, asked(0), _seen()],
        "copy": [_EXPECT, copied, asked(0), _seen()],
    }


def _alone(name: str, place: str, directives: str) -> Iterator[Case]:
    """Yield cases of shared::cluster in a CTA that has no other."""
    four = _once("mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 4;")
    stored = _once(
        place + "mov.u32 %r18, 4711;\nst.async.weak.shared::cluster.mbarrier::"
        "complete_tx::bytes.u32 [%far], %r18, [%near];"
    )
    arrive = _once(f"{place}mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%near];")
    scripts = {
        **_into(place),
        "st.async": [four, stored, asked(0), _seen()],
        "arrive": [arrive, asked(0), _seen()],
    }
    for kind, script in scripts.items():
        yield scripted(
            f"cluster/{kind} into {name}",
            _ALONE,
            {0: script},
            block=64,
            shared=_SHARED,
            start=_start(),
            end=MEET_CLUSTER,
            directives=directives,
        )


def _exits() -> Iterator[Case]:
    def gone(name: str, text: str) -> Case:
        return _pair(
            f"exited peer: {name}", _GONE, {0: [SLEEP, text], 1: [], 2: [EXIT], 3: [EXIT]}, _GONE
        )

    place = peer_address("tile")
    yield gone("load", f"{place}\nld.shared::cluster.u32 %r1, [%far];\n{store(0, '%r1')}")
    yield gone("store", f"{place}\nst.shared::cluster.u32 [%far], %t;")
    yield gone(
        "atomic", _once(f"{place}\natom.shared::cluster.add.u32 %r1, [%far], 1;\n{store(0, '%r1')}")
    )
    yield gone("arrive", _remote(""))
    yield gone("relaxed arrive", _remote(".relaxed.cluster"))
    yield gone("copy", _once(_PLACES + _push(128, "%r16")) + SLEEP)
    yield gone("nothing", "")
    yield _pair(
        "late peer: load",
        _GONE,
        {
            0: [f"{place}\nld.shared::cluster.u32 %r1, [%far];\n{store(0, '%r1')}"],
            2: [SLEEP, EXIT],
            3: [EXIT],
        },
    )
    yield _pair(
        "one warp of the peer stays",
        _GONE,
        {
            0: [SLEEP, f"{place}\nld.shared::cluster.u32 %r1, [%far];\n{store(0, '%r1')}"],
            2: [EXIT],
            3: [SLEEP, SLEEP, SLEEP],
        },
    )
    push = _once(_PLACES + _push(128, "%r16"))
    yield _pair(
        "own copy in flight",
        _FLIGHT,
        {0: [_EXPECT, asked(0), _seen()], 2: [push, EXIT], 3: [EXIT]},
        "a CTA exits while a bulk copy reads its shared memory",
    )
    yield _pair(
        "own arrival in flight", _FLIGHT, {0: [asked(0)], 2: [_remote(""), EXIT], 3: [EXIT]}
    )
    four = _once("mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 4;")
    yield _pair(
        "own st.async in flight",
        _FLIGHT,
        {
            0: [four, asked(0), _seen()],
            2: [
                _once(
                    _PLACES + "mov.u32 %r18, 4711;\nst.async.weak.shared::cluster.mbarrier::"
                    "complete_tx::bytes.u32 [%far], %r18, [%near];"
                ),
                EXIT,
            ],
            3: [EXIT],
        },
    )


def _answers(first: int) -> str:
    """Store test_wait of both parities in words `first` and `first` + 1."""
    return "\n".join(
        f"mbarrier.test_wait.parity.shared::cta.b64 %done, [bar], {parity};\n"
        f"selp.u32 %r20, 1, 0, %done;\n{store(first + parity, '%r20')}"
        for parity in (0, 1)
    )


def _ranges() -> Iterator[Case]:
    def steps(name: str, texts: list[str], undefined: str = "", count: int = 1) -> Case:
        script = [
            part for i, text in enumerate(texts) for part in (_once(text + "\n" + _answers(2 * i)),)
        ]
        return _pair(name, _CONTENTS, {0: script}, undefined, count, end=MEET_CLUSTER)

    arrive = "mbarrier.arrive.shared::cta.b64 _, [bar]{};"
    yield steps(
        "arrivals: two where one is wanted, one by one", [arrive.format(""), arrive.format("")]
    )
    yield steps(
        "arrivals: two at once where one is wanted",
        [arrive.format(", 2"), arrive.format("")],
        "an arrival count above the pending one",
    )
    yield steps(
        "arrivals: five at once where two are wanted",
        [arrive.format(", 5"), arrive.format(""), arrive.format("")],
        "an arrival count above the pending one",
        2,
    )
    yield steps(
        "tx-count: beyond its range",
        [
            "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 1048575;",
            "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 1048575;",
            arrive.format(""),
        ],
        "a tx-count beyond 2^20 - 1",
    )
    yield steps(
        "initialised again, untouched",
        ["mbarrier.init.shared::cta.b64 [bar], 1;", arrive.format("")],
    )
    yield steps(
        "initialised again, in use",
        [arrive.format(""), "mbarrier.init.shared::cta.b64 [bar], 1;", arrive.format("")],
        "mbarrier.init of a live barrier",
        1,
    )
    never = _once(
        "mov.u64 %rd3, 0;\nst.shared.u64 [tile], %rd3;\n"
        "mbarrier.arrive.shared::cta.b64 _, [tile];\n"
        "mbarrier.test_wait.parity.shared::cta.b64 %done, [tile], 0;\n"
        f"selp.u32 %r20, 1, 0, %done;\n{store(0, '%r20')}"
    )
    yield _pair(
        "never initialised",
        _CONTENTS,
        {0: [never]},
        "an mbarrier nobody initialised",
        end=MEET_CLUSTER,
    )
    odd = _once("mov.u32 %r1, tile;\nadd.u32 %r1, %r1, 4;\nmbarrier.init.shared::cta.b64 [%r1], 1;")
    yield _pair(
        "off its alignment", _CONTENTS, {0: [odd]}, "an mbarrier off 8 bytes", end=MEET_CLUSTER
    )
