"""`python -m bench COMMAND`: measurements, printed or as JSON."""

from __future__ import annotations

import argparse
import json
import sys


def _simulator(arguments: argparse.Namespace) -> int:
    from . import simulator

    shape = simulator.Shape(arguments.seqlen, arguments.heads, arguments.heads_kv)
    found = simulator.measure(shape, arguments.runs)
    print(json.dumps(simulator.as_json(found)) if arguments.json else simulator.as_text(found))
    return 0


def _static(arguments: argparse.Namespace) -> int:
    from . import static

    reports = static.measure()
    if arguments.json:
        print(json.dumps(static.as_json(reports)))
    else:
        print(static.as_csv(reports) if arguments.csv else static.as_text(reports))
    return 0


def _accuracy(arguments: argparse.Namespace) -> int:
    from . import accuracy

    jobs = accuracy.default_jobs() if arguments.jobs is None else arguments.jobs
    results = accuracy.measure_all(accuracy.default_cases(), jobs)
    found = accuracy.as_json(results) if arguments.json else accuracy.as_text(results)
    print(json.dumps(found) if arguments.json else found)
    return 0


def _timing(arguments: argparse.Namespace) -> int:
    from . import timing

    print(timing.as_text(arguments.seqlen, arguments.causal, arguments.machine))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    speed = commands.add_parser("simulator", help="the simulator's own speed on the forward")
    speed.add_argument("--seqlen", type=int, default=2048)
    speed.add_argument("--heads", type=int, default=2)
    speed.add_argument("--heads-kv", type=int, default=1)
    speed.add_argument("--runs", type=int, default=3, help="warm runs; the fastest counts")
    speed.add_argument("--json", action="store_true", help="print one JSON object")
    speed.set_defaults(main=_simulator)
    compiled = commands.add_parser(
        "static", help="registers, SMEM and instructions of the hot loops, beside flash-attn-4's"
    )
    form = compiled.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--csv", action="store_true", help="print comma-separated values")
    compiled.set_defaults(main=_static)
    errors = commands.add_parser(
        "accuracy", help="error of out for each degree and share of emulated exp2, simulated"
    )
    errors.add_argument("--jobs", type=int, help="processes; as many as cores, at most 4")
    errors.add_argument("--json", action="store_true", help="print one JSON object")
    errors.set_defaults(main=_accuracy)
    modelled = commands.add_parser(
        "timing", help="predicted clocks of a forward step on one CTA pair, with its critical path"
    )
    modelled.add_argument("--seqlen", type=int, default=2048)
    modelled.add_argument("--causal", action="store_true")
    modelled.add_argument("--machine", default="b200", help="b200 or b300")
    modelled.set_defaults(main=_timing)
    parsed = parser.parse_args(arguments)
    return parsed.main(parsed)


if __name__ == "__main__":
    sys.exit(main())
