"""The first hour on a GPU: one command, one report; without a GPU it runs in the simulator.

Every step runs in a process of its own with a time limit; a step that hangs is killed, named, and
the next one goes on. Started again with the same --out, it goes on where it ended. docs/bringup.md
says what each stage settles.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.bringup.stages import STAGES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [stage.name for stage in STAGES]
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bringup_report"),
        help="directory of results and report (default: %(default)s); what is "
        "there already is not run again",
    )
    parser.add_argument(
        "--again",
        action="append",
        default=[],
        metavar="STAGE",
        choices=names,
        help="drop this stage's results first",
    )
    parser.add_argument(
        "--stages", nargs="+", choices=names, default=names, help="run these only (default: all)"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="steps STAGE/STEP that match, as in 'golden/tma*'",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="run in the simulator, as on a machine without a GPU",
    )
    parser.add_argument("--report", action="store_true", help="only write the report again")
    parser.add_argument(
        "--decide",
        type=Path,
        metavar="REPORT",
        help="only print the configurations that follow from a report.json, on any machine",
    )
    parser.add_argument("--plant", action="store_true", help=argparse.SUPPRESS)
