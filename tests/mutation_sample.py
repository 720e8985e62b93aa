"""Sample mutants of the sources, and count those that the default cases and all cases kill.

    python tests/mutation_sample.py --seed 1 fa4_hd256/call sm100_sim/src/sm100_sim/isa

Each mutant is one change of one statement: an operator, a constant, a condition, or a statement
left out. It is made in a copy of the checkout, with copies of the caches. Up to three steps decide
on it, each of which ends with the first failure:

1. the three test files nearest to it and, for code that is compiled, a file of calls that run it,
   with the default cases;
2. for a mutant that survives these, the cases of the same files that the default leaves out;
3. for one that all cases kill, other files with the default cases, since any of the default set
   may notice it: those that import it by way of other modules, the nearest first.

A run of more than `--longest` seconds of CPU time, together for the other files, decides nothing:
such a mutant is unknown, and not counted. A test that fails without the mutant, too, is left out.
Each mutant prints a line, the end the counts. `--jobs`, `--seconds`: mutants at once, and the time
for all of them.

Mutants of files that are compiled into kernels compile these again, which takes minutes each.
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
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
#: The packages whose sources are mutated or imported, by their first folder.
PACKAGES = ("fa4_hd256", "schedulers", "softmax_emu", "sm100_sim", "bench")
#: The folder of the simulator's package.
SIMULATOR = Path("sm100_sim", "src")
#: Files nearest to a mutant, at most.
MOST_FILES = 3

#: Folders of tests of calls, in tests/operator.
CALLS = ("attention", "masks_and_scores", "cache", "pytorch")
#: Part of a module's path -> test file of calls that run its kernels, the first that fits.
CALL_OF = {"backward": "test_backward", "decode": "test_kvcache", "mask": "test_block_mask"}

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
    operator = ROOT / "tests/operator"
    calls = [
        file.relative_to(ROOT)
        for folder in CALLS
        for file in sorted(operator.glob(f"{folder}/test_*.py"))
    ]
    calls.sort(key=lambda file: file.stem.removeprefix("test_") not in between)
    of_calls = calls if module.parts[0] in ("fa4_hd256", "schedulers", "softmax_emu") else []
    further = [file for layer in others for file in layer]
    every = [*named, *direct, *second, *beside, *further, *of_calls]
    files = [file.as_posix() for file in dict.fromkeys(every)]
    return Tests(files[:MOST_FILES], call_of(module), files[MOST_FILES:])


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
    """Plugin of pytest: writes down which test fails, and with left_out runs the cases which the
    default leaves out, and no others."""

    def __init__(self, place: Path, left_out: bool) -> None:
        self.place, self.left_out = place, left_out

    def pytest_collection_modifyitems(self, items: list) -> None:
        if self.left_out:
            from suite import sampled_cases

            items[:] = sampled_cases(items)[1]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.place.write_text(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.place.write_text(report.nodeid)


class Copy:
    """A copy of the checkout, and runs of its tests.

    end: of the time for all mutants, on the monotonic clock; longest: seconds of CPU time of a run.
    `failed`: the last test that failed. `broken`: tests that fail without any mutant.
    """

    def __init__(self, folder: Path, end: float, longest: int) -> None:
        self.folder, self.end, self.longest = folder, end, longest
        self.broken: list[str] = []
        self._sound: set[str] = set()
        self._failed = folder / "failed"

    @property
    def failed(self) -> str:
        return self._failed.read_text() if self._failed.exists() else ""

    def verdict(self, module: Path, source: str, files: Tests) -> str:
        """Return which tests kill a mutant of a module: "default", "all cases", "survives", or
        "unknown". files: see `tests_of`."""
        original = (self.folder / module).read_text()
        (self.folder / module).write_text(source)
        try:
            return self._verdict(module, original, files)
        finally:
            (self.folder / module).write_text(original)

    def _verdict(self, module: Path, original: str, files: Tests) -> str:
        run = functools.partial(self.noticed, module, original)
        near = [arguments for arguments in (files.of_calls, files.near) if arguments]
        for left_out in (False, True):
            results = []
            for arguments in near:
                results.append(run(arguments, self.longest, left_out))
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
        noticed, most = self.failed, spent() + self.longest
        for file in files.others:
            left = int(most - spent())
            if left > 0 and run([file], left) == "fails":
                return "default"
        self._failed.write_text(noticed)
        return "all cases" if time.monotonic() < self.end else "unknown"

    def noticed(
        self, module: Path, original: str, files: list[str], longest: int, left_out: bool = False
    ) -> str:
        """Run tests as `run` does. A test that fails without the mutant, too, is left out from then
        on."""
        while (found := self.run(files, longest, left_out)) == "fails":
            test, source = self.failed, (self.folder / module).read_text()
            if test not in self._sound:
                (self.folder / module).write_text(original)
                alone = self.run([test], self.longest) if test else "fails"
                (self.folder / module).write_text(source)
                if alone == "too long":
                    return alone
                if alone == "fails":
                    if not test or test in self.broken:
                        return "too long"
                    self.broken.append(test)
                    continue
                self._sound.add(test)
            self._failed.write_text(test)
            break
        return found

    def run(self, files: list[str], longest: int, left_out: bool = False) -> str:
        """Run pytest on these files, with the default cases or those that these leave out. Returns
        "passes", "fails", or "too long" after so many seconds of CPU time, ten times as many of
        any, or at the end."""
        self._failed.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            self._child(files, longest, left_out)
        end = min(self.end, time.monotonic() + 10 * longest)
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            time.sleep(0.2)
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
        if os.WIFSIGNALED(ended[1]) and os.WTERMSIG(ended[1]) in (signal.SIGXCPU, signal.SIGKILL):
            return "too long"
        # 5: there is no such case.
        return "passes" if os.waitstatus_to_exitcode(ended[1]) in (0, 5) else "fails"

    def _child(self, files: list[str], longest: int, left_out: bool) -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (longest, longest + 5))
        os.chdir(self.folder)
        with open(self.folder / "log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.path[:0] = paths = [str(self.folder), str(self.folder / SIMULATOR)]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        import pytest

        options = ["-q", "-x", "-p", "no:cacheprovider", *(["--all-cases"] if left_out else [])]
        options += [f"--deselect={test}" for test in self.broken]
        os._exit(pytest.main([*options, *files], [Watch(self._failed, left_out)]))


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


def copied(place: Path, shares_caches: bool) -> Path:
    """Return a copy of the checkout in `place`. Caches are copied, too, and become those of this
    process, unless workers share them: what a mutant leaves in them must not reach anyone else.
    Entries are known by the sources that are compiled in, so what changes no key may be shared."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
    for name in () if shares_caches else ("fa4_hd256", "sm100_sim"):
        variable = f"{name.upper()}_CACHE_DIR"
        cache = Path(os.environ.get(variable, ROOT / ".cache" / name))
        os.environ[variable] = str(place / "caches" / name)
        if cache.is_dir():
            shutil.copytree(cache, place / "caches" / name)
    return Path(shutil.copytree(ROOT, place / "checkout", ignore=left_out, symlinks=True))


class Sampler:
    """Workers that take one mutant after the other, each in a copy of the checkout, until none is
    left or the time is over. Each result is written at once, a line of JSON."""

    def __init__(self, asked: argparse.Namespace, place: Path) -> None:
        self.asked, self.place = asked, place
        self.chosen = sample(asked.folders, asked.seed, asked.count)
        self.end = time.monotonic() + asked.seconds
        self.next = multiprocessing.get_context("fork").Value("i", 0)
        self.out = asked.out or place / "results.jsonl"

    def run(self) -> list[dict[str, Any]]:
        """Return the results of all mutants that were decided or given up."""
        context = multiprocessing.get_context("fork")
        workers = [
            context.Process(target=self.work, args=(self.place / str(number),))
            for number in range(self.asked.jobs)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def work(self, place: Path) -> None:
        folder = copied(place, self.asked.share_caches)
        copy = Copy(folder, self.end, self.asked.longest)
        while time.monotonic() < self.end:
            with self.next.get_lock():
                number, self.next.value = self.next.value, self.next.value + 1
            if number >= len(self.chosen):
                return
            module, (line, text, source), files = self.chosen[number]
            cpu, begin = spent(), time.monotonic()
            killed = copy.verdict(module, source, files)
            found = {
                "mutant": number, "verdict": killed, "where": f"{module}:{line}", "text": text,
                "cpu_s": round(spent() - cpu), "wall_s": round(time.monotonic() - begin),
                "test": copy.failed if killed in KILLED else "", "broken": copy.broken,
            }  # fmt: skip
            with self.next.get_lock(), open(self.out, "a") as out:
                print(json.dumps(found), file=out)
            print(f"{killed}: {found['where']}: {text}  ({found['wall_s']} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--longest", type=int, default=240, help="seconds of CPU time of a run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of all runs together")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    parser.add_argument("--share-caches", action="store_true", help="no copies of them for workers")
    parser.add_argument("--out", type=Path, help="file that gets each result, a line of JSON")
    parser.add_argument("folders", nargs="+", help="folders or files of the sources")
    asked = parser.parse_args()
    for module in ("torch", "cutlass.cute", "hypothesis", "numba", "pytest"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)  # before the forks, which then start sooner
    with tempfile.TemporaryDirectory() as place:
        found = Sampler(asked, Path(place)).run()
    counts = Counter(one["verdict"] for one in found)
    by_all = sum(counts[name] for name in KILLED)
    print(
        f"{len(found)} mutants: default {counts['default']}, all {by_all} "
        f"({counts['default'] / max(by_all, 1):.0%}), {counts['survives']} survive, "
        f"{counts['unknown']} unknown"
    )


if __name__ == "__main__":
    main()
