"""Forward and backward under masks by the timing model: ours on Blackwell, with `block_mask=`, and
what making the mask takes."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

from bench.commands.masks import chosen
from bench.measure.masks import MaskedCase
from bench.suite import BACKWARD, DIRECTIONS
from bench.tables.comparison import BOUND, OURS
from bench.tables.ready import ready
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from lab.model import masked, masked_backward
from lab.model.origin import modelled_machine
from lab.model.predictor import Predictor, predictor_of
from lab.paths import PATH_COLUMNS, Paths, path_figures, path_note
from lab.whole.conditions import Call

MODELLED_COLUMNS = (
    Column("direction"), Column("shape"), Column("heads"), Column("mask"),
    Column("visible", format=".1%", title="pairs seen"),
    Column("listed", format=".1%", title="listed"),
    Column("partial", format=".1%", title="of them with bits"),
    Column("ours_ms", "ms", ".3f", OURS), Column("range", title="ours, range"),
    Column("causal_ms", "ms", ".3f", BOUND), Column(OURS, "TFLOPS", ".0f", OURS),
    Column("mask_us", "us", ".0f", "making the mask"), *PATH_COLUMNS,
)  # fmt: skip
MODELLED_NOTES = (
    "bf16, bits made before. Listed: of the forward's steps of 256 queries and 128 keys; of the "
    "backward's blocks of 256 x 256, two steps of dV each. With bits: of the steps of the forward, "
    "or of dV, those of which either half of a tile's rows or keys has bits.",
    f"Making the mask: {masked.OPERATION_US} us of the host for each operation of PyTorch, as an "
    "H200's five forward rows have on average, or HBM's time for what they read and write, where "
    "that is longer; with those of the backward in rows of it; once for all layers, and in no "
    "other column.",
    path_note("the replays of the kernels that read lists"),
)


def modelled(jobs: Sequence[tuple[MaskedCase, str]], predictor: Predictor) -> Table:
    """Every (case, direction) on Blackwell. Raises ValueError for a Hopper machine."""
    machine, values = predictor.machine, predictor.machine.values()
    if machine.architecture == "sm_90a":
        raise ValueError(
            f"{machine.name} is of {machine.architecture}; accepted: a machine of Blackwell, since "
            "its block-mask kernels alone are replayed"
        )
    calls_of = _Modelled(predictor)

    def row(case: MaskedCase, direction: str) -> dict[str, Any]:
        calls, (listed, partial), paths = calls_of(case, direction)
        sampled = zip(calls, machine.sampled(predictor.draws), strict=True)
        seconds = [call.seconds(drawn) for call, drawn in sampled]
        plain = predictor.predict(OURS, case.plain, direction)
        return {
            "direction": direction, "shape": case.shape, "heads": case.heads_text,
            "mask": case.mask,
            "visible": case.pairs / (case.batch * case.seqlen_q * case.seqlen_k),
            "listed": listed, "partial": partial, "ours_ms": seconds[0] * 1e3,
            "range": f"{min(seconds) * 1e3:.3f}..{max(seconds) * 1e3:.3f}",
            "causal_ms": float(plain.seconds[0]) * 1e3,
            OURS: case.flop(direction) / seconds[0] / 1e12,
            "mask_us": masked.making(case, direction == BACKWARD).seconds(values) * 1e6,
            **path_figures(paths),
            BASIS: "modelled", MACHINE: modelled_machine(machine),
        }  # fmt: skip

    rows = ready((row(*job) for job in jobs), len(jobs), MODELLED_COLUMNS)
    plot = Plot(("shape", "heads", "mask"), ("ours_ms", "causal_ms"), panel="direction")
    title = "Attention under masks at head_dim 256"
    return Table("masks", title, MODELLED_COLUMNS, rows, MODELLED_NOTES, plot)


class _Modelled:
    """Calls of cases on the timing model, each kernel replayed where a case first needs it."""

    def __init__(self, predictor: Predictor) -> None:
        which = predictor.machine, predictor.draws
        self._forward = functools.cache(lambda clc: masked.forward(*which, clc))
        self._backward = functools.cache(lambda clc: masked_backward.backward(*which, clc))

    def __call__(
        self, case: MaskedCase, direction: str
    ) -> tuple[list[Call], tuple[float, float], Paths]:
        """Return (a call for each of the drawn machines, shares that are listed and that have bits,
        of the replays)."""
        if direction == BACKWARD:
            backward = self._backward(masked_backward.uses_clc(case))
            calls, shares = backward.calls(case), masked_backward.shares(case)
            return calls, shares, backward.paths_of(case)
        kernel = self._forward(masked.uses_clc(case))
        return masked.calls(case, kernel), masked.shares(case), kernel.paths


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Raises ValueError where no case has a mask."""
    cases, _ = chosen(arguments.only, arguments.provider)
    directions = [arguments.direction] if arguments.direction else DIRECTIONS
    masks = [case for case in cases if isinstance(case, MaskedCase) and not case.packed]
    if not masks:
        raise ValueError(
            f"--only {arguments.only!r} has score_mods or packed sequences alone, which are not "
            "modelled; accepted without a GPU: masks of dense sequences"
        )
    jobs = [(case, direction) for direction in directions for case in masks]
    predictor = predictor_of(arguments.machine, arguments.draws)
    emit(modelled(jobs, predictor), arguments)
    return 0
