"""`python -m lab peers`: earlier flash-attn-4 and FROST, prepared to be compiled and replayed.

Published rates are of them (`lab/published`), and of the CuTe DSL of their day. Without
arguments: which are known and which are prepared. `COMMIT...`: prepares these, once; pip fetches
CuTe DSL, quack and, where a version of the package has the commit's files, that version. Of the
others a checkout is needed: `--source DIR`.
"""

from __future__ import annotations

import argparse

from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Table
from fa4_hd256 import progress
from lab.model.peers import releases

COLUMNS = (
    Column("release"), Column("what"), Column("cutlass_dsl", title="CuTe DSL"), Column("state"),
)  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Raises ValueError for a commit that is not known, and for a checkout of anything else."""
    wanted = [releases.release(commit) for commit in arguments.commits]
    if arguments.source is not None and len(wanted) != 1:
        raise ValueError("--source is a checkout at one commit: name that commit, and no other")
    for one in wanted:
        with progress.step(f"preparing {one.what}"):
            releases.prepare(one, arguments.source)
    rows = [
        {
            "release": one.commit, "what": one.what, "cutlass_dsl": one.cutlass_dsl,
            "state": releases.unavailable(one) or f"prepared: {one.folder}",
            BASIS: "computed", MACHINE: "this code",
        }
        for one in wanted or releases.ALL.values()
    ]  # fmt: skip
    emit(Table("peers", "Earlier flash-attn-4 and FROST", COLUMNS, rows), arguments)
    return 0
