"""Places of errors, as far as each layer knows them."""

from types import SimpleNamespace

from sm100_sim.errors import SimulationError

LOAD = SimpleNamespace(text="ld.global.b32 %r1, [%rd1]", line=12, source=("kernel.py", 7))
OTHER = SimpleNamespace(text="bar.sync 0", line=1, source=None)


def test_the_innermost_layer_says_where():
    """Known parts stay; unknown ones are filled in, 0 among them."""
    error = SimulationError("wrong").at(instruction=LOAD, lane=0)
    assert error.at(OTHER, "cta", 0, 5) is error
    assert (error.instruction, error.cta, error.warp, error.lane) == (LOAD, "cta", 0, 0)
    error.at(OTHER, "another", 3, 6)
    assert (error.instruction, error.cta, error.warp, error.lane) == (LOAD, "cta", 0, 0)


def test_the_place_in_one_line():
    error = SimulationError("wrong")
    assert error.place() == "" and str(error) == "wrong"
    place = error.at(LOAD, 2, 0, 31).place()
    assert place.startswith("at `ld.global.b32 %r1, [%rd1]` (PTX line 12)")
    assert "from kernel.py:7" in place
    for part in ("CTA 2", "warp 0", "lane 31"):
        assert part in place, place
    assert "from" not in SimulationError("wrong").at(OTHER).place()
