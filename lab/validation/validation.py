"""The timing model against published rates, and against replays outside its fits; rows of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.tables.ready import results
from bench.tables.table import Column
from fa4_hd256 import progress
from fa4_hd256.run.kernel_names import in_words
from lab.model.backward import Backward
from lab.model.forward import Kernel
from lab.model.machines import held_at
from lab.model.predictor import Provider, replayable
from lab.model.stated_errors import lengths_of
from lab.model.tiles import KEYS, ROWS
from lab.published.rows import BURST, FIT, TEST, Build, Published
from sm100_sim.timing import load

DRAWS = 4
REPLAYED_COLUMNS = (
    Column("kernel"), Column("gpu", title="GPU"), Column("case"),
    Column("published", "TFLOPS", ".0f"), Column("modelled", "TFLOPS", ".0f"),
    Column("error", "", "+.1%"),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A published row and what the model says of the very kernel.

    seconds: float64, at the machine's own clock or the one that the GPU was held at, the central
    constants first. clock_ghz: of the row's session, fitted; fitted: seconds with the central
    constants at that clock.
    """

    row: Published
    seconds: np.ndarray
    clock_ghz: float
    fitted: float

    @property
    def error(self) -> float:
        """Return the error of the rate, at the machine's own clock: above 0 the model is too
        fast."""
        return float(self.row.seconds / self.seconds[0] - 1)

    @property
    def tflops(self) -> float:
        """Return the modelled TFLOPS, at the machine's own clock."""
        return self.row.tflops_of(float(self.seconds[0]))

    @property
    def error_fitted(self) -> float:
        return self.row.seconds / self.fitted - 1

    @property
    def counts(self) -> bool:
        """Return True if it is unthrottled and device-bound, and of 1k to 32k or a chunk of a
        prompt."""
        return self.row.kind == BURST and self.row.seqlen <= 32768


def _kernel(row: Published, draws: int) -> Kernel | Backward:
    provider = replayable(row)
    if provider is None:
        raise ValueError(f"{row.build}, {row.case} cannot be replayed: see `replayable`")
    variant = provider.variant(row.problem, row.direction, divided=row.parts > 1)
    found = _replayed(provider, row, variant, draws)
    return found.divided(row.parts) if isinstance(found, Kernel) and row.parts > 1 else found


#: Kernels by provider, direction, variant, machine, the clock that it was held at, and draws.
_kernels: dict[tuple, Kernel | Backward] = {}


def _replayed(provider: Provider, row: Published, variant: Hashable, draws: int) -> Any:
    key = provider.name, row.direction, variant, row.machine, row.held_ghz, draws
    if key not in _kernels:
        make = getattr(provider, row.direction)
        machine = load(row.machine)
        if row.held_ghz is not None:
            machine = held_at(machine, row.held_ghz)
        told = in_words(variant) or "full"
        with progress.step(f"replaying {provider.name} for {row.gpu}, {row.direction}: {told}"):
            _kernels[key] = make(variant, machine, draws)
    return _kernels[key]


def _seconds(kernel: Kernel | Backward, row: Published, clock_ghz: float | None) -> np.ndarray:
    """clock_ghz: None for the machine's own, with all draws; else of the central constants."""
    if clock_ghz is not None:
        values = [kernel.values[0]._replace(clock_ghz=clock_ghz)]
        kernel = replace(kernel, values=values)
    device = [
        call.seconds(drawn, row.load_before or 0.0)
        for call, drawn in zip(kernel.calls(row.problem), kernel.values)
    ]
    # Calls follow one another: the longer of the two shows.
    return np.maximum(device, row.protocol.host_seconds)


def effective_clock(rows: Sequence[tuple[Published, Kernel | Backward]]) -> float:
    """GHz at which a session's rows of the fit half come out right in the geometric mean."""
    clock = float(rows[0][1].values[0].clock_ghz)
    for _ in range(3):
        excess = [np.log(row.seconds / _seconds(kernel, row, clock)[0]) for row, kernel in rows]
        clock /= float(np.exp(np.mean(excess)))
    return clock


def _at_own_clock(replayed: tuple[Published, Kernel | Backward]) -> list[dict[str, Any]]:
    """Return the row that is printed when a kernel has been replayed."""
    row, kernel = replayed
    one = Found(row, _seconds(kernel, row, None), float(kernel.values[0].clock_ghz), row.seconds)
    return [{
        "kernel": str(row.build), "gpu": row.gpu, "case": f"{row.direction}, {row.case}",
        "published": row.tflops, "modelled": one.tflops, "error": one.error,
    }]  # fmt: skip


def judged(
    published: Iterable[Published], machines: Sequence[str], draws: int = DRAWS
) -> list[Found]:
    """Judge the rows whose very kernel is replayed, on the machines named, each printed at the
    machine's clock as soon as it is replayed. The clock of a session is fitted to its unthrottled
    rows of the fit half."""
    chosen = [
        row for row in published
        if row.machine in machines and row.role in (FIT, TEST) and replayable(row)
    ]  # fmt: skip
    replayed = ((row, _kernel(row, draws)) for row in chosen)
    kernels = list(results(replayed, len(chosen), REPLAYED_COLUMNS, _at_own_clock))
    clocks = {}
    for session in dict.fromkeys(row.session for row, _ in kernels):
        fit = [(row, kernel) for row, kernel in kernels
               if row.session == session and row.role == FIT and row.kind == BURST]  # fmt: skip
        clocks[session] = effective_clock(fit) if fit else None
    found = []
    for row, kernel in kernels:
        seconds, clock = _seconds(kernel, row, None), clocks[row.session]
        own = float(kernel.values[0].clock_ghz)
        fitted_seconds = float(_seconds(kernel, row, clock)[0]) if clock else float(seconds[0])
        found.append(Found(row, seconds, clock or own, fitted_seconds))
    return found


def ratios(found: Sequence[Found]) -> Iterator[tuple[Found, Build, float, float]]:
    """Yield (a row, the build it is compared with, published and modelled ratio of the rates) of
    two builds on one GPU in one session, the same shape and protocol."""
    for number, base in enumerate(found):
        for other in found[number + 1 :]:
            a, b = base.row, other.row
            alike = a.session == b.session and a.protocol == b.protocol and a.problem == b.problem
            if alike and a.direction == b.direction and a.build != b.build:
                modelled = float(base.seconds[0] / other.seconds[0])
                yield other, a.build, b.tflops / a.tflops, modelled


def on_two_gpus(found: Sequence[Found], newer: str, older: str) -> list[tuple[Found, Found]]:
    """Return pairs of the same kernel, shape and protocol on each GPU; unthrottled rows."""

    def key(row: Published) -> tuple:
        return row.build, row.direction, row.case, row.protocol

    base = {key(one.row): one for one in found if one.row.gpu == older and one.counts}
    return [
        (one, base[key(one.row)]) for one in found
        if one.row.gpu == newer and one.counts and key(one.row) in base
    ]  # fmt: skip


def tiles_of(row: Published) -> int:
    """Return the number of tiles of 256 queries, or splits of them."""
    return row.heads[0] * -(-row.seqlen // ROWS) * row.parts * row.batch


def chunks(rows: Iterable[Published]) -> Iterator[tuple[Published, Published, int]]:
    """Yield (a chunk of a prompt, the same with twice the keys, by how many steps its tiles
    differ), where every tile has a CTA pair of its own."""
    known = {(r.build, r.gpu, r.heads, r.seqlen, r.longest): r for r in rows if r.seqlen >= 512}
    for (build, gpu, heads, seqlen, keys), row in known.items():
        more = known.get((build, gpu, heads, seqlen, 2 * keys))
        if row.keys and more and tiles_of(row) <= 74:
            yield row, more, keys // KEYS // row.parts


def class_of(row: Published) -> tuple[str, ...]:
    """Return (GPU, direction, mask, lengths, protocol)."""
    lengths = lengths_of(row.seqlen, row.longest)
    return row.gpu, row.direction, row.mask, lengths, row.kind


def rms(values: Iterable[float]) -> float:
    """0 of none."""
    found = np.array(list(values), float)
    return float(np.sqrt(np.mean(found**2))) if found.size else 0.0
