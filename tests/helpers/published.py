"""Published names of sm100_sim, as functions from a checkout to a list of offences, one line each
(see `style`)."""

from __future__ import annotations

import ast
from pathlib import Path

#: Modules whose `__all__` is what they publish; besides them every module under `sm100_sim.tools`.
PUBLIC = ("sm100_sim", "sm100_sim.timing")
#: Packages that may import no more than that.
PACKAGES = ("fa4_hd256", "bench", "examples", "sm100_sim/examples")


def names_of(root: Path, module: str) -> set[str]:
    """`__all__` of a package."""
    tree = ast.parse(
        (root / "sm100_sim" / "src" / module.replace(".", "/") / "__init__.py").read_text()
    )
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def private_imports(source: str, public: dict[str, set[str]]) -> list[str]:
    """Return the imports of unpublished names of the simulator: "line 3: sm100_sim.run"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            if module.partition(".")[0] != "sm100_sim" or name in public.get(module, set()):
                continue
            is_tool = f"{module}.".startswith("sm100_sim.tools.") and not name.startswith("_")
            if not is_tool and (name or module not in public):
                found.append(f"line {node.lineno}: {'.'.join(filter(None, (module, name)))}")
    return found


def imports(root: Path) -> list[str]:
    """Imports of private names of the simulator in `PACKAGES`."""
    public = {module: names_of(root, module) for module in PUBLIC}
    return [
        f"{path.relative_to(root)}, {line}, which sm100_sim does not publish"
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
        for line in private_imports(path.read_text(), public)
    ]
