"""The files of docs/tables and lab/docs/tables: in the catalogue, headed by their command, linked
from their page."""

import functools
import importlib
import json
import os
import re

import pytest
from checkout import ROOT

from bench.tables.results import json_text
from bench.tables.table import Column, Table
from lab.__main__ import main
from lab.commands import tables as command
from lab.model.hopper import rows as hopper_rows
from lab.model.origin import modelled_machine
from lab.tables.documents import DOCUMENTS, FOLDER, LAB_FOLDER, Document, path_of
from sm100_sim.timing import load


def test_every_file_is_in_the_catalogue_and_the_other_way_round():
    found = [path for folder in (FOLDER, LAB_FOLDER) for path in folder.glob("*")]
    assert sorted(found) == sorted(map(path_of, DOCUMENTS))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_file_says_what_it_is(name):
    document, text = DOCUMENTS[name], path_of(name).read_text("utf-8")
    assert text.startswith(document.header(name))
    program = importlib.import_module(f"{document.program}.__main__")
    assert document.command[0] in program.COMMANDS
    origin = text[len(document.header(name)) :].split("\n\n")[0]
    bases = re.findall(r"\b(measured|modelled|computed):", origin.lower())
    assert bases, origin
    # Whoever reads a modelled figure is told by which constants.
    assert "modelled" not in bases or re.search(r"constants [0-9a-z]{5,}", origin), origin
    page = ROOT / document.page
    link = os.path.relpath(document.folder / f"{name}.md", page.parent)
    assert f"({link})" in page.read_text("utf-8")


@functools.cache
def todays_constants() -> frozenset[str]:
    """The digests of every machine of the model, and of Hopper GPUs as attention is predicted."""
    machines = [load(name) for name in ("b200", "gb200", "b300", "gb300", "h200")]
    machines += [row.machine for row in hopper_rows.rows()]
    printed = map(modelled_machine, machines)
    return frozenset(text.rsplit(maxsplit=1)[-1] for text in printed)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_modelled_file_is_of_todays_constants(name):
    text = path_of(name).read_text("utf-8")
    found = set(re.findall(r"(?i)modelled[^.|]*?constants[^.|]*?([0-9a-f]{8})", text))
    assert found <= todays_constants(), f"python -m lab tables {name} --write"
    assert found or "odelled:" not in text


def test_a_file_of_other_constants_is_seen(tmp_path, monkeypatch):
    text = path_of("steps").read_text("utf-8")
    digests = re.findall(r"constants ([0-9a-f]{8})", text)
    (tmp_path / "steps.md").write_text(text.replace(digests[-1], "4098d5b3"))
    monkeypatch.setattr(f"{__name__}.path_of", lambda name: tmp_path / f"{name}.md")
    with pytest.raises(AssertionError, match="lab tables steps --write"):
        test_a_modelled_file_is_of_todays_constants("steps")


@pytest.mark.parametrize("planted", ["no command", "no constants"])
def test_a_file_that_does_not_say_it_is_seen(planted, tmp_path, monkeypatch):
    name = "steps"
    text = path_of(name).read_text("utf-8")
    line = {"no command": r"    python -m lab steps\n", "no constants": r"constants \w+"}
    changed = re.sub(line[planted], "", text)
    assert changed != text
    (tmp_path / f"{name}.md").write_text(changed)
    monkeypatch.setattr(f"{__name__}.path_of", lambda name: tmp_path / f"{name}.md")
    with pytest.raises(AssertionError):
        test_a_file_says_what_it_is(name)


def test_a_file_is_made_by_its_command(tmp_path, monkeypatch, capsys):
    row = {"x": 3, "basis": "modelled", "machine": "B200 modelled, constants 01234567"}
    printed = Table("steps", "T", (Column("x"),), [row], environment={"commit": "abc"})
    monkeypatch.setattr(command, "made", lambda document: [printed])
    assert main(["tables", "steps", "--write", str(tmp_path), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["tables"]
    assert listed["rows"][0]["state"] == "written"
    monkeypatch.setattr(f"{__name__}.path_of", lambda name: tmp_path / f"{name}.md")
    test_a_file_says_what_it_is("steps")
    text = (tmp_path / "steps.md").read_text()
    assert "constants 01234567. commit abc." in text and "|   3 |" in text


def test_a_file_is_made_of_results_from_elsewhere(tmp_path, capsys):
    """Cases of a command are shared out; a provider that one of them left out has no rate there."""
    files = []
    for number, columns in enumerate((("x", "a"), ("x", "a", "b"))):
        row = {name: f"{name}{number}" for name in columns} | {"basis": "measured", "machine": "G"}
        shown = Table("steps", "T", tuple(map(Column, columns)), [row], (f"n{number}", "n"),
                      environment={"commit": f"c{number}"})  # fmt: skip
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json_text([shown]))
    (found,) = command.merged(files)
    assert [column.name for column in found.columns] == ["x", "a", "b"]
    assert [row["b"] for row in found.rows] == [None, "b1"] and found.notes == ("n0", "n", "n1")
    write = ["tables", "steps", "--write", str(tmp_path), "--results", *map(str, files)]
    assert main(write) == 0
    text = (tmp_path / "steps.md").read_text()
    assert text.startswith(DOCUMENTS["steps"].header("steps"))
    assert "Measured: G." in text and text.count("| x") == 3
    capsys.readouterr()
    assert main(["tables", "masks_h200", "steps", *write[2:]]) == 2
    assert "--results are of one command" in capsys.readouterr().err
    other = Table("steps", "U", (), [])
    files[0].write_text(json_text([other]))
    assert main(write) == 2 and "results of several commands" in capsys.readouterr().err


def test_a_command_is_run_with_its_options(monkeypatch):
    """`calibrate --show` prints what is kept and replays nothing."""
    document = Document("T", ("calibrate", "--show"), "p.md")
    found = command.made(document)
    assert found[0].rows and found[0].command == "calibrate"
    assert found[0].as_markdown() in document.text("name", found)


def test_a_run_of_everything_is_refused(capsys):
    assert main(["tables", "--write"]) == 2
    assert "--write takes names" in capsys.readouterr().err
