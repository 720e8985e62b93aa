"""Loads of Hopper's kernel of dV and dS, as measured, in replays."""

from __future__ import annotations

import json

import pytest

from lab.model.hopper import loads as hopper_loads
from lab.model.hopper.attention import hopper
from lab.model.machines import with_load


@pytest.mark.parametrize("name, keys", [("4 x 4096", 4096), ("16 x 1024", 1024)])
def test_a_load_takes_what_was_measured_at_the_clock_of_the_measurement(name, keys):
    known = json.loads(hopper_loads.MEASURED.read_text())
    clocks = hopper_loads.load_clocks(hopper_loads.lacking(keys), known["clock_ghz"])
    assert clocks == pytest.approx(known[name]["Q"]["mean"])


def test_longer_sequences_lack_less_and_slower_clocks_wait_fewer_of_them():
    waits = [hopper_loads.load_clocks(hopper_loads.lacking(n), 1.65) for n in (1024, 4096, 65536)]
    assert waits == sorted(waits, reverse=True)
    assert hopper_loads.load_clocks(0.1, 1.5) < hopper_loads.load_clocks(0.1, 1.8)


def test_a_load_of_a_replay_takes_so_long():
    machine = hopper_loads.under_traffic(hopper(), 4096)
    values, alone = machine.values(), hopper().values()
    (clocks, before) = (
        one.tma_issue + one.tma_load_l2 + hopper_loads.LOAD_BYTES / one.l2_bytes_per_clock_sm
        for one in (values, alone)
    )
    assert clocks == pytest.approx(hopper_loads.load_clocks(1 / 16, alone.clock_ghz))
    assert clocks > 1.3 * before
    with pytest.raises(ValueError, match="32768 bytes in 100 clocks; accepted are more than 38"):
        with_load(hopper(), hopper_loads.LOAD_BYTES, 100)
