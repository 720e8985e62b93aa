"""Links between the project's pages: what a page names by a relative link is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from checkout import ROOT

_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def missing(page: Path) -> list[str]:
    """Relative links of a Markdown page that lead nowhere."""
    links = _LINK.findall(page.read_text("utf-8"))
    return [link for link in links
            if "://" not in link and not (page.parent / link).exists()]


def test_no_page_links_to_what_is_not_there():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    pages = [ROOT / name for name in listed.stdout.split()] or sorted(ROOT.glob("docs/*.md"))
    assert len(pages) > 15
    found = {page.relative_to(ROOT).as_posix(): missing(page) for page in pages}
    assert {page: links for page, links in found.items() if links} == {}


def test_a_link_to_nothing_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[here](page.md#part) [there](absent.md) [far](https://example.org/x.md)")
    assert missing(page) == ["absent.md"]
