"""`python -m sm100_sim [flags] SCRIPT.py [args...]` runs a GPU script in the simulator; `COMMANDS`
has what else there is, and `python -m sm100_sim COMMAND --help` says how to call it."""

from __future__ import annotations

import importlib
import sys

from . import interrupt
from .errors import MissingExtra

#: Command -> (module, function of its arguments that returns the exit status, what it does). Each
#: is imported when it is called: `record` runs without llvmlite.
COMMANDS = {
    "run": ("command.run", "run_file", "a kernel in CUDA C++ (through NVRTC) or PTX, its arguments "
            "given on the command line"),
    "mutate": ("mutation.command", "mutate", "what the sanitizer finds: a script's kernels with "
               "one synchronisation instruction left out"),
    "predict": ("timing.__main__", "main", "predicted time of a script's kernels, critical path"),
    "speed": ("tools.speed", "speed", "how fast a script runs here, plain and sanitized; what a "
              "PTX module takes to translate"),
    "record": ("tools.golden.command", "record_vectors", "golden vectors, on a Hopper GPU"),
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run a command, or a script; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        return _run_command(*arguments)
    if arguments[:1] == ["--version"]:
        print(f"sm100-sim {sys.modules[__package__].__version__}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    from .attach.runner import run_script

    return run_script(arguments)


def _run_command(name: str, *arguments: str) -> int:
    module, function, _ = COMMANDS[name]
    try:
        return getattr(importlib.import_module(f"sm100_sim.{module}"), function)(list(arguments))
    except MissingExtra as error:
        print(f"sm100_sim: {error}", file=sys.stderr)
        return 2


def run() -> int:
    """Run what this process was started for.  Ctrl-C ends a command within seconds; a script
    decides for itself."""
    is_command = sys.argv[1:2] and sys.argv[1] in COMMANDS
    return interrupt.command(main) if is_command else main()


def usage() -> str:
    """Return the usage text: how to run a script, and a line for each command."""
    from .attach.runner import USAGE

    commands = [f"  {name:8} {what}" for name, (_, _, what) in COMMANDS.items()]
    return "\n".join([USAGE, "commands (python -m sm100_sim COMMAND --help):", *commands])


if __name__ == "__main__":
    sys.exit(run())
