"""Edits of flash-attention's tests in memory, so that they run at head_dim 256 on any GPU.

Their tests skip what their own kernels lack at head_dim 256 on a GPU, such as gradients on Hopper.
The edits are of syntax trees: nothing of the tests is stored here.
"""

from __future__ import annotations

import ast
import importlib.machinery
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

__all__ = ["HEAD_DIM_NAMES", "Finder"]

HEAD_DIM = 256
#: Names that hold a head_dim in the tests.
HEAD_DIM_NAMES = frozenset(("d", "dv", "dim", "hdim", "headdim", "head_dim", "headdim_v"))
#: Names that say which GPU there is.
GPU_NAMES = frozenset(("IS_SM90", "IS_SM100", "IS_SM110", "IS_SM120", "COMPUTE_CAPABILITY"))
#: Names of values that are replaced: other chunks than 0 are not offered.
REPLACED = {"attention_chunk_vals": [0]}


class Finder(importlib.machinery.PathFinder):
    """Finds the test modules of a checkout, to edit them while they are imported.

    tests: names of the functions to edit.
    """

    def __init__(self, checkout: Path, tests: list[str]) -> None:
        self._checkout, self._tests = checkout, tests

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = fullname.split(".")[-1]
        if not name.startswith("test_") or name == "test_util":
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is None or found.origin is None:
            return None
        if self._checkout not in Path(found.origin).parents:
            return None
        found.loader = _Loader(fullname, found.origin, self._tests)
        return found


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads an edited module, from no bytecode."""

    def __init__(self, fullname: str, path: str, tests: list[str]) -> None:
        super().__init__(fullname, path)
        self._tests = tests

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                _Edit(node.name in self._tests).visit(node)
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Edit(ast.NodeTransformer):
    """Edits of a function. is_test: whether it is one of the tests that are run."""

    def __init__(self, is_test: bool) -> None:
        self._is_test = is_test

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [
            each for each in node.decorator_list if not (_is_skipif(each) and _names_gpu(each))
        ]
        if node.name == "create_tensors":
            _raise_defaults(node)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        """Drop a statement that skips for a GPU and does nothing else."""
        if _names_gpu(node.test) and not node.orelse and all(map(_skips, node.body)):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """Drop the GPU, and a softcap of 0, from a condition for head_dim 256 on one GPU."""
        values = {ast.unparse(value) for value in node.values}
        if isinstance(node.op, ast.And) and {"IS_SM100", "d == 256", "dv == 256"} <= values:
            dropped = ("IS_SM100", "softcap == 0.0")
            node.values = [each for each in node.values if ast.unparse(each) not in dropped]
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        for target in node.targets:
            if isinstance(target, ast.Name):
                if target.id in REPLACED:
                    node.value = ast.copy_location(
                        ast.parse(repr(REPLACED[target.id]), mode="eval").body, node.value
                    )
                elif self._is_test and target.id in HEAD_DIM_NAMES:
                    node.value = _raised(node.value)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for place, name in enumerate(target.elts):
                    if self._is_test and isinstance(name, ast.Name) and name.id in HEAD_DIM_NAMES:
                        node.value.elts[place] = _raised(node.value.elts[place])
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        if self._is_test and node.arg in HEAD_DIM_NAMES:
            node.value = _raised(node.value)
        return self.generic_visit(node)


def _raised(value: ast.expr) -> ast.expr:
    """Return 256 for a head_dim that is written as a number; numbers of dimensions stay."""
    if isinstance(value, ast.Constant) and isinstance(value.value, int) and value.value >= 8:
        return ast.copy_location(ast.Constant(HEAD_DIM), value)
    return value


def _raise_defaults(node: ast.FunctionDef) -> None:
    first = len(node.args.args) - len(node.args.defaults)
    for place, argument in enumerate(node.args.args[first:]):
        if argument.arg in HEAD_DIM_NAMES:
            node.args.defaults[place] = _raised(node.args.defaults[place])


def _is_skipif(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.skipif"


def _names_gpu(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Name) and each.id in GPU_NAMES for each in ast.walk(node))


def _skips(node: ast.stmt) -> bool:
    """Return True for a statement that only skips, or expects a failure, under any conditions."""
    if isinstance(node, ast.If):
        return not node.orelse and all(map(_skips, node.body))
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(
        node.value, ast.Call
    ) else None  # fmt: skip
    return called is not None and ast.unparse(called) in ("pytest.skip", "pytest.xfail")
