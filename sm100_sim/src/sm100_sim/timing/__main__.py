"""`python -m sm100_sim predict [--machine NAME] SCRIPT.py`: predict the kernels of a GPU script.

Runs a script in CuTe DSL or Triton that was written for a GPU in the simulator, as `python -m
sm100_sim` does, or a kernel in CUDA C++ or PTX (FILE.cu --kernel NAME and what `run` takes
besides), and prints a prediction of every kernel that is launched: clocks of the first cluster, the
critical path, utilisation of every resource. Everything is modelled, nothing measured.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from typing import TYPE_CHECKING

from sm100_sim import progress

from .machine_constants import Machine, load, machines

if TYPE_CHECKING:
    from .prediction import Prediction


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sm100_sim predict", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--machine",
        default="b200",
        help=f"{', '.join(machines())}, or a file: a report of a bringup, say",
    )
    parser.add_argument("--draws", type=int, default=4, help="replays with drawn constants")
    parser.add_argument(
        "--trace",
        help="write a timeline of the last kernel to this file, for Perfetto (ui.perfetto.dev)",
    )
    parser.add_argument("script", metavar="SCRIPT.py|FILE.cu|FILE.ptx")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script, or of run")
    choice = parser.parse_args(arguments)
    try:
        machine = load(choice.machine)
    except ValueError as error:
        parser.error(str(error))
    if not os.path.isfile(choice.script):
        print(f"sm100_sim: {choice.script!r} is not a file", file=sys.stderr)
        return 2
    kernel = choice.script.endswith((".cu", ".ptx"))
    predictions = (_of_kernel if kernel else _of_script)(choice, machine)
    if not predictions:
        print("the script launched no kernel in the simulator", file=sys.stderr)
        return 2
    for prediction in predictions:
        print(prediction.as_text(), end="\n\n")
    if choice.trace:
        from .replaying.chrome import write

        write(choice.trace, predictions[-1])
        print(f"the timeline is in {choice.trace}; open it in Perfetto, https://ui.perfetto.dev")
    return 0


def _of_script(choice: argparse.Namespace, machine: Machine) -> list[Prediction]:
    """Predict the kernels that a script launches."""
    from . import attached

    saved = sys.argv, list(sys.path)
    sys.argv = [choice.script, *choice.args]
    sys.path[0] = os.path.dirname(os.path.abspath(choice.script))
    try:
        with attached(machine, choice.draws, step=progress.step) as found:
            runpy.run_path(choice.script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = saved
    return found.predictions


def _of_kernel(choice: argparse.Namespace, machine: Machine) -> list[Prediction]:
    """Predict a kernel in CUDA C++ or PTX, launched as the command `run` does."""
    from sm100_sim.command import run

    from . import predict_launches

    parser = argparse.ArgumentParser(prog="python -m sm100_sim predict FILE.cu")
    run.add_launch(parser)
    launch = parser.parse_args(choice.args)
    launch.file = choice.script
    ptx, name = run.module_of(launch)
    return predict_launches(
        lambda options: run.launched(launch, ptx, name, [], options), machine=machine,
        draws=choice.draws,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
