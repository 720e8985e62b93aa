"""Options name what modules that take long to load have: both lists are the same."""

from __future__ import annotations

import inspect
import subprocess
import sys

from checkout import ROOT

from bench import options
from bench.__main__ import COMMANDS
from bench.commands import throughput
from bench.measure import mask_providers, nsight, providers, training
from fa4_hd256 import build_options, warm
from fa4_hd256.run import needs
from lab.commands import steps
from lab.measure import ladder, mutation_targets, ranks
from lab.model import defaults, fences
from lab.pictures.catalogue import PICTURES
from sm100_sim.timing import load, machines


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
    assert options.PROVIDERS == tuple(p.name for p in providers.default_providers())
    assert options.MASK_PROVIDERS == tuple(p.name for p in mask_providers.mask_providers())
    assert set(options.MACHINES) == set(machines())
    assert options.FENCED == tuple(fences.calls(1024, load("b200")))
    assert options.PICTURE_NAMES == tuple(PICTURES)
    assert sorted(options.TARGETS) == sorted(mutation_targets.targets())


#: Values that there are not, of options and arguments, and of each a name that is told instead.
REFUSED = {
    ("throughput", "--provider", "nope"): "flash-attn-4, five products",
    ("masks", "--provider", "flex"): "SDPA, dense mask",
    ("throughput", "--modelled", "--machine", "b400"): "gb300",
    ("roofline", "--machine", "b400"): "files whose name ends in .json",
    ("static", "--json", "--csv"): "--json and --csv cannot both go to stdout",
    ("defaults", "colours"): "no choice 'colours'; there are: order, forward;",
    ("mutation", "nope"): "no target 'nope'; there are: forward, full, static;",
    ("tables", "nope"): "no table 'nope'; there are: throughput;",
    ("pictures", "nope"): "no picture 'nope'; there are: throughput-forward;",
    ("fences", "--kernel", "nope"): "no kernel has 'nope' in its name; there are: dV and dS, full;",
    ("throughput", "--modelled", "--group", "nope"): "invalid choice: 'nope' (choose from",
}


def test_names_that_there_are_not_are_refused_at_once():
    """With exit status 2 and the accepted names, and before anything that takes long is loaded."""
    code = (
        "import sys\n"
        "from bench.__main__ import main\n"
        f"for given in {list(REFUSED)!r}:\n"
        "    try:\n"
        "        status = main(list(given))\n"
        "    except SystemExit as error:\n"
        "        status = error.code\n"
        "    print(status, {'torch', 'cutlass', 'llvmlite'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["2 set()"] * len(REFUSED), done.stdout + done.stderr
    assert all(name in done.stderr for name in REFUSED.values()), done.stderr


def test_names_of_build_are_those_of_needs():
    assert build_options.USES == tuple(sorted(needs.USES))
    assert build_options.FORMS == tuple(sorted(needs.FORMS))
    assert build_options.DTYPES == tuple(sorted(warm._DTYPES))
    assert build_options.KV_DTYPES == tuple(sorted(warm._KV_DTYPES))
