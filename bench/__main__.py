"""`python -m bench simulator`: measurements, printed or as JSON."""

from __future__ import annotations

import argparse
import json
import sys

from . import simulator


def _simulator(arguments: argparse.Namespace) -> int:
    shape = simulator.Shape(arguments.seqlen, arguments.heads, arguments.heads_kv)
    found = simulator.measure(shape, arguments.runs)
    print(json.dumps(simulator.as_json(found)) if arguments.json else simulator.as_text(found))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    speed = commands.add_parser("simulator", help="the simulator's own speed on the forward")
    default = simulator.DEFAULT
    speed.add_argument("--seqlen", type=int, default=default.seqlen)
    speed.add_argument("--heads", type=int, default=default.heads)
    speed.add_argument("--heads-kv", type=int, default=default.heads_kv)
    speed.add_argument("--runs", type=int, default=3, help="warm runs; the fastest counts")
    speed.add_argument("--json", action="store_true", help="print one JSON object")
    speed.set_defaults(main=_simulator)
    parsed = parser.parse_args(arguments)
    return parsed.main(parsed)


if __name__ == "__main__":
    sys.exit(main())
