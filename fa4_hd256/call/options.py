"""Options of a call: numbers as users give them, windows, and all that the description of a call
keeps of them (`Options`)."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kernels.limits import HEAD_DIM
from ..kernels.mask.windows import Window
from ..kernels.problem_class import FunctionClass
from ..kernels.small.combine_config import MOST_PARTS
from ..words import shown
from .operator_arguments import ForwardValues

# ---------------------------------------------------------------- numbers

#: No number of rows is greater.
_BEYOND = 1 << 40


def plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def flags_of(**given: Any) -> list[bool]:
    """Return arguments that are True or False, in order. Raises TypeError for another one."""
    flags = {name: plain(value) for name, value in given.items()}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {shown(flag)}")
    return list(flags.values())


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


# ---------------------------------------------------------------- KV splits

#: num_splits of a caller who leaves the choice to the operator (`division.splits_for`).
BY_RULE = 0
#: What the operator gets in place of a number of splits: `division`, NOTE [fixed splits].
FIXED_SPLITS = -1
#: The most KV splits of a tile that a call can request.
MOST_SPLITS = MOST_PARTS


def requested_splits(num_splits: Any, batch_invariant: Any) -> Any:
    """Return the operator's argument for these two of a user: `FIXED_SPLITS`, or num_splits as it
    was given. Raises TypeError for a batch_invariant that is no bool, and ValueError for a number
    of splits beside it."""
    num_splits, batch_invariant = plain(num_splits), plain(batch_invariant)
    if batch_invariant is True:
        if type(num_splits) is not int or num_splits != BY_RULE:
            raise ValueError(
                f"num_splits is {shown(num_splits)} with batch_invariant=True, which divides "
                f"keys by itself; accepted: {BY_RULE}. Results of a given number of KV splits do "
                "not depend on the batch in any case"
            )
        return FIXED_SPLITS
    flags_of(batch_invariant=batch_invariant)
    if type(num_splits) is int and num_splits == FIXED_SPLITS:
        raise _refusal(num_splits)
    return num_splits


def check_beside_list(num_splits: int) -> None:
    """Raise ValueError unless num_splits is left to scheduler metadata."""
    if num_splits != BY_RULE:
        raise ValueError(
            f"{'batch_invariant' if num_splits == FIXED_SPLITS else 'num_splits'} is given with "
            "scheduler_metadata, which has the KV splits; accepted: one of them"
        )


def check_num_splits(num_splits: int) -> int:
    """Return the operator's number as it is. Raises ValueError if it is not accepted."""
    if not 0 <= num_splits <= MOST_SPLITS and num_splits != FIXED_SPLITS:
        raise _refusal(num_splits)
    return num_splits


def _refusal(num_splits: int) -> ValueError:
    return ValueError(
        f"num_splits is {num_splits}; accepted: 1 (none) to {MOST_SPLITS}, or {BY_RULE} to leave "
        "the choice to the operator"
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


def sides_of(window_size: Any) -> list[int | None]:
    """Return the two sides of a window_size as users give them.

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
    return sides


def window_of(window_size: Any, causal: bool = False) -> Window:
    """Return (left, right), None for unbounded, from a window_size as users give it.

    -1 means unbounded, except in an `ExactWindow`; any other negative number is a bound. causal
    sets right to 0. An empty window, left + right < 0, is always the same one.

    Raises TypeError for a side that is no int, ValueError for what is no pair.
    """
    sides = sides_of(window_size)
    none = None if isinstance(window_size, ExactWindow) else -1
    left, right = (
        None if side is None or side == none else max(min(side, LARGEST_BOUND), -LARGEST_BOUND)
        for side in sides
    )
    if causal:
        right = 0
    is_empty = left is not None and right is not None and left + right < 0
    return _EMPTY if is_empty else (left, right)


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
        """Return the options of a user: causal a bool, softmax_scale a real number or None for
        1 / sqrt(256), window_size as of `window_of`, softcap a real number.

        Raises TypeError for other kinds, ValueError for a window that is no pair. Ranges are
        checked with the tensors (`Problem.describe`).
        """
        (causal,) = flags_of(causal=causal)
        window = window_of(window_size, causal)
        scale = 1.0 / math.sqrt(HEAD_DIM)
        if softmax_scale is not None:
            scale = _real("softmax_scale", softmax_scale, "a real number or None")
        return cls(scale, window, _real("softcap", softcap, "a real number"), use_clc)

    @classmethod
    def of_operator(
        cls, values: ForwardValues, functions: tuple[FunctionClass | None, ...]
    ) -> Options:
        """Make the options from an operator's values; functions: score_mod and mask_mod."""
        sides = values.window_left, values.window_right
        left, right = (None if side == UNBOUNDED else side for side in sides)
        score_mod, mask_mod = functions
        return cls(
            values.softmax_scale, (left, right), values.softcap, values.use_clc, score_mod, mask_mod
        )

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the window as operators' schemas take it: `UNBOUNDED` for None."""
        left, right = (UNBOUNDED if side is None else side for side in self.window)
        return left, right
