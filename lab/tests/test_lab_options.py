"""Options name what modules that take long to load have: both lists are the same."""

from __future__ import annotations

import inspect

from refused import refusals

from lab import options
from lab.__main__ import COMMANDS, GROUPS, main
from lab.commands import steps
from lab.measure import mutation_targets, ranks
from lab.pictures.catalogue import PICTURES


def test_every_command_has_options_and_a_place_in_the_help():
    for name in COMMANDS:
        assert inspect.isfunction(getattr(options, name.replace("-", "_")))
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)


def test_names_are_those_of_the_modules():
    assert options.WAYS == tuple(ranks.WAYS)
    assert options.STEP_PROVIDERS == tuple(dict.fromkeys(name for name, _ in steps.KERNELS))
    assert options.PICTURE_NAMES == tuple(PICTURES)
    assert sorted(options.TARGETS) == sorted(mutation_targets.targets())


#: Values that there are not, of options and arguments, and of each a name that is told instead.
REFUSED = {
    ("steps", "--machine", "b400"): "gb300",
    ("steps", "--json", "--csv"): "--json and --csv cannot both go to stdout",
    ("mutation", "nope"): "no target 'nope'; there are: forward, full, static;",
    ("tables", "nope"): "no table 'nope'; there are: throughput;",
    ("pictures", "nope"): "no picture 'nope'; there are: bars-h200;",
}


def test_names_that_there_are_not_are_refused_at_once():
    refusals("lab", REFUSED)


def test_a_refused_value_is_a_message(capsys):
    assert main(["calibrate", "--sets", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: --sets 0, --lot 48, ")
