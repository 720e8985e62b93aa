"""The limits this project sets itself (tests/helpers/style.py has them).

One test names all offences of its kind.
"""

from __future__ import annotations

import subprocess
import sys

import published
import pytest
import style
from checkout import ROOT


def say(offences: list[str]) -> str:
    return "\n" + "\n".join(offences)


def test_sizes():
    """Lines of files and functions, parameters."""
    offences = style.sizes(ROOT)
    exceptions = "MORE_LINES and MORE_PARAMETERS of tests/helpers/style.py have the exceptions"
    assert not offences, say([*offences, exceptions])


def test_imports():
    """Packages import what they may, and there are no circles."""
    offences = style.imports(ROOT)
    assert not offences, say(offences)


def test_imports_of_tests():
    """`make test` and a GPU's tests need no lab."""
    offences = style.imports_of_tests(ROOT)
    assert not offences, say(offences)


def test_libraries_are_imported_by_names_that_cannot_collide():
    offences = style.bare_imports(ROOT)
    assert not offences, say(offences)


def test_imports_inside_the_package_are_relative():
    offences = style.absolute_imports(ROOT)
    assert not offences, say(offences)


def test_what_modules_publish():
    offences = style.exports(ROOT)
    assert not offences, say(offences)


def test_private_api_of_pytorch_is_in_one_file():
    offences = style.private_names(ROOT)
    assert not offences, say(offences)


def test_the_simulator_is_used_by_its_published_names():
    offences = published.imports(ROOT)
    assert not offences, say(offences)


def test_class_names():
    offences = style.class_names(ROOT)
    assert not offences, say(offences)


def test_no_file_stands_twice():
    offences = style.copies(ROOT)
    assert not offences, say(offences)


def test_module_names():
    offences = style.module_names(ROOT)
    assert not offences, say(offences)


def test_docstrings_begin_with_a_verb_or_name_the_thing():
    offences = style.openings(ROOT)
    assert not offences, say(offences)


def test_words_of_the_field():
    offences = style.words(ROOT) + style.annotations(ROOT)
    assert not offences, say(offences)


def test_no_path_of_a_machine():
    offences = style.machine_paths(ROOT)
    assert not offences, say(offences)


@pytest.mark.parametrize("command", [("check", "--output-format=concise"), ("format", "--check")])
def test_ruff(command):
    command = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
