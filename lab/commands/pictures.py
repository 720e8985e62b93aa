"""`python -m lab pictures [NAME...]`: the pictures of docs/pictures, drawn from the code.

Kernels' plans and barriers, layouts, the polynomial's error and the planted race are taken from the
code as it is; rates and the timeline from the small files of lab/pictures/data, which --replay
makes again on the timing model; losses from one that --losses writes of a training's results.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Table


def main(arguments: argparse.Namespace) -> int:
    """Return the exit status, 1 if --check has found a file that is not current."""
    from lab.pictures import inputs, losses
    from lab.pictures.catalogue import PICTURES

    if arguments.replay:
        inputs.replay()
    if arguments.losses:
        losses.keep(arguments.losses)
    rows = [
        _row(name, arguments.write / f"{name}.svg", PICTURES[name]().svg(), arguments.check)
        for name in arguments.names or PICTURES
    ]
    stale = [row for row in rows if row["state"] == "not current"]
    note = ("What is not current is drawn again by `python -m lab pictures`.",) if stale else ()
    columns = Column("picture"), Column("state"), Column("bytes")
    emit(Table("pictures", f"Pictures in {arguments.write.name}", columns, rows, note), arguments)
    return 1 if stale else 0


def _row(name: str, target: Path, drawn: str, only_check: bool) -> dict[str, Any]:
    from lab.pictures import inputs, losses

    if only_check:
        same = target.is_file() and target.read_text("utf-8") == drawn
        state = "current" if same else "not current"
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(drawn, "utf-8")
        state = "written"
    basis, machine = "computed", "this code"
    if name in inputs.MODELLED:
        basis, machine = "modelled", inputs.constants()
    elif name in losses.MEASURED:
        basis, machine = "measured", losses.read_losses()["origin"]
    return {
        "picture": name, "state": state, "bytes": len(drawn.encode()), BASIS: basis,
        MACHINE: machine,
    }  # fmt: skip
