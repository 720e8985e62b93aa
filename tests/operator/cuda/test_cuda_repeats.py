"""Repeated calls on a GPU: the same bits, under either scheduler, and the right ones."""

from __future__ import annotations

import pytest
import torch
from cuda_cases import ALL, CASES, Case, differing, dirty, exact

LAUNCHES = 20

#: Largest error of the norm: of bfloat16's and float16's roundoff, P and dS rounded beside the
#: results.
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


def test_a_changed_bit_is_noticed():
    """The comparison of these tests counts signs of zero and NaN's bits."""
    one = {"out": torch.zeros(8).bfloat16(), "lse": torch.full((3,), torch.nan)}
    same = {name: tensor.clone() for name, tensor in one.items()}
    assert differing(one, same) == []
    same["out"][5] = -0.0
    assert differing(one, same) == ["out"]
    same["lse"].view(torch.int32)[2] += 1
    assert differing(one, same) == ["out", "lse"]


def test_a_case_in_the_simulator():
    """The reference in float32 agrees with a call small enough for the simulator."""
    case = Case(((5, 9),), (2, 1))
    tensors = case.tensors("cpu")
    wanted = exact(case, tensors)
    assert wanted["dk"].shape == tensors["k"].shape and wanted["lse"].shape == (1, 2, 5)
    from fa4_hd256.check import reference

    out, lse = reference.attention(*(tensors[name] for name in "qkv"), causal=True)
    assert torch.allclose(wanted["out"].double(), out, atol=1e-5)
    assert torch.allclose(wanted["lse"].double(), lse, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ALL)
def test_launches_are_bitwise_equal(name, use_clc, device):
    """Memory that a launch does not write would hold NaN of another time."""
    tensors = ALL[name].tensors(device)
    first = ALL[name].run(tensors, use_clc)
    assert all(torch.isfinite(first[key]).all() for key in first if key != "lse")
    for launch in range(LAUNCHES - 1):
        dirty(device)
        assert differing(first, ALL[name].run(tensors, use_clc)) == [], f"launch {launch + 1}"


@pytest.mark.cuda
@pytest.mark.parametrize("name", ALL)
def test_schedulers_are_bitwise_equal(name, device):
    tensors = ALL[name].tensors(device)
    assert differing(*(ALL[name].run(tensors, use_clc) for use_clc in (False, True))) == []


@pytest.mark.cuda
@pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [name for name in ALL if not ALL[name].is_packed])
def test_many_tiles_are_right(name, use_clc, device):
    """Against float32: more tiles than SMs, which the simulator is too slow for."""
    case = ALL[name]
    tensors = case.tensors(device)
    found, wanted = case.run(tensors, use_clc), exact(case, tensors)
    for key, tensor in wanted.items():
        error = (found[key].double() - tensor.double()).norm() / tensor.double().norm()
        assert error < TOLERANCE[case.dtype], (key, error)


@pytest.mark.cuda
def test_packed_sequences_are_right(device):
    """Results equal those of each sequence alone."""
    case = CASES["packed"]
    tensors = case.tensors(device)
    found = case.run(tensors)
    ends = [tensors[name].tolist() for name in ("cu_q", "cu_k")]
    for index, lengths in enumerate(case.lengths[:6]):
        rows, keys = (slice(*side[index : index + 2]) for side in ends)
        if lengths[0] == 0:
            continue
        sides = {"q": rows, "k": keys, "v": keys, "dout": rows, "dq": rows, "dk": keys, "dv": keys,
                 "out": rows}  # fmt: skip
        one = {name: tensors[name][sides[name]][None] for name in ("q", "k", "v", "dout")}
        one["dlse"] = tensors["dlse"][None, :, rows]
        wanted = exact(Case((lengths,), case.heads), one)
        for key in ("out", "dq", "dk", "dv"):
            tensor = wanted[key].double()
            error = (found[key][sides[key]][None].double() - tensor).norm()
            # One key alone: dq and dk are 0 but for rounding.
            assert error < 8e-3 * tensor.norm() + 1e-2, (lengths, key)
