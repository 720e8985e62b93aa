"""Imports: packages import those below them, and nothing of the repository around the project."""

from __future__ import annotations

import re
from pathlib import Path

from import_graph import SIMULATOR, circles, import_graph, names_imported, upwards
from project import DOCS, PACKAGE, PROJECT

#: Top-level names of the repository's other products.
OTHERS = {"bench", "fa4_hd256", "lab", "schedulers", "softmax_emu", "tests"}


def graph_of(sources: Path) -> dict[str, set[str]]:
    files = {path.relative_to(sources).as_posix(): path for path in sources.rglob("*.py")}
    return import_graph(files)


def of_others(project: Path) -> list[str]:
    """Return the imports of other products in a project's folders."""
    return [
        f"{path.relative_to(project)}: {name}"
        for folder in ("src", "tests", "examples")
        for path in sorted((project / folder).rglob("*.py"))
        for name in sorted(names_imported(path, ""))
        if name.split("/")[0] in OTHERS
    ]


def test_packages_import_lower_ones_and_there_are_no_circles():
    graph = graph_of(PACKAGE.parent)
    assert len(graph) > 150
    assert [*upwards(graph), *circles(graph)] == []


def test_nothing_of_the_repository_around_is_imported():
    assert (PROJECT / "src").is_dir() and of_others(PROJECT) == []


def test_offences_are_named(tmp_path):
    texts = {
        "src/sm100_sim/run.py": "if TYPE_CHECKING:\n    from .launcher import launch\n",
        "src/sm100_sim/launcher.py": "def f():\n    from . import run\n",
        "src/sm100_sim/trace.py": "from . import sanitizer\n", "src/sm100_sim/sanitizer.py": "",
        "tests/test_a.py": "def f():\n    from bench.suite import Case\n",
        "examples/a.py": "import lab, labels\n",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = graph_of(tmp_path / "src")
    assert list(upwards(graph)) == [
        "sm100_sim/run imports sm100_sim/launcher, which is no lower package",
        "sm100_sim/trace imports sm100_sim/sanitizer, which is no lower package",
    ]
    assert circles(graph) == ["import circle: sm100_sim/launcher, sm100_sim/run"]
    assert of_others(tmp_path) == ["tests/test_a.py: bench/suite/Case", "examples/a.py: lab"]


# ---------------------------------------------------------------- the page


def section(heading: str) -> str:
    page = (DOCS / "simulator.md").read_text("utf-8")
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_the_picture_of_the_packages_has_all_of_them_in_their_order():
    picture = section("The packages").split("```")[1]
    folders = {path.parent.name for path in PACKAGE.rglob("*.py")} - {"sm100_sim"}
    modules = {path.stem for path in PACKAGE.glob("[!_]*.py")}
    assert not {name for name in folders if f"{name}/" not in picture}
    assert not {name for name in modules if not re.search(rf"\b{name}\b", picture)}
    rows = {package: row for row, packages in enumerate(SIMULATOR) for package in packages}
    heads = [re.match(r"(\w+)", line)[1] for line in picture.splitlines() if line[:1].isalpha()]
    order = [rows[name] for name in heads if name in rows]
    assert len(order) > 10 and order == sorted(order, reverse=True)


def test_each_file_of_the_way_through_the_code_is_imported_by_one_before_it():
    way = re.findall(
        r"^\d+\. `([\w/]+?)(?:\.py|/)?`", section("From a launch to an instruction"), re.M
    )
    graph = graph_of(PACKAGE.parent)
    assert len(way) > 6
    for place, file in enumerate(way[1:], 1):
        seen = {name for before in way[:place] for name in graph[f"sm100_sim/{before}"]}
        assert any(f"{name}/".startswith(f"sm100_sim/{file}/") for name in seen), file
