"""`python -m bench COMMAND`: results as a Markdown table, JSON, CSV or a plot.

A command is a module of `commands` with `main(arguments)`, which returns the exit status. Its
options are a function of `options`. The module is imported after the options have been read: help
and a mistyped option load nothing that takes long. Results leave through `results.emit`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from bench.tables import results
from fa4_hd256 import __version__, interrupt, progress
from fa4_hd256.run.bug_report import has_driver

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


#: Commands that replay kernels on the timing model where there is no GPU, or with --modelled.
MODELLED_WITHOUT_GPU = frozenset((
    "ex2-sweep", "kv-types", "ladder", "masks", "pages", "schedulers", "splits", "throughput",
))  # fmt: skip
#: Commands that replay them in any case.
MODELLED = frozenset(("contention", "defaults", "steps", "timing", "validate"))
#: Needs of the timing model beside those of fa4_hd256: modules, distributions.
MODULES, DISTRIBUTIONS = ("llvmlite", "numba"), ("nvidia-cuda-nvdisasm",)
INSTALL = "pip install -e ./sm100_sim -e '.[bench]'"


def missing_extra(arguments: Sequence[str]) -> str:
    """Return what the command needs and is not installed, with what to do; empty for nothing.

    It is checked before anything else is imported, so that nobody waits for a pool to fail.
    """
    name = arguments[0] if arguments else ""
    measures = name in MODELLED_WITHOUT_GPU and has_driver() and "--modelled" not in arguments
    if measures or name not in MODELLED | MODELLED_WITHOUT_GPU or {"-h", "--help"} & {*arguments}:
        return ""
    lacking = [module for module in MODULES if importlib.util.find_spec(module) is None]
    for distribution in DISTRIBUTIONS:
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            lacking.append(distribution)
    if not lacking:
        return ""
    return (
        f"python -m bench {name} needs {', '.join(lacking)}; {INSTALL} in the checkout installs "
        "all that bench needs"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    A value that is not accepted, and a package that is not installed, give 2 and one line.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split("\n")[0])
    parser.add_argument("--version", action="version", version=f"fa4-hd256 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, description=summary)
    if lacking := missing_extra(arguments):
        print(f"error: {lacking}", file=sys.stderr)
        return 2
    try:
        if arguments and arguments[0] in COMMANDS:
            _add_options(commands.choices[arguments[0]], arguments[0])
        parsed = parser.parse_args(arguments)
        # Before the work, which may take an hour.
        results.check_output_options(parsed)
        return parsed.main(parsed)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
    except ImportError as error:
        if _is_ours(error.name):
            raise
        print(f"error: {error}; {INSTALL} in the checkout installs all that bench needs",
              file=sys.stderr)  # fmt: skip
    return 2


def _is_ours(module: str | None) -> bool:
    """Return True for a module of this checkout: that it is missing is a mistake of ours."""
    return (module or "").partition(".")[0] in ("", "bench", "fa4_hd256")


def _add_options(parser: argparse.ArgumentParser, name: str) -> None:
    from . import options

    getattr(options, _module(name))(parser)
    parser.set_defaults(main=lambda arguments: _command(name).main(arguments))


def _command(name: str) -> Any:
    with progress.step("loading PyTorch and CuTe DSL"):
        return importlib.import_module(f"{__package__}.commands.{_module(name)}")


def _module(name: str) -> str:
    """Return the name of the command's module, and of the function that adds its options."""
    return name.replace("-", "_")


def run() -> int:
    """Run the command of this process, which Ctrl-C ends within seconds."""
    return interrupt.command(main)


if __name__ == "__main__":
    sys.exit(run())
