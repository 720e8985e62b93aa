"""dS in tiles: where an element lies, and which tiles a call has."""

from __future__ import annotations

import torch
from ds_images import from_tiles, to_tiles

from fa4_hd256.kernels.backward_ds_tiles import (
    DS_TILE_ELEMENTS,
    DsTiles,
    count_tiles,
    tile_strides,
)


def test_an_element_of_a_tile():
    """By the rule of the module, in bytes; every place is taken once."""
    (keys, runs, run), strides = tile_strides()
    places = {
        key * strides[0] + query // run * strides[1] + query % run * strides[2]: (key, query)
        for key in range(keys)
        for query in range(runs * run)
    }
    assert sorted(places) == list(range(DS_TILE_ELEMENTS))
    for place, (key, query) in places.items():
        assert 2 * place == query // 8 * 2048 + key * 16 + query % 8 * 2


def test_tiles_are_in_whole_blocks():
    assert [count_tiles(length) for length in (1, 128, 256, 257, 512)] == [2, 2, 2, 4, 4]


def test_every_tile_has_a_number_of_its_own():
    tiles = DsTiles.of(3, 300, 700)
    numbers = [
        tiles.index((sequence, head), kv_tile, q_tile)
        for sequence in range(2) for head in range(3)
        for kv_tile in range(tiles.kv_tiles) for q_tile in range(tiles.q_tiles)
    ]  # fmt: skip
    assert sorted(numbers) == list(range(tiles.count(2)))


def test_an_image_and_back():
    """What a block holds where nothing is seen, and beyond the ends, is 0; other tiles are not
    written."""
    tiles = DsTiles.of(2, 300, 600)
    ds = torch.arange(2 * 300 * 600).reshape(2, 300, 600) % 251 + 1.0
    seen = torch.zeros(300, 600, dtype=torch.bool)
    seen[:, :200] = True
    found = from_tiles(to_tiles([ds], [seen], tiles, torch.bfloat16), tiles, 0)
    assert (found[:, :300, :256] == ds[:, :, :256]).all()
    assert (found[:, 300:, :256] == 0).all() and found[:, :, 256:].isnan().all()
