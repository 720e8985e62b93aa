"""Options of a call: numbers as users give them, windows, and all that the description of a call
keeps of them (`Options`)."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kernels.functions.user_functions import FunctionClass
from ..kernels.limits import HEAD_DIM
from ..kernels.mask.windows import Reach, Window
from ..kernels.rows.sequences import PADDING
from ..schedulers.choice import BACKWARD_PREFERS_CLC, clc_requested, grid_rows, prefers_clc
from ..words import shown
from .operator_arguments import BackwardValues, ForwardValues
from .process import sms_are_shared

__all__ = [
    "LARGEST_BOUND",
    "NO_WINDOW",
    "UNBOUNDED",
    "ExactWindow",
    "Options",
    "backward_use_clc",
    "bounds_of_operator",
    "causal_of",
    "check_options",
    "is_sure",
    "is_unknown",
    "plain",
    "scale_of",
    "softcap_of",
    "window_of",
]

# ---------------------------------------------------------------- numbers

#: No number of rows is greater.
_BEYOND = 1 << 40


def plain(value: Any) -> Any:
    """Return a scalar of NumPy as Python's, anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def is_sure(condition: Any) -> bool:
    """Return a condition, False where it depends on data that a traced graph has not."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(condition))


def is_unknown(number: Any) -> bool:
    """Return True for a number that depends on data, such as one of `Tensor.item` in a graph."""
    if isinstance(number, int) and not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return bool(guard_or_true(number > _BEYOND)) and not guard_or_false(number > _BEYOND)


def causal_of(causal: Any) -> bool:
    """Return causal as a bool. Raises TypeError for another type."""
    causal = plain(causal)
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {shown(causal)}")
    return causal


def scale_of(softmax_scale: Any) -> float:
    """A Python float; 1 / sqrt(256) for None."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(HEAD_DIM)
    return _real("softmax_scale", softmax_scale, "a real number or None")


def softcap_of(softcap: Any) -> float:
    """A Python float, 0 for none."""
    return _real("softcap", softcap, "a real number")


def _real(name: str, value: Any, accepted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {accepted}, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"{name} is too large for a float; accepted: {accepted} that is finite in float32"
        ) from None


#: Scores come out of softcap with an error of some 1e-7 of it: beyond, weights would be off. Below,
#: all weights are alike, and scores over softcap are no finite number of float32.
LARGEST_SOFTCAP, LEAST_SOFTCAP = 1e4, 1e-6
#: Of softmax_scale: beyond, float32 rounds scores by more than a weight, a power of two, can bear.
LARGEST_SCALE = 1e6


def check_options(softmax_scale: float, softcap: float) -> None:
    """Raise ValueError for a number out of range."""
    if not abs(softmax_scale) <= LARGEST_SCALE:
        raise ValueError(
            f"softmax_scale is {softmax_scale}; accepted: any number of up to {LARGEST_SCALE:g}, "
            "negative ones and 0 too"
        )
    if softcap != 0 and not LEAST_SOFTCAP <= softcap <= LARGEST_SOFTCAP:
        raise ValueError(
            f"softcap is {softcap}; accepted: 0 (none) or a number from {LEAST_SOFTCAP:g} to "
            f"{LARGEST_SOFTCAP:g}, since a larger one caps nothing"
        )


# ---------------------------------------------------------------- windows

#: A side without a bound, in an operator's schema. No bound of `window_of` is as small.
UNBOUNDED = -(1 << 40)
#: The largest bound that differs from none, and of negative ones the smallest: more rows than a
#: sequence has. Larger ones mean the same.
LARGEST_BOUND = 1 << 39
#: An empty window: no query sees any key.
_EMPTY: Window = (None, -LARGEST_BOUND)


#: window_size of calls without one, as most are: that very object.
NO_WINDOW: tuple[int | None, int | None] = (None, None)


class ExactWindow(NamedTuple):
    """A window_size whose -1 is a bound, as flash-attention 4 means it; None for unbounded."""

    left: int | None
    right: int | None


def window_of(window_size: Any, causal: bool = False) -> Window:
    """Return (left, right), None for unbounded, from a window_size as users give it.

    -1 means unbounded, except in an `ExactWindow`; any other negative number is a bound. causal
    sets right to 0. An empty window, left + right < 0, is always the same one.

    Raises TypeError for a side that is no int, ValueError for what is no pair.
    """
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size is {shown(window_size)}; accepted: a pair (left, right)")
    sides = [plain(side) for side in window_size]
    for side in sides:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(
                f"window_size is {shown(window_size)}; each side must be an int or None"
            )
        if side is not None and not -(1 << 63) <= side < 1 << 63:
            raise ValueError(
                f"a side of window_size is {side}; accepted: a number that fits into 64 bits"
            )
    none = None if isinstance(window_size, ExactWindow) else -1
    left, right = (None if side is None or side == none else _bound(side) for side in sides)
    if causal:
        right = 0
    is_empty = left is not None and right is not None and left + right < 0
    return _EMPTY if is_empty else (left, right)


def _bound(side: int) -> int:
    return max(min(side, LARGEST_BOUND), -LARGEST_BOUND)


def bounds_of_operator(window: Window) -> tuple[int, int]:
    """Return a window as operators' schemas take it: `UNBOUNDED` for None."""
    left, right = (UNBOUNDED if side is None else side for side in window)
    return left, right


# ---------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Options:
    """Options of a call beside q, k and v.

    softmax_scale: finite. window: keys visible to the left and right of the diagonal, of either
    sign, None for unbounded; causal is (., 0). softcap: 0 for none. score_mod, mask_mod: None for
    none. max_logits: the greatest logit of each head is a result, too.
    """

    softmax_scale: float
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    use_clc: bool = False
    score_mod: FunctionClass | None = None
    mask_mod: FunctionClass | None = None
    max_logits: bool = False

    @classmethod
    def check(
        cls, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, use_clc: bool = False
    ) -> Options:
        """The options as users give them.

        Raises TypeError, or ValueError for a window that is no pair; see `causal_of`,
        `scale_of` and `softcap_of` for what is accepted. Their ranges are checked with the tensors
        (`Problem.describe`).
        """
        is_causal = causal_of(causal)
        window = window_of(window_size, is_causal)
        scale, softcap = scale_of(softmax_scale), softcap_of(softcap)
        return cls(scale, window, softcap, use_clc)

    @classmethod
    def of_operator(
        cls, values: ForwardValues | BackwardValues, functions: tuple[FunctionClass | None, ...]
    ) -> Options:
        """Make the options from an operator's arguments, whose window is `bounds`; functions:
        score_mod and mask_mod."""
        sides = values.window_left, values.window_right
        left, right = (None if side == UNBOUNDED else side for side in sides)
        score_mod, mask_mod = functions
        return cls(
            values.softmax_scale, (left, right), values.softcap, values.use_clc, score_mod, mask_mod
        )

    @property
    def bounds(self) -> tuple[int, int]:
        """The window as an operator's schema takes it."""
        return bounds_of_operator(self.window)

    @property
    def reach(self) -> Reach:
        """Return the rows and bounds that the window leaves."""
        return Reach.of(self.window)

    def scheduled(
        self,
        use_clc: bool | None,
        rows: int = 1,
        offsets: torch.Tensor | None = None,
        longest: int | None = None,
        masked: bool = False,
    ) -> Options:
        """Return the options with the tile scheduler that a user who passes `use_clc` gets.

        rows: of queries. offsets, longest: cu_seqlens_q and max_seqlen_q where these are packed.
        masked: whether there is a block mask. Raises as `clc_requested` does.
        """
        # Rows that there are, and rows that the grid has room for.
        filling = (1, 1)
        if offsets is not None and longest is not None and not is_unknown(longest):
            filling = rows, grid_rows(rows, offsets.numel() - 1, longest, PADDING)
        bounded = masked or self.window != (None, None)
        default = prefers_clc(bounded, *filling, sms_are_shared())
        return replace(self, use_clc=clc_requested(plain(use_clc), default))


def backward_use_clc(use_clc: bool | None) -> bool:
    """Return True if the backward of a user who passes `use_clc` takes the dynamic tile scheduler.
    Raises as `clc_requested` does."""
    return clc_requested(plain(use_clc), BACKWARD_PREFERS_CLC)
