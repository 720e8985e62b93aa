"""Options name what modules that take long to load have: both lists are the same."""

from __future__ import annotations

import inspect

from refused import refusals

from bench import options
from bench.__main__ import COMMANDS, GROUPS
from bench.commands import throughput
from bench.measure import mask_providers, providers, training
from bench.serving import models
from fa4_hd256 import warm
from fa4_hd256.run.ahead import needs
from fa4_hd256.run.ahead import options as build_options
from sm100_sim.timing import machines


def test_every_command_has_options_and_a_place_in_the_help():
    for name in COMMANDS:
        assert inspect.isfunction(getattr(options, name.replace("-", "_")))
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)


def test_names_are_those_of_the_modules():
    assert options.ATTENTIONS == tuple(training.IMPLEMENTATIONS)
    assert options.DTYPES == tuple(throughput.DTYPES)
    assert options.PROVIDERS == tuple(p.name for p in providers.default_providers())
    assert options.MASK_PROVIDERS == tuple(p.name for p in mask_providers.mask_providers())
    assert options.SERVED_MODELS == tuple(models.MODELS)
    assert set(options.MACHINES) == set(machines())


#: Values that there are not, of options and arguments, and of each a name that is told instead.
REFUSED = {
    ("throughput", "--provider", "nope"): "flash-attn-4, five products",
    ("masks", "--provider", "flex"): "SDPA, dense mask",
    ("throughput", "--modelled", "--machine", "b400"): "files whose name ends in .json",
    ("host", "--json", "--csv"): "--json and --csv cannot both go to stdout",
    ("throughput", "--modelled", "--group", "nope"): "invalid choice: 'nope' (choose from",
}


def test_names_that_there_are_not_are_refused_at_once():
    refusals("bench", REFUSED)


def test_names_of_build_are_those_of_needs():
    assert build_options.USES == tuple(sorted(needs.USES))
    assert build_options.FORMS == tuple(sorted(needs.FORMS))
    assert build_options.DTYPES == tuple(sorted(warm._DTYPES))
    assert build_options.KV_DTYPES == tuple(sorted(warm._KV_DTYPES))
