"""Cases with score_mods that people train with, each said twice: in CuTe DSL, as `score_mod=` of
ours takes it, and in PyTorch, as FlexAttention does.

The latter is what results are compared with, too, and where something is only added, what the
dense bias of SDPA is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch

from bench.suite import GEMMA_HEADS, Case, equal
from fa4_hd256.score_mods import ScoreMod, alibi

#: Cap of `CAPPED`: Gemma 2's 50 would leave random ones as they are, and a wrong slope unseen.
CAP = 5.0
#: Distances that `DISTANCES` tells from each other; the last one is that of all beyond.
TABLE = 128

#: (score, batch entry, head, query, key) -> score, tensors that broadcast.
TorchFunction = Callable[[Any, Any, Any, Any, Any], torch.Tensor]


class ScoreFunction(NamedTuple):
    """A score_mod. text: its name in tables. added: whether it adds a number of each head, query
    and key, which a dense bias says as well. score_mod, torch_function: from (heads, device) to the
    function as our operator and as FlexAttention take it."""

    text: str
    added: bool
    score_mod: Callable[[int, torch.device], ScoreMod]
    torch_function: Callable[[int, torch.device], TorchFunction]


def _slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Return ALiBi's slopes by its paper, for as many heads as a power of two, float32."""
    return torch.exp2(-8 * (torch.arange(heads, device=device) + 1.0) / heads)


def _alibi(heads: int, device: torch.device) -> TorchFunction:
    slopes = _slopes(heads, device)
    return lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()


def _table(heads: int, device: torch.device) -> torch.Tensor:
    """Return (heads, TABLE) float32: a learned number for each head and distance, as T5's."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(heads, TABLE, generator=generator).to(device)


def _of_distance(score: Any, place: Any, tensors: tuple) -> Any:
    distance = cutlass.max(cutlass.min(place.query - place.key, TABLE - 1), 0)
    return score + tensors[0][place.head, distance]


def _distances(heads: int, device: torch.device) -> TorchFunction:
    table = _table(heads, device)
    return lambda score, b, h, q, k: score + table[h, (q - k).clamp(0, TABLE - 1)]


def _capped(score: Any, place: Any, tensors: tuple) -> Any:
    return CAP * cute.math.tanh(score / CAP)


def _slope_of_capped(score: Any, place: Any, tensors: tuple) -> Any:
    tanh = cute.math.tanh(score / CAP)
    return 1.0 - tanh * tanh


ALIBI = ScoreFunction("ALiBi", True, lambda *of: alibi(_slopes(*of)), _alibi)
#: One load for each score.
DISTANCES = ScoreFunction(
    f"table of {TABLE} distances", True,
    lambda *of: ScoreMod.of(_of_distance, tensors=(_table(*of),)), _distances,
)  # fmt: skip
#: Softcap as a function, with its slope.
CAPPED = ScoreFunction(
    f"tanh, cap {CAP:g}", False, lambda *of: ScoreMod.of(_capped, _slope_of_capped),
    lambda *of: lambda score, b, h, q, k: CAP * torch.tanh(score / CAP),
)  # fmt: skip


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
        """Return `plain` with the softcap that `CAPPED` is."""
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
    ScoredCase("scores", equal(4, 4096), *heads, True, function=function)
    for function, heads in ((ALIBI, (16, 16)), (DISTANCES, (16, 16)), (CAPPED, GEMMA_HEADS))
)
