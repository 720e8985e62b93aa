"""`python -m bench COMMAND`: results as a Markdown table, JSON, CSV or a plot."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.command_line import Program, run_command
from fa4_hd256 import interrupt
from fa4_hd256.run.bug_report import has_driver

#: Command and its line of help.
COMMANDS = {
    "throughput": "TFLOPS over the shape suite, providers side by side",
    "masks": "masks that people train with, beside SDPA and FlexAttention",
    "schedulers": "the static tile scheduler against the dynamic one (CLC)",
    "ex2-sweep": "error and time of exp2 mixes; the best of each mask and length",
    "training": "a small model trained with each attention: its loss by step",
    "decode": "decoding beside others, over K and V in e4m3, in pages, with new rows of a cache",
    "gate": "a sigmoid gate of the result, in the kernel and apart",
    "accuracy": "error of out by degree and share of emulated exp2, or of gradients, simulated",
    "host": "host time of an eager call, beside others",
    "bringup": "the first hour on a GPU: one command, one report",
    "vllm": "random models served by vLLM, with our backend beside its own",
    "sglang": "the same models served by SGLang",
    "profile": "Nsight Compute on our kernels: its command lines, or run",
    "report": "one HTML page from the JSON results of the others",
}
#: Title of the help -> commands.
GROUPS = {
    "time on a GPU (without one: modelled, where lab/ is here)": (
        "throughput", "decode", "schedulers", "ex2-sweep",
    ),
    "time on a GPU": ("masks", "gate", "vllm", "sglang"),
    "correctness": ("accuracy", "training", "bringup"),
    "analysis": ("host", "profile", "report"),
}  # fmt: skip
#: Commands that replay kernels on the timing model where there is no GPU, or with --modelled.
MODELLED_WITHOUT_GPU = frozenset(("decode", "ex2-sweep", "schedulers", "throughput"))


def replays(arguments: Sequence[str]) -> bool:
    """Return True if this command line needs the timing model."""
    name = arguments[0] if arguments else ""
    return name in MODELLED_WITHOUT_GPU and ("--modelled" in arguments or not has_driver())


PROGRAM = Program("bench", __doc__, COMMANDS, GROUPS, replays)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(PROGRAM, sys.argv[1:] if arguments is None else arguments)


def run() -> int:
    """Run the command of this process, which Ctrl-C ends within seconds."""
    return interrupt.command(main)


if __name__ == "__main__":
    sys.exit(run())
