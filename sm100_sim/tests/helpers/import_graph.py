"""Imports among modules, by their sources: the graph, its circles, and the simulator's order."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

#: Packages of the simulator, from the lowest: each imports those of lower rows alone.
SIMULATOR = (
    ("terminal", "waiting", "words"),
    ("causes", "devices", "interrupt", "progress", "ptx", "settings"),
    ("jit",),
    ("native",),
    ("errors", "targets"),
    ("state",),
    ("host", "isa"),
    ("translate",),
    ("run",),
    ("sanitizer", "trace"),
    ("report",),
    ("launcher",),
    ("ptx_launcher", "triton_launcher"),
    ("cuda_launcher",),
    ("command",),
    ("attach",),
    ("pytest_plugin",),
    ("mutation",),
    ("timing",),
    ("tools",),
    ("__main__",),
)


def import_statements(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements of a file, wherever in it; a file is parsed once."""
    return _import_statements(file, file.stat().st_mtime_ns)


@functools.cache
def _import_statements(file: Path, changed: int) -> list[ast.Import | ast.ImportFrom]:
    tree = ast.parse(file.read_text("utf-8"), str(file))
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def names_imported(file: Path, package: str) -> set[str]:
    """Return what a file imports anywhere, as paths: "package/module/name". package: the path of
    its own, for relative imports."""
    names, parts = set(), package.split("/")
    for node in import_statements(file):
        if isinstance(node, ast.Import):
            names |= {alias.name.replace(".", "/") for alias in node.names}
        else:
            base = parts[: len(parts) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names |= {"/".join([*base, alias.name]) for alias in node.names}
    return names


def import_graph(
    files: dict[str, Path], named: Callable[[str], str] = lambda name: name
) -> dict[str, set[str]]:
    """Return modules -> modules of these that they import anywhere.

    files: by the path from the folder of their package. A package is the path of its folder.
    named: the path by which `files` has what is imported by another name.
    """
    modules = {path.removesuffix(".py").removesuffix("/__init__"): path for path in files}
    found = {}
    for module, path in modules.items():
        # `from package import name`: a module of the package, or what its __init__ defines.
        names = {named(name) for name in names_imported(files[path], path.rpartition("/")[0])}
        known = {name if name in modules else name.rpartition("/")[0] for name in names}
        found[module] = {name for name in known if name in modules} - {module}
    return found


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Return each group of modules that import each other in a circle, once."""

    def reached(start: str) -> set[str]:
        seen, left = set(), [start]
        while left:
            for name in graph.get(left.pop(), set()) - seen:
                seen.add(name)
                left.append(name)
        return seen

    reach = {module: reached(module) for module in graph}
    groups = {
        tuple(sorted(other for other in reach[module] if module in reach.get(other, ())))
        for module in graph
        if module in reach[module]
    }
    return [f"import circle: {', '.join(group)}" for group in sorted(groups)]


def upwards(graph: dict[str, set[str]]) -> Iterator[str]:
    """Yield what modules of the simulator import from their own row of `SIMULATOR` or a higher
    one."""
    rows = {package: row for row, packages in enumerate(SIMULATOR) for package in packages}
    for module, imported in sorted(graph.items()):
        package = f"{module}/".split("/")[1]
        for name in sorted(imported):
            other = f"{name}/".split("/")[1]
            if package in rows and other != package:
                if rows.get(other, len(SIMULATOR)) >= rows[package]:
                    yield f"{module} imports {name}, which is no lower package"
