"""Ring attention: queries stay on their rank; keys and values pass from rank to rank.

At hop t rank r attends to the keys of rank r - t, received from rank r - 1, and sends them on to
rank r + 1 meanwhile. Rows go no further than the last rank that sees them. With a window that
reaches ahead, some readers are nearer in the other direction: rows then pass both ways.

In the backward the float32 sums of dK and dV follow their rows, and the last rank that sees the
rows sends the sums to the owner. Each rank keeps a part of its local work for that time
(`local_parts`), so that this transfer overlaps with a kernel, too.

Sums are added in the order of hops, so results have the same bits in every run.

NOTE [room for a transfer].  A transfer between GPUs is a kernel, and needs some SMs.  An attention
kernel holds all SMs until its last tiles.  If both become ready at the same moment, the transfer
may have to wait.  So a short kernel is launched between the start of a transfer and the next
attention: one that zeroes sums, merges the last result, or prepares rows of the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .exchange import Ranks, Transfer
from .local import Attended, KeysValues, LocalResults, Settings, add_gradients
from .spans import PositionMask, Rows, SpanPart, local_parts, local_rows, parts_of, spans_by_rank

#: No rows in both directions.
_NOTHING: list[torch.Tensor | None] = [None, None]


class Route(NamedTuple):
    """The way of one rank's keys. step: 1 or -1. rows: positions that are sent. hops: receivers."""

    step: int
    rows: Rows
    hops: int


@functools.lru_cache(maxsize=64)
def routes(division: tuple[Rows, ...], mask: PositionMask) -> tuple[tuple[Route, Route], ...]:
    """Return the routes of every rank's keys, forward and backward. division: rows by rank."""
    ranks = len(division)
    seen = {
        (reader, owner): _seen(division[reader], division[owner], mask)
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
    """Return the largest distance that rows travel forward, not backward: that with the fewest
    hops, then the largest. distances: of readers from owners, 1 to ranks - 1."""

    def hops(forward: int) -> int:
        beyond = [distance for distance in distances if distance > forward]
        within = [distance for distance in distances if distance <= forward]
        return max(within, default=0) + max((ranks - d for d in beyond), default=0)

    return min(range(ranks), key=lambda forward: (hops(forward), -forward))


def _seen(queries: Rows, keys: Rows, mask: PositionMask) -> Rows:
    seen = []
    for span in keys:
        rows = [part.keys for part in parts_of(queries, (span,), mask)]
        inside = _around(rows) if rows else range(0)
        seen.append(range(span.start + inside.start, span.start + inside.stop))
    return tuple(seen)


def _around(rows: Sequence[range]) -> range:
    return range(min(each.start for each in rows), max(each.stop for each in rows))


def _route(
    owner: int, step: int, hops: range, seen: dict[tuple[int, int], Rows], ranks: int
) -> Route:
    readers = [(hop, seen[(owner + step * hop) % ranks, owner]) for hop in hops]
    readers = [(hop, rows) for hop, rows in readers if any(rows)]
    if not readers:
        return Route(step, (), 0)
    by_span = ([rows for rows in span if rows] for span in zip(*(rows for _, rows in readers)))
    spans = tuple(_around(rows) for rows in by_span if rows)
    return Route(step, spans, max(hop for hop, _ in readers))


class _Passing:
    """Rows that pass one rank in one direction. At a hop the rank holds rows of rank `owner(hop)`.
    It has received them from rank `before`, and sends them to rank `after`."""

    def __init__(self, ranks: Ranks, all_routes: Sequence[tuple[Route, Route]], direction: int):
        self._ranks = ranks
        self._routes = [of_owner[direction] for of_owner in all_routes]
        self.step = self._routes[0].step
        self.after = (ranks.rank + self.step) % ranks.count
        self.before = (ranks.rank - self.step) % ranks.count
        self.hops = max(route.hops for route in self._routes)

    def route(self, hop: int) -> Route | None:
        """Return the route of the rows held at a hop, at hop 0 its own; None if it holds none."""
        route = self._routes[self.owner(hop)]
        return route if route.hops and hop <= route.hops else None

    def rows(self, hop: int) -> Rows:
        route = self.route(hop)
        return () if route is None else route.rows

    def owner(self, hop: int) -> int:
        return (self._ranks.rank - self.step * hop) % self._ranks.count

    def first_rows(self, kv: KeysValues, held: Rows) -> torch.Tensor | None:
        route = self.route(0)
        if route is None:
            return None
        sent = [local_rows(held, rows) for rows in route.rows]
        return torch.stack([torch.cat([t[:, r.start : r.stop] for r in sent], dim=1) for t in kv])

    def room(self, like: torch.Tensor, hop: int, dtype: torch.dtype) -> torch.Tensor | None:
        route = self.route(hop)
        if route is None:
            return None
        batch, _, heads, dim = like.shape
        rows = sum(map(len, self.rows(hop)))
        return torch.empty(2, batch, rows, heads, dim, dtype=dtype, device=like.device)

    def is_last(self, hop: int) -> bool:
        route = self.route(hop)
        return route is not None and hop == route.hops


class RingAttention:
    """Ring attention of one rank: its hops, and what it sends and receives at each."""

    def __init__(self, ranks: Ranks, rows: int, settings: Settings) -> None:
        self.ranks, self.settings, self.mask = ranks, settings, settings.mask
        division = spans_by_rank(settings.order, ranks.count, rows)
        self.local = division[ranks.rank]
        all_routes = routes(division, self.mask)
        self.ways = [_Passing(ranks, all_routes, direction) for direction in (0, 1)]
        self.hops = max(way.hops for way in self.ways)

    def parts(self, rows: Rows) -> tuple[SpanPart, ...]:
        return parts_of(self.local, rows, self.mask)

    def first(self, kv: KeysValues) -> list[torch.Tensor | None]:
        return [way.first_rows(kv, self.local) for way in self.ways]

    def pass_on(
        self, held: Sequence[torch.Tensor | None], hop: int, like: torch.Tensor
    ) -> tuple[Transfer, list[torch.Tensor | None]]:
        """Start to send what is held at a hop. Return the transfer, and the buffers that hold the
        next hop's rows when it is done. like: k."""
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
        """Start to send the sums of dK and dV of the rows held at a hop: on with the rows, or, from
        the last rank, to the owner.

        Returns the transfer, and for each direction two buffers: the sums that belong to the next
        hop's rows, and the sums of the local rows if this hop is their last.
        """
        sends, receives = [], []
        nexts: list[torch.Tensor | None] = []
        returned_sums: list[torch.Tensor | None] = []
        for way, tensor in zip(self.ways, sums, strict=True):
            if tensor is not None:
                to = way.owner(hop) if way.is_last(hop) else way.after
                sends.append((tensor, to))
            # At the next hop the previous rank has added to these sums.
            following = way.room(like, hop + 1, torch.float32)
            if following is not None:
                receives.append((following, way.before))
            nexts.append(following)
            route, home = way.route(0), None
            if route is not None and route.hops == hop:
                home = way.room(like, 0, torch.float32)
                assert home is not None
                last = (self.ranks.rank + way.step * hop) % self.ranks.count
                receives.append((home, last))
            returned_sums.append(home)
        return self.ranks.start(sends, receives), nexts, returned_sums

    def attend(self, q: torch.Tensor, kv: KeysValues) -> Attended:
        """Return out and lse of this rank's queries over all keys. kv: k and v of this rank."""
        k = kv[0]
        transfer, held = self.pass_on(self.first(kv), 0, k)
        attended = Attended(q)
        attended.add(q, kv, self.parts(self.local), self.settings)
        for hop in range(1, self.hops + 1):
            transfer.wait()
            arrived = held
            transfer, held = self.pass_on(arrived, hop, k)
            for way, tensor in zip(self.ways, arrived, strict=True):
                if tensor is not None:
                    parts = self.parts(way.rows(hop))
                    attended.add(q, (tensor[0], tensor[1]), parts, self.settings)
        transfer.wait()
        return attended

    def gradients(self, local: LocalResults, kv: KeysValues) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 (dq, dkv) of this rank's rows; dkv: (2, batch, rows, heads_kv, 256)."""
        k = kv[0]
        # Without hops there is no transfer to overlap with.
        at_start, at_end = (
            local_parts(self.local, self.mask) if self.hops else (self.parts(self.local), ())
        )
        transfer, held = self.pass_on(self.first(kv), 0, k)
        dq = torch.zeros(local.q.shape, dtype=torch.float32, device=k.device)
        dkv = torch.zeros(2, *k.shape, dtype=torch.float32, device=k.device)
        add_gradients(local, kv, (dq, dkv), at_start, self.settings)
        summing, before, returned_sums = Transfer(), _NOTHING, _NOTHING
        for hop in range(1, self.hops + 1):
            transfer.wait()
            arrived = held
            transfer, held = self.pass_on(arrived, hop, k)
            sums = [None if t is None else torch.zeros_like(t, dtype=dq.dtype) for t in arrived]
            for way, tensor, total in zip(self.ways, arrived, sums, strict=True):
                if tensor is not None and total is not None:
                    parts = self.parts(way.rows(hop))
                    add_gradients(local, (tensor[0], tensor[1]), (dq, total), parts, self.settings)
            summing.wait()
            for total, earlier in zip(sums, before, strict=True):
                if total is not None and earlier is not None:
                    total += earlier
            self._add_returned(dkv, returned_sums)
            summing, before, returned_sums = self.send_sums(sums, hop, k)
        add_gradients(local, kv, (dq, dkv), at_end, self.settings)
        transfer.wait()
        summing.wait()
        self._add_returned(dkv, returned_sums)
        return dq, dkv

    def _add_returned(
        self, dkv: torch.Tensor, returned_sums: Sequence[torch.Tensor | None]
    ) -> None:
        for way, home in zip(self.ways, returned_sums, strict=True):
            if home is None:
                continue
            begin = 0
            for rows in way.rows(0):
                inside = local_rows(self.local, rows)
                dkv[:, :, inside.start : inside.stop] += home[:, :, begin : begin + len(rows)]
                begin += len(rows)
