"""Masks that kernels evaluate themselves, for `mask_mod=` of `flash_attn_func`: functions written
in CuTe DSL and compiled into the kernels, beside the lists of a `block_mask`. See docs/masks.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .call.functions.keys import KernelFunction, check_function, key_of, register
from .kernels.functions.kernel_functions import Functions
from .kernels.functions.part_places import key_in_part
from .kernels.functions.user_functions import MASK_MOD

__all__ = ["MaskMod"]


@dataclass(frozen=True)
class MaskMod(KernelFunction):
    """Mask that kernels evaluate, with the tensors that it reads.

    function: (batch, head, query, key, tensors) -> Boolean, in CuTe DSL: four Int32, counted from
    0, the head that of the queries; a tuple of cute.Tensor, as many as `tensors`. It is evaluated
    in the partial tiles of a block mask alone. key: names it: what is compiled into a kernel, by
    which caches in memory and on disk know it; `of` derives one. tensors: up to four, of float32 or
    int32, of any shape. Copies are made of those that are not contiguous, at every call.

    Raises TypeError or ValueError for other kinds, and for a key that names another function.
    """

    kind = MASK_MOD
    accepted = (
        "a MaskMod of fa4_hd256.mask_mods. A function of PyTorch goes into a BlockMask, which "
        "alone is enough"
    )
    function: Callable[..., Any]
    key: str
    tensors: tuple[torch.Tensor, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        check_function(MASK_MOD, self.key, self.function, self.tensors)
        register(MASK_MOD, self.key, Functions(self.function))

    @classmethod
    def of(cls, function: Callable[..., Any], tensors: tuple[torch.Tensor, ...] = ()) -> MaskMod:
        """Make a MaskMod whose key is derived from the function, as that of a `ScoreMod`. Raises
        ValueError for a function whose meaning another process could not tell: give it a key of
        your own."""
        return cls(function, key_of(MASK_MOD, function), tensors)

    def in_part(self, place: torch.Tensor) -> MaskMod:
        """Return that of a call that is a part of another one, with the places of that
        (`key_in_part`).

        place: int32, where the part lies: fields of a `ScoreOrigin`, (6,), or `part_tiles` where
        tiles of the part are not tiles of the whole.
        """
        key = key_in_part(self.key)
        return MaskMod(MASK_MOD.functions_of(key).function, key, (*self.tensors, place))


def part_tiles(origin: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """Join a `ScoreOrigin` (6,) int32 and the part's tiles, as `PartTiles` reads them."""
    return torch.cat((origin.expand(*tiles.shape[:3], -1), tiles), dim=-1)
