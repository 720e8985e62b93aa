"""Cases with score_mods that people train with, each said twice: in CuTe DSL, as `score_mod=` of
ours takes it, and in PyTorch, as FlexAttention does.

The latter is what results are compared with, too, and where something is only added, what the
dense bias of SDPA is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import cutlass
import cutlass.cute as cute
import torch

from bench.suite import GEMMA_HEADS, Case
from fa4_hd256.score_mods import ScoreMod, alibi

#: Cap of `Capped`: Gemma 2's 50 would leave random ones as they are, and a wrong slope unseen.
CAP = 5.0
#: Distances that `Distances` tells from each other; the last one is that of all beyond.
TABLE = 128

#: (score, batch entry, head, query, key) -> score, tensors that broadcast.
TorchFunction = Callable[[Any, Any, Any, Any, Any], torch.Tensor]


class ScoreFunction(Protocol):
    """A score_mod. added: whether what it does is to add a number of each head, query and key,
    which a dense bias says as well."""

    added: ClassVar[bool]

    @property
    def text(self) -> str:
        """Return the name in tables."""

    def score_mod(self, heads: int, device: torch.device) -> ScoreMod:
        """Return the function as our operator takes it."""

    def torch_function(self, heads: int, device: torch.device) -> TorchFunction:
        """Return the function as FlexAttention takes it."""


@dataclass(frozen=True)
class Alibi:
    """ALiBi with the slopes of its paper, of as many heads as a power of two."""

    added: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return "ALiBi"

    def _slopes(self, heads: int, device: torch.device) -> torch.Tensor:
        """Return (heads,) float32."""
        return torch.exp2(-8 * (torch.arange(heads, device=device) + 1.0) / heads)

    def score_mod(self, heads: int, device: torch.device) -> ScoreMod:
        return alibi(self._slopes(heads, device))

    def torch_function(self, heads: int, device: torch.device) -> TorchFunction:
        slopes = self._slopes(heads, device)
        return lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()


def _of_distance(score: Any, place: Any, tensors: tuple) -> Any:
    distance = cutlass.max(cutlass.min(place.query - place.key, TABLE - 1), 0)
    return score + tensors[0][place.head, distance]


@dataclass(frozen=True)
class Distances:
    """A learned number for each head and distance, as T5 has them, one load for each score."""

    added: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return f"table of {TABLE} distances"

    def _table(self, heads: int, device: torch.device) -> torch.Tensor:
        """Return (heads, TABLE) float32."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(heads, TABLE, generator=generator).to(device)

    def score_mod(self, heads: int, device: torch.device) -> ScoreMod:
        return ScoreMod.of(_of_distance, tensors=(self._table(heads, device),))

    def torch_function(self, heads: int, device: torch.device) -> TorchFunction:
        table = self._table(heads, device)
        return lambda score, b, h, q, k: score + table[h, (q - k).clamp(0, TABLE - 1)]


def _capped(score: Any, place: Any, tensors: tuple) -> Any:
    return CAP * cute.math.tanh(score / CAP)


def _slope_of_capped(score: Any, place: Any, tensors: tuple) -> Any:
    tanh = cute.math.tanh(score / CAP)
    return 1.0 - tanh * tanh


@dataclass(frozen=True)
class Capped:
    """Softcap as a function, with its slope."""

    added: ClassVar[bool] = False

    @property
    def text(self) -> str:
        return f"tanh, cap {CAP:g}"

    def score_mod(self, heads: int, device: torch.device) -> ScoreMod:
        return ScoreMod.of(_capped, _slope_of_capped)

    def torch_function(self, heads: int, device: torch.device) -> TorchFunction:
        return lambda score, b, h, q, k: CAP * torch.tanh(score / CAP)


@dataclass(frozen=True)
class ScoredCase(Case):
    """A causal `Case` with a score_mod; of as many queries as keys, not packed."""

    function: ScoreFunction = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = self.bounds == (None, 0) and not self.softcap and not self.page_size
        if self.packed or not plain or self._is_unequal:
            raise ValueError(
                f"{self.group}: a score_mod beside packed sequences, a window, softcap, "
                "pages, other lengths of keys or without causal; accepted: causal alone"
            )

    @property
    def mask(self) -> str:
        return f"causal, {self.function.text}"

    @property
    def plain(self) -> Case:
        """Return the case without the function."""
        return Case(self.group, self.lengths, self.heads, self.heads_kv, True)

    @property
    def capped(self) -> Case:
        """`plain` with the softcap that `Capped` is."""
        return Case(self.group, self.lengths, self.heads, self.heads_kv, True, softcap=CAP)

    def score_mod(self, device: torch.device) -> ScoreMod:
        return self.function.score_mod(self.heads, device)

    def torch_function(self, device: torch.device) -> TorchFunction:
        return self.function.torch_function(self.heads, device)

    def of_part(self, sequence: int, first_row: int, heads: tuple[int, ...]) -> TorchFunction:
        """Return the function, on the CPU, of some rows and heads of a sequence, which are counted
        from 0."""
        whole, numbers = self.torch_function(torch.device("cpu")), torch.tensor(heads)
        return lambda score, b, h, q, k: whole(score, b + sequence, numbers[h], q + first_row, k)

    def bias(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return (1, heads, seqlen, seqlen): what is added to scores, -inf where nothing is seen;
        rounded to dtype. Raises ValueError for a function that does more than add."""
        if not self.function.added:
            raise ValueError(f"{self.mask} is no bias; accepted: a function that adds")
        function, tokens = self.torch_function(device), torch.arange(self.seqlen_q, device=device)
        queries, none = tokens[:, None], torch.zeros((), device=device)
        seen = tokens <= queries
        found = torch.empty(1, self.heads, *seen.shape, device=device, dtype=dtype)
        for head in range(self.heads):
            of_head = function(none, 0, head, queries, tokens)
            found[0, head] = of_head.masked_fill(~seen, -torch.inf)
        return found


#: Cases of `python -m bench masks` beside masks.
SCORED_CASES = tuple(
    ScoredCase("scores", ((4096, 4096),) * 4, *heads, True, function=function)
    for function, heads in ((Alibi(), (16, 16)), (Distances(), (16, 16)), (Capped(), GEMMA_HEADS))
)
