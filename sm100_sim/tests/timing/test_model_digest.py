"""The digest of the timing model's code: of what decides a replay, and of its meaning."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sm100_sim import timing
from sm100_sim.jit.native_cache import meaning_of
from sm100_sim.timing import sources


@pytest.fixture
def copy(tmp_path):
    """A copy of the package: an edit of a file, and the digest of what decides a replay."""
    package = tmp_path / "sm100_sim"
    ignored = shutil.ignore_patterns("__pycache__", "data")
    shutil.copytree(Path(sources.__file__).parents[1], package, ignore=ignored)

    def edit(name, before, after):
        text = (package / name).read_text()
        assert before in text, f"{name} has no {before!r}"
        (package / name).write_text(text.replace(before, after, 1))

    def digest():
        return meaning_of(sources.deciding_sources(package))

    assert digest() == timing.model_digest()
    return edit, digest


@pytest.mark.parametrize(
    ("name", "before", "after", "same"),
    [
        ("timing/replaying/engine.py", '"""', '"""Another first line.\n\n', True),
        ("timing/replaying/chrome.py", "_STALL = 40", "_STALL = 50", True),
        ("launcher.py", "STATE_LIMIT = 1 << 30", "STATE_LIMIT = 1 << 31", True),
        ("timing/program.py", "SLOTS = 4", "SLOTS = 2", False),
        ("trace/records.py", "import", "import sys\nimport", False),
        ("isa/arithmetic/integer.py", '"add"', '"plus"', False),
    ],
)
@pytest.mark.sampled("timing/replaying/engine.py*", "isa/arithmetic/*")
def test_what_changes_it(copy, name, before, after, same):
    edit, digest = copy
    first = digest()
    edit(name, before, after)
    assert (digest() == first) == same


def test_a_traced_program_does_not_depend_on_how_it_is_replayed():
    names = {name for name, _ in sources.tracing_sources()}
    decided = {name for name, _ in sources.deciding_sources()}
    assert decided - names == set(sources.REPLAYING)
    assert {
        "timing/program.py",
        "timing/machine_code/sass.py",
        "timing/machine_code/paths.py",
    } <= names
