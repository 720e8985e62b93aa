"""Make a site of the pages: hooks of mkdocs, and a griffe extension (mkdocs.yml names both).

Pages are written for a checkout, where README.md and CONTRIBUTING.md stand above docs/ and links
lead to sources. On the site these two are pages, and a link to any other file outside docs/ is the
file's name: tests/test_links.py checks that it exists.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
#: Files of the checkout -> pages of the site.
ADDED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
#: Lines of a docstring that begin with names of arguments and a colon.
_ARGUMENTS = re.compile(r"^((?:\w+, )*\w+):(?= )", re.MULTILINE)
#: A sign at the start of a line within a formula, which Markdown takes for a list.
_SIGN = re.compile(r"^( +)([-+*] )", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that stand above docs/."""
    for source, page in ADDED.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=_with_links_of_the_site(text, "")))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Rewrite links out of docs/."""
    if page.file.src_uri in ADDED.values():
        return text
    return _with_links_of_the_site(
        text, posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    )


def _with_links_of_the_site(text: str, folder: str) -> str:
    """Return the text of a page of `folder` with links that the site has."""

    def link(found: re.Match[str]) -> str:
        words, path, anchor = found[1], found[2], found[3] or ""
        if not path or "://" in path:
            return found[0]
        target = posixpath.normpath(posixpath.join(folder, path))
        if target in ADDED:
            depth = "../" * folder.removeprefix("docs").count("/") if folder else ""
            return f"[{words}]({depth}{ADDED[target]}{anchor})"
        if target.startswith("docs/"):
            return found[0] if folder else f"[{words}]({target.removeprefix('docs/')}{anchor})"
        return words

    return _LINK.sub(link, text)


class ArgumentLists(griffe.Extension):
    """Make arguments in docstrings list items of Markdown."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of a function or class."""
        if obj.docstring is not None:
            text = _SIGN.sub(r"\1\\\2", obj.docstring.value)
            obj.docstring.value = _ARGUMENTS.sub(r"\n- **\1**:", text)
