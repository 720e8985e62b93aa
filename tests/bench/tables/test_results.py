"""The layer that every command's results go through, on a table written by hand."""

import argparse
import csv
import io
import json

import pytest

from bench import __main__ as command_line
from bench.tables import results
from bench.tables.table import Column, Plot, Table

pytest.importorskip("cutlass")

COLUMNS = (Column("shape"), Column("tflops", "TFLOPS", ".1f"), Column("best"))


def rows():
    common = {"basis": "modelled", "machine": "B200 modelled, constants 01234567"}
    return [
        {"shape": "a", "tflops": 1000.25, "best": True, "low": 900.0, "high": 1100.0, **common},
        {"shape": "b|c", "tflops": None, "best": False, "low": None, "high": None, **common},
        {"shape": "d", "tflops": 7, "best": None, "low": 6, "high": 9, "more": {"x": 3}, **common},
    ]


def table(**changed) -> Table:
    given = {
        "command": "try",
        "title": "A title",
        "columns": COLUMNS,
        "rows": rows(),
        "plot": Plot("shape", "tflops", low="low", high="high"),
        "environment": {"python": "3"},
    }
    return Table(**{**given, **changed})


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    results.add_output_options(parser)
    return parser.parse_args(given)


def test_text_is_aligned_and_names_the_origin_once():
    text = table(notes=("A note.",)).as_markdown()
    assert text.splitlines() == [
        "A title. Modelled: B200 modelled, constants 01234567.",
        "",
        "| shape | tflops (TFLOPS) | best |",
        "|-------|----------------:|------|",
        "| a     |          1000.2 | yes  |",
        "| b\\|c  |               - | no   |",
        "| d     |             7.0 | -    |",
        "",
        "A note.",
    ]


def test_rows_of_different_origin_say_so_each():
    mixed = rows()
    mixed[1] = {**mixed[1], "basis": "measured", "machine": "a GPU at 1.9 GHz"}
    lines = table(rows=mixed).as_markdown().splitlines()
    assert lines[0] == "A title."
    assert "| basis    | on " in lines[2]
    assert "| measured | a GPU at 1.9 GHz " in lines[5]


def test_json_is_read_back():
    (found,) = results.read_json(results.json_text([table()]))
    assert found == table()
    two_names = table(plot=Plot(("shape", "best"), ("tflops", "low")))
    assert results.read_json(results.json_text([two_names])) == [two_names]
    with pytest.raises(ValueError, match="there is no list of tables"):
        results.read_json("[1]")
    with pytest.raises(ValueError, match="not a table"):
        results.read_json('{"tables": [{"command": "x"}]}')


def test_csv_has_what_text_leaves_out():
    (first, _, last) = csv.DictReader(io.StringIO(results.csv_text([table()])))
    assert first["tflops"] == "1000.25" and first["basis"] == "modelled"
    assert last["more.x"] == "3" and "table" not in last
    several = list(csv.DictReader(io.StringIO(results.csv_text([table(), table(title="B")]))))
    assert [row["table"] for row in several] == ["A title"] * 3 + ["B"] * 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": [{"shape": "a"}]}, "has no tflops, best, basis, machine"),
        ({"rows": [{**rows()[0], "basis": "guessed"}]}, "accepted are measured, modelled"),
        ({"plot": Plot("shape", "absent")}, r"\['absent'\] are not in the rows"),
        ({"columns": (*COLUMNS, Column("best"))}, "occurs twice"),
    ],
)
def test_refused_tables(changed, message):
    with pytest.raises(ValueError, match=message):
        table(**changed)


def test_files_and_stdout(tmp_path, capsys):
    results.emit(table(), options("--json", str(tmp_path / "a.json"), "--csv"))
    assert capsys.readouterr().out.startswith("shape,tflops,best")
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["tables"][0]["rows"][0]["tflops"] == 1000.25
    results.emit(table(), options("--csv", str(tmp_path / "a.csv")))
    assert capsys.readouterr().out == table().as_markdown() + "\n"
    assert (tmp_path / "a.csv").read_text() == results.csv_text([table()])
    with pytest.raises(ValueError, match="cannot both go to stdout"):
        results.emit(table(), options("--csv", "--json"))


def test_plots(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    line = Plot("low", "tflops", kind="line", series="machine", panel="basis")
    wide = Plot("shape", ("tflops", "low"))
    tables = [table(), table(title="B", plot=line), table(plot=None), table(plot=wide)]
    results.emit(tables, options("--plot", str(tmp_path / "a.svg")))
    capsys.readouterr()
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn.count('id="axes_') == 3, "one for each table with a plot"
    assert "(modelled)" in drawn
    with pytest.raises(ValueError, match="nothing to plot"):
        results.emit(table(plot=None), options("--plot", str(tmp_path / "b.svg")))


def test_suffixes_of_plots_are_matplotlibs():
    matplotlib = pytest.importorskip("matplotlib.backends.backend_agg")
    known = matplotlib.FigureCanvasAgg.get_supported_filetypes()
    assert {suffix[1:] for suffix in results.SUFFIXES} <= set(known)


@pytest.mark.parametrize("suffix", results.SUFFIXES)
def test_a_plot_of_every_suffix_is_written(suffix, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / f"a{suffix}"
    results.draw([table()], options("--plot", str(target)).plot)
    assert target.stat().st_size > 1000


#: Commands that print tables; the others write a report.
TABULAR = [name for name in command_line.COMMANDS if name not in ("bringup", "report")]


@pytest.mark.parametrize(
    ("given", "told"),
    [(("--plot", "x.abc"), "x.abc has the suffix .abc; accepted: .eps, .jpg, "),
     (("--plot", "x"), "x has no suffix; accepted: .eps, .jpg, "),
     (("--plot", "no/where/x.svg"), "there is no folder no/where; create it first"),
     (("--json", "no/where/x.json"), "there is no folder no/where; create it first"),
     (("--csv", "/"), "/ is a folder; accepted: the name of a file")],
)  # fmt: skip
def test_files_that_cannot_be_written_are_refused_before_the_work(given, told, capsys):
    for name in TABULAR:
        with pytest.raises(SystemExit) as left:
            command_line.main([name, *given])
        assert left.value.code == 2 and told in capsys.readouterr().err, name


def test_a_plot_without_matplotlib_is_refused_before_the_work(monkeypatch, capsys):
    monkeypatch.setattr(results.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        options("--plot", "x.svg")
    assert "which is not installed: pip install matplotlib" in capsys.readouterr().err


def test_every_command_offers_the_output_options(capsys):
    for name in TABULAR:
        with pytest.raises(SystemExit) as left:
            command_line.main([name, "--help"])
        assert left.value.code == 0
        text = capsys.readouterr().out
        assert all(option in text for option in ("--json", "--csv", "--plot")), name
