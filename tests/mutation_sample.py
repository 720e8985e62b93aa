"""Sample mutants of the sources, and count those that the default cases and all cases kill.

    python tests/mutation_sample.py --seed 1 --count 40 fa4_hd256/call fa4_hd256/run sm100_sim/isa

Each mutant is one change of one statement: an operator, a constant, a condition, or a statement
left out. It is made in a copy of the checkout. The tests of a mutant are up to three files: those
that are named as its module and those that import it, or else those of the folder that mirrors its
own. They run with the default cases; for a mutant that survives them, the same files run with
`--all-cases`. Each mutant prints a line, and the two counts so far.

Mutants of files that are compiled into kernels compile these again, which takes minutes each.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import resource
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Seconds of CPU time after which a run counts as killed: a mutant that never ends.
LONGEST = 900
#: Test files of one mutant at most.
MOST_FILES = 3

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


def mutant(path: Path, pick: random.Random) -> tuple[int, str, str] | None:
    """Return (line, the mutated line, the whole source) of one mutant inside a function, drawn at
    random; None where there is none."""
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


def tests_of(module: Path) -> list[str]:
    """Return the test files of a source file, those that are named as it first."""
    package, name = ".".join(module.parts[:-1]), module.stem
    wanted = re.compile(
        rf"from {package}\.{name} import|import {package}\.{name}\b"
        rf"|from {package} import [^#\n]*\b{name}\b"
    )
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    importing = [file for file in files if wanted.search(file.read_text())]
    folder = {"fa4_hd256": "operator", "sm100_sim": "sim"}.get(module.parts[0], module.parts[0])
    mirror = ROOT.joinpath("tests", folder, *module.parts[1:-1])
    named = [file for file in files if file.parent == mirror and name in file.stem]
    beside = [file for file in files if file.parent == mirror]
    chosen = list(dict.fromkeys([*named, *importing] or beside))[:MOST_FILES]
    return [file.relative_to(ROOT).as_posix() for file in chosen]


def fails(copy: Path, files: list[str], *options: str) -> bool:
    """Return True if pytest fails, or does not end, on these files of a copy of the checkout."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST))
        os.chdir(copy)
        with open(copy / "log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.path[:0] = [str(copy)]
        os.environ["PYTHONPATH"] = str(copy)
        import pytest

        os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *options, *files]))
    return os.waitpid(child, 0)[1] != 0


def sample(folders: list[str], seed: int, count: int) -> list[tuple[Path, tuple[int, str, str]]]:
    """Return `count` mutants of files drawn at random, one of each file before a second of any."""
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
                if one is not None and tests_of(module):
                    found.append((module, one))
        rounds += 1
    return found


def copied(place: Path) -> Path:
    """Return a copy of the checkout in `place`, without caches."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
    return Path(shutil.copytree(ROOT, place / "checkout", ignore=left_out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("folders", nargs="+", help="folders or files of the sources")
    asked = parser.parse_args()
    import torch  # noqa: F401  # before the forks, which then start in a second

    by_default = by_all = 0
    with tempfile.TemporaryDirectory() as place:
        copy = copied(Path(place))
        for number, (module, (line, text, source)) in enumerate(
            sample(asked.folders, asked.seed, asked.count), 1
        ):
            original, files = (copy / module).read_text(), tests_of(module)
            (copy / module).write_text(source)
            killed = "default" if fails(copy, files) else None
            if killed is None and fails(copy, files, "--all-cases"):
                killed = "all cases"
            (copy / module).write_text(original)
            by_default += killed == "default"
            by_all += killed is not None
            print(f"{killed or 'survives'}: {module}:{line}: {text}", flush=True)
            print(f"  {number} mutants: default cases {by_default}, all {by_all}", flush=True)


if __name__ == "__main__":
    main()
