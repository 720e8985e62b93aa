"""Constants, and the closed forms of the tensor core against the published measurements."""

import json

import numpy as np
import pytest

from sm100_sim.timing.machine_constants import Values, load, machines
from sm100_sim.timing.tensor import MEASURED, mma_cost


@pytest.mark.parametrize(("mode", "rows"), MEASURED.items())
def test_closed_forms_reproduce_every_measured_row(mode, rows):
    for n, (latency, interval) in rows.items():
        cost = mma_cost(mode[1], n, mode[0], mode[2])
        # Four clocks: the spread of latencies published for M = 128 of a pair.
        assert abs(cost.latency - latency) <= 4, (mode, n)
        assert abs(cost.interval - interval) <= 3, (mode, n)


def test_no_such_mma():
    with pytest.raises(ValueError, match="M = 32"):
        mma_cost(32, 64, 1, False)


def test_every_machine_has_every_constant_with_a_source():
    assert {"b200", "b300"} <= set(machines())
    for name in machines():
        machine = load(name)
        assert set(machine.constants) == set(Values._fields)
        for constant in machine.constants.values():
            assert constant.source and constant.unit
            assert constant.low <= constant.value <= constant.high


def test_b300_differs_from_b200_in_exp2():
    assert load("b300").values().mufu_interval == load("b200").values().mufu_interval / 2


def test_what_a_machine_is_like_may_be_like_another():
    gb200, gb300 = load("gb200"), load("gb300")
    assert gb300.values().sms == gb200.values().sms != load("b200").values().sms
    assert gb300.values().mufu_interval == gb200.values().mufu_interval / 2
    assert gb300.constants["tmem_load"] == load("b200").constants["tmem_load"]
    found = {name: load(name).architecture for name in machines()}
    assert found == {"b200": "sm_100a", "gb200": "sm_100a", "b300": "sm_103a", "gb300": "sm_103a",
                     "h100": "sm_90a", "h200": "sm_90a"}  # fmt: skip


def test_draws_stay_in_range_and_repeat():
    machine = load()
    one, two = (machine.drawn(np.random.default_rng(3)) for _ in range(2))
    assert one == two
    for name, value in one._asdict().items():
        assert machine.constants[name].low <= value <= machine.constants[name].high


@pytest.mark.parametrize("name", ["b200", "h200"])
def test_fewer_draws_than_none_are_refused(name):
    assert len(load(name).sampled(0)) == 1
    with pytest.raises(ValueError, match="-1 draws"):
        load(name).sampled(-1)


def test_unknown_machine():
    with pytest.raises(ValueError, match="there are"):
        load("b100")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [({"like": "b200", "constants": {}}, "no \"basis\""),
     ({"basis": "a guess", "constants": {}}, "what kernels are compiled for"),
     ({"like": "b400", "basis": "a guess", "constants": {}}, "like 'b400'; accepted: b200")],
)  # fmt: skip
def test_a_file_that_describes_no_machine(content, complaint, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=complaint):
        load(str(path))
