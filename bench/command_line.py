"""The command lines of `python -m bench` and of `python -m lab`.

A command is a module of the package's `commands` with `main(arguments)`, which returns the exit
status. Its options are a function of the package's `options`. The module is imported after the
options have been read: help and a mistyped option load nothing that takes long. Results leave
through `results.emit`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.modelled import missing_lab
from bench.tables import results
from fa4_hd256 import __version__, progress

#: Needs of the timing model beside those of fa4_hd256: modules, distributions.
MODULES, DISTRIBUTIONS = ("llvmlite", "numba"), ("nvidia-cuda-nvdisasm",)
INSTALL = "pip install -e ./sm100_sim -e '.[bench]'"


@dataclass(frozen=True)
class Program:
    """A package with commands. commands: name -> its line of help; the module has the name, with _
    for -. groups: title of the help -> names. replays: whether a command line needs the timing
    model."""

    package: str
    description: str
    commands: Mapping[str, str]
    groups: Mapping[str, Sequence[str]]
    replays: Callable[[Sequence[str]], bool]

    def help(self) -> str:
        width = max(map(len, self.commands)) + 2
        blocks = (
            "\n".join([f"{title}:", *(f"  {name:{width}}{self.commands[name]}" for name in names)])
            for title, names in self.groups.items()
        )
        return "\n\n".join(blocks)


def missing_extra(program: Program, arguments: Sequence[str]) -> str:
    """Return what the command needs and is not installed, with what to do; empty for nothing. It is
    checked before the command is imported, so that nobody waits for a pool to fail."""
    if not program.replays(arguments):
        return ""
    if lacking := missing_lab():
        return lacking
    missing = [module for module in MODULES if importlib.util.find_spec(module) is None]
    for distribution in DISTRIBUTIONS:
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            missing.append(distribution)
    if not missing:
        return ""
    return (
        f"python -m {program.package} {arguments[0]} needs {', '.join(missing)}; {INSTALL} in the "
        "checkout installs all that it needs"
    )


def run_command(program: Program, arguments: Sequence[str]) -> int:
    """Run one command and return its exit status. A value that is not accepted, and a package that
    is not installed, give 2 and one line."""
    try:
        parsed = _parser(program, arguments).parse_args(arguments)
        if lacking := missing_extra(program, arguments):
            raise ValueError(lacking)
        if hasattr(parsed, "json"):
            # Before the work, which may take an hour.
            results.check_output_options(parsed)
        return parsed.main(parsed)
    except (ValueError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
    except ImportError as error:
        if _is_ours(error.name):
            raise
        print(f"error: {error}; {INSTALL} in the checkout installs all that it needs",
              file=sys.stderr)  # fmt: skip
    return 2


def _parser(program: Program, arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser; only the given command has its options."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program.package}",
        description=program.description,
        epilog=program.help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fa4-hd256 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in program.commands.items():
        commands.add_parser(name, description=summary)
    name = arguments[0] if arguments else ""
    if name in program.commands:
        options = importlib.import_module(f"{program.package}.options")
        getattr(options, _module(name))(commands.choices[name])
        commands.choices[name].set_defaults(
            main=lambda parsed: _command(program, name).main(parsed)
        )
    return parser


def _command(program: Program, name: str) -> Any:
    with progress.step("loading PyTorch and CuTe DSL"):
        return importlib.import_module(f"{program.package}.commands.{_module(name)}")


def _module(name: str) -> str:
    """Return the name of the command's module, and of the function that adds its options."""
    return name.replace("-", "_")


def _is_ours(module: str | None) -> bool:
    """Return True for a module of this checkout: that it is missing is a mistake of ours."""
    return (module or "").partition(".")[0] in ("", "bench", "lab", "fa4_hd256")
