"""sm100_sim as a distribution of its own: what it holds, what it publishes, what it runs alone."""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from project import PACKAGE, PROJECT

import sm100_sim
from sm100_sim import progress, timing, waiting
from sm100_sim.__main__ import COMMANDS, main

#: Modules whose `__all__` is what they publish.
PUBLIC = {"sm100_sim": sm100_sim, "sm100_sim.timing": timing}

#: Examples that need nothing else.
NO_EXTRA = ("first_kernel", "planted_race", "hang")

#: Runs in an interpreter that finds nothing of this project but the wheel, and no optional package.
ALONE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {"torch", "cutlass", "cuda", "numba", "scipy", "tvm_ffi", "fa4_hd256", "bench",
                   "schedulers", "softmax_emu"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
sys.path.insert(0, sys.argv[1])
import sm100_sim
assert sm100_sim.__file__.startswith(sys.argv[1]), sm100_sim.__file__
"""


def sources() -> set[str]:
    """Files of the package below its folder of sources."""
    kept = {".py", ".json", ".npz", ".typed"}
    paths = [path for path in PACKAGE.rglob("*") if path.suffix in kept]
    return {path.relative_to(PACKAGE.parent).as_posix() for path in paths}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The wheel, built from the source distribution, both unpacked."""
    pytest.importorskip("setuptools", minversion="77")
    directory = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".cache", "tests")
    shutil.copytree(PROJECT, directory / "source", ignore=ignored)

    def run(*command):
        done = subprocess.run([sys.executable, *command], cwd=directory / "source",
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr

    run("-c", f"import setuptools.build_meta as b; b.build_sdist({str(directory)!r})")
    (packed,) = directory.glob("*.tar.gz")
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir",
        str(directory), str(packed))  # fmt: skip
    (wheel,) = directory.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(directory / "site")
    shutil.unpack_archive(packed, directory / "site")
    return directory / "site"


def test_the_wheel_holds_every_file(site):
    held = {
        path.relative_to(site).as_posix()
        for path in (site / "sm100_sim").rglob("*")
        if path.is_file()
    }
    assert held == sources()
    (unpacked,) = site.glob("sm100_sim-*/pyproject.toml")
    assert {"CHANGELOG.md", "LICENSE", "README.md"} <= {p.name for p in unpacked.parent.iterdir()}
    (information,) = site.glob("*.dist-info")
    assert information.name == f"sm100_sim-{sm100_sim.__version__}.dist-info"
    assert (information / "licenses" / "LICENSE").is_file()


def alone(site: Path, code: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-I", "-B", "-c", ALONE + code, str(site), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_it_runs_alone(site):
    """A kernel of PTX, a golden case, the constants of the timing model; the examples that need no
    more."""
    done = alone(site, """
import contextlib, runpy
from sm100_sim.tools.golden import Vectors, all_cases
from sm100_sim.tools.golden.comparing import difference
from sm100_sim.tools.golden.replay import replay
case = next(case for case in all_cases() if case.group == "integer")
assert not difference(case, replay(case), Vectors().outputs(case))
assert sm100_sim.timing.load("b200").values().sms == sm100_sim.device("b200").sms
for example in sys.argv[2:]:
    sys.argv = [example]
    with contextlib.suppress(SystemExit):
        runpy.run_path(example, run_name="__main__")
""", *(str(PROJECT / "examples" / f"{name}.py") for name in NO_EXTRA))  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in ("0 of 1000 elements differ", "race in shared memory", "the launch hangs"):
        assert f"\n{line}" in f"\n{done.stdout}"


def test_the_kernel_of_the_page(site):
    """The first kernel of README.md prints what the page says."""
    blocks = re.findall(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(), re.S)
    (code,) = (block for block in blocks if "PTX = " in block)
    (said,) = re.findall(r"# (\[0 2 4 6\].*)\n", code)
    done = alone(site, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{said}\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sm100_sim.timing.predict", r"needs numba, .*; pip install './sm100_sim\[timing\]'"),
        (
            "with sm100_sim.attached(): pass",
            r"needs torch, .*; pip install './sm100_sim\[attach\]'",
        ),
        (
            "from sm100_sim.tools.golden.record import Gpu; Gpu()",
            r"needs cuda, .*; pip install './sm100_sim\[gpu\]'",
        ),
    ],
)
def test_what_an_extra_is_for_says_so(site, code, said):
    done = alone(site, code)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("sm100_sim.errors.MissingExtra: "), done.stderr
    assert re.search(said, last), last


@pytest.mark.parametrize("arguments", [
    ["script.py"], ["predict", "script.py"], ["mutate", "script.py"], ["record", "--out", "a"],
], ids=" ".join)  # fmt: skip
def test_a_command_without_what_it_needs(site, tmp_path, arguments):
    """One line that says what to install, no traceback."""
    (tmp_path / "script.py").write_text("")
    done = alone(site, f"""
import os, runpy
os.chdir({str(tmp_path)!r})
sys.argv = ["sm100_sim", *{arguments}]
runpy.run_module("sm100_sim", run_name="__main__")
""")  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(r"sm100_sim: .* needs \w+, .*; pip install './sm100_sim\[\w+\]' .*", line)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m sm100_sim {name} ")


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), (["-h"], 0), ([], 2)])
def test_the_table_of_commands(arguments, status, capsys):
    assert main(arguments) == status
    shown = capsys.readouterr()
    text, empty = (shown.err, shown.out) if status else (shown.out, shown.err)
    assert text.startswith("usage: python -m sm100_sim [flags] SCRIPT.py") and not empty
    assert all(re.search(rf"^  {name} +\w", text, re.M) for name in COMMANDS)


# ---------------------------------------------------------------- published names


def imported_for_typing(module) -> set[str]:
    """Names that a package imports for type checkers."""
    tree = ast.parse(Path(module.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


@pytest.mark.parametrize("name", PUBLIC)
def test_published_names_are_there(name):
    """Each can be had, says what it is, and is known to type checkers."""
    module = PUBLIC[name]
    assert set(module.__all__) == imported_for_typing(module)
    assert len(set(module.__all__)) == len(module.__all__)
    for one in module.__all__:
        found = getattr(module, one)
        if inspect.isclass(found) or inspect.isfunction(found) or inspect.ismodule(found):
            assert inspect.getdoc(found), one
        if inspect.isclass(found):
            assert found.__doc__, one
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018


@pytest.mark.parametrize("command", [[], ["predict"], ["speed"], ["mutate"]])
def test_a_script_that_is_not_there_is_one_line(command, capsys):
    assert main([*command, "no_such_script.py"]) == 2
    assert capsys.readouterr().err == "sm100_sim: 'no_such_script.py' is not a file\n"


@pytest.mark.parametrize("command", [["record"]])
def test_a_machine_without_a_driver_is_one_line(command, monkeypatch, capsys):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert main(command) == 2
    told = capsys.readouterr().err
    assert f"sm100_sim: {command[0]} needs a GPU" in told and told.count("\n") == 1


def test_a_script_without_a_kernel_is_one_line(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("print('nothing to launch')\n")
    assert main(["predict", str(script)]) == 2
    assert capsys.readouterr().err == "the script launched no kernel in the simulator\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_done_is_shown_on_a_terminal(is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(waiting, "LATER", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with progress.step("replaying attention"):
        time.sleep(0.2)
    assert list(progress.counted([1, 2], 2, "running", "program")) == [1, 2]
    shown = capsys.readouterr().err
    assert ("replaying attention" in shown) == ("running" in shown) == is_terminal
