"""Sample mutants of the sources, and count those that the default cases and all cases kill.

    python tests/mutation_sample.py --seed 1 build/mutants fa4_hd256/call schedulers

Each mutant is one change of one statement: an operator, a constant, a condition, or a statement
left out. It is made in a tree of its own: a copy of the checkout, with caches. Up to three steps
decide on it, each of which ends with the first failure:

1. the test files nearest to it, mostly three, and, for code that is compiled, a file of calls that
   run it, with the default cases;
2. for a mutant that survives these, the cases of the same files that the default leaves out;
3. for one that all cases kill, other files with the default cases, since any of the default set
   may notice it: those that import it by way of other modules, the nearest first.

A run of more than `--longest` seconds of CPU time, together for the other files, decides nothing:
such a mutant is unknown, and not counted. A mutant that survives may be noticed by files that did
not run.

The test files of step 1 run without a mutant first. They fill the caches, and a test that fails
there is left out. `build/mutants` gets the trees and the results: `results.jsonl` has a line for
each mutant. A second call with the same arguments goes on from there. `--jobs`, `--seconds`:
mutants at once, and the time for all of them. Mutants of files that are compiled into kernels, or
translate these, compile them again, which takes minutes each.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import itertools
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
#: The packages whose sources are mutated or imported, by their first folder.
PACKAGES = ("fa4_hd256", "schedulers", "softmax_emu", "sm100_sim", "bench")
#: The folder of the simulator's package.
SIMULATOR = Path("sm100_sim", "src")
#: Files nearest to a mutant, where so many are named as it or import it.
MOST_FILES = 3

#: Folders of tests of calls, in tests/operator.
CALLS = ("attention", "masks_and_scores", "cache", "pytorch")
#: Part of a module's path -> test file of calls that run its kernels, the first that fits.
CALL_OF = {"backward": "test_backward", "decode": "test_kvcache", "mask": "test_block_mask"}

#: Variable of a cache -> folder where the tests of a checkout have it.
CACHES = {"FA4_HD256_CACHE_DIR": ".cache/fa4_hd256", "SM100_SIM_CACHE_DIR": "sm100_sim/.cache"}

#: Verdicts on mutants that some test notices.
KILLED = ("default", "all cases")

#: Line, the mutated line, the whole source.
Mutant = tuple[int, str, str]


class Tests(NamedTuple):
    """Arguments of pytest for a source file: the test files nearest to it; of compiled code a file
    of calls, under its architecture; files of the others."""

    near: list[str]
    of_calls: list[str]
    others: list[str]


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

    Nearest are files named as it, then those that import it or import what imports it. Where these
    are few, the nearest are all files of the folder that mirrors its own, too: instructions are
    found in tables, by which no import leads to them. The last of the others are those of calls,
    which find their kernels by name: no import leads to these. Of them the first are named as a
    folder or a file between the source and the call.
    """
    first, *inner = in_packages(module).parent.parts
    folder = {"fa4_hd256": "tests/operator", "sm100_sim": "sm100_sim/tests"}
    tests = ROOT / folder.get(first, f"tests/{first}")
    mirror = tests.joinpath(*inner)
    while not mirror.is_dir():
        mirror = mirror.parent
    beside = [file.relative_to(ROOT) for file in sorted(mirror.glob("test_*.py"))]
    named = [file for file in beside if module.stem in file.stem]
    named += [file.relative_to(ROOT) for file in sorted(tests.rglob(f"test_{module.stem}*.py"))]
    direct, second, *others = [*by_distance(module), [], []]
    direct.sort(key=lambda file: file not in beside)
    between = {part for one in (module, *importers().get(module, ())) for part in one.parts}
    operator = ROOT / "tests/operator"
    calls = [
        file.relative_to(ROOT)
        for folder in CALLS
        for file in sorted(operator.glob(f"{folder}/test_*.py"))
    ]
    calls.sort(key=lambda file: file.stem.removeprefix("test_") not in between)
    of_calls = calls if module.parts[0] in ("fa4_hd256", "schedulers", "softmax_emu") else []
    further = [file for layer in others for file in layer]
    near = list(dict.fromkeys([*named, *direct, *second]))
    near = near[:MOST_FILES] if len(near) >= MOST_FILES else [*dict.fromkeys([*near, *beside])]
    every = [*near, *named, *direct, *second, *beside, *further, *of_calls]
    files = [file.as_posix() for file in dict.fromkeys(every)]
    return Tests(files[: len(near)], call_of(module), files[len(near) :])


def call_of(module: Path) -> list[str]:
    """Return arguments of pytest for calls that run a module's kernels; none for host code."""
    parts = {*module.with_suffix("").parts}
    if not parts & {"kernels", "schedulers", "softmax_emu"}:
        return []
    name = next((name for part, name in CALL_OF.items() if part in parts), "test_forward")
    (file,) = (ROOT / "tests/operator").rglob(f"{name}.py")
    architecture = ["--arch", "sm_90a"] if "hopper" in parts else []
    return [*architecture, file.relative_to(ROOT).as_posix()]


class Watch:
    """Plugin of pytest: writes down which tests fail, and with left_out runs the cases which the
    default leaves out, and no others."""

    def __init__(self, place: Path, left_out: bool) -> None:
        self.place, self.left_out = place, left_out

    def pytest_collection_modifyitems(self, items: list) -> None:
        if self.left_out:
            from suite import sampled_cases

            items[:] = sampled_cases(items)[1]

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed:
            with open(self.place, "a") as file:
                print(report.nodeid, file=file)


def linked(source: Path, target: Path) -> Path:
    """Return a tree whose files are hard links to those of another.

    What tests write there, entries of caches and bytecode, replaces files as a whole. Locks are
    left out: each tree has its own.
    """

    def link(old: str, new: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # a temporary file
            os.link(old, new)

    ignored = shutil.ignore_patterns("*.lock", "*.tmp")
    shutil.copytree(source, target, symlinks=True, ignore=ignored, copy_function=link)
    return target


def kill_group(leader: int) -> None:
    """Kill a process and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


class Runs:
    """Runs of pytest in trees, one at a time.

    folder: of this worker, for logs and temporary files; end: of the time for all mutants, on the
    monotonic clock. `failed`: the tests that failed in the last run.
    """

    def __init__(self, folder: Path, end: float) -> None:
        self.folder, self.end = folder, end
        self.failed: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, tree: Path, arguments: list[str], longest: float, left_out: bool = False) -> str:
        """Run pytest with the default cases or those that these leave out. Returns "passes",
        "fails", or "too long" after so many seconds of CPU time, five times as many of any, or at
        the end."""
        failed = self.folder / "failed"
        failed.unlink(missing_ok=True)
        self.failed = []
        if time.monotonic() > self.end:
            return "too long"
        child = os.fork()
        if child == 0:
            self._child(tree, arguments, math.ceil(longest), Watch(failed, left_out))
        end = min(self.end, time.monotonic() + 5 * longest)
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            time.sleep(0.2)
            if time.monotonic() > end:
                kill_group(child)
        kill_group(child)  # processes that tests have left
        self.failed = failed.read_text().splitlines() if failed.exists() else []
        if os.WIFSIGNALED(ended[1]) and os.WTERMSIG(ended[1]) in (signal.SIGXCPU, signal.SIGKILL):
            return "too long"
        # 5: there is no such case.
        return "passes" if os.waitstatus_to_exitcode(ended[1]) in (0, 5) else "fails"

    def _child(self, tree: Path, arguments: list[str], longest: int, watch: Watch) -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (longest, longest + 5))
        os.chdir(tree)
        with open(self.folder / "log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        # Bytecode and caches belong to the tree.
        for name in (*CACHES, "PYTHONDONTWRITEBYTECODE"):
            os.environ.pop(name, None)
        sys.dont_write_bytecode = False
        sys.path[:0] = paths = [str(tree), str(tree / SIMULATOR)]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        import pytest

        if watch.left_out:
            arguments = ["--all-cases", *arguments]
        # The simulator has settings, and names of tests, of its own.
        options = ["-q", "-c", "pyproject.toml", "-p", "no:cacheprovider"]
        options.append(f"--basetemp={self.folder / 'tmp'}")
        os._exit(pytest.main([*options, *arguments], [watch]))


class Worker:
    """Takes one task after the other until none is left or the time is over: first each test file
    near a mutant, which fills the caches and finds the tests that fail without any mutant, then the
    mutants."""

    def __init__(self, sampler: Sampler, number: int) -> None:
        self.sampler, self.longest = sampler, sampler.longest
        self.folder = sampler.place / str(number)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.runs = Runs(self.folder, sampler.end)
        self._sound: set[str] = set()

    def work(self) -> None:
        while time.monotonic() < self.sampler.end and (task := self.sampler.taken()) is not None:
            begin, cpu = time.monotonic(), spent()
            if isinstance(task, str):
                found: dict[str, Any] | None = self.prepared(task)
            else:
                found = self.decided(*task)
            # What the end has cut short is left to the next call.
            if found is not None and time.monotonic() < self.sampler.end:
                cost = {"cpu_s": round(spent() - cpu), "wall_s": round(time.monotonic() - begin)}
                self.sampler.note(found | cost)
        shutil.rmtree(self.folder, ignore_errors=True)

    def prepared(self, arguments: str) -> dict[str, Any]:
        """Run a file without a mutant."""
        found = self.runs.run(self.sampler.base, arguments.split(), 2 * self.longest)
        crashed = found == "fails" and not self.runs.failed
        return {
            "prepared": arguments,
            "broken": arguments.split()[-1:] * crashed + self.runs.failed,
        }

    def decided(self, module: Path, mutant: Mutant, files: Tests) -> dict[str, Any]:
        """Return which tests kill a mutant: the default ones, all cases or none."""
        line, text, source = mutant
        self.tree = linked(self.sampler.base, self.folder / "mutant")
        try:
            (self.tree / module).unlink()  # it is linked
            (self.tree / module).write_text(source)
            verdict = self._verdict(files)
        finally:
            shutil.rmtree(self.tree)
        test = self.test if verdict in KILLED else ""
        return {"verdict": verdict, "where": f"{module}:{line}", "text": text, "test": test}

    def _verdict(self, files: Tests) -> str:
        seconds = self.sampler.without_mutant()[0]
        quick = sorted(files.near, key=lambda file: seconds.get(file, math.inf))
        near = [arguments for arguments in (quick, files.of_calls) if arguments]
        for left_out in (False, True):
            results = []
            for arguments in near:
                results.append(self.noticed(arguments, self.longest, left_out))
                if results[-1] == "fails":
                    break
            if "fails" in results:
                break
            if "too long" in results and not left_out:
                return "unknown"
        else:
            return "survives" if set(results) == {"passes"} else "unknown"
        if not left_out:
            return "default"
        noticed, most = self.test, spent() + self.longest
        for file in files.others:
            if (left := most - spent()) > 0 and self.noticed([file], left) == "fails":
                return "default"
        self.test = noticed
        return "all cases"

    def noticed(self, arguments: list[str], longest: float, left_out: bool = False) -> str:
        """Run tests with the mutant as `Runs.run` does, up to the first that fails: `test`. A test
        that fails without the mutant, too, is left out from then on."""
        while True:
            prepared, broken = self.sampler.without_mutant()
            left = [argument for argument in arguments if argument not in broken]
            if not any(argument.endswith(".py") for argument in left):
                return "too long"  # no file is left that could tell
            out = [f"--deselect={test}" for test in broken if "::" in test]
            found = self.runs.run(self.tree, ["-x", *out, *left], longest, left_out)
            if found != "fails":
                return found
            self.test = self.runs.failed[0] if self.runs.failed else "no test: pytest ends"
            if not self.runs.failed:
                return "fails" if prepared.keys() >= set(left) and not left_out else "too long"
            if self.test in self._sound:
                return "fails"
            # A file is named that cannot be imported.
            of_test = [self.test] if "::" in self.test else ["--collect-only", self.test]
            alone = self.runs.run(self.clean, of_test, self.longest)
            if alone != "fails":
                self._sound |= {self.test} if alone == "passes" else set()
                return "fails" if alone == "passes" else alone
            self.sampler.note({"prepared": "", "broken": [self.test], "cpu_s": 0})

    @functools.cached_property
    def clean(self) -> Path:
        """A tree without any mutant."""
        return linked(self.sampler.base, self.folder / "clean")


def spent() -> float:
    """Return the CPU seconds of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def sample(folders: list[str], seed: int, count: int) -> list[tuple[Path, Mutant, Tests]]:
    """Return `count` mutants of files drawn at random, of each folder in turn and one of each file
    before a second of any, and the tests of each."""
    pick = random.Random(seed)
    orders = []
    for folder in folders:
        path = ROOT / folder
        files = [path] if folder.endswith(".py") else sorted(path.rglob("*.py"))
        pick.shuffle(files)
        orders.append(files)
    mixed = [file for files in itertools.zip_longest(*orders) for file in files if file is not None]
    found = []
    for file in mixed * 5:
        if len(found) < count:
            module, one = file.relative_to(ROOT), mutant(file, pick)
            if one is not None and (tests := tests_of(module)).near:
                found.append((module, one, tests))
    return found


class Sampler:
    """Workers, and what they share: the tree that mutants are made of, `base`, and two files of
    results, a line of JSON each, from which another call goes on."""

    def __init__(self, asked: argparse.Namespace, end: float) -> None:
        self.place, self.longest, self.jobs, self.end = asked.place, asked.longest, asked.jobs, end
        self.base, self.results = self.place / "base", self.place / "results.jsonl"
        self._files = self.place / "files.jsonl"
        self._next = multiprocessing.get_context("fork").Value("i", 0)
        known = {(one["where"], one["text"]) for one in self.decided()}
        mutants = [
            (module, one, files)
            for module, one, files in sample(asked.folders, asked.seed, asked.count)
            if (f"{module}:{one[0]}", one[1]) not in known
        ]
        near = {" ".join(files.of_calls) for *_, files in mutants}
        near |= {file for *_, files in mutants for file in files.near}
        near -= {"", *self.without_mutant()[0]}
        # Long files begin first.
        first = sorted(near, key=lambda name: (-(ROOT / name.split()[-1]).stat().st_size, name))
        self._tasks: list[Any] = [*first, *mutants]

    def run(self) -> None:
        if not self.base.is_dir():
            copied(self.base)
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=self._work, args=(i,)) for i in range(self.jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _work(self, number: int) -> None:
        Worker(self, number).work()

    def taken(self) -> Any:
        """Return the next task: a test file, or a mutant; None after the last."""
        with self._next.get_lock():
            number, self._next.value = self._next.value, self._next.value + 1
        return self._tasks[number] if number < len(self._tasks) else None

    def note(self, found: dict[str, Any]) -> None:
        """Write down a result."""
        file = self.results if "verdict" in found else self._files
        with self._next.get_lock(), open(file, "a") as out:
            print(json.dumps(found), file=out)
        if "verdict" in found:
            print(f"{found['verdict']}: {found['where']}: {found['text']}", flush=True)

    def decided(self) -> list[dict[str, Any]]:
        """Return the results of all mutants."""
        return lines_of(self.results)

    def without_mutant(self) -> tuple[dict[str, int], list[str]]:
        """Return the CPU seconds of the files, and options, that ran without a mutant; the tests
        that failed."""
        found = lines_of(self._files)
        seconds = {name: one["cpu_s"] for one in found for name in one["prepared"].split()}
        return seconds, [test for one in found for test in one["broken"]]


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON lines; none of one that is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def copied(place: Path) -> None:
    """Copy the checkout, and the caches that the environment names."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "*.lock")
    shutil.copytree(ROOT, place, ignore=left_out, symlinks=True)
    for name, folder in CACHES.items():
        if cache := os.environ.get(name):
            shutil.copytree(cache, place / folder, ignore=left_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--longest", type=int, default=240, help="seconds of CPU time of a run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of all runs together")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    parser.add_argument("place", type=Path, help="folder of trees and results, on a fast disk")
    parser.add_argument("folders", nargs="+", help="folders or files of the sources")
    asked = parser.parse_args()
    asked.place = asked.place.resolve()
    end = time.monotonic() + asked.seconds
    for module in ("torch", "cutlass.cute", "hypothesis", "numba", "pytest"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)  # before the forks, which then start sooner
    asked.place.mkdir(parents=True, exist_ok=True)
    sampler = Sampler(asked, end)
    sampler.run()
    found = sampler.decided()
    print("simulator:", summary([one for one in found if one["where"].startswith("sm100_sim")]))
    print("all:", summary(found))
    print(f"{len(sampler.without_mutant()[1])} tests fail without a mutant")


def summary(found: list[dict[str, Any]]) -> str:
    """Return a line of counts."""
    counts = Counter(one["verdict"] for one in found)
    by_all = sum(counts[name] for name in KILLED)
    return (
        f"{len(found)} mutants: default {counts['default']}, all {by_all} "
        f"({counts['default'] / max(by_all, 1):.0%}), {counts['survives']} survive, "
        f"{counts['unknown']} unknown"
    )


if __name__ == "__main__":
    main()
