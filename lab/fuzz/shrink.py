"""The smallest variant of a program on which two machines still differ.

Delta debugging (Zeller and Hildebrandt, 2002) over the pieces of many programs at once: a round
tries chunks of each program's pieces, then the largest union of those that may go, so that one run
of all candidates on each machine serves every program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .families import program
from .outcome import Outcome, Variant

#: Runs candidates: outcomes by key.
Runner = Callable[[list[Variant]], "dict[str, Outcome]"]
#: Parts into which the pieces are cut, round by round; the last is repeated until nothing goes.
_PARTS = (4, 16, 1 << 30)
_ROUNDS = 8


@dataclass
class _Search:
    """State of one program: pieces known to be unneeded, the round's cut, whether it is done."""

    name: str
    dropped: frozenset[int]
    level: int = 0
    done: bool = False
    removable: list[frozenset[int]] = field(default_factory=list)

    def variant(self, more: Iterable[int] = ()) -> Variant:
        """The program without what is known and `more`."""
        return Variant(self.name, tuple(sorted(self.dropped | set(more))))

    def chunks(self) -> list[frozenset[int]]:
        """Sets of pieces to try; a piece that is gone takes those inside it along."""
        left = [
            n
            for n, piece in enumerate(program(self.name).numbered())
            if not piece.fixed and n not in self.dropped
        ]
        size = max(1, len(left) // _PARTS[self.level])
        return [frozenset(left[start : start + size]) for start in range(0, len(left), size)]

    def advance(self, gone: frozenset[int]) -> None:
        self.dropped |= gone
        last = self.level == len(_PARTS) - 1
        self.done = last and not gone
        self.level = min(self.level + 1, len(_PARTS) - 1)


def shrink(variants: Iterable[Variant], one: Runner, other: Runner) -> dict[Variant, Variant]:
    """The smallest variants found of programs on which the two runners differ. They differ as the
    whole program does: in their outputs, or in the same states."""
    variants = list(variants)

    def states(candidates: list[Variant]) -> dict[Variant, tuple[str, str]]:
        mine, theirs = one(candidates), other(candidates)
        return {
            v: (mine[v.key].state, theirs[v.key].state)
            for v in candidates
            if not mine[v.key].agrees(theirs[v.key])
        }

    wanted = {v.name: pair for v, pair in states(variants).items()}

    def differ(candidates: list[Variant]) -> set[Variant]:
        return {v for v, pair in states(candidates).items() if pair == wanted[v.name]}

    variants = [v for v in variants if v.name in wanted]
    searches = {v: _Search(v.name, frozenset(v.dropped)) for v in variants}
    for _ in range(_ROUNDS):
        active = [search for search in searches.values() if not search.done]
        if not active:
            break
        _round(active, differ)
    return {v: search.variant() for v, search in searches.items()}


def _round(active: list[_Search], differ: Callable[[list[Variant]], set[Variant]]) -> None:
    """Try every chunk of every program, then the unions of those that can go."""
    tried = {search.variant(chunk): None for search in active for chunk in search.chunks()}
    failing = differ(list(tried))
    unions: dict[Variant, None] = {}
    for search in active:
        search.removable = [c for c in search.chunks() if search.variant(c) in failing]
        for count in range(2, len(search.removable) + 1):
            unions[search.variant(frozenset().union(*search.removable[:count]))] = None
    failing |= differ(list(unions)) if unions else set()
    for search in active:
        gone: frozenset[int] = frozenset()
        for count in range(len(search.removable), 0, -1):
            union = frozenset().union(*search.removable[:count])
            if search.variant(union) in failing:
                gone = union
                break
        search.advance(gone)
