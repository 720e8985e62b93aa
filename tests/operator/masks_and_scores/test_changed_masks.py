"""A `BlockMask` whose function or tables change gives the mask of now, not of the first call."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask

from fa4_hd256 import masks
from fa4_hd256.call.functions.state import FunctionState
from fa4_hd256.integrations.flex_attention import _traced_mask

ROWS = 128
FAR = torch.tensor(5)


def block_mask_of(mask_mod):
    """All blocks partial, whatever the function says now."""
    made = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, ROWS, ROWS, device="cpu")
    made.mask_mod = mask_mod
    return made


def near(limit):
    """The dense mask of `q - k < limit`."""
    q, k = torch.arange(ROWS)[:, None], torch.arange(ROWS)
    return q - k < limit


def seen(block_mask):
    return masks.as_tile_mask(block_mask, batch=1, heads=1).dense()[0, 0]


def of_cell():
    limit = torch.tensor(5)
    return lambda b, h, q, k: q - k < limit, lambda: limit.fill_(9)


def of_replaced_cell():
    limit = torch.tensor(5)

    def replace():
        nonlocal limit
        limit = torch.tensor(9)

    return lambda b, h, q, k: q - k < limit, replace


def of_number():
    limit = 5

    def replace():
        nonlocal limit
        limit = 9

    return lambda b, h, q, k: q - k < limit, replace


def of_partial():
    limit = torch.tensor(5)

    def reads(limit, b, h, q, k):
        return q - k < limit

    return functools.partial(reads, limit), lambda: limit.fill_(9)


def of_keyword():
    limit = torch.tensor(5)

    def reads(b, h, q, k, *, limit=limit):
        return q - k < limit

    return reads, lambda: limit.fill_(9)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("limit", torch.tensor(5))

    def inner(self):
        return self.limit

    def mask(self, b, h, q, k):
        return q - k < self.inner()


def of_buffer():
    layer = Layer()
    return layer.mask, lambda: layer.limit.fill_(9)


def of_replaced_buffer():
    layer = Layer()
    return layer.mask, lambda: setattr(layer, "limit", torch.tensor(9))


def of_global():
    return lambda b, h, q, k: q - k < FAR, lambda: FAR.fill_(9)


def of_module():
    settings = types.ModuleType("settings")
    settings.limit = 5
    return lambda b, h, q, k: q - k < settings.limit, lambda: setattr(settings, "limit", 9)


def of_container():
    limits = {"near": [torch.tensor(5)]}
    return lambda b, h, q, k: q - k < limits["near"][0], lambda: limits["near"][0].fill_(9)


def of_function_inside():
    limit = torch.tensor(5)
    inner = and_masks(lambda b, h, q, k: q - k < limit, lambda b, h, q, k: q - k < 100)
    return and_masks(inner, lambda b, h, q, k: k >= 0), lambda: limit.fill_(9)


def of_data():
    limit = torch.tensor(5)
    return lambda b, h, q, k: q - k < limit, lambda: limit.data.fill_(9)


def of_inference():
    with torch.inference_mode():
        limit = torch.tensor(5)

    def write():
        with torch.inference_mode():
            limit.fill_(9)

    return lambda b, h, q, k: q - k < limit, write


def of_unnamed_reads():
    settings = types.SimpleNamespace(limit=5)
    return (
        lambda b, h, q, k: q - k < getattr(settings, "lim" + "it"),
        lambda: setattr(settings, "limit", 9),
    )


FUNCTIONS = [
    of_cell, of_replaced_cell, of_number, of_partial, of_keyword, of_buffer, of_replaced_buffer,
    of_global, of_module, of_container, of_function_inside, of_data, of_inference,
    of_unnamed_reads,
]  # fmt: skip


@pytest.mark.parametrize("make", FUNCTIONS)
def test_what_a_function_reads_changes(make):
    FAR.fill_(5)
    mask_mod, change = make()
    block_mask = block_mask_of(mask_mod)
    assert torch.equal(seen(block_mask), near(5))
    change()
    assert torch.equal(seen(block_mask), near(9))


@pytest.mark.parametrize("make", [of_cell, of_replaced_cell, of_number])
def test_what_a_traced_function_reads_changes(make):
    """`limit` is int64; the kernels read a copy."""
    mask_mod, change = make()
    block_mask = block_mask_of(mask_mod)

    def traced():
        found = _traced_mask(block_mask, torch.device("cpu"))
        return found.key, [tensor.tolist() for tensor in found.tensors]

    first = traced()
    assert traced() == first
    change()
    second = traced()
    assert second != first
    assert second[1] in ([[9]], [])


def test_a_function_is_replaced():
    block_mask = block_mask_of(lambda b, h, q, k: q - k < 5)
    assert torch.equal(seen(block_mask), near(5))
    first = _traced_mask(block_mask, torch.device("cpu"))
    block_mask.mask_mod = lambda b, h, q, k: q - k < 9
    assert torch.equal(seen(block_mask), near(9))
    assert _traced_mask(block_mask, torch.device("cpu")).key != first.key


def test_tables_change():
    block_mask = block_mask_of(lambda b, h, q, k: q - k < 5)
    assert seen(block_mask).any()
    lists = masks.as_tile_mask(block_mask, with_bits=False)
    block_mask.kv_num_blocks.zero_()
    assert not seen(block_mask).any()
    assert not torch.equal(masks.as_tile_mask(block_mask, with_bits=False).tiles, lists.tiles)


@pytest.mark.parametrize("make", [of_cell, of_partial, of_buffer, of_function_inside, of_module])
def test_what_stays_as_it_is_is_made_once(make):
    """Layers share a mask; other attributes of a module may change."""
    mask_mod, _ = make()
    block_mask = block_mask_of(mask_mod)
    first = masks.as_tile_mask(block_mask)
    if isinstance(getattr(mask_mod, "__self__", None), Layer):
        mask_mod.__self__.steps = 3
    assert masks.as_tile_mask(block_mask) is first
    lists = masks.as_tile_mask(block_mask, with_bits=False)
    assert masks.as_tile_mask(block_mask, with_bits=False) is lists
    traced = _traced_mask(block_mask, torch.device("cpu"))
    assert _traced_mask(block_mask, torch.device("cpu")) is traced


def that_calls(name):
    return lambda b, h, q, k: eval(name)


class Answers:
    def __getattr__(self, name):
        return 5


def test_functions_whose_reads_cannot_be_known():
    answers, stream = Answers(), iter(range(9))
    for function in (
        that_calls("q >= k"), lambda b, h, q, k: q - k < answers.limit,
        lambda b, h, q, k: q - k < next(stream),
    ):  # fmt: skip
        assert FunctionState.of(function) is None
    assert FunctionState.of(near) is not None
