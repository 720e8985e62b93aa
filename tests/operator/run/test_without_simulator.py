"""Installation without sm100_sim: one clear line for CPU tensors, and nothing else needs it."""

from __future__ import annotations

import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from fa4_hd256 import __main__ as command
from fa4_hd256 import environment, flash_attn_func


@pytest.fixture(params=[None, ModuleType("sm100_sim")], ids=["absent", "folder of a checkout"])
def without(request, monkeypatch):
    """Pretend that the simulator is not installed, there or not there as a folder of sources."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sm100_sim"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sm100_sim", request.param)


@pytest.mark.usefixtures("without")
def test_cpu_tensors():
    q = torch.zeros(1, 64, 1, 256, dtype=torch.bfloat16)
    with pytest.raises(ImportError) as caught:
        flash_attn_func(q, q, q)
    text = str(caught.value)
    assert text == (
        "CPU tensors run in the simulator: sm100_sim is not installed; pip install ./sm100_sim in "
        "a checkout of fa4-hd256 installs it, or use a CUDA device"
    )
    assert caught.value.name == "sm100_sim" and caught.value.__suppress_context__


@pytest.mark.usefixtures("without")
def test_env(capsys):
    assert command.main(["env"]) == 0
    shown = capsys.readouterr().out
    assert f"cpu: cannot be used: CPU tensors run in the simulator: {environment.NO_SIMULATOR}" in (
        shown
    )
    assert f"\n{environment.NO_SIMULATOR}\n" in shown


def in_another_process(missing: str, code: str) -> subprocess.CompletedProcess:
    code = f"import sys\nsys.modules[{missing!r}] = None\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("program", "arguments", "says"),
    [
        ("fa4_hd256", ["demo", "--seqlen", "64"], environment.NO_SIMULATOR),
        ("bench", ["bringup", "--simulate", "--report"], "pip install -e ./sm100_sim "),
    ],
    ids=["fa4_hd256", "bench"],
)
def test_commands_that_need_it(program, arguments, says):
    code = f"from {program}.__main__ import main\nsys.exit(main({arguments}))"
    done = in_another_process("sm100_sim", code)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and says in line


def test_a_module_missing_inside_the_simulator_is_another_error():
    """Advice to install what is there would mislead."""
    code = "from fa4_hd256.gpus import simulated\nsimulated.simulator().launch"
    done = in_another_process("llvmlite", code)
    assert done.returncode == 1 and re.search("ModuleNotFoundError: .*llvmlite", done.stderr)
    assert "sm100_sim is not installed" not in done.stderr


def test_importing_the_operator_does_not_import_it():
    code = "import sys, fa4_hd256, fa4_hd256.run.launch; print('sm100_sim' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
