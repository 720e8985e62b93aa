"""tests/README.md lists what `make test` leaves out."""

import ast

import left_out
from checkout import ROOT


def test_the_page_lists_every_mark():
    page = (ROOT / left_out.PAGE).read_text("utf-8")
    assert page == left_out.written(ROOT), "run `python tests/helpers/left_out.py`"
    named = sum(len(row.split("|")[3].split(",")) for row in left_out.rows(ROOT))
    assert named > 100


def test_every_description_is_of_a_folder_with_marks():
    used = {row.split("|")[1].strip() for row in left_out.rows(ROOT)}
    assert used == {*left_out.GUARDS}


def test_marks_of_a_file():
    text = """
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.sampled
def test_all_of_it(a): ...

@pytest.mark.sampled("1", "x-*")
def test_some(a): ...

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.sampled)])
def test_one_case(a): ...

def test_always(): ...
"""
    found = left_out.left_out(ast.parse(text))
    assert found.whole == ["all of it"]
    assert found.some == {"some": ("1", "x-*"), "one case": ("those without the mark",)}
    whole = left_out.left_out(ast.parse(f"pytestmark = [pytest.mark.sampled]\n{text}"))
    assert len(whole.whole) == 4 and not whole.some
