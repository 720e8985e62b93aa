"""`python -m fa4_hd256 demo | plan | env | build`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any

from . import __version__, environment, interrupt, progress
from .architectures import ARCHITECTURES, named
from .models import MODELS
from .run.toolkit import ToolkitError

PROGRAM = "python -m fa4_hd256"


#: Command -> its line of help.
COMMANDS = {
    "demo": "causal attention in the shape of a real model",
    "plan": "roles, memory, barriers and steps of the kernels",
    "env": "environment variables, caches and versions",
    "build": "a directory of kernels that a container ships",
}


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--version", action="version", version=f"fa4-hd256 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in COMMANDS.items():
        options = commands.add_parser(name, help=summary, description=summary)
        if name == command:
            _ADD_OPTIONS[name](options)
    return parser


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(MODELS), default="gemma-3-4b")
    parser.add_argument("--seqlen", type=int, default=512, help="tokens (default %(default)s)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cpu: the simulator"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(main=_demo)


def _plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        choices=[architecture.name for architecture in ARCHITECTURES],
        help=f"default: that of {environment.ARCHITECTURE.name}",
    )
    parser.set_defaults(main=_plan)


def _build_options(parser: argparse.ArgumentParser) -> None:
    from .run.ahead import options as build_options

    build_options.add_arguments(parser)
    parser.set_defaults(main=_build)


_ADD_OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "demo": _demo_options,
    "plan": _plan_options,
    "env": lambda parser: parser.set_defaults(main=_env),
    "build": _build_options,
}


def _demo(arguments: argparse.Namespace) -> int:
    from .run.bug_report import has_driver

    # Answered before PyTorch is loaded, which takes seconds.
    if arguments.seqlen < 1:
        raise ValueError(f"seqlen is {arguments.seqlen}; accepted: 1 or more")
    if arguments.device == "cuda" and not has_driver():
        raise ValueError(
            "device is cuda, but this machine has no driver of NVIDIA's; accepted here: cpu"
        )
    return _loaded("check.demo").main(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from .kernels.kernel_set import kernels_of
    from .kernels.proof.plans import describe

    chosen = named(arguments.arch) if arguments.arch else environment.architecture()
    kernels = kernels_of(chosen)
    forward, *others = (config() for config in kernels.configs("forward"))
    # Calls take the same kernel with other tiles where they have a mask or few rows.
    tiles = [t for t in kernels.forwards if t.kind == forward.tiles.kind and t != forward.tiles]
    same_kernel = [kernels.tuned(t, True, 1 << 20, "B200", False) for t in tiles]
    backward = [config() for config in kernels.configs("backward")]
    if kernels.mxfp8_backward is not None:
        backward += [config() for config in kernels.configs("mxfp8_backward")]
    configs = forward, *same_kernel, *others, *backward
    print("\n\n".join(describe(kernels, config) for config in configs))
    return 0


def _env(_: argparse.Namespace) -> int:
    from .run import bug_report

    print(bug_report.describe())
    return 0


def _build(arguments: argparse.Namespace) -> int:
    return _loaded("warm").main(arguments)


def _loaded(module: str) -> Any:
    """Return a module of this package that takes seconds to load."""
    with progress.step("loading PyTorch and CuTe DSL"):
        return importlib.import_module(f".{module}", __package__)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status, 2 with a message for a value that is not accepted, for
    kernels that an architecture does not have, and where the command needs the simulator, which is
    not installed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["bringup"]:
        print("error: bringup is `python -m bench bringup`, in a checkout", file=sys.stderr)
        return 2
    try:
        parsed = _parser(next(iter(arguments), None)).parse_args(arguments)
        return parsed.main(parsed)
    except (ValueError, NotImplementedError, ToolkitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        if error.name == "sm100_sim":
            print(f"error: {environment.NO_SIMULATOR}", file=sys.stderr)
            return 2
        raise


def run() -> int:
    return interrupt.command(main)


if __name__ == "__main__":
    sys.exit(run())
