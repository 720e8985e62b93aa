"""The limits this project sets itself: sizes, imports between rooms, no path of a machine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("fa4_hd256", "schedulers", "softmax_emu", "sm100_sim", "bench")
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for top in (*ROOMS, "tests")
    for path in (ROOT / top).rglob("*.py")
)

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
# A warp role is one loop of waits, work and signals that reads worse in pieces.
MAX_ROLE_LINES = 150
MAX_PARAMETERS = 8

# Limits raised on purpose, each with its reason: (file, function) -> parameters.
MORE_PARAMETERS = {
    # The signature of the field's libraries, which users call by these names.
    ("fa4_hd256/interface.py", "flash_attn_func"): 14,
    ("fa4_hd256/interface.py", "flash_attn_varlen_func"): 21,
    # A torch operator's schema is flat: tensors and plain values only.
    ("fa4_hd256/interface.py", "forward"): 19,
    ("fa4_hd256/interface.py", "_"): 19,
    ("fa4_hd256/autograd.py", "backward"): 21,
    ("fa4_hd256/autograd.py", "_"): 21,
}

# Which other rooms a room may import (design: the house and its rooms).
ALLOWED = {
    "sm100_sim": set(),
    "schedulers": set(),
    "softmax_emu": set(),
    "fa4_hd256": {"schedulers", "softmax_emu"},
    "bench": {"fa4_hd256", "schedulers", "softmax_emu", "sm100_sim"},
}
# Only these files of the operator know the simulator: where it launches, and its checks.
KNOW_THE_SIMULATOR = ("fa4_hd256/run/launch.py", "fa4_hd256/check/")


def tree(source: str) -> ast.Module:
    return ast.parse((ROOT / source).read_text(), source)


def functions(source: str):
    """(function, whether it is a warp role) of a file.

    Roles are the methods that the forward kernel's dispatch names: `self.role(context)`.
    """
    for node in ast.walk(tree(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [argument.arg for argument in node.args.args]
            is_kernel_file = re.fullmatch(r"fa4_hd256/kernels/.*\.py", source)
            yield node, bool(is_kernel_file) and names == ["self", "context"]


def imported_rooms(source: str) -> set[str]:
    found = set()
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
    return found & set(ROOMS)


def test_every_room_has_sources():
    """An empty list would make every other check here pass."""
    assert {source.split("/")[0] for source in SOURCES} == {*ROOMS, "tests"}


def test_no_two_test_modules_share_a_name():
    """pytest imports them by their names alone: the second of a pair cannot be collected."""
    names = sorted(Path(source).name for source in SOURCES if source.startswith("tests/"))
    assert names == sorted(set(names))


@pytest.mark.parametrize("source", SOURCES)
def test_sizes(source):
    lines = (ROOT / source).read_text().count("\n")
    assert lines <= MAX_FILE_LINES, f"{source} has {lines} lines"
    for function, is_role in functions(source):
        length = function.end_lineno - function.lineno + 1
        limit = MAX_ROLE_LINES if is_role else MAX_FUNCTION_LINES
        assert length <= limit, f"{source}: {function.name} has {length} lines"
        parameters = function.args
        count = len(parameters.posonlyargs + parameters.args + parameters.kwonlyargs)
        count -= bool(parameters.args) and parameters.args[0].arg in ("self", "cls")
        most = MORE_PARAMETERS.get((source, function.name), MAX_PARAMETERS)
        assert count <= most, f"{source}: {function.name} has {count} parameters"


@pytest.mark.parametrize("source", [s for s in SOURCES if not s.startswith("tests/")])
def test_imports_between_rooms(source):
    room = source.split("/")[0]
    allowed = ALLOWED[room] | {room}
    if source.startswith(KNOW_THE_SIMULATOR):
        allowed = allowed | {"sm100_sim"}
    assert imported_rooms(source) <= allowed


def test_ruff():
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", "."]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_absolute_path_of_a_machine():
    """A path that exists on one machine only does not belong into the repository."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = listed.stdout.split() if listed.returncode == 0 else SOURCES
    pattern = re.compile("/(?:" + "|".join(("work", "home", "Users", "farm", "root")) + ")/")
    for name in files:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".yml", ".json", "") and path.is_file():
            if name == Path(__file__).relative_to(ROOT).as_posix():
                continue
            found = pattern.search(path.read_text(errors="ignore"))
            assert found is None, f"{name} holds {found[0]}"
