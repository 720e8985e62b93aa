"""`python -m lab COMMAND`: models of what is measured, and the tables and pictures of the pages."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.command_line import Program, run_command
from fa4_hd256 import interrupt

#: Command and its line of help.
COMMANDS = {
    "steps": "clocks of steps and tiles, forward and backward, beside flash-attn-4's and FROST's",
    "validate": "the timing model against published and measured figures, error by row",
    "calibrate": "sets of the timing model's constants that published rates do not contradict",
    "predict": "attention on an H200 by the timing model, beside what was measured",
    "foreign": "whole launches of kernels of others: predicted, and measured on an H200",
    "peers": "earlier flash-attn-4 and FROST, prepared to be compiled and replayed",
    "ranks": "one long sequence over several GPUs beside one GPU and PyTorch's, measured",
    "parallel": "training steps of a block by tensor parallelism and FSDP2, measured",
    "mutation": "what the sanitizer finds when synchronisation is left out of the kernels",
    "tables": "the tables of docs/tables, by the commands that print them",
    "pictures": "the pictures of docs/pictures, drawn from the code",
}
#: Title of the help -> commands.
GROUPS = {
    "modelled": ("steps",),
    "the model against measurements": ("validate", "calibrate", "predict", "foreign", "peers"),
    "measured or simulated": ("ranks", "parallel", "mutation"),
    "pages": ("tables", "pictures"),
}
#: Commands that replay kernels on the timing model.
MODELLED = frozenset(("steps", "validate"))


def replays(arguments: Sequence[str]) -> bool:
    return bool(arguments) and arguments[0] in MODELLED


PROGRAM = Program("lab", __doc__, COMMANDS, GROUPS, replays)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(PROGRAM, sys.argv[1:] if arguments is None else arguments)


def run() -> int:
    """Run the command of this process, which Ctrl-C ends within seconds."""
    return interrupt.command(main)


if __name__ == "__main__":
    sys.exit(run())
