"""Rows measured on an H200 or an H100: what the timing model says of each, and what was measured.

They were measured in first launches and sustained; decoding steps are within the power budget and
have one time. `seen` says that a row was known before the model
predicted it. All have 16,384 tokens but for decoding steps and chunks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.suite import BACKWARD, FORWARD, H200_TOKENS, Case
from fa4_hd256.kernels.limits import HEAD_DIM
from lab.model.calls import Kind, default_splits, defaults_to_clc
from lab.model.hopper import attention as model
from lab.model.hopper.clocks import DEFAULT, Clocks
from lab.model.machines import gpu_of
from lab.model.peers import flash_attn_4_hopper as theirs
from lab.whole.conditions import Call
from sm100_sim.timing import Machine, load

OURS, THEIRS = "fa4_hd256", "flash-attn-4"
#: Names of GPUs in those of rows.
_OTHER_GPUS = {"h200": "", "h100": ", H100"}
#: Measurements of rows, by `Row.name`.
MEASURED = Path(__file__).parents[2] / "micro" / "hopper_rows.json"
#: Queries of the shortest row that is no decoding step: those are timed by `bench decode`.
LEAST_QUERIES = 512
#: Time of a graph without a kernel by the events that rows are timed by, an H200 (lab/notes.md).
EMPTY_GRAPH_US = 5.2


@dataclass(frozen=True)
class Row:
    """One row. seen: whether it had been measured before the model said anything of it. gpu: the
    machine's name."""

    provider: str
    direction: str
    case: Case
    seen: bool
    head_dim: int = HEAD_DIM
    gpu: str = "h200"

    @property
    def name(self) -> str:
        dim = "" if self.head_dim == HEAD_DIM else f", head_dim {self.head_dim}"
        what = f"{self.case.shape}, {self.case.heads_text}, {self.case.mask}{dim}"
        return f"{self.provider} {self.direction}: {what}{_OTHER_GPUS[self.gpu]}"

    @property
    def decodes(self) -> bool:
        return self.case.seqlen_q < LEAST_QUERIES

    @property
    def flop(self) -> float:
        return self.case.flop(self.direction, self.head_dim)

    @property
    def machine(self) -> Machine:
        """Return the machine at the clock of its replays."""
        return model.hopper(self.gpu)

    def calls(self) -> list[Call]:
        case, machine = self.case, self.machine
        if self.direction == BACKWARD and self.provider == THEIRS:
            return theirs.backward(case.causal, machine).calls(case)
        if self.direction == BACKWARD:
            use_clc = defaults_to_clc(case, BACKWARD)
            found = model.backward(Kind.of(case), use_clc, machine, case.seqlen_k)
            return found.calls(case)
        if self.provider == THEIRS:
            return theirs.forward(case.causal, machine, head_dim=self.head_dim).calls(case)
        splits = default_splits(case, gpu_of(machine))
        kernel = model.forward(model.forward_variant(case, machine, splits), machine)
        return (kernel.divided(splits) if splits > 1 else kernel).calls(case)

    def times(self, clocks: Clocks = DEFAULT) -> model.Times:
        """clocks: of the very GPU."""
        return model.times(self.calls(), self.machine, clocks)


def by_events(seconds: float) -> float:
    """Seconds of a launch by events: the graph's own are among them, in which the model has the
    launch of its first kernel."""
    return seconds + (EMPTY_GRAPH_US - model.hopper().values().launch_us) * 1e-6


def _dense(
    seqlen: int, causal: bool, heads: tuple[int, int] = (16, 16), left: int | None = None
) -> Case:
    lengths = ((seqlen, seqlen),) * max(1, H200_TOKENS // seqlen)
    return Case("h200", lengths, *heads, causal, (left, None))


def _decode(batch: int, queries: int, keys: int, heads: tuple[int, int]) -> Case:
    return Case("h200", ((queries, keys),) * batch, *heads, True)


def rows() -> Iterator[Row]:
    """All of them, an H200's first."""
    for gpu in ("h200", "h100"):
        for row in (*_forward(), *_unseen(), *_backward(gpu), *_windows()):
            if gpu == "h200":
                yield row
            elif not row.decodes:
                yield replace(row, gpu=gpu, seen=row.seen and row.direction == BACKWARD)


def _forward() -> Iterator[Row]:
    for causal in (False, True):
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
            yield Row(OURS, FORWARD, _dense(seqlen, causal), True)
            yield Row(THEIRS, FORWARD, _dense(seqlen, causal), True)
    yield Row(OURS, FORWARD, _dense(4096, True, left=511), True)
    for seqlen, causal in ((4096, False), (16384, False), (1024, True), (4096, True),
                           (16384, True)):  # fmt: skip
        yield Row(OURS, FORWARD, _dense(seqlen, causal, (16, 2)), True)
    for queries in (1, 4):
        yield Row(OURS, FORWARD, _decode(128, queries, 131072, (32, 2)), True)
        yield Row(OURS, FORWARD, _decode(1, queries, 131072, (32, 2)), True)
        yield Row(OURS, FORWARD, _decode(8, queries, 8192, (16, 2)), True)


def _windows() -> Iterator[Row]:
    """Narrow ones, whose keys and values take as much of HBM as queries and results."""
    for seqlen, left, heads in ((2048, 511, (16, 16)), (4096, 255, (16, 16)), (8192, 767, (16, 16)),
                                (4096, 1023, (16, 2)), (16384, 511, (16, 2))):  # fmt: skip
        yield Row(OURS, FORWARD, _dense(seqlen, True, heads, left), False)


def _backward(gpu: str) -> Iterator[Row]:
    for causal in (False, True):
        for seqlen in (1024, 2048, 4096, 8192, 16384):
            # The first rows of each showed what was wrong with the kernels.
            ours = gpu == "h200" and (seqlen > 1024 or not causal)
            theirs = gpu == "h100" and seqlen != 8192
            yield Row(OURS, BACKWARD, _dense(seqlen, causal), ours)
            yield Row(THEIRS, BACKWARD, _dense(seqlen, causal), theirs)


def _unseen() -> Iterator[Row]:
    for seqlen, causal in ((3072, False), (6144, False), (3072, True), (6144, True)):
        yield Row(OURS, FORWARD, _dense(seqlen, causal), False)
        yield Row(THEIRS, FORWARD, _dense(seqlen, causal), False)
    for seqlen, causal, heads in ((8192, True, (32, 2)), (2048, True, (24, 4)),
                                  (2048, False, (8, 8)), (8192, False, (4, 4))):  # fmt: skip
        yield Row(OURS, FORWARD, _dense(seqlen, causal, heads), False)
    yield Row(OURS, FORWARD, _dense(16384, True, left=1023), False)
    for count in (16, 8, 4):
        yield Row(OURS, FORWARD, _decode(1, 512, 65536, (count, 1)), True)
    yield Row(OURS, FORWARD, _decode(32, 1, 32768, (16, 2)), False)
    yield Row(OURS, FORWARD, _decode(4, 1, 65536, (32, 4)), False)
    for causal in (False, True):
        for seqlen in (1024, 4096, 16384):
            yield Row(THEIRS, FORWARD, _dense(seqlen, causal), False, 128)


@functools.cache
def _kept() -> dict[str, dict]:
    """The file's "rows" and "runs"."""
    found: dict[str, dict] = json.loads(MEASURED.read_text())
    return found


def measured() -> dict[str, dict]:
    """Row's name -> {"first", "late": [us, MHz of an SM] in first launches and sustained, "run":
    which, or "us": median of launches within the power budget, "from": where it stands; "clocks":
    of the kernels by Nsight Compute, if they were counted}."""
    return _kept()["rows"]


def clocks_of(row: dict) -> Clocks:
    """Return the clocks of the GPU on which a row was measured, or of the machine's."""
    if "run" not in row:
        return DEFAULT
    run = _kept()["runs"][row["run"]]
    return Clocks.of(run["product"], run["attention"], load("h200").values())
