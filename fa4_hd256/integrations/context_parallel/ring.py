"""Ring attention: every rank keeps its queries, keys and values pass from rank to rank.

At hop t rank r works on the rows of rank r - t, which it has from rank r - 1, and while it does,
hands them on to r + 1. Rows that no rank further on sees are not sent, and rows that nobody sees
are not requested; under a window of both sides, whose far ranks are those just ahead, rows go the
other way round, too. In the backward the sums of dK and dV follow their rows in float32, and from
the last rank that sees these go home; a part of a rank's own rows is left for then (`own_parts`),
so that this, too, goes on beside a kernel.

Sums are made in the order of the hops, so that results have the same bits in every run.

NOTE [room for a transfer].  A transfer on GPUs is a kernel, too, which needs some SMs; attention's
takes all there are until its last tiles.  Both may begin at the same moment, when what was issued
before is done.  So short kernels stand between: after the start of a transfer and before the next
attention sums are filled with zeros, what the attention before has found is taken in, or the
backward's rows are prepared.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .exchange import Ranks, Transfer
from .local import Attended, Held, OwnRows, Settings, add_gradients
from .spans import PositionMask, Rows, SpanPart, local_rows, own_parts, parts_of, placed

__all__ = ["RingAttention", "Route", "routes"]

#: No rows in both directions.
_NOTHING: list[torch.Tensor | None] = [None, None]


class Route(NamedTuple):
    """The way of one rank's keys round the ring. step: 1 to the next rank, -1 to the one before.
    rows: those that are sent. hops: ranks that they come to, 0 for none."""

    step: int
    rows: Rows
    hops: int


@functools.lru_cache(maxsize=64)
def routes(places: tuple[Rows, ...], mask: PositionMask) -> tuple[tuple[Route, Route], ...]:
    """Return the routes of every rank's keys in both directions. places: the rows of every rank."""
    ranks = len(places)
    seen = {
        (reader, owner): _seen(places[reader], places[owner], mask)
        for reader in range(ranks)
        for owner in range(ranks)
        if reader != owner
    }
    ahead = sorted({(r - o) % ranks for (r, o), rows in seen.items() if any(rows)})
    forward = _cut(ahead, ranks)
    return tuple(
        (
            _route(owner, 1, range(1, forward + 1), seen, ranks),
            _route(owner, -1, range(1, ranks - forward), seen, ranks),
        )
        for owner in range(ranks)
    )


def _cut(distances: Sequence[int], ranks: int) -> int:
    """Return the largest distance to go forward, of distances between 1 and ranks - 1, so that with
    the others going backward rows make the fewest hops; of several such, the one with the most
    forward."""

    def hops(forward: int) -> int:
        beyond = [distance for distance in distances if distance > forward]
        within = [distance for distance in distances if distance <= forward]
        return max(within, default=0) + max((ranks - d for d in beyond), default=0)

    return min(range(ranks), key=lambda forward: (hops(forward), -forward))


def _seen(queries: Rows, keys: Rows, mask: PositionMask) -> Rows:
    """Return the part of each span of keys that some query sees."""
    found = []
    for span in keys:
        parts = parts_of(queries, (span,), mask)
        rows = range(0)
        if parts:
            begin = min(part.keys.start for part in parts)
            end = max(part.keys.stop for part in parts)
            rows = range(span.start + begin, span.start + end)
        found.append(rows)
    return tuple(found)


def _route(
    owner: int, step: int, hops: range, seen: dict[tuple[int, int], Rows], ranks: int
) -> Route:
    readers = [(hop, seen[(owner + step * hop) % ranks, owner]) for hop in hops]
    readers = [(hop, rows) for hop, rows in readers if any(rows)]
    if not readers:
        return Route(step, (), 0)
    spans = []
    for of_span in zip(*(rows for _, rows in readers)):
        given = [rows for rows in of_span if rows]
        if given:
            spans.append(range(min(r.start for r in given), max(r.stop for r in given)))
    return Route(step, tuple(spans), max(hop for hop, _ in readers))


class _Passing:
    """Rows on their way in one direction, seen from one rank.

    It holds rows of owner `owner(hop)` at a hop, which it has from rank `before` and hands on to
    `after`.
    """

    def __init__(self, ranks: Ranks, all_routes: Sequence[tuple[Route, Route]], direction: int):
        self._ranks = ranks
        self._routes = [of_owner[direction] for of_owner in all_routes]
        self.step = self._routes[0].step
        self.after = (ranks.own + self.step) % ranks.count
        self.before = (ranks.own - self.step) % ranks.count
        self.hops = max(route.hops for route in self._routes)

    def route(self, hop: int) -> Route | None:
        """Return the route of the rows that come to this rank at a hop, at hop 0 of its own; None
        if none come."""
        found = self._routes[self.owner(hop)]
        return found if found.hops and hop <= found.hops else None

    def rows(self, hop: int) -> Rows:
        """The rows that come at a hop, as positions."""
        route = self.route(hop)
        return () if route is None else route.rows

    def owner(self, hop: int) -> int:
        return (self._ranks.own - self.step * hop) % self._ranks.count

    def own_rows(self, kv: Held, held: Rows) -> torch.Tensor | None:
        """Return (2, batch, rows, heads_kv, 256) of k and v that this rank sends, contiguous."""
        route = self.route(0)
        if route is None:
            return None
        places = [local_rows(held, rows) for rows in route.rows]
        return torch.stack([torch.cat([t[:, p.start : p.stop] for p in places], dim=1) for t in kv])

    def room(self, like: torch.Tensor, hop: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a buffer for the rows of a hop: (2, batch, rows, heads_kv, 256)."""
        route = self.route(hop)
        if route is None:
            return None
        batch, _, heads, dim = like.shape
        rows = sum(map(len, self.rows(hop)))
        return torch.empty(2, batch, rows, heads, dim, dtype=dtype, device=like.device)

    def is_last(self, hop: int) -> bool:
        """Return True if rows that come at a hop go no further."""
        route = self.route(hop)
        return route is not None and hop == route.hops


class RingAttention:
    """One rank's walk round the ring: hops, what comes and goes at each."""

    def __init__(self, ranks: Ranks, order: str, rows: int, settings: Settings) -> None:
        self.ranks, self.mask = ranks, settings.mask
        places = placed(order, ranks.count, rows)
        self.own = places[ranks.own]
        found = routes(places, self.mask)
        self.ways = [_Passing(ranks, found, direction) for direction in (0, 1)]
        self.hops = max(way.hops for way in self.ways)

    def parts(self, rows: Rows) -> tuple[SpanPart, ...]:
        """Return the parts of the sequence that this rank's queries see."""
        return parts_of(self.own, rows, self.mask)

    def first(self, kv: Held) -> list[torch.Tensor | None]:
        """Return, for each direction, the rows that this rank sends first."""
        return [way.own_rows(kv, self.own) for way in self.ways]

    def pass_on(
        self, held: Sequence[torch.Tensor | None], hop: int, like: torch.Tensor
    ) -> tuple[Transfer, list[torch.Tensor | None]]:
        """Hand on what is held at a hop; what will be at the next one, once the transfer is done.
        like: k."""
        sends, receives, rooms = [], [], []
        for way, tensor in zip(self.ways, held, strict=True):
            if tensor is not None and not way.is_last(hop):
                sends.append((tensor, way.after))
            room = way.room(like, hop + 1, like.dtype)
            if room is not None:
                receives.append((room, way.before))
            rooms.append(room)
        return self.ranks.start(sends, receives), rooms

    def send_sums(
        self, sums: Sequence[torch.Tensor | None], hop: int, like: torch.Tensor
    ) -> tuple[Transfer, list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Hand on, or send home, the sums of dK and dV of what is held at a hop.

        Returns what is to be waited for; for each way the sums that belong to the next hop's rows,
        and those of this rank's own rows, where their last rank was at this hop.
        """
        sends, receives = [], []
        nexts: list[torch.Tensor | None] = []
        homes: list[torch.Tensor | None] = []
        for way, tensor in zip(self.ways, sums, strict=True):
            if tensor is not None:
                to = way.owner(hop) if way.is_last(hop) else way.after
                sends.append((tensor, to))
            # The rank before has added to these by then; at hop 0 nobody has.
            following = way.room(like, hop + 1, torch.float32)
            if following is not None:
                receives.append((following, way.before))
            nexts.append(following)
            own, home = way.route(0), None
            if own is not None and own.hops == hop:
                home = way.room(like, 0, torch.float32)
                assert home is not None
                last = (self.ranks.own + way.step * hop) % self.ranks.count
                receives.append((home, last))
            homes.append(home)
        return self.ranks.start(sends, receives), nexts, homes

    def attend(self, q: torch.Tensor, kv: Held, settings: Settings) -> Attended:
        """Return out and lse of this rank's queries over all keys. kv: k and v of this rank."""
        k = kv[0]
        transfer, held = self.pass_on(self.first(kv), 0, k)
        attended = Attended(q)
        attended.add(q, kv, self.parts(self.own), settings)
        for hop in range(1, self.hops + 1):
            transfer.wait()
            arrived = held
            transfer, held = self.pass_on(arrived, hop, k)
            for way, tensor in zip(self.ways, arrived, strict=True):
                if tensor is not None:
                    parts = self.parts(way.rows(hop))
                    attended.add(q, (tensor[0], tensor[1]), parts, settings)
        transfer.wait()
        return attended

    def gradients(
        self, own: OwnRows, kv: Held, settings: Settings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 (dq, dkv) of this rank's rows; dkv: (2, batch, rows, heads_kv, 256)."""
        k = kv[0]
        # Without a hop there is nothing to work beside.
        at_begin, at_end = (
            own_parts(self.own, self.mask) if self.hops else (self.parts(self.own), ())
        )
        transfer, held = self.pass_on(self.first(kv), 0, k)
        dq = torch.zeros(own.q.shape, dtype=torch.float32, device=k.device)
        dkv = torch.zeros(2, *k.shape, dtype=torch.float32, device=k.device)
        add_gradients(own, kv, (dq, dkv), at_begin, settings)
        summing, before, homes = Transfer(), _NOTHING, _NOTHING
        for hop in range(1, self.hops + 1):
            transfer.wait()
            arrived = held
            transfer, held = self.pass_on(arrived, hop, k)
            sums = [None if t is None else torch.zeros_like(t, dtype=dq.dtype) for t in arrived]
            for way, tensor, total in zip(self.ways, arrived, sums, strict=True):
                if tensor is not None and total is not None:
                    parts = self.parts(way.rows(hop))
                    add_gradients(own, (tensor[0], tensor[1]), (dq, total), parts, settings)
            summing.wait()
            for total, earlier in zip(sums, before, strict=True):
                if total is not None and earlier is not None:
                    total += earlier
            self._bring_home(dkv, homes)
            summing, before, homes = self.send_sums(sums, hop, k)
        add_gradients(own, kv, (dq, dkv), at_end, settings)
        transfer.wait()
        summing.wait()
        self._bring_home(dkv, homes)
        return dq, dkv

    def _bring_home(self, dkv: torch.Tensor, homes: Sequence[torch.Tensor | None]) -> None:
        """Add the sums of rows that were sent away."""
        for way, home in zip(self.ways, homes, strict=True):
            if home is None:
                continue
            begin = 0
            for rows in way.rows(0):
                place = local_rows(self.own, rows)
                dkv[:, :, place.start : place.stop] += home[:, :, begin : begin + len(rows)]
                begin += len(rows)
