"""`python -m fa4_hd256 demo | plan | env | build | bringup`."""

from __future__ import annotations

import argparse
import sys

from . import environment
from .models import MODELS


def _parser() -> argparse.ArgumentParser:
    from . import warm
    from .check import demo

    parser = argparse.ArgumentParser(prog="python -m fa4_hd256", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("demo", help="causal attention in the shape of a real model")
    run.add_argument("--model", choices=sorted(MODELS), default=demo.DEFAULT_MODEL)
    run.add_argument("--seqlen", type=int, default=demo.DEFAULT_SEQLEN, help="tokens (default 512)")
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: the simulator")
    run.add_argument("--json", action="store_true", help="print one JSON object")
    run.set_defaults(main=demo.main)
    plan = commands.add_parser("plan", help="roles, memory, barriers and steps of the kernels")
    plan.set_defaults(main=_plan)
    settings = commands.add_parser("env", help="environment variables, caches and versions")
    settings.set_defaults(main=_env)
    ahead = commands.add_parser("build", help="a directory of kernels that a container ships")
    warm.add_arguments(ahead)
    ahead.set_defaults(main=warm.main)
    commands.add_parser("bringup", help="the first hour on a GPU: one command, one report")
    return parser


def _bringup_parser() -> argparse.ArgumentParser:
    """A parser of its own: bringup also runs where CuTe DSL, which the others need, is missing."""
    from .check.bringup import command

    parser = argparse.ArgumentParser(
        prog="python -m fa4_hd256 bringup", description=command.__doc__
    )
    command.add_arguments(parser)
    parser.set_defaults(main=command.main)
    return parser


def _plan(_: argparse.Namespace) -> int:
    from .kernels.kernel_set import kernels_of

    kernels = kernels_of(environment.architecture())
    configs = *kernels.configs("forward"), *kernels.configs("backward")
    print("\n\n".join(config().describe() for config in configs))
    return 0


def _env(_: argparse.Namespace) -> int:
    from .run.compile import versions
    from .run.keys import disk_cache
    from .run.launch import describe_gpus, simulator_state

    print(environment.describe())
    print()
    print(describe_gpus())
    print()
    cache = disk_cache()
    print(f"{cache.contents} in {cache.directory}: {cache.state()}")
    print(_prebuilt_state())
    print(simulator_state())
    print()
    print("\n".join(f"{name} {version}" for name, version in versions().items()))
    return 0


def _prebuilt_state() -> str:
    from .run import prebuilt

    try:
        place = prebuilt.active()
    except ValueError as error:
        return f"prebuilt kernels: {error}"
    if place is None:
        return "no prebuilt kernels in use"
    return f"{place.directory}: {place.describe()}"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status, 2 with a message for a value that is not accepted, for
    kernels that an architecture does not have, and where the command needs the simulator, which is
    not installed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ["bringup"]:
            parsed = _bringup_parser().parse_args(arguments[1:])
        else:
            parsed = _parser().parse_args(arguments)
        return parsed.main(parsed)
    except (ValueError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        if error.name != "sm100_sim":
            raise
        print(f"error: {environment.NO_SIMULATOR}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
