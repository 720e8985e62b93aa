"""The tests that `make test` leaves out, as tests/README.md lists them.

`python tests/helpers/left_out.py` writes the page again. A file's row says what its tests are for,
in the first sentence of its docstring, and names its tests with the mark `sampled`: a name says
what its test holds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = "tests/README.md"
FOLDERS = ("tests", "sm100_sim/tests")
#: Stands before the first row.
HEAD = "| tests of | left out whole | cases that `make test` runs |\n|---|---|---|\n"


class LeftOut(NamedTuple):
    """Tests of a file with the mark: those of no default case, and those of some with their
    patterns."""

    whole: list[str]
    some: dict[str, tuple[str, ...]]


def marks_of(nodes: list[ast.expr]) -> Iterator[tuple[str, ...]]:
    """Yield the patterns of each mark `sampled` among decorators or marks."""
    for node in nodes:
        if isinstance(node, ast.List | ast.Tuple):
            yield from marks_of(node.elts)
        called = node.func if isinstance(node, ast.Call) else node
        if ast.unparse(called) == "pytest.mark.sampled":
            given = node.args if isinstance(node, ast.Call) else []
            yield tuple(ast.literal_eval(one) for one in given)


def left_out(tree: ast.Module) -> LeftOut:
    """Return what is left out of a file."""
    found = LeftOut([], {})
    of_file = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    is_whole = bool(list(marks_of(of_file)))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            name = node.name.removeprefix("test_").replace("_", " ")
            marks = [()] if is_whole else list(marks_of(node.decorator_list))
            if marks == [()]:
                found.whole.append(name)
            elif marks:
                found.some[name] = marks[0]
            elif "pytest.mark.sampled" in "".join(map(ast.unparse, node.decorator_list)):
                found.some[name] = ("those without the mark",)
    return found


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring in one line."""
    return " ".join(text.split()).split(". ")[0].rstrip(".:")


def rows(root: Path) -> Iterator[str]:
    """Yield a row of the page for each file with the mark."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("test_*.py")):
            tree = ast.parse(path.read_text("utf-8"))
            whole, some = left_out(tree)
            if whole or some:
                link = path.relative_to(root).as_posix()
                cases = "; ".join(f"{test}: {', '.join(kept)}" for test, kept in some.items())
                doc = first_sentence(ast.get_docstring(tree) or "")
                if folder != "tests":
                    doc = doc.replace("docs/", "sm100_sim/docs/")  # of the simulator's project
                cells = (f"[{path.stem}](../{link}): {doc}", "; ".join(whole), cases)
                yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def written(root: Path) -> str:
    """Return the page as it should be: what stands before the table, and the table."""
    before = (root / PAGE).read_text("utf-8").partition(HEAD)[0]
    return before + HEAD + "".join(rows(root))


if __name__ == "__main__":
    (ROOT / PAGE).write_text(written(ROOT), "utf-8")
