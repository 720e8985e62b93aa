"""Findings: what they say, and how they are collected."""

from __future__ import annotations

from typing import Any, NamedTuple

from .compiled.tracking import BARRIER
from .memory.in_flight import IN_FLIGHT
from .memory.shadow import Access

_WHAT = {
    "generic": "",
    "ld": "tensor memory load, ",
    "st": "tensor memory store, ",
    "mma": "MMA, asynchronous, ",
    "wgmma": "wgmma, asynchronous, ",
    "tma": "copy, asynchronous, ",
    "bulk": "bulk store, asynchronous, ",
    "clc": "launch-control response, asynchronous, ",
    "dealloc": "deallocation, ",
    "arrive": "arrival, ",
    "copy": "cp.async, asynchronous, ",
    "stored": "asynchronous store, ",
    "reduced": "asynchronous reduction, ",
    "atomic": "atomic or ordered access, ",
}

#: Missing edges after an access of each kind, for whoever touches the same bytes next.
_EDGES = {
    "ld": (
        "load-in-flight",
        "the load is not known to be complete: tcgen05.wait::ld by its warp, then an arrive (or "
        "barrier) that the later access waits for, must stand between",
    ),
    "st": (
        "store-in-flight",
        "the store is not known to be complete: tcgen05.wait::st by its warp, then an arrive (or "
        "barrier) that the later access waits for, must stand between",
    ),
    "mma": (
        "mma-in-flight",
        "an MMA is known to be complete only through tcgen05.commit -> mbarrier -> wait; no such "
        "wait leads to the later access",
    ),
    "wgmma": (
        "mma-in-flight",
        "a wgmma is known to be complete only through wgmma.commit_group and wait_group by the "
        "warps of its warpgroup, and then an arrive (or barrier) that the later access waits for",
    ),
    "tma": (
        "copy-in-flight",
        "no wait for the phase that the copy completes leads to the later access",
    ),
    "clc": (
        "copy-in-flight",
        "no wait for the phase that the response completes leads to the later access",
    ),
    "stored": (
        "copy-in-flight",
        "no wait for the phase that the store completes leads to the later access",
    ),
    "reduced": (
        "copy-in-flight",
        "no wait for the phase that the reduction completes leads to the later access",
    ),
    "copy": (
        "copy-in-flight",
        "cp.async is known to be complete only through cp.async.wait_group by the thread that "
        "issued it and then a barrier, or through an mbarrier that tracks it "
        "(cp.async.mbarrier.arrive) and a wait",
    ),
    "bulk": (
        "bulk-store-in-flight",
        "the bulk store may still read its source: cp.async.bulk.commit_group and "
        "wait_group{.read} by the thread that issued it must stand between, and a barrier if "
        "another warp follows",
    ),
}
_ORDINARY = (
    "race",
    "nothing orders the two: no arrive -> wait (mbarrier, named barrier, cluster barrier) leads "
    "from the first to the second",
)


class Site(NamedTuple):
    """Actor of a finding: instruction (its index in the kernel, PTX line and opcode), CTA
    coordinates and warp index."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs of a site
    line: int
    opcode: str
    cta: tuple[int, ...]
    warp: int


class Party(NamedTuple):
    """One access of a finding, for people: `what` it does ("write, MMA, asynchronous"), the text
    and PTX line of the instruction, its source line and those of the calls that lead there (file,
    line), and who executes it."""

    what: str
    text: str
    line: int
    source: tuple[str, int] | None
    stack: tuple[tuple[str, int], ...]
    cta: tuple[int, ...]
    warp: int


class Finding(str):
    """The text of a finding, with its `kind` (see docs/sanitizer.md).

    parties: the first access and the second, as far as there are any. missing: the edge that would
    order them, or what else is wrong. sites: the instructions involved. about: the memory or
    barrier, without its CTA. times: how often the sites met. ctas, warps: by site, those that were
    seen there. stretches: by site, see `stretches.Stretches`; what `causes` goes by.
    """

    kind: str
    sites: tuple[Site, ...]
    about: str
    times: int
    ctas: tuple[set[tuple[int, ...]], ...]
    warps: tuple[set[int], ...]
    stretches: tuple[int, ...]
    parties: tuple[Party, ...]
    missing: str

    def __new__(
        cls, kind: str, text: str, sites: tuple[Site, ...] = (), about: str = "",
        parties: tuple[Party, ...] = (), missing: str = "",
    ) -> Finding:  # fmt: skip
        self = super().__new__(cls, f"{kind}: {text}")
        self.kind, self.sites, self.about = kind, sites, about
        self.parties, self.missing = parties, missing or text
        self.times, self.stretches = 1, ()
        self.ctas = tuple({site.cta} for site in sites)
        self.warps = tuple({site.warp} for site in sites)
        return self

    def __getnewargs__(self) -> tuple:
        text = self.removeprefix(f"{self.kind}: ")
        return self.kind, text, self.sites, self.about, self.parties, self.missing

    @property
    def lines(self) -> tuple[int, ...]:
        """PTX lines of the sites."""
        return tuple(site.line for site in self.sites)

    def again(self, other: Finding) -> None:
        """Count the same finding once more, perhaps in other CTAs and warps."""
        self.times += other.times
        pairs: Any = (self.ctas, other.ctas), (self.warps, other.warps)
        for mine, theirs in pairs:
            for known, fresh in zip(mine, theirs, strict=False):
                known.update(fresh)


def place(instruction: Any, cta: Any, warp: int) -> str:
    """Instruction text, source line, CTA and warp."""
    if instruction is None:
        return f"CTA {cta} warp {warp}"
    source = f", {instruction.source[0]}:{instruction.source[1]}" if instruction.source else ""
    return f"`{instruction.text}` (PTX line {instruction.line}{source}), CTA {cta} warp {warp}"


def parties(*accesses: Access) -> tuple[Party, ...]:
    """Return the accesses for people, those of no instruction left out."""
    return tuple(
        party("{}, {}".format(*_verb(a)).rstrip(", "), a.instruction, a.cta, a.index)
        for a in accesses if a.instruction is not None
    )  # fmt: skip


def party(what: str, instruction: Any, cta: Any, warp: int) -> Party:
    """An instruction, as a CTA's warp executes it, for people."""
    return Party(what, instruction.text, instruction.line, instruction.source, instruction.stack,
                 tuple(cta), warp)  # fmt: skip


def _verb(access: Access) -> tuple[str, str]:
    """Return what an access does, and how: ("write", "MMA, asynchronous, ")."""
    verb = "write" if access.write else "read"
    what = _WHAT.get(access.kind, "")
    if access.kind in ("dealloc", "arrive"):
        verb, what = what.removesuffix(", "), ""
    return verb, what


def describe(access: Access) -> str:
    """An access in words."""
    verb, what = _verb(access)
    detail = f" [{access.detail}]" if access.detail else ""
    return f"{verb} ({what}{place(access.instruction, access.cta, access.index)}){detail}"


def race(before: Access, access: Access, where: str, missing_fence: bool) -> Finding:
    """Two accesses that are not ordered; `missing_fence`: but for a proxy fence they are."""
    kind, edge = _EDGES.get(before.kind, _ORDINARY)
    if missing_fence:
        kind = "missing-proxy-fence"
        edge = (
            "the first is an access through the generic proxy and the second goes through the "
            "async proxy: fence.proxy.async must follow the first, before the arrive or barrier "
            "that the second waits for"
        )
    elif access.kind == "dealloc":
        kind = "freed-in-use"
        edge = f"tensor memory is freed while it may be in use; {edge}"
    text = f"{where}: {describe(before)}, then {describe(access)}: {edge}"
    pair = before, access
    return Finding(kind, text, sites(*pair), about(where), parties(*pair), edge)


def registers(hazard: Any, cta: Any, warp: int) -> Finding:
    """A register of a wgmma that is touched at the wrong time (`in_flight.Hazard`), by a warp."""
    product, other = hazard.product, hazard.other
    verb = "written" if hazard.writes else "read"
    who = "what the kernel begins with" if other is None else place(other, cta, warp)
    if hazard.kind == IN_FLIGHT:
        edge = (
            f"{verb} while the wgmma may be at work: wgmma.commit_group and a wait_group that "
            "covers its group must stand between; only wgmmas of the same shape may go on with its "
            "accumulator"
        )
    else:
        edge = f"{verb} without a wgmma.fence behind it and before the wgmma"
    text = f"{hazard.register} of {place(product, cta, warp)}, touched by {who}: {edge}"
    pair = [one for one in (other, product) if one is not None]
    words = ["wgmma, asynchronous" if one is product else f"register {verb}" for one in pair]
    return Finding(
        hazard.kind, text, tuple(site(one, cta, warp) for one in pair), "registers",
        tuple(party(word, one, cta, warp) for word, one in zip(words, pair, strict=True)), edge,
    )  # fmt: skip


def not_waited(used: Any) -> Finding:
    """Data of a tcgen05.ld that are used before a tcgen05.wait::ld (`load_waits.Use`), in whatever
    warps execute the two."""
    edge = (
        f"register {used.register} depends on what tcgen05.ld brings only behind tcgen05.wait::ld "
        "(.sync.aligned), which must stand between the two"
    )
    return _of_load(used, "use of its data", edge)


def arrived_early(used: Any) -> Finding:
    """A tcgen05.ld in flight where its warp arrives at a barrier (`load_waits.Use`)."""
    edge = (
        "the arrival does not wait for tcgen05.ld, and who waits for it may overwrite the columns "
        "first: tcgen05.wait::ld (.sync.aligned) must stand between the two"
    )
    return _of_load(used, "arrival", edge)


def _of_load(used: Any, other: str, edge: str) -> Finding:
    nobody: Any = (), -1
    pair = used.load, used.other
    told = [place(one, *nobody).rpartition(", CTA ")[0] for one in pair]
    words = "tensor memory load", other
    finding = Finding(
        "load-not-waited", f"{', then '.join(told)}: {edge}",
        tuple(site(one, *nobody) for one in pair), "registers",
        tuple(party(word, one, *nobody) for word, one in zip(words, pair, strict=True)), edge,
    )  # fmt: skip
    finding.ctas, finding.warps = (set(), set()), (set(), set())
    return finding


def site(instruction: Any, cta: Any, warp: int) -> Site:
    """An instruction as a CTA's warp executes it."""
    return Site(instruction.index, instruction.line, instruction.opcode, tuple(cta), warp)


def sites(*accesses: Access) -> tuple[Site, ...]:
    """Sites of the accesses, those of no instruction left out."""
    return tuple(site(a.instruction, a.cta, a.index) for a in accesses if a.instruction is not None)


def about(where: str) -> str:
    """A memory without its CTA: "shared memory of CTA (0, 0, 0)" is shared memory."""
    return where.partition(" of CTA")[0]


def unready(number: int, access: Access, where: str) -> Finding:
    """An access to granules that were never written, or that are a live mbarrier."""
    if number == BARRIER:
        return Finding(
            "barrier-bytes",
            f"{where}: {describe(access)} touches the bytes of a live mbarrier; only mbarrier "
            "instructions may, until mbarrier.inval",
            sites(access),
            about(where),
            parties(access),
            "only mbarrier instructions may touch a live mbarrier, until mbarrier.inval",
        )
    return Finding(
        "uninitialised-read",
        f"{where}: {describe(access)} reads what nobody has written",
        sites(access),
        about(where),
        parties(access),
        "a write that comes before: nobody has written what is read",
    )
