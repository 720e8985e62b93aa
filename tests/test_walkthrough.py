"""docs/walkthrough.md and the code: what it names exists, what it quotes stands there, in order."""

from __future__ import annotations

import ast
import re

from checkout import ROOT

PAGE = ROOT / "docs" / "walkthrough.md"
PICTURES = ROOT / "docs" / "pictures"
PAGES = (
    *(ROOT / "docs").glob("*.md"), *(ROOT / "sm100_sim/docs").glob("*.md"), ROOT / "README.md",
)  # fmt: skip
_NAMED = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)")
_QUOTED = re.compile(r"^```python (\S+)\n(.*?)^```", re.M | re.S)
_LINKED = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def names_of(path: str) -> set[str]:
    """Functions and classes of a file, methods as Class.method."""
    found = set()
    for node in ast.parse((ROOT / path).read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (n for n in node.body if isinstance(n, ast.FunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def unknown_names(text: str) -> list[str]:
    """Links [`name`](../file.py) whose file has no such name."""
    return [
        f"{path}: {name}" for name, path in _NAMED.findall(text)
        if not (ROOT / path).is_file() or name not in names_of(path)
    ]  # fmt: skip


def misquoted(text: str) -> list[str]:
    """Quoted lines that do not stand in their file, one after the other."""
    found = []
    for path, quote in _QUOTED.findall(text):
        source = [line.strip() for line in (ROOT / path).read_text("utf-8").split("\n")]
        place = 0
        for line in filter(None, (line.strip() for line in quote.split("\n"))):
            if line in source[place:]:
                place += source[place:].index(line) + 1
            else:
                found.append(f"{path}: {line}")
    return found


def test_names_exist():
    text = PAGE.read_text("utf-8")
    assert len(_NAMED.findall(text)) > 20
    assert not unknown_names(text)


def test_quotes_stand_in_their_files():
    text = PAGE.read_text("utf-8")
    assert len(_QUOTED.findall(text)) > 5
    assert not misquoted(text)


def test_what_is_wrong_is_told():
    link = "[`{}`](../fa4_hd256/kernels/plan/edges.py)"
    text = " ".join(link.format(name) for name in ("Edge.waiter_state", "Edge.forever", "Rim"))
    assert [name.split(": ")[1] for name in unknown_names(text)] == ["Edge.forever", "Rim"]
    quote = "```python schedulers/protocol.py\nwhile work.is_valid:\n{}\n```\n"
    assert not misquoted(quote.format("work = scheduler.advance_to_next_work()"))
    assert misquoted(quote.format("work = scheduler.initial_work()"))


def test_links_of_all_pages_to_pictures_lead_somewhere():
    for page in PAGES:
        for link in _LINKED.findall(page.read_text("utf-8")):
            if link.endswith(".svg") or page == PAGE:
                assert (page.parent / link).is_file(), f"{page.name}: {link}"


def test_every_picture_is_on_some_page():
    pages = "".join(page.read_text("utf-8") for page in PAGES)
    unseen = [p.name for p in PICTURES.glob("*.svg") if f"pictures/{p.name}" not in pages]
    assert not unseen
