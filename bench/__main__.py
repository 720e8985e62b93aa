"""`python -m bench COMMAND`: results as a Markdown table, JSON, CSV or a plot.

A command is a module of this room with `add_arguments(parser)` and `main(arguments)`, which returns
the exit status; it is imported only when it is asked for. Results leave through `results.emit`.
"""

from __future__ import annotations

import argparse
import importlib
import sys

#: Command and its line of help; the module has the command's name, with _ for -.
COMMANDS = {
    "accuracy": "error of out by degree and share of emulated exp2, or of gradients, simulated",
    "calibrate": "sets of the timing model's constants that published rates do not contradict",
    "contention": "the tile schedulers while another kernel (NCCL's) holds SMs, modelled",
    "defaults": "what a call decides for itself against its alternatives, over all constants",
    "ex2-sweep": "error and time of exp2 mixes; the best of each mask and length",
    "fences": "clocks that fences of GPU scope cost our kernels, by the timing model",
    "fp8": "keys and values in e4m3: errors by method, and what a step costs",
    "hopper": "the timing model against a Hopper GPU, measured and modelled",
    "host": "what the host does before an eager call returns, by part, beside others",
    "intensity": "FLOP for each byte at every level of memory, beside the machine's balance",
    "kv-types": "decoding over keys and values in e4m3 beside bf16, measured",
    "ladder": "what each optimisation of the forward brings, one switch at a time",
    "masks": "masks that people train with, beside SDPA and FlexAttention, measured",
    "mutation": "what the sanitizer finds when synchronisation is left out of the kernels",
    "new-rows": "decoding with new rows of a cache and without, measured",
    "pages": "keys and values in pages of 16 and 128 rows beside none",
    "parallel": "training steps of a block by tensor parallelism and FSDP2, measured",
    "peers": "earlier flash-attn-4 and FROST, prepared to be compiled and replayed",
    "pictures": "the pictures of docs/pictures, drawn from the code",
    "predict": "attention on an H200 by the timing model, beside what was measured",
    "profile": "Nsight Compute on our kernels: its command line, or a summary of its report",
    "ranks": "one long sequence over several GPUs beside one GPU and PyTorch's, measured",
    "report": "one HTML page from the JSON results of the others",
    "roofline": "clocks of each resource for a shape and a configuration",
    "schedulers": "the static tile scheduler against the dynamic one (CLC)",
    "simulator": "the simulator's own speed on the forward",
    "splits": "keys of a query tile divided among CTA pairs, where tiles are few",
    "static": "registers, SMEM and instructions of the kernels, beside flash-attn-4's",
    "steps": "clocks of steps and tiles, forward and backward, beside flash-attn-4's and FROST's",
    "tables": "the tables of docs/tables, by the commands that print them",
    "throughput": "TFLOPS over the shape suite, providers side by side; modelled without a GPU",
    "timing": "predicted clocks of a forward step on one CTA pair, with its critical path",
    "training": "a small model trained with each attention: its loss by step, on a GPU",
    "validate": "the timing model against published and measured figures, error by row",
    "whole-gpu": "the whole-problem model against an H200: bytes, launches, clock and power",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status. A value that is not accepted gives 2 and its message."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in arguments[:1]:
            module = importlib.import_module(f"{__package__}.commands.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(main=module.main)
    parsed = parser.parse_args(arguments)
    try:
        return parsed.main(parsed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
