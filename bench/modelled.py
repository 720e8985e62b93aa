"""Figures of the timing model in the place of a measurement: those of lab/, where it is here."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys


def missing_lab() -> str:
    """Return why nothing can be modelled; empty where it can."""
    if importlib.util.find_spec("lab") is not None:
        return ""
    return (
        "without a GPU that runs the kernels, figures are those of the timing model, and lab/, "
        "which has it, is not here: run this on a GPU, or from the root of a whole checkout"
    )


def modelled(command: str, arguments: argparse.Namespace) -> int:
    """Run a command's counterpart in `lab.modelled`, say so on stderr, and return its exit status.
    Raises ValueError where lab/ is not here."""
    if lacking := missing_lab():
        raise ValueError(lacking)
    reason = "--modelled" if arguments.modelled else "no GPU here runs the kernels"
    print(f"{reason}: figures are modelled, of {arguments.machine}, not measured", file=sys.stderr)
    return importlib.import_module(f"lab.modelled.{command}").main(arguments)
