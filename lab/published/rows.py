"""Published rates: which kernel, which GPU, how it was measured, what it is for.

A rate validates the model only where the very kernel can be compiled and replayed
(`predictor.replayable`). The others stand as published.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.suite import BACKWARD, FORWARD, Case

FLASH_ATTENTION, FROST = "flash-attention", "cudnn-frontend"
CUDNN = "cuDNN"

#: Purpose of a row. The clock of a GPU is fitted on one half of its rows and tested on the other;
#: `AS_PUBLISHED` is never counted: its kernel is closed, or nobody said which it was.
AS_PUBLISHED = "as published"
FIT, TEST = "fit half", "test half"

#: Kind of a measured rate. Sustained: more than `SUSTAINED_SECONDS` of load before it. Host-bound:
#: the time is that of the host's calls.
BURST, SUSTAINED, HOST_BOUND, UNKNOWN = "burst", "sustained", "host-bound", "unknown"
SUSTAINED_SECONDS = 0.1


@dataclass(frozen=True)
class Build:
    """A version of a project's kernels, exactly.

    project: `FLASH_ATTENTION`, ... . version: a commit (8 digits) or a release, None if that is not
    said. cutlass_dsl: the release of nvidia-cutlass-dsl that compiled it; where it is not said the
    newest of that day. options: what the caller or its plan chose, as (name, value).
    """

    project: str
    version: str | None
    cutlass_dsl: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.project} {self.version or '(version not said)'}"


@dataclass(frozen=True)
class Clock:
    """ghz: None where nothing is known. evidence: who says so. held: the GPU could not go faster,
    whatever it did; else it is the highest that was set or seen."""

    ghz: float | None
    evidence: str
    held: bool = False


NO_CLOCK = Clock(None, "none")


@dataclass(frozen=True)
class Protocol:
    """Protocol by which a rate was measured.

    method: the timer. warmup, timed: calls, or milliseconds of calls where `milliseconds`; None if
    that is not said. cold: L2 is flushed before each call. host_seconds: that the host takes for a
    call, 0 where it is not known to show.
    """

    method: str
    warmup: float | None = None
    timed: float | None = None
    milliseconds: bool = False
    cold: bool = False
    host_seconds: float = 0.0

    def load_before(self, seconds: float) -> float | None:
        """Seconds of load before the median timed call of one that takes `seconds`."""
        if self.warmup is None or self.timed is None:
            return None
        if not self.milliseconds:
            return seconds * (self.warmup + (self.timed - 1) / 2)
        # Triton's `do_bench`: one call, five to estimate, then as many as fit, at least one.
        calls = [max(1, int(each * 1e-3 / seconds)) for each in (self.warmup, self.timed)]
        return seconds * (6 + calls[0] + (calls[1] - 1) / 2)


UNKNOWN_PROTOCOL = Protocol("not said")


@dataclass(frozen=True)
class Published:
    """A rate as somebody published it.

    tflops: 10^12 operations a second by `Case.flop`, five products for a backward. keys: of each
    sequence, None for as many as queries (`seqlen`). heads: of queries and of keys. host_bound: the
    time is that of the host's calls. lab: who measured; rows of a lab and GPU share their clock.
    """

    build: Build
    gpu: str
    causal: bool
    batch: int
    seqlen: int
    heads: tuple[int, int]
    tflops: float
    source: str
    role: str = AS_PUBLISHED
    direction: str = FORWARD
    clock: Clock = NO_CLOCK
    protocol: Protocol = UNKNOWN_PROTOCOL
    host_bound: bool = False
    keys: int | None = None
    head_dim: int = 256
    lab: str = ""

    def __post_init__(self) -> None:
        if self.direction not in (FORWARD, BACKWARD) or not self.tflops > 0:
            raise ValueError(
                f"no rate of a {FORWARD} or {BACKWARD} in TFLOPS: {self.direction}, {self.tflops}"
            )

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def problem(self) -> Case:
        lengths = (self.seqlen, self.longest)
        return Case("published", (lengths,) * self.batch, *self.heads, self.causal)

    @property
    def seconds(self) -> float:
        return self.tflops_of(self.tflops)

    def tflops_of(self, seconds: float) -> float:
        return self.problem.flop(self.direction, self.head_dim) / seconds / 1e12

    @property
    def load_before(self) -> float | None:
        """Seconds of load before the median timed call, None if the protocol is not said."""
        return self.protocol.load_before(self.seconds)

    @property
    def kind(self) -> str:
        """`BURST`, `SUSTAINED`, `HOST_BOUND` or `UNKNOWN`."""
        if self.host_bound:
            return HOST_BOUND
        if self.load_before is None:
            return UNKNOWN
        return SUSTAINED if self.load_before > SUSTAINED_SECONDS else BURST

    @property
    def case(self) -> str:
        keys = f" x {self.keys} keys" if self.keys else ""
        heads = f"heads {self.heads[0]}/{self.heads[1]}"
        return f"{self.mask}, {self.batch}x{self.seqlen}{keys}, {heads}"

    @property
    def session(self) -> str:
        """GPU and lab."""
        return f"{self.gpu}, {self.lab}"

    @property
    def longest(self) -> int:
        """Keys of a sequence."""
        return self.keys or self.seqlen

    @property
    def parts(self) -> int:
        """Return the number of KV splits of its build."""
        return dict(self.build.options).get("SPLIT_KV", 1)

    @property
    def machine(self) -> str:
        return self.gpu.lower()

    @property
    def held_ghz(self) -> float | None:
        """The clock of a GPU that was held at one, None for one that had its own."""
        return self.clock.ghz if self.clock.held else None


def half_of(seqlen: int) -> str:
    """2k, 8k, 32k and 128k are for the fit, the lengths between them for the test."""
    return FIT if round(math.log2(seqlen)) % 2 else TEST


def series(
    first: Published, rates: Mapping[int, float], tokens: int | None = None
) -> Iterator[Published]:
    """Rates by seqlen, alike in all else, the role by `half_of` unless the first stands as
    published. tokens: in each batch; None: the batch of the first."""
    for seqlen, rate in rates.items():
        batch = max(1, tokens // seqlen) if tokens else first.batch
        role = AS_PUBLISHED if first.role == AS_PUBLISHED else half_of(seqlen)
        yield replace(first, batch=batch, seqlen=seqlen, tflops=rate, role=role)
