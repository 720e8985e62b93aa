"""TMA descriptors: round trip, the bytes CuTe DSL emits, refusals that name the field."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm100_sim.state.tensormap import DTYPES, TensorMap, TensorMapError, decode, encode

_BITS = dict(DTYPES.values())


@st.composite
def tensor_maps(draw):
    rank = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([name for name, bits in _BITS.items() if bits >= 8]))
    width = _BITS[dtype] // 8
    swizzle = draw(st.sampled_from([0, 32, 64, 128]))
    inner = draw(st.integers(1, min(256 * width, swizzle or 256 * width) // 16)) * 16 // width

    def outer(low, high):
        return draw(st.lists(st.integers(low, high), min_size=rank - 1, max_size=rank - 1))

    box, room = [inner], (2**18 - 1) // (inner * width)  # the driver refuses boxes of 2^18 bytes
    for _ in range(rank - 1):
        box.append(draw(st.integers(1, min(256, room))))
        room //= box[-1]

    return TensorMap(
        address=draw(st.integers(0, 2**44)) * 16,
        dtype=dtype,
        sizes=tuple(draw(st.lists(st.integers(1, 2**32), min_size=rank, max_size=rank))),
        strides=tuple(16 * s for s in outer(0, 2**36 - 1)),
        box=tuple(box),
        element_strides=(1, *outer(1, 8)),
        swizzle=swizzle,
        nan_fill=draw(st.booleans()) and dtype in ("f16", "bf16", "f32"),
        tf32=draw(st.booleans()) and dtype == "f32",
        l2_promotion=draw(st.sampled_from([0, 64, 128, 256])),
        version=draw(st.sampled_from([0, 2])),
    )


@settings(max_examples=200, derandomize=True, deadline=None)
@given(tensor_maps(), st.binary(min_size=64, max_size=64))
def test_round_trip(tensor_map, garbage):
    raw = encode(tensor_map)
    assert decode(raw) == tensor_map
    # The second half of the 128 bytes is whatever was on the host's stack.
    assert decode(raw[:64] + garbage) == tensor_map


def test_descriptor_as_cute_dsl_emits_it():
    """A (1, 2048, 2, 256) bf16 tensor of an attention kernel, box 64 x 128, 128 B swizzle."""
    raw = bytes.fromhex(
        "404085f8857f0000326524004000000020000000000002000000000000000000"
        "ff000000ff0700000100000000000000000000000000003f7f00000000000000"
    ).ljust(128, b"\xaa")
    assert decode(raw) == TensorMap(
        address=0x7F85F8854040,
        dtype="bf16",
        sizes=(256, 2048, 2, 1),
        strides=(1024, 512, 2097152),
        box=(64, 128, 1, 1),
        element_strides=(1, 1, 1, 1),
        swizzle=128,
        l2_promotion=128,
    )
    assert decode(raw).tile_bytes == 64 * 128 * 2
    assert decode(raw).extent() == (0x7F85F8854040, 0x7F85F8854040 + 2048 * 2 * 512)


GOOD = TensorMap(4096, "f16", (64, 8), (128,), (64, 8), (1, 1), swizzle=128)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"address": 4104}, "address"),
        ({"strides": (120,)}, "stride"),
        ({"box": (64, 257)}, "box"),
        ({"element_strides": (1, 9)}, "element stride"),
        ({"box": (4, 8)}, "multiple of 16"),
        ({"box": (128, 8)}, "swizzle span"),
        ({"dtype": "u16", "nan_fill": True}, "NaN"),
        ({"tf32": True}, "tf32"),
        ({"sizes": (0, 8)}, "size"),
    ],
)
def test_limits_name_the_field(change, named):
    with pytest.raises(TensorMapError, match=named):
        encode(dataclasses.replace(GOOD, **change))


def test_undefined_fields_are_refused():
    raw = bytearray(encode(GOOD))
    raw[9] |= 0x06  # element type field 12 or above
    with pytest.raises(TensorMapError, match="element type"):
        decode(bytes(raw))
    with pytest.raises(TensorMapError, match="64 bytes"):
        decode(bytes(raw[:64]))
