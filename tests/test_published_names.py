"""`published`: uses of the simulator's private names are seen."""

from __future__ import annotations

import published
from published import private_imports

#: Published names of a checkout, for the tests below.
NAMES = {"sm100_sim": {"Options", "timing"}, "sm100_sim.timing": {"predict"}}


def test_a_private_import_is_seen():
    text = """
import sm100_sim, sm100_sim.launcher, sm100_sim.tools.golden
from sm100_sim import Options, settings
def inside():
    from sm100_sim.timing import predict, engine
    from sm100_sim.tools.golden.replay import replay, _hidden
    from sm100_sim.run.machine import Machine
    from sm100_simulator import other
"""
    assert [line.partition(": ")[2] for line in private_imports(text, NAMES)] == [
        "sm100_sim.launcher", "sm100_sim.settings", "sm100_sim.timing.engine",
        "sm100_sim.tools.golden.replay._hidden", "sm100_sim.run.machine.Machine",
    ]  # fmt: skip


def test_offences_are_named(tmp_path):
    """A checkout of a few files has each offence."""
    for name in ("sm100_sim/src/sm100_sim/timing", "fa4_hd256", "bench", "examples"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("sm100_sim", "sm100_sim/timing"):
        (tmp_path / "sm100_sim/src" / name / "__init__.py").write_text('__all__ = ["launch"]\n')
    (tmp_path / "fa4_hd256/a.py").write_text("from sm100_sim import launch\n")
    assert published.imports(tmp_path) == []
    (tmp_path / "examples/a.py").write_text("from sm100_sim import launch, run\n")
    assert published.imports(tmp_path) == [
        "examples/a.py, line 1: sm100_sim.run, which sm100_sim does not publish"
    ]
