"""The tests that `make test` leaves out, as tests/README.md counts them.

`python tests/helpers/left_out.py` writes the page again. A row is a folder: what its tests guard,
and its files with the mark `sampled`.
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
HEAD = "| folder | what its tests guard | left out: in whole / in part |\n|---|---|---|\n"
#: Folder -> what its tests guard. A folder without an entry is described by the one above it.
GUARDS = {
    "tests": "the wheel; tolerances under other settings of BLAS libraries",
    "tests/bench": "commands of `bench` and stages of bringup, as a user runs them without a GPU",
    "tests/operator/attention": "dense and packed calls, forward and backward, against float64",
    "tests/operator/cache": "KV caches: pages, left padding, new rows, e4m3, NVFP4",
    "tests/operator/call": "backwards divided into chunks",
    "tests/operator/compat": "flash-attn-4's score_mod and mask_mod in our kernels",
    "tests/operator/gpus": "one binary for every GPU of a family",
    "tests/operator/integrations": "transformers, SDPA, vLLM, SGLang: their own classes and models",
    "tests/operator/integrations/context_parallel": "attention over two and four processes",
    "tests/operator/kernels": "machine code, work, races and schedules of each kernel",
    "tests/operator/masks_and_scores": "block masks, tree masks, mask_mods and score_mods",
    "tests/operator/package": "examples; the package under another name",
    "tests/operator/pytorch": "autograd, torch.compile, torch.func, opcheck, FLOPs",
    "tests/operator/run": "plans, compiled and prebuilt kernels, warm_up, SM counts",
    "tests/softmax_emu": "the exp2 polynomials: their fit, and the device code",
    "sm100_sim/tests": "examples of the simulator",
    "sm100_sim/tests/third_party": "other projects' kernels, unmodified, in the simulator",
    "sm100_sim/tests/timing": "the timing model",
    "sm100_sim/tests/tools": "vectors and rules recorded on GPUs",
    "sm100_sim/tests/translate": "translated kernels on disk",
}  # fmt: skip


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


def guards(folder: str) -> str:
    """Return the entry of `GUARDS` that describes a folder."""
    while folder not in GUARDS:
        folder = folder.rpartition("/")[0]
    return folder


def rows(root: Path) -> Iterator[str]:
    """Yield a row of the page for each folder: `backward 4/5` says that four tests of
    test_backward.py are left out in whole and five in part."""
    found: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("test_*.py")):
            whole, some = left_out(ast.parse(path.read_text("utf-8")))
            if whole or some:
                described = guards(path.parent.relative_to(root).as_posix())
                name = path.stem.removeprefix("test_")
                found.setdefault(described, []).append(f"{name} {len(whole)}/{len(some)}")
    for folder, files in found.items():
        yield f"| {folder} | {GUARDS[folder]} | {', '.join(files)} |\n"


def written(root: Path) -> str:
    """Return the page as it should be: what stands before the table, and the table."""
    before = (root / PAGE).read_text("utf-8").partition(HEAD)[0]
    return before + HEAD + "".join(rows(root))


if __name__ == "__main__":
    (ROOT / PAGE).write_text(written(ROOT), "utf-8")
