"""`python -m sm100_sim predict [--machine NAME] SCRIPT.py`: predict the kernels of a GPU script.

Runs a CuTe DSL script that was written for a GPU in the simulator, as `python -m sm100_sim` does,
and prints a prediction of every kernel it launches: clocks of the first cluster, the critical path,
utilisation of every resource. Everything is modelled, nothing measured.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from sm100_sim import progress

from .machine_constants import load, machines


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sm100_sim predict", description=__doc__)
    parser.add_argument(
        "--machine",
        default="b200",
        help=f"{', '.join(machines())}, or a file: a report of a bringup, say",
    )
    parser.add_argument("--draws", type=int, default=4, help="replays with drawn constants")
    parser.add_argument("--trace", help="write a Chrome trace of the last kernel to this file")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    choice = parser.parse_args(arguments)
    try:
        machine = load(choice.machine)
    except ValueError as error:
        parser.error(str(error))
    if not os.path.isfile(choice.script):
        print(f"sm100_sim: {choice.script!r} is not a file", file=sys.stderr)
        return 2
    from . import attached

    saved = sys.argv, list(sys.path)
    sys.argv = [choice.script, *choice.args]
    sys.path[0] = os.path.dirname(os.path.abspath(choice.script))
    try:
        with attached(machine, choice.draws, step=progress.step) as found:
            runpy.run_path(choice.script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = saved
    if not found.predictions:
        print("the script launched no kernel in the simulator", file=sys.stderr)
        return 2
    for prediction in found.predictions:
        print(prediction.as_text(), end="\n\n")
    if choice.trace:
        from .replaying.chrome import write

        write(choice.trace, found.predictions[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
