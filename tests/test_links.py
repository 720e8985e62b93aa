"""Links, files, names of the code and commands in pages, docstrings and comments."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import mentions
import pytest
import style
from checkout import ROOT

from fa4_hd256.architectures import ARCHITECTURES
from fa4_hd256.kernels.kernel_set import kernels_of

_LINK = re.compile(r"\]\(([^)#\s]*)#?([^)\s]*)\)")


def missing(page: Path) -> list[str]:
    """Relative links of a Markdown page that lead nowhere, or to no heading of a page."""
    found = []
    for path, anchor in _LINK.findall(page.read_text("utf-8")):
        target = page.parent / path if path else page
        if "://" in path:
            continue
        if not target.exists():
            found.append(path)
        elif anchor and anchor not in headings(target):
            found.append(f"{path}#{anchor}")
    return found


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.strip().lower()).replace(" ", "-") for line in lines}


def test_no_page_links_to_what_is_not_there():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    pages = [ROOT / name for name in listed.stdout.split()] or sorted(ROOT.glob("docs/*.md"))
    assert len(pages) > 15
    found = {page.relative_to(ROOT).as_posix(): missing(page) for page in pages}
    assert {page: links for page, links in found.items() if links} == {}


def test_a_link_to_nothing_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A (new) part\n[here](page.md#a-new-part) [too](#a-new-part) [no](#part)"
        " [there](absent.md#x) [far](https://example.org/x.md)"
    )
    assert missing(page) == ["#part", "absent.md"]


def test_files_names_and_commands_that_are_mentioned_exist():
    found = dict(mentions.texts())
    assert {"README.md", "docs/architecture.md", "bench/__main__.py"} <= set(found)
    assert [line for place, text in found.items() for line in mentions.offences(place, text)] == []


#: Package -> the page that lists its commands.
COMMANDS = {
    "fa4_hd256": "docs/api.md", "softmax_emu": "docs/api.md", "bench": "docs/benchmarks.md",
    "sm100_sim": "sm100_sim/README.md", "lab": "lab/README.md",
}  # fmt: skip


def test_every_command_is_in_a_list_of_commands():
    for package, commands in mentions.commands().items():
        page = mentions.named_at_the_top((ROOT / COMMANDS[package]).read_text("utf-8"))
        rows = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
        assert not {name for name in commands if not re.search(rf"[` ]{name}[`, ]", rows)}


def test_rooms_and_modules_are_in_the_picture_of_the_rooms():
    tree = (ROOT / "docs/architecture.md").read_text("utf-8").split("```")[1]
    inside = ("fa4_hd256", "fa4_hd256/call", "fa4_hd256/run", "fa4_hd256/kernels", "fa4_hd256/gpus",
              "schedulers", "softmax_emu")  # fmt: skip
    modules = {path.stem for package in inside for path in (ROOT / package).glob("[!_]*.py")}
    assert len(modules) > 50
    assert not {name for name in modules if not re.search(rf"\b{name}\b", tree)}
    packages = {path.parent.name for path in (ROOT / "fa4_hd256").rglob("*.py")}
    assert len(packages) > 20 and not {name for name in packages if f"{name}/" not in tree}


def test_rooms_import_those_below_them_in_the_picture():
    tree = (ROOT / "docs/architecture.md").read_text("utf-8").split("```")[1]
    places, package = {}, ""
    for number, line in enumerate(tree.splitlines()):
        package = re.match(r"\w+|", line)[0] or package
        # Names up to the second space in a row, and those that a colon explains.
        for name in re.findall(r"(?:^  |; |, )(\w+)(?=/|,|:| {2}|$)", line):
            places.setdefault(f"{package}/{name}", number)
    assert {"fa4_hd256/run", "fa4_hd256/words"} <= set(places)
    edges = [
        ("/".join(one.split("/")[:2]), "/".join(other.split("/")[:2]))
        for one, imported in style.import_graph(ROOT).items()
        for other in imported
    ]
    inside = {(one, other) for one, other in edges if {one, other} <= set(places)
              and one.split("/")[0] == other.split("/")[0]}  # fmt: skip
    assert len(inside) > 80
    assert not {(one, other) for one, other in inside if places[one] > places[other]}


def test_each_file_of_a_way_through_the_code_is_imported_by_one_before_it():
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    section = page.split("\n## Ways through the code\n")[1].split("\n## ")[0]
    graph = style.import_graph(ROOT)
    for architecture in ARCHITECTURES:
        folder = f"fa4_hd256/kernels/{architecture.folder}"
        named = (place.split(":")[0] for place in kernels_of(architecture).classes.values())
        graph["fa4_hd256/kernels/kernel_set"] |= {
            f"{folder}/{module.replace('.', '/')}" for module in named
        }
    ways: list[list[str]] = []
    for number, file in re.findall(r"^(\d+)\. `([\w/]+)(?:\.py)?`", section, re.MULTILINE):
        if number == "1":
            ways.append([])
        ways[-1].append(style.known_as(file.strip("/")))
    packages = [way[0].split("/")[0] for way in ways]
    assert packages == ["fa4_hd256", "fa4_hd256", "fa4_hd256", "lab"]
    for way in ways:
        for place, file in enumerate(way[1:], 1):
            seen = {name for before in way[:place] for name in graph[before]}
            # A module of a package, or a package by what it publishes.
            assert any(
                f"{name}/".startswith(f"{file}/") or file.startswith(f"{name}/") for name in seen
            ), f"{file}: none of {way[:place]} imports it"


@pytest.mark.parametrize("text, offence", [
    ("see lab/model/none.py", "path lab/model/none.py"),
    ("in `sm100_sim/src/none`", "path sm100_sim/src/none"),
    ("in `codegen_none.py`", "file codegen_none.py"),
    ("`sm100_sim.launcher.no_such`", "name sm100_sim.launcher.no_such"),
    # In two pieces: a word of this file is a word of the code.
    ("as `no_such" "_function(x)` says", "name no_such" "_function"),
    ("python -m bench none", "command python -m bench none"),
    ("python -m schedulers", "command python -m schedulers"),
    ("python -m bench throughput --none", "option --none of python -m bench"),
    ("`sm100_sim/src/sm100_sim/launcher.py`, `launcher.py`, `sm100_sim.launcher.launch`, "
     "python -m bench throughput --json FILE; python -m sm100_sim SCRIPT.py --its-own", None),
])  # fmt: skip
def test_a_stale_mention_is_seen(text, offence):
    found = mentions.offences("page.md", text)
    assert [line for line in found if offence and offence in line] if offence else found == []
