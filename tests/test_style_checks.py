"""The checks of style notice what they are for: offences planted in a checkout of a few files."""

from __future__ import annotations

import pytest
import style

LONG = "def long():\n" + "    x = 1\n" * 60
ROLE = "class K:\n    def load(self, context):\n" + "        x = 1\n" * 149
#: In two pieces, since this file is checked, too.
HOME = "/" + "home/"


@pytest.fixture
def checkout(tmp_path):
    """A checkout without an offence; every package has a module."""
    for package in style.PACKAGES:
        (tmp_path / package).mkdir(parents=True, exist_ok=True)
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("")
    return tmp_path


CHECKS = (
    style.sizes, style.imports, style.bare_imports, style.absolute_imports, style.module_names,
    style.machine_paths, style.openings, style.words, style.annotations,
    style.class_names, style.copies, style.exports,
)  # fmt: skip


def test_nothing_is_found_where_nothing_is(checkout):
    (checkout / "fa4_hd256/kernels/role.py").write_text(ROLE)
    for installed in ("sm100_sim/build/lib", "sm100_sim/.venv/lib", "bench/build/lib"):
        (checkout / installed).mkdir(parents=True)
        (checkout / installed / "test_a.py").write_text(LONG)
    text = "import sm100_sim\nfrom ... import environment\n"
    (checkout / "fa4_hd256/gpus/simulated/a.py").write_text(text)
    assert [check(checkout) for check in CHECKS] == [[]] * len(CHECKS)


def test_this_checkout_has_the_files_that_are_checked():
    """An empty list would make every check pass."""
    from checkout import ROOT

    assert {s.split("/")[0] for s in style.sources(ROOT)} == {*style.TOPS, "examples", "tests"}


@pytest.mark.parametrize("path, text, check, offence", [
    ("bench/a.py", "\n" * 701, style.sizes, "bench/a.py has 701 lines, at most 700"),
    ("bench/a.py", LONG, style.sizes, "bench/a.py:1: long has 61 lines, at most 60"),
    ("tests/a.py", LONG, style.sizes, "tests/a.py:1: long has 61 lines, at most 60"),
    ("bench/a.py", ROLE, style.sizes, "bench/a.py:2: load has 150 lines, at most 60"),
    ("fa4_hd256/kernels/a.py", ROLE + "        y = 1\n", style.sizes,
     "fa4_hd256/kernels/a.py:2: load has 151 lines, at most 150"),
    ("bench/a.py", "def f(a, b, c, d, /, e, f, g, *, h, i): pass\n", style.sizes,
     "bench/a.py:1: f has 9 parameters, at most 8"),
    ("schedulers/a.py", "def f():\n    import fa4_hd256\n", style.imports,
     "schedulers/a (package schedulers) imports fa4_hd256 (package fa4_hd256)"),
    ("bench/a.py", "from schedulers.clc import a\n", style.bare_imports,
     "bench/a.py imports schedulers.clc; write fa4_hd256.schedulers.clc"),
    ("tests/a.py", "def f():\n    import softmax_emu\n", style.bare_imports,
     "tests/a.py imports softmax_emu; write fa4_hd256.softmax_emu"),
    ("bench/a.py", "from bench.commands import schedulers\n", style.bare_imports, None),
    ("fa4_hd256/run/a.py", "def f():\n    import fa4_hd256.call\n", style.absolute_imports,
     "fa4_hd256/run/a.py imports fa4_hd256.call; write a relative import"),
    ("fa4_hd256/run/a.py", "if TYPE_CHECKING:\n    from fa4_hd256 import call\n",
     style.absolute_imports,
     "fa4_hd256/run/a.py imports fa4_hd256; write a relative import"),
    ("fa4_hd256/run/a.py", "from ..call import b\n", style.absolute_imports, None),
    ("fa4_hd256/run/a.py", "import os\n\n__all__ = ['b']\n", style.exports,
     "fa4_hd256/run/a.py has __all__; users import nothing from it"),
    ("fa4_hd256/masks.py", "__all__ = ['b']\n", style.exports, None),
    ("fa4_hd256/run/__init__.py", "__all__ = ['b']\n", style.exports, None),
    ("bench/a.py", "__all__ = ['b']\n", style.exports, None),
    ("bench/a.py", "from fa4_hd256.call import b\n", style.absolute_imports, None),
    ("sm100_sim/src/sm100_sim/a.py", "from fa4_hd256.schedulers import static\n", style.imports,
     "sm100_sim/a (package sm100_sim) imports schedulers (package schedulers)"),
    ("fa4_hd256/kernels/a.py", "from ..call import b\n", style.imports,
     "fa4_hd256/kernels/a (package fa4_hd256/kernels) imports fa4_hd256/call "
     "(package fa4_hd256/call)"),
    ("fa4_hd256/kernels/a.py", "def f():\n    from . import blackwell\n", style.imports,
     "fa4_hd256/kernels/a (package fa4_hd256/kernels) imports fa4_hd256/kernels/blackwell "
     "(package fa4_hd256/kernels/blackwell)"),
    ("fa4_hd256/kernels/blackwell/forward/a.py", "from .. import backward\n", style.imports,
     "fa4_hd256/kernels/blackwell/forward/a (package fa4_hd256/kernels/blackwell/forward) imports "
     "fa4_hd256/kernels/blackwell/backward (package fa4_hd256/kernels/blackwell/backward)"),
    ("fa4_hd256/environment/a.py", "if TYPE_CHECKING:\n    from ..gpus import b\n", style.imports,
     "fa4_hd256/environment/a (package fa4_hd256/environment) imports fa4_hd256/gpus "
     "(package fa4_hd256/gpus)"),
    ("fa4_hd256/run/a.py", "import sm100_sim.launcher\n", style.imports,
     "fa4_hd256/run/a (package fa4_hd256/run) imports sm100_sim (package sm100_sim)"),
    ("schedulers/a.py", "def f():\n    from . import a, b\n", style.imports, None),
    ("tests/bench/a.py", "def f():\n    from lab.model import ours\n", style.imports_of_tests,
     "tests/bench/a.py imports lab/model/ours; move what it tests to that product's tests"),
    ("tests/bench/a.py", "import bench.suite\n", style.imports_of_tests, None),
    ("tests/operator/a.py", "import bench.suite\n", style.imports_of_tests,
     "tests/operator/a.py imports bench/suite; move what it tests to that product's tests"),
    ("sm100_sim/tests/test_a.py", "", style.module_names, "2 files of tests are called test_a.py"),
    ("bench/a.py", f"HERE = '{HOME}me'\n", style.machine_paths, f"bench/a.py holds {HOME}"),
])  # fmt: skip
def test_an_offence_is_named(checkout, path, text, check, offence):
    (checkout / path).parent.mkdir(parents=True, exist_ok=True)
    (checkout / path).write_text(text)
    assert check(checkout) == ([offence] if offence else [])


@pytest.mark.parametrize("paths, is_named", [
    (("run/a.py", "call/b.py"), True), (("run/a.py", "kernels/hopper/b.py"), True),
    (("kernels/hopper/a.py", "kernels/hopper/b.py"), True),
    (("kernels/hopper/a.py", "kernels/blackwell/b.py"), False),
    (("kernels/hopper/a.py", "kernels/blackwell/b.py", "run/c.py"), True),
])  # fmt: skip
def test_a_name_of_several_classes_is_named(checkout, paths, is_named):
    for path in paths:
        (checkout / "fa4_hd256" / path).write_text("class Part: ...\n")
    where = ", ".join(sorted(f"fa4_hd256/{path}" for path in paths))
    expected = [f"{len(paths)} classes are called Part: {where}"] if is_named else []
    assert style.class_names(checkout) == expected


def test_a_copy_of_a_file_is_named(checkout):
    text = "a = 1\n" * 6
    (checkout / "bench/a.py").write_text(text)
    (checkout / "bench/link.py").symlink_to("a.py")
    assert style.copies(checkout) == []
    (checkout / "sm100_sim/a.py").write_text(text)
    assert style.copies(checkout) == ["bench/a.py and sm100_sim/a.py are equal"]


@pytest.mark.parametrize("opening, word", [
    ("Of which", "Of"), ("What", "What"), ("whether", "whether"), ("(what, where)", "what"),
    ("`As", "As"), ("Those", "Those"), ("The same", "The same"), ("It", "It"), ("This:", "This"),
])  # fmt: skip
def test_a_docstring_that_begins_with_a_fragment_is_named(checkout, opening, word):
    (checkout / "bench/a.py").write_text(f'def f():\n    """{opening} rows have."""\n')
    (message,) = style.openings(checkout)
    begun = " ".join(f"{opening} rows have.".split()[:4])
    assert message.startswith(f"bench/a.py:2: '{begun}' begins with '{word}'")


@pytest.mark.parametrize("opening", [
    "Return", "Rows", "This module's", "Assert", "Thesis", "The device", "(rows, columns)",
])  # fmt: skip
def test_a_docstring_that_names_the_thing_is_not(checkout, opening):
    (checkout / "bench/a.py").write_text(f'"""{opening} rows have."""\n')
    assert style.openings(checkout) == []


@pytest.mark.parametrize("text", ["See `f`.", "As `a.f`", "like f."])
def test_a_docstring_that_only_refers_is_named(checkout, text):
    (checkout / "bench/a.py").write_text(f'"""{text}"""\n')
    (checkout / "bench/b.py").write_text('"""Return the sum; see `f`."""\n')
    expected = f"bench/a.py:1: '{text}' refers to another docstring; write or delete it"
    assert style.openings(checkout) == [expected]


@pytest.mark.parametrize("text, phrase", [
    ("x = 1  # made anew", "anew"), ("# timed by\n# turns", "by turns"),
    ('"""A list of\nparts."""', "lists? of parts"),
])  # fmt: skip
def test_a_private_word_is_named(checkout, monkeypatch, text, phrase):
    monkeypatch.setattr(style, "GLOSSARY", {phrase: ("better", 1)})
    (checkout / "bench/a.py").write_text(f"{text}\n")
    assert style.words(checkout) == []
    (checkout / "tests/b.py").write_text(f"{text}\n")
    (offence,) = style.words(checkout)
    assert offence.endswith("stands 2 times, at most 1; write better: bench/a.py 1, tests/b.py 1")


@pytest.mark.parametrize("text, count", [
    ("def f(a: tuple) -> tuple: ...", 2), ("def f(a: tuple[int, ...]): ...", 0),
    ("def role(self, context: Any): ...", 1), ("def role(self, context: Context): ...", 0),
    ("A = (1,  2)  # fmt: skip", 1),
])  # fmt: skip
def test_annotations_that_say_too_little_are_counted(checkout, monkeypatch, text, count):
    table = dict.fromkeys(style.ANNOTATIONS, ("better", 0, 0))
    monkeypatch.setattr(style, "ANNOTATIONS", table)
    (checkout / "fa4_hd256/a.py").write_text(f"{text}\n")
    offences = style.annotations(checkout)
    assert len(offences) == (count > 0)
    assert all(f"stands {count} times, at most 0" in offence for offence in offences)


def test_a_circle_under_type_checking_is_named(checkout):
    """One of the three imports is for annotations only."""
    (checkout / "sm100_sim/a.py").write_text("from . import b\n")
    (checkout / "sm100_sim/b.py").write_text("def f():\n    import sm100_sim.c\n")
    (checkout / "sm100_sim/c.py").write_text("if TYPE_CHECKING:\n    from .a import A\n")
    assert style.imports(checkout) == ["import circle: sm100_sim/a, sm100_sim/b, sm100_sim/c"]


def test_a_circle_is_named(checkout):
    (checkout / "schedulers/a.py").write_text("def f():\n    from .b import g\n")
    (checkout / "schedulers/b.py").write_text("from . import a\n")
    assert style.imports(checkout) == ["import circle: schedulers/a, schedulers/b"]
