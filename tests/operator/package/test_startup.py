"""The first second: commands that only print load neither PyTorch nor CuTe DSL, and looking up an
operator loads no compiler of PyTorch's and proves no plan."""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
import sys

import pytest
import torch

import fa4_hd256
import sm100_sim
from fa4_hd256 import __main__ as command_line
from fa4_hd256.call.process import constant_in_graphs
from fa4_hd256.run import bug_report

#: Runs a command and prints, last, which slow packages it has loaded.
COMMAND = """
import contextlib, importlib, sys
from fa4_hd256.run import bug_report
bug_report.has_driver = lambda: False
main = importlib.import_module(f"{sys.argv[1]}.__main__").main
with contextlib.suppress(SystemExit):
    main(sys.argv[2:])
print(sorted({"torch", "cutlass", "matplotlib", "scipy", "transformers"} & set(sys.modules)))
"""

LOOK_UP = """
import sys
import torch, cutlass
import fa4_hd256
fa4_hd256.flash_attn_func, fa4_hd256.flash_attn_varlen_func, fa4_hd256.flash_attn_with_kvcache
late = {"torch._dynamo", "torch._inductor", "sympy", "sm100_sim", "fa4_hd256.kernels.proof"}
print(sorted(late & set(sys.modules)))
"""


#: Calls a package's commands for help, then with an option that none has.
EVERY_COMMAND = """
import contextlib, importlib, os, sys
from fa4_hd256.run import bug_report
bug_report.has_driver = lambda: False
module = importlib.import_module(f"{sys.argv[1]}.__main__")
statuses = []
with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
    with contextlib.redirect_stderr(nowhere):
        for name in module.COMMANDS:
            for option in ("--help", "--no-such-option"):
                try:
                    module.main([name, option])
                except SystemExit as end:
                    statuses.append(end.code)
print(len(module.COMMANDS) * [0, 2] == statuses)
print(sorted({"torch", "cutlass", "matplotlib", "scipy", "transformers"} & set(sys.modules)))
"""


def run(code: str, *arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("fa4_hd256", ["--help"]),
        ("fa4_hd256", ["--version"]),
        ("fa4_hd256", ["env"]),
        ("fa4_hd256", ["dmeo"]),
        ("fa4_hd256", ["demo", "--model", "no-model"]),
        ("fa4_hd256", ["demo", "--seqlen", "0"]),
        ("fa4_hd256", ["demo", "--device", "cuda"]),
        ("bench", ["--help"]),
        ("bench", ["throughptu"]),
        ("sm100_sim", ["--help"]),
        ("fa4_hd256.softmax_emu", ["--help"]),
        ("fa4_hd256.softmax_emu", ["fti"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_commands_that_only_print_load_little(package, arguments):
    assert run(COMMAND, package, *arguments)[-1] == "[]"


@pytest.mark.parametrize("package", ["fa4_hd256", "bench"])
def test_help_and_typos_of_every_command_load_little(package):
    assert run(EVERY_COMMAND, package) == ["True", "[]"]


def test_a_demo_on_a_gpu_that_is_not_there_is_refused_at_once(monkeypatch, capsys):
    monkeypatch.setattr(bug_report, "has_driver", lambda: False)
    assert command_line.main(["demo", "--device", "cuda"]) == 2
    said = "error: device is cuda, but this machine has no driver of NVIDIA's; accepted here: cpu"
    assert capsys.readouterr() == ("", f"{said}\n")


def test_looking_up_an_operator_loads_no_compiler_and_no_proof():
    assert run(LOOK_UP) == ["[]"]


def test_the_mark_of_constants_is_pytorchs_own():
    def one():
        pass

    def other():
        pass

    marked = torch.compiler.assume_constant_result(one)
    assert vars(marked) and vars(marked) == vars(constant_in_graphs(other))


@pytest.mark.parametrize("package", [fa4_hd256, sm100_sim], ids=lambda package: package.__name__)
def test_public_names_are_listed(package):
    assert {*package.__all__, "__version__"} <= set(dir(package))
    assert package.__version__.count(".") == 2


@pytest.mark.parametrize("package", ["fa4_hd256", "bench", "sm100_sim", "softmax_emu"])
def test_every_command_tells_its_version(package, capsys):
    main = importlib.import_module(f"{package}.__main__").main
    with contextlib.suppress(SystemExit):
        assert main(["--version"]) == 0
    shown = capsys.readouterr().out
    assert re.match(r"(fa4-hd256|sm100-sim),? (\d+\.\d+\.\d+|not installed)", shown)
