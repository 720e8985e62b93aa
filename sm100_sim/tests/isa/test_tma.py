"""TMA tiles against an element-by-element formula: edges, stores, padded elements, refusals. Fills,
strides and reductions are recorded (tests/tools/test_golden.py, "tma").
"""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm100_sim.errors import MemoryFault, Misaligned, SimulationError
from sm100_sim.isa.copies import tiles
from sm100_sim.state.tensormap import TensorMap


class HostMemory:
    """One numpy buffer as global memory, with the interface that tile copies use."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data.reshape(-1).view(np.uint8)
        self.start = self.data.__array_interface__["data"][0]

    def check(self, start, nbytes, write, what):
        if not (self.start <= start and start + nbytes <= self.start + self.data.size):
            raise MemoryFault(f"{what} outside the tensors")

    def view(self, start, nbytes):
        return self.data[start - self.start : start - self.start + nbytes]


def aligned(nbytes: int) -> np.ndarray:
    raw = np.zeros(nbytes + 1024, np.uint8)
    skip = -raw.__array_interface__["data"][0] % 1024
    return raw[skip : skip + nbytes]


def describe(array: np.ndarray, box, dtype: str, **fields) -> TensorMap:
    """Descriptor of a numpy array (slowest dimension first) with `box` given fastest first."""
    rank = array.ndim
    return TensorMap(
        address=array.__array_interface__["data"][0],
        dtype=dtype,
        sizes=tuple(reversed(array.shape)),
        strides=tuple(reversed(array.strides[:-1])),
        box=tuple(box),
        element_strides=fields.pop("element_strides", (1,) * rank),
        **fields,
    )


def slow_offset(position: int, span: int, base: int) -> int:
    """SMEM address of byte `position` of a dense tile at `base`, swizzled bit by bit."""
    address = base + position
    for low, high in {0: (), 32: ((4, 7),), 64: ((4, 7), (5, 8)), 128: ((4, 7), (5, 8), (6, 9))}[
        span
    ]:
        address ^= (address >> high & 1) << low
    return address


def slow_elements(t: TensorMap, coordinates):
    """Yield (position in the tile in elements, global index fastest first or None if outside)."""
    shape = t.tile_shape
    for position, index in enumerate(itertools.product(*(range(n) for n in reversed(shape)))):
        index = tuple(reversed(index))
        place = tuple(c + i * s for c, i, s in zip(coordinates, index, t.steps, strict=True))
        inside = all(0 <= p < n for p, n in zip(place, t.sizes, strict=True))
        yield position, place if inside else None


def slow_load(array, t, coordinates, smem, base, fill):
    width = array.itemsize
    for position, place in slow_elements(t, coordinates):
        at = slow_offset(position * width, t.swizzle, base)
        value = fill if place is None else array[tuple(reversed(place))]
        smem[at : at + width] = np.array([value], array.dtype).view(np.uint8)


@st.composite
def cases(draw):
    rank = draw(st.integers(1, 5))
    swizzle = draw(st.sampled_from([0, 32, 64, 128]))
    inner = swizzle // 2 if swizzle else draw(st.sampled_from([8, 16, 24]))
    sizes = [8 * draw(st.integers(1, 9))] + [draw(st.integers(1, 7)) for _ in range(rank - 1)]
    box = [inner] + [draw(st.integers(1, 5)) for _ in range(rank - 1)]
    steps = [1] + [draw(st.integers(1, 3)) for _ in range(rank - 1)]
    coordinates = [draw(st.integers(-b - 1, n + 1)) for b, n in zip(box, sizes, strict=True)]
    return sizes, box, steps, coordinates, swizzle, draw(st.integers(0, 9)) * 128


@settings(max_examples=150, derandomize=True, deadline=None)
@given(cases())
def test_loads_at_any_edge(case):
    sizes, box, steps, coordinates, swizzle, base = case
    store = aligned(int(np.prod(sizes)) * 2).view(np.uint16)
    array = store.reshape(tuple(reversed(sizes)))
    array[...] = np.arange(1, array.size + 1).reshape(array.shape)
    t = describe(array, box, "u16", swizzle=swizzle, element_strides=tuple(steps))
    got, want = aligned(65536), aligned(65536)
    got[:] = want[:] = 0xEE
    size = tiles.load_tile(t, tuple(coordinates), HostMemory(array), got, base)
    slow_load(array, t, coordinates, want, base, 0)
    assert size == t.tile_bytes
    assert np.array_equal(got, want)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(cases())
def test_stores_drop_what_lies_outside(case):
    sizes, box, steps, coordinates, swizzle, base = case
    array = aligned(int(np.prod(sizes)) * 2).view(np.uint16).reshape(tuple(reversed(sizes)))
    want = array.copy()
    smem = aligned(65536)
    smem.view(np.uint16)[:] = np.arange(32768) + 1
    t = describe(array, box, "u16", swizzle=swizzle, element_strides=tuple(steps))
    for position, place in slow_elements(t, coordinates):
        if place is not None:
            at = slow_offset(2 * position, swizzle, base)
            want[tuple(reversed(place))] = smem[at : at + 2].view(np.uint16)[0]
    tiles.store_tile(t, tuple(coordinates), HostMemory(array), smem, base)
    assert np.array_equal(array, want)


def test_what_is_refused():
    array = aligned(64 * 64 * 2).view(np.uint16).reshape(64, 64)
    memory, smem = HostMemory(array), aligned(16384)
    t = describe(array, (64, 8), "u16", swizzle=128)
    with pytest.raises(Misaligned, match="128"):
        tiles.load_tile(t, (0, 0), memory, smem, 64)
    with pytest.raises(MemoryFault, match="16384"):
        tiles.load_tile(t, (0, 0), memory, smem, 16384 - 512)
    beyond = dataclasses.replace(t, sizes=(64, 128))
    with pytest.raises(MemoryFault, match="outside the tensors"):
        tiles.load_tile(beyond, (0, 60), memory, smem, 0)
    with pytest.raises(SimulationError, match="interleave"):
        tiles.load_tile(dataclasses.replace(t, interleave=16), (0, 0), memory, smem, 0)


def test_a_load_that_begins_before_its_tensor_needs_the_first_byte():
    """The base of a map that names its rows twice lies 4 rows below the memory of the tensor."""
    array = aligned(8 * 128).view(np.uint16).reshape(8, 64)
    array[...] = np.arange(1, 513).reshape(8, 64)
    memory, smem = HostMemory(array), aligned(4096)
    t = describe(array, (64, 4, 1), "u16", element_strides=(1, 1, 1))
    t = dataclasses.replace(t, sizes=(64, 4, 9), strides=(128, 128))
    below = dataclasses.replace(t, address=t.address - 4 * 128)
    tiles.load_tile(below, (0, 2, 3), memory, smem, 0)  # The two rows before row 3.
    assert (smem[: t.tile_bytes].view(np.uint16).reshape(4, 64)[:2] == array[1:3]).all()
    with pytest.raises(MemoryFault, match="begins before its tensor"):
        tiles.load_tile(below, (0, -2, 4), memory, smem, 0)
    tiles.load_tile(t, (0, -2, 0), memory, smem, 0)
    assert (smem[: t.tile_bytes].view(np.uint16).reshape(4, 64)[2:] == array[:2]).all()


@pytest.mark.parametrize(("dtype", "bits"), [("b4x16_p64", 4), ("b6x16_p32", 6)])
@pytest.mark.parametrize("swizzle", [0, 128])
def test_padded_elements(dtype, bits, swizzle):
    """16 elements to 16 bytes, data first, zeros behind; outside the tensor zeros alone."""
    array = aligned(6 * 256 * bits // 8).reshape(6, -1)
    array[...] = np.random.default_rng(1).integers(0, 256, array.shape)
    t = TensorMap(
        address=array.__array_interface__["data"][0], dtype=dtype, sizes=(256, 6),
        strides=(array.shape[1],), box=(128, 4), element_strides=(1, 1), swizzle=swizzle,
    )  # fmt: skip
    smem = aligned(4096)
    smem[:] = 0xFF
    assert tiles.load_tile(t, (128, 3), HostMemory(array), smem, 1024) == 4 * 128 * bits // 8
    for row in range(4):
        for unit in range(8):
            want = np.zeros(16, np.uint8)
            if row + 3 < 6:
                first = (128 + 16 * unit) * bits // 8
                want[: 2 * bits] = array[row + 3, first : first + 2 * bits]
            at = slow_offset(row * 128 + unit * 16, swizzle, 1024)
            assert np.array_equal(smem[at : at + 16], want), (row, unit)
    assert np.all(smem[:1024] == 0xFF) and np.all(smem[1536:] == 0xFF)


def test_packed_elements_are_copied_in_bytes():
    t = TensorMap(
        address=4096, dtype="b4x16", sizes=(256, 6), strides=(128,), box=(64, 4),
        element_strides=(1, 1),
    )  # fmt: skip
    assert (t.packed.dtype, t.packed.sizes, t.packed.box) == ("u8", (128, 6), (32, 4))
    assert t.packed.tile_bytes == t.tile_bytes == 128
