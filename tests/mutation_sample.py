"""Sample mutants of the sources, and count those that the default cases and all cases kill.

    python tests/mutation_sample.py --seed 1 fa4_hd256/call sm100_sim/src/sm100_sim/isa

Each mutant is one change of one statement: an operator, a constant, a condition, or a statement
left out. It is made in a copy of the checkout, with copies of the caches. Three runs at most decide
on it, each of which ends with the first failure:

1. the three test files nearest to it, with the default cases;
2. for a mutant that survives these, the cases of the same files that the default leaves out;
3. for one that all cases kill, other files with the default cases, since any of the default set
   may notice it: those that import it by way of other modules, the nearest first.

A run of more than `--longest` seconds of CPU time, together for the other files, decides nothing:
such a mutant is unknown, and not counted. Each mutant prints a line, and the two counts so far.

Mutants of files that are compiled into kernels compile these again, which takes minutes each.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The packages whose sources are mutated or imported, by their first folder.
PACKAGES = ("fa4_hd256", "schedulers", "softmax_emu", "sm100_sim", "bench")
#: The folder of the simulator's package.
SIMULATOR = Path("sm100_sim", "src")
#: Files nearest to a mutant, at most.
MOST_FILES = 3

#: Line, the mutated line, the whole source.
Mutant = tuple[int, str, str]
#: The test files nearest to a source file, and the others.
Tests = tuple[list[str], list[str]]

COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
COMPUTED = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//", ast.Div: "*",
    ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip


def changed(node: ast.AST) -> str | None:
    """Return the source of a node after its mutation; None for a node that has none."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator = COMPARED[type(node.ops[0])]
        return f"{ast.unparse(node.left)} {operator} {ast.unparse(node.comparators[0])}"
    if isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        operator = COMPUTED[type(node.op)]
        return f"({ast.unparse(node.left)}) {operator} ({ast.unparse(node.right)})"
    if isinstance(node, ast.BoolOp):
        operator = " or " if isinstance(node.op, ast.And) else " and "
        return "(" + operator.join(f"({ast.unparse(value)})" for value in node.values) + ")"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.Constant) and type(node.value) in (bool, int):
        value = node.value
        return repr(not value) if isinstance(value, bool) else repr(value + 1)
    if isinstance(node, ast.Expr | ast.AugAssign | ast.Raise):
        documents = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return None if documents else "pass"
    return None


def mutant(path: Path, pick: random.Random) -> Mutant | None:
    """Return one mutant inside a function, drawn at random; None where there is none."""
    text = path.read_text()
    lines, tree = text.splitlines(keepends=True), ast.parse(text)
    statements = [
        statement
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for statement in function.body
    ]
    nodes = [node for statement in statements for node in ast.walk(statement) if changed(node)]
    pick.shuffle(nodes)
    for node in nodes:
        line = lines[node.lineno - 1]
        if node.lineno != node.end_lineno or not line.isascii():
            continue
        mutated = line[: node.col_offset] + changed(node) + line[node.end_col_offset :]
        source = "".join([*lines[: node.lineno - 1], mutated, *lines[node.lineno :]])
        try:
            new = ast.parse(source)
        except SyntaxError:  # part of an f-string, whose columns are those of its parts
            continue
        if ast.dump(new) != ast.dump(tree):
            return node.lineno, mutated.strip(), source
    return None


def in_packages(path: Path) -> Path:
    """Return the path of a file from the folder of its package."""
    return path.relative_to(SIMULATOR) if path.is_relative_to(SIMULATOR) else path


@functools.cache
def imported_by(file: Path) -> frozenset[Path]:
    """Return the modules of the packages that a file imports by name, relative to the checkout."""
    package = in_packages(file.relative_to(ROOT)).parent.parts
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {module_of(*alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *(node.module or "").split(".")) if node.module else base
            found |= {module_of(*base, alias.name) for alias in node.names}
    return frozenset(found - {None})


@functools.cache
def module_of(*names: str) -> Path | None:
    """Return the file of a module, or of the module that a name is imported from; None outside the
    packages."""
    if names[:1] == ("fa4_hd256",) and names[1:2] in (("schedulers",), ("softmax_emu",)):
        names = names[1:]  # links in fa4_hd256
    if not names or names[0] not in PACKAGES:
        return None
    folder = SIMULATOR if names[0] == "sm100_sim" else Path()
    for path in (
        folder.joinpath(*names).with_suffix(".py"),
        folder.joinpath(*names, "__init__.py"),
    ):
        if (ROOT / path).is_file():
            return path
    return module_of(*names[:-1])


@functools.cache
def importers() -> dict[Path, set[Path]]:
    """Return for each module of the packages the modules and test files that import it."""
    found: dict[Path, set[Path]] = {}
    for folder in (*PACKAGES, "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for module in imported_by(file):
                found.setdefault(module, set()).add(file.relative_to(ROOT))
    return found


def by_distance(module: Path) -> list[list[Path]]:
    """Return the test files that import a module, by the number of modules in between; of equally
    many those that import the fewest others come first, and those for a GPU last."""
    seen, layer, found = {module}, {module}, []
    while layer:
        layer = {file for one in layer for file in importers().get(one, ())} - seen
        seen |= layer
        tests = [file for file in layer if file.name.startswith("test_")]
        found.append(
            sorted(tests, key=lambda f: ("cuda" in f.parts, len(imported_by(ROOT / f)), f))
        )
        layer -= set(tests)
    return found


def tests_of(module: Path) -> Tests:
    """Return the test files nearest to a source file, and the others that import it in any way.

    Nearest are files named as it, then those that import it or import what imports it, then those
    of the folder that mirrors its own. The last of the others are those of calls, which find their
    kernels by name: no import leads to these. Of them the first are named as a folder or a file
    between the source and the call.
    """
    first, *inner = in_packages(module).parent.parts
    folder = {"fa4_hd256": "tests/operator", "sm100_sim": "sm100_sim/tests"}
    tests = ROOT / folder.get(first, f"tests/{first}")
    mirror = tests.joinpath(*inner)
    beside = [file.relative_to(ROOT) for file in sorted(mirror.glob("test_*.py"))]
    named = [file for file in beside if module.stem in file.stem]
    named += [file.relative_to(ROOT) for file in sorted(tests.rglob(f"test_{module.stem}*.py"))]
    direct, second, *others = [*by_distance(module), [], []]
    direct.sort(key=lambda file: file not in beside)
    between = {part for one in (module, *importers().get(module, ())) for part in one.parts}
    calls = [file.relative_to(ROOT) for file in sorted((ROOT / "tests/operator").glob("test_*.py"))]
    calls.sort(key=lambda file: file.stem.removeprefix("test_") not in between)
    of_calls = calls if module.parts[0] in ("fa4_hd256", "schedulers", "softmax_emu") else []
    further = [file for layer in others for file in layer]
    every = [*named, *direct, *second, *beside, *further, *of_calls]
    files = [file.as_posix() for file in dict.fromkeys(every)]
    return files[:MOST_FILES], files[MOST_FILES:]


class LeftOut:
    """Plugin of pytest that runs the cases which the default leaves out, and no others."""

    def pytest_collection_modifyitems(self, items: list) -> None:
        from suite import sampled_cases

        items[:] = sampled_cases(items)[1]


def result(copy: Path, files: list[str], longest: int, left_out: bool = False) -> str:
    """Run pytest on these files of a copy of the checkout, with the default cases or those that
    these leave out. Returns "passes", "fails", or "too long" after so many seconds of CPU time, or
    ten times as many of any."""
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (longest, longest + 5))
        os.chdir(copy)
        with open(copy / "log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.path[:0] = paths = [str(copy), str(copy / SIMULATOR)]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        import pytest

        options = ["-q", "-x", "-p", "no:cacheprovider", *(["--all-cases"] if left_out else [])]
        os._exit(pytest.main([*options, *files], [LeftOut()] if left_out else []))
    end = time.monotonic() + 10 * longest
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        time.sleep(0.2)
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
    if os.WIFSIGNALED(ended[1]) and os.WTERMSIG(ended[1]) in (signal.SIGXCPU, signal.SIGKILL):
        return "too long"
    # 5: there is no such case.
    return "passes" if os.waitstatus_to_exitcode(ended[1]) in (0, 5) else "fails"


def failure(copy: Path) -> str:
    """Return the summary of the last run that failed, in one line."""
    lines = (copy / "log").read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return (failed or lines[-1:] or [""])[-1][:160]


def verdict(copy: Path, files: Tests, longest: int) -> str:
    """Return which tests kill the mutant in a copy: "default", "all cases", "survives", or
    "unknown". files: see `tests_of`."""
    near, others = files
    found = result(copy, near, longest)
    if found != "passes":
        return "default" if found == "fails" else "unknown"
    found = result(copy, near, longest, left_out=True)
    if found != "fails":
        return "survives" if found == "passes" else "unknown"
    noticed, end = failure(copy), spent() + longest
    for file in others:
        left = int(end - spent())
        if left > 0 and result(copy, [file], left) == "fails":
            return "default"
    (copy / "log").write_text(noticed)
    return "all cases"


def spent() -> float:
    """Return the CPU seconds of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def sample(folders: list[str], seed: int, count: int) -> list[tuple[Path, Mutant, Tests]]:
    """Return `count` mutants of files drawn at random, one of each file before a second of any, and
    the tests of each."""
    pick = random.Random(seed)
    files = sorted(
        path
        for folder in folders
        for path in ([ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py"))
    )
    pick.shuffle(files)
    found, rounds = [], 0
    while len(found) < count and rounds < 5:
        for path in files:
            if len(found) < count:
                module, one = path.relative_to(ROOT), mutant(path, pick)
                if one is not None and (files := tests_of(module))[0]:
                    found.append((module, one, files))
        rounds += 1
    return found


def copied(place: Path) -> Path:
    """Return a copy of the checkout in `place`. Caches are copied, too, and become those of this
    process: what a mutant leaves in them must not reach anyone else."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
    for name in ("fa4_hd256", "sm100_sim"):
        variable = f"{name.upper()}_CACHE_DIR"
        cache = Path(os.environ.get(variable, ROOT / ".cache" / name))
        os.environ[variable] = str(place / "caches" / name)
        if cache.is_dir():
            shutil.copytree(cache, place / "caches" / name)
    return Path(shutil.copytree(ROOT, place / "checkout", ignore=left_out, symlinks=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--longest", type=int, default=240, help="seconds of CPU time of a run")
    parser.add_argument("folders", nargs="+", help="folders or files of the sources")
    asked = parser.parse_args()
    for module in ("torch", "cutlass.cute", "hypothesis", "numba", "pytest"):
        importlib.import_module(module)  # before the forks, which then start sooner

    counts = Counter()
    with tempfile.TemporaryDirectory() as place:
        copy = copied(Path(place))
        chosen = sample(asked.folders, asked.seed, asked.count)
        for number, (module, (line, text, source), files) in enumerate(chosen, 1):
            original, before = (copy / module).read_text(), spent()
            (copy / module).write_text(source)
            killed = verdict(copy, files, asked.longest)
            (copy / module).write_text(original)
            counts[killed] += 1
            by_all = counts["default"] + counts["all cases"]
            print(f"{killed}: {module}:{line}: {text}  ({spent() - before:.0f} s)", flush=True)
            if killed in ("default", "all cases"):
                print(f"  {failure(copy)}")
            print(f"  {number} mutants: default {counts['default']}, all {by_all}", flush=True)


if __name__ == "__main__":
    main()
