"""Options name what modules that take long to load have: both lists are the same."""

from __future__ import annotations

import inspect

from bench import options
from bench.__main__ import COMMANDS
from bench.commands import steps, throughput
from bench.measure import ladder, nsight, ranks, training
from bench.model import defaults
from fa4_hd256 import build_options, warm
from fa4_hd256.run import needs


def test_every_command_has_options():
    for name in COMMANDS:
        assert inspect.isfunction(getattr(options, name.replace("-", "_")))


def test_names_are_those_of_the_modules():
    mix = ladder.PATTERN
    assert options.CHOICES == tuple(defaults.CHOICES)
    assert options.LADDER_MIX == (mix.ex2_emu_freq, mix.ex2_emu_res)
    assert (options.INTERVAL, options.BUFFER_BYTES) == (nsight.INTERVAL, nsight.BUFFER_BYTES)
    assert options.WAYS == tuple(ranks.WAYS)
    assert options.STEP_PROVIDERS == tuple(dict.fromkeys(name for name, _ in steps.KERNELS))
    assert options.ATTENTIONS == tuple(training.IMPLEMENTATIONS)
    assert options.DTYPES == tuple(throughput.DTYPES)


def test_names_of_build_are_those_of_needs():
    assert build_options.USES == tuple(sorted(needs.USES))
    assert build_options.FORMS == tuple(sorted(needs.FORMS))
    assert build_options.DTYPES == tuple(sorted(warm._DTYPES))
    assert build_options.KV_DTYPES == tuple(sorted(warm._KV_DTYPES))
