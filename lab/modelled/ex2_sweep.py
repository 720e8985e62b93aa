"""Mixes of exp2 by the timing model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.commands.ex2_sweep import E4M3, Timed, swept, tables, write
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE
from fa4_hd256.softmax_emu.pattern import Ex2Pattern
from lab.model.exp2 import modelled_times
from lab.model.origin import modelled_machine
from lab.paths import PATH_COLUMNS, path_note
from sm100_sim.timing import load


def main(arguments: argparse.Namespace) -> int:
    name = arguments.machine
    machine = modelled_machine(load(name))
    origin = {"gpu": name.upper(), BASIS: "modelled", MACHINE: machine}
    if arguments.e4m3:
        origin["dtype"] = E4M3

    def timed(patterns: Sequence[Ex2Pattern], causal: bool) -> Timed:
        return modelled_times(
            patterns, causal, name, arguments.draws, arguments.jobs, arguments.e4m3
        )

    rows = swept(arguments, timed, origin)
    replays = "the replay of a mix and those that costs of tiles are fitted to"
    emit(tables(rows, PATH_COLUMNS, (path_note(replays),)), arguments)
    write(arguments, rows)
    return 0
