"""Functions of scores for `score_mod=` of `flash_attn_func` and `flash_attn_varlen_func`.

A score_mod is written in CuTe DSL and compiled into the kernels, with its derivative where it has
one: see docs/masks.md. By name: `alibi`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .call.functions.keys import KernelFunction, check_function, key_of, register
from .kernels.functions.kernel_functions import Functions, Scored
from .kernels.functions.part_places import key_in_part
from .kernels.functions.user_functions import ALIBI, SCORE_MOD

__all__ = ["ScoreMod", "Scored", "alibi"]


@dataclass(frozen=True)
class ScoreMod(KernelFunction):
    """Change of scores, with the tensors that it reads.

    function: (score, place, tensors) -> score, in CuTe DSL: a Float32, softmax_scale * q k; a
    `Scored`; a tuple of cute.Tensor, as many as `tensors`. What it returns goes into the mask and
    the softmax. slope: its derivative with respect to score, of the same arguments; None where that
    is 1 everywhere, since something is added. key: names both: what is compiled into a kernel, by
    which caches in memory and on disk know it; `of` derives one. tensors: up to four, of float32 or
    int32, of any shape; there are no gradients to them. Copies are made of those that are not
    contiguous, at every call.

    Raises TypeError or ValueError for other kinds, and for a key that names other functions.
    """

    kind = SCORE_MOD
    accepted = "a ScoreMod of fa4_hd256.score_mods, such as alibi(slopes)"
    function: Callable[..., Any]
    slope: Callable[..., Any] | None
    key: str
    tensors: tuple[torch.Tensor, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        check_function(SCORE_MOD, self.key, self.function, self.tensors)
        if self.slope is not None and not callable(self.slope):
            raise TypeError(
                f"slope of a ScoreMod is {type(self.slope).__name__}; accepted: a function of "
                f"{SCORE_MOD.arguments}, or None"
            )
        register(SCORE_MOD, self.key, Functions(self.function, self.slope))

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        slope: Callable[..., Any] | None = None,
        tensors: tuple[torch.Tensor, ...] = (),
    ) -> ScoreMod:
        """Make a ScoreMod whose key is derived from the functions: their code, constants, defaults,
        what they close over and the globals that they read.

        These may be numbers, str, None, tuples of such, other functions of Python, and what CuTe
        DSL, `math` and Python itself offer. Raises ValueError for anything else, whose meaning
        another process could not tell: give such a function a key of your own.
        """
        return cls(function, slope, key_of(SCORE_MOD, function, slope), tensors)

    def in_part(self, origins: torch.Tensor) -> ScoreMod:
        """Return that of a call that is a part of another one, with the places of that
        (`key_in_part`).

        origins: int32 fields of `ScoreOrigin`: where the part lies, (6,), or of each of its
        sequences, (sequences, 6).
        """
        key = key_in_part(self.key)
        return ScoreMod(*SCORE_MOD.functions_of(key), key, (*self.tensors, origins))


def alibi(slopes: torch.Tensor) -> ScoreMod:
    """ALiBi (arXiv 2108.12409): -slope * |query + seqlen_k - seqlen_q - key| is added to a score,
    as flash-attention's alibi_slopes do.

    slopes: (heads,) or (batch, heads) float32, of the query heads. Raises TypeError for another
    dtype, ValueError for other dimensions.
    """
    if not isinstance(slopes, torch.Tensor) or slopes.dtype != torch.float32:
        kind = slopes.dtype if isinstance(slopes, torch.Tensor) else type(slopes).__name__
        raise TypeError(f"slopes is {kind}; accepted: a float32 tensor")
    if slopes.ndim not in (1, 2):
        raise ValueError(
            f"slopes has shape {tuple(slopes.shape)}; accepted: (heads,) or (batch, heads)"
        )
    return ScoreMod(*SCORE_MOD.functions_of(ALIBI), ALIBI, (slopes,))
