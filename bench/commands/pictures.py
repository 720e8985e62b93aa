"""`python -m bench pictures [NAME...]`: the pictures of docs/pictures, drawn from the code.

Kernels' plans and barriers, layouts, the polynomial's error and the planted race are taken from the
code as it is; rates and the timeline from the small files of bench/pictures/data, which --replay
makes again on the timing model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="of pictures; all unless chosen")
    parser.add_argument("--write", type=Path, metavar="DIR", default=FOLDER,
                        help="default: docs/pictures")
    parser.add_argument("--check", action="store_true",
                        help="write nothing; exit status 1 if a file there is not current")
    parser.add_argument("--replay", action="store_true",
                        help="first make the data of the replays again: some minutes")


def main(arguments: argparse.Namespace) -> int:
    """The exit status. Raises ValueError for a name that is none."""
    from bench.pictures import data
    from bench.pictures.catalogue import PICTURES

    if arguments.replay:
        data.replay()
    for name in arguments.names:
        if name not in PICTURES:
            raise ValueError(f"picture {name!r}; accepted are {', '.join(PICTURES)}")
    stale = []
    for name in arguments.names or PICTURES:
        target = arguments.write / f"{name}.svg"
        drawn = PICTURES[name]().svg()
        if arguments.check:
            if not target.is_file() or target.read_text("utf-8") != drawn:
                stale.append(target.name)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(drawn, "utf-8")
            print(target)
    if stale:
        print(f"not current: {', '.join(stale)}; `python -m bench pictures` draws them anew")
    return 1 if stale else 0
