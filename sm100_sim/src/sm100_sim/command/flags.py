"""Flags that running a script and running a kernel share."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sm100_sim import devices

#: Flag -> the variable that it stands for (`settings`).
_VARIABLES = {
    "sanitize": "SM100_SIM_SANITIZE", "seed": "SM100_SIM_SEED", "device": devices.VARIABLE,
    "clusters": "SM100_SIM_CLUSTERS",
}  # fmt: skip
#: Values of --sanitize, beside none at all.
READINGS = ("1", "wait-ld", "strict", "strict-order")


def parser(name: str, what: str, positional: str) -> argparse.ArgumentParser:
    """Return a parser of the shared flags. positional: name of the file that is run."""
    made = argparse.ArgumentParser(
        prog=f"python -m sm100_sim {name}".strip(), description=what, allow_abbrev=False
    )
    add = made.add_argument
    add("file", metavar=positional)
    add(
        "--sanitize",
        choices=READINGS,
        metavar="READING",
        help="look for races and misuse; --sanitize=wait-ld for tcgen05.ld without "
        "tcgen05.wait::ld and nothing else, --sanitize=strict by the letter of the PTX ISA",
    )
    add("--seed", help="an adversarial schedule, another for each number")
    add(
        "--device",
        help=f"the GPU to pass for: {', '.join(devices.DEVICES)}, also as b200:19 "
        "with a number of SMs",
    )
    add("--clusters", help="clusters resident at once")
    add("--keep-ptx", metavar="DIR", help="write the PTX of each kernel, whose lines findings name")
    add(
        "--html",
        metavar="FILE",
        help="one page: each finding as a happens-before picture, both "
        "stacks, the timeline of the run",
    )
    add("--sarif", metavar="FILE", help="findings for code scanning (SARIF 2.1.0)")
    add("--junit", metavar="FILE", help="a test case for each kernel, as JUnit has it")
    return made


def parsed(
    made: argparse.ArgumentParser, arguments: Sequence[str], in_front: bool = False
) -> argparse.Namespace:
    """Parse arguments; a bare --sanitize is --sanitize=1. Ends the process as argparse does.

    in_front: flags stand in front of the file alone; what follows it is the file's own.
    """
    end = _flags_in_front(arguments) if in_front else len(arguments)
    given = ["--sanitize=1" if word == "--sanitize" else word for word in arguments[:end]]
    return made.parse_args([*given, *arguments[end:]])


def _flags_in_front(arguments: Sequence[str]) -> int:
    """Number of words in front of the file: flags, and the values of those that take one."""
    place = 0
    while place < len(arguments) and arguments[place].startswith("-"):
        word = arguments[place]
        place += 1 if "=" in word or word == "--sanitize" else 2
    return place


@contextlib.contextmanager
def applied(choice: Mapping[str, Any]) -> Iterator[None]:
    """Within, the flags hold for all launches of the process.

    choice: flag -> its text, None where it is not given.
    """
    saved = {}
    try:
        for flag, variable in _VARIABLES.items():
            value = choice.get(flag)
            if value is not None:
                saved[variable] = os.environ.get(variable)
                os.environ[variable] = value
        yield
    finally:
        for variable, before in saved.items():
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before
