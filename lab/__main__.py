"""`python -m lab COMMAND`: models of what is measured, and the tables and pictures of the pages."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.command_line import Program, run_command
from fa4_hd256 import interrupt
from fa4_hd256.run.bug_report import has_driver

#: Command and its line of help.
COMMANDS = {
    "timing": "predicted clocks of a forward step on one CTA pair, with its critical path",
    "steps": "clocks of steps and tiles, forward and backward, beside flash-attn-4's and FROST's",
    "defaults": "what a call decides for itself against its alternatives, over all constants",
    "contention": "the tile schedulers while another kernel (NCCL's) holds SMs",
    "ladder": "what each optimisation of the forward brings, one switch at a time",
    "splits": "KV splits of a query tile: every number of splits, measured or modelled",
    "validate": "the timing model against published and measured figures, error by row",
    "calibrate": "sets of the timing model's constants that published rates do not contradict",
    "hopper": "the timing model against a Hopper GPU, measured and modelled",
    "predict": "attention on an H200 by the timing model, beside what was measured",
    "whole-gpu": "the whole-problem model against an H200: bytes, launches, clock and power",
    "peers": "earlier flash-attn-4 and FROST, prepared to be compiled and replayed",
    "ranks": "one long sequence over several GPUs beside one GPU and PyTorch's, measured",
    "parallel": "training steps of a block by tensor parallelism and FSDP2, measured",
    "fp8": "keys and values in e4m3: errors by method, and what a step costs",
    "mutation": "what the sanitizer finds when synchronisation is left out of the kernels",
    "simulator": "the simulator's own speed on the forward",
    "tables": "the tables of docs/tables, by the commands that print them",
    "pictures": "the pictures of docs/pictures, drawn from the code",
}
#: Title of the help -> commands.
GROUPS = {
    "modelled": ("timing", "steps", "defaults", "contention", "ladder", "splits"),
    "the model against measurements": (
        "validate", "calibrate", "hopper", "predict", "whole-gpu", "peers",
    ),
    "measured or simulated": ("ranks", "parallel", "fp8", "mutation", "simulator"),
    "pages": ("tables", "pictures"),
}  # fmt: skip
#: Commands that replay kernels on the timing model, and those that do so where there is no GPU.
MODELLED = frozenset(("contention", "defaults", "steps", "timing", "validate"))
MODELLED_WITHOUT_GPU = frozenset(("ladder", "splits"))


def replays(arguments: Sequence[str]) -> bool:
    """Return True if this command line needs the timing model."""
    name = arguments[0] if arguments else ""
    measures = has_driver() and "--modelled" not in arguments
    return name in MODELLED or (name in MODELLED_WITHOUT_GPU and not measures)


PROGRAM = Program("lab", __doc__, COMMANDS, GROUPS, replays)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    return run_command(PROGRAM, sys.argv[1:] if arguments is None else arguments)


def run() -> int:
    """Run the command of this process, which Ctrl-C ends within seconds."""
    return interrupt.command(main)


if __name__ == "__main__":
    sys.exit(run())
