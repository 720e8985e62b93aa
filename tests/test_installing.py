"""Advice of messages on what to install, which must work from a clone; scripts name functions."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator

import pytest
import style
from checkout import ROOT

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")

#: Distributions of this repository: they are on no index, so messages name their folders.
FOLDERS = {"fa4-hd256": ".", "sm100-sim": "./sm100_sim"}


def project(name: str) -> dict:
    path = ROOT / FOLDERS[name] / "pyproject.toml"
    return tomllib.loads(path.read_text("utf-8"))["project"]


def advised(text: str) -> Iterator[str]:
    """Yield the words that `pip install` is to install."""
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # a message in two pieces
    text = text.replace("in a checkout of fa4-hd256", "")
    for command in re.findall(r"pip install ((?:-e |[\w.\-/=]+ ?|'[^']*' ?)+)", text):
        yield from (word for word in shlex.split(command) if word != "-e")


def offence(word: str) -> str:
    name, _, extra = word.rstrip("]").partition("[")
    if name in FOLDERS:
        return f"{word} is on no index"
    owner = next((one for one, folder in FOLDERS.items() if folder == name), None)
    known = {*project(owner)["optional-dependencies"], "{extra}"} if owner and extra else set()
    if known and not set(extra.split(",")) <= known:
        return f"{word}: there is no such extra"
    return ""


def test_what_messages_advise_to_install():
    found = {}
    for name in style.sources(ROOT):
        if not name.startswith(("tests/", "examples/")):
            for word in advised((ROOT / name).read_text("utf-8")):
                found[f"{name}: {word}"] = offence(word)
    assert len(found) > 8 and not {place: why for place, why in found.items() if why}


@pytest.mark.parametrize(("word", "why"), [
    ("fa4-hd256[bench]", "no index"), ("sm100-sim", "no index"), (".[bnech]", "no such extra"),
    ("./sm100_sim[timing]", ""), (".[test,bench]", ""), ("matplotlib", ""),
])  # fmt: skip
def test_bad_advice_is_seen(word, why):
    assert why in offence(word) and bool(offence(word)) == bool(why)


@pytest.mark.parametrize("name", FOLDERS)
def test_scripts_name_functions_and_there_are_no_addresses(name):
    assert "urls" not in project(name)
    (place,) = project(name)["scripts"].values()
    module, _, function = place.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
