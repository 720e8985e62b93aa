"""`python -m bench peers`: earlier flash-attn-4 and FROST, prepared to be compiled and replayed.

Published rates are of them (`bench/model/published`), and of the CuTe DSL of their day. Without
arguments: which are known and which are prepared. `COMMIT...`: prepares these, once; pip fetches
CuTe DSL, quack and, where a version of the package has the commit's files, that version. Of the
others a checkout is needed: `--source DIR`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.peers import releases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="to prepare")
    parser.add_argument(
        "--source", type=Path, metavar="DIR",
        help="checkout of github.com/Dao-AILab/flash-attention at that commit",
    )


def main(arguments: argparse.Namespace) -> int:
    wanted = [releases.release(commit) for commit in arguments.commits]
    if arguments.source is not None and len(wanted) != 1:
        raise ValueError("--source is a checkout at one commit: name that commit, and no other")
    for one in wanted:
        print(f"{one.commit}: {releases.prepare(one, arguments.source)}")
    if not wanted:
        for one in releases.ALL.values():
            state = releases.unavailable(one) or f"prepared: {one.folder}"
            print(f"{one.commit}  {one.what}; CuTe DSL {one.cutlass_dsl}; {state}")
    return 0
