"""Views of one buffer: those that share no byte may be written to and read by one call."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa4_hd256.call import memory
from fa4_hd256.call.memory import share_memory

BUFFER = torch.empty(64, dtype=torch.int16)


@st.composite
def views(draw):
    """A strided view of some elements of the buffer, in 16 or 32 bits."""
    buffer = draw(st.sampled_from([BUFFER, BUFFER.view(torch.int32)]))
    dims = draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims))
    strides = draw(st.lists(st.integers(0, 9), min_size=dims, max_size=dims))
    last = sum((size - 1) * stride for size, stride in zip(shape, strides))
    begin = draw(st.integers(0, 8))
    if begin + last >= buffer.numel():
        shape = [1] * dims
    return buffer.as_strided(shape, strides, begin)


def bytes_of(view):
    width, begin = view.element_size(), view.data_ptr()
    places = itertools.product(*(range(size) for size in view.shape))
    return {
        begin + width * sum(i * stride for i, stride in zip(place, view.stride())) + byte
        for place in places
        for byte in range(width)
    }


@given(views(), views())
def test_it_agrees_with_a_list_of_all_bytes(one, other):
    assert share_memory(one, other) == bool(bytes_of(one) & bytes_of(other))


def test_slices_of_large_buffers_take_few_steps(monkeypatch):
    monkeypatch.setattr(memory, "MOST_STEPS", 200)
    memory._meet.cache_clear()
    buffer = torch.empty(4, 1 << 20, 24, 256, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(memory, "memory_span", lambda view: _span(view))
    for last, found in ((8, False), (9, True)):
        assert share_memory(buffer[:, :, :last], buffer[:, :, 8:16]) is found


def _span(view):
    """Return the span of a view of memory that is not there."""
    return 2 * view.storage_offset(), 1 << 60


def test_what_takes_too_long_counts_as_shared(monkeypatch):
    monkeypatch.setattr(memory, "MOST_STEPS", 0)
    memory._meet.cache_clear()
    try:
        assert share_memory(BUFFER[0::2], BUFFER[1::2])
    finally:
        memory._meet.cache_clear()
    monkeypatch.undo()
    assert not share_memory(BUFFER[0::2], BUFFER[1::2])


@pytest.mark.parametrize("empty", [BUFFER[3:3], BUFFER[0:0]])
def test_an_empty_view_shares_nothing(empty):
    assert not share_memory(empty, BUFFER) and not share_memory(BUFFER, empty)
