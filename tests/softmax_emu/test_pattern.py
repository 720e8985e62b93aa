"""The ratio pattern: the field's rule, true shares, refusals."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4_hd256.softmax_emu import HARDWARE_ONLY, POLYNOMIAL_ONLY, Ex2Pattern


@pytest.mark.parametrize(
    ("pattern", "share"),
    [
        # The published setting: advertised as 3/4 or 1/2, delivered as 3/8.
        (Ex2Pattern(4, 3), Fraction(3, 8)),
        (Ex2Pattern(4, 3, last_fragment_hardware=False), Fraction(1, 2)),
        (Ex2Pattern(16, 4, 1), Fraction(1, 8)),
        # The shares the project's notes quote for head_dim 256.
        (Ex2Pattern(16, 4), Fraction(3, 16)),
        (Ex2Pattern(32, 32, 3), Fraction(0)),
        (HARDWARE_ONLY, Fraction(0)),
        (POLYNOMIAL_ONLY, Fraction(1)),
    ],
    ids=str,
)
def test_true_share(pattern, share):
    assert pattern.true_share(128) == share
    assert f"{100 * float(share):g} % emulated" in str(pattern)


@given(
    freq=st.integers(0, 16).map(lambda half: 2 * half),
    data=st.data(),
    start=st.integers(0, 5),
    last=st.booleans(),
    fragments=st.integers(1, 5),
)
def test_rule(freq, data, start, last, fragments):
    res = data.draw(st.integers(0, freq))
    pattern = Ex2Pattern(freq, res, start, last)
    expected = 0
    for fragment in range(fragments):
        exempt = freq == 0 or fragment < start or (last and fragment == fragments - 1)
        for even in range(0, 32, 2):
            hardware = exempt or even % freq < freq - res
            expected += 0 if hardware else 2
            for column in (even, even + 1):
                assert pattern.is_emulated(fragment, column, fragments) is not hardware
    assert pattern.true_share(32 * fragments) == Fraction(expected, 32 * fragments)


def test_usable_in_compile_keys():
    assert hash(Ex2Pattern(4, 3)) == hash(Ex2Pattern(4, 3))
    assert Ex2Pattern(4, 3) != Ex2Pattern(4, 3, degree=5)
    with pytest.raises(AttributeError):
        Ex2Pattern(4, 3).degree = 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ex2_emu_freq": 3}, ValueError, "ex2_emu_freq is 3; accepted are 0"),
        ({"ex2_emu_freq": 34}, ValueError, "ex2_emu_freq is 34"),
        ({"ex2_emu_freq": -2}, ValueError, "ex2_emu_freq is -2"),
        ({"ex2_emu_freq": 4, "ex2_emu_res": 5}, ValueError, "0 to ex2_emu_freq, which is 4"),
        ({"ex2_emu_start_frg": -1}, ValueError, "ex2_emu_start_frg is -1"),
        ({"degree": 6}, ValueError, "degree is 6; accepted are 2, 3, 4, 5"),
        ({"ex2_emu_freq": 4.0}, TypeError, "ex2_emu_freq must be an int"),
        ({"last_fragment_hardware": 1}, TypeError, "must be a bool"),
    ],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        Ex2Pattern(**arguments)


def test_questions_outside_the_row_are_refused():
    with pytest.raises(ValueError, match="num_columns is 100"):
        HARDWARE_ONLY.true_share(100)
    with pytest.raises(ValueError, match="fragment 4 is not one of 4"):
        HARDWARE_ONLY.is_emulated(4, 0, 4)
    with pytest.raises(ValueError, match="column 32"):
        HARDWARE_ONLY.is_emulated(0, 32, 4)
