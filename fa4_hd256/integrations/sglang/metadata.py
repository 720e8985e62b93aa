"""Facts of a step that its layers share, built from SGLang's tensors without waiting for a device.

`req_to_token` has a row for each request: the slot of the key and value of each position. A page is
as many slots in a row as it has rows, so the slot of a page's first row names the page.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch


@dataclass(frozen=True)
class ImageRows:
    """Images of a step whose rows see each other: each is a sequence that ends with the image.

    rows: (n,) int64, places of the images' rows in q. requests: (images,) int64, places of their
    requests in the batch. starts: (images + 1,) int32, offsets of rows. ends: (images,) int32, keys
    up to an image's end. longest, furthest: bounds of its rows and of its keys.
    """

    rows: torch.Tensor
    requests: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    longest: int
    furthest: int

    @classmethod
    def of(
        cls,
        spans: Iterable[tuple[int, int, int]],
        new: Sequence[int],
        before: Sequence[int],
        device: torch.device,
    ) -> ImageRows | None:
        """Return the images that lie in a step as a whole, or None. spans: (request, first, last)
        positions of an image. new, before: rows of each request in the step, and before it. An
        image that a step has a part of stays causal, as in SGLang."""
        begins = [0, *itertools.accumulate(new)]
        whole = [
            (request, first, last)
            for request, first, last in spans
            if before[request] <= first and last < before[request] + new[request]
        ]
        if not whole:
            return None
        counts = [last + 1 - first for _, first, last in whole]
        places = [
            begins[request] + position - before[request]
            for request, first, last in whole
            for position in range(first, last + 1)
        ]

        def tensor(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        ends = [last + 1 for _, _, last in whole]
        return cls(
            tensor(places, torch.int64),
            tensor([request for request, _, _ in whole], torch.int64),
            tensor([0, *itertools.accumulate(counts)], torch.int32),
            tensor(ends, torch.int32),
            max(counts),
            max(ends),
        )

    def keys_of(self, page_table: torch.Tensor) -> dict[str, Any]:
        return {
            "cu_seqlens_q": self.starts,
            "max_seqlen_q": self.longest,
            "seqused_k": self.ends,
            "max_seqlen_k": self.furthest,
            "page_table": page_table[self.requests],
        }


@dataclass(frozen=True)
class EngineStep:
    """Queries and keys of the sequences of a step.

    cu_seqlens_q: (sequences + 1,) int32 offsets of queries. seqused_k: (sequences,) int32 keys, or
    (draft steps, sequences). max_seqlen_q, max_seqlen_k: bounds of both. page_table: (sequences,
    pages) int32.

    Of layers with a sliding window: window_table, the same of their cache where it is another one;
    window_slots, (rows,) int64 or (draft steps, rows), where new rows go there; window_first,
    (sequences,) int32, the first key that a bidirectional block sees.

    tree_mask: words of drafts in a tree. node_starts, node_keys, node_table: then layers with a
    sliding window have one sequence for each node, in pages of one row (`node_tables`). images:
    those whose rows see each other.
    """

    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    seqused_k: torch.Tensor
    max_seqlen_k: int
    page_table: torch.Tensor
    window_table: torch.Tensor | None = None
    window_slots: torch.Tensor | None = None
    window_first: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    node_starts: torch.Tensor | None = None
    node_keys: torch.Tensor | None = None
    node_table: torch.Tensor | None = None
    images: ImageRows | None = None

    def of_draft(self, step: int) -> EngineStep:
        """Return one step of a draft, which shares the tables."""
        slots = None if self.window_slots is None else self.window_slots[step]
        return replace(self, seqused_k=self.seqused_k[step], window_slots=slots)

    def tensors(self) -> dict[str, torch.Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


class Tables:
    """Page tables of requests. req_to_token: (requests, positions) int32. to_window: translates
    slots to those of the cache of layers with a sliding window; None if it is the same cache."""

    def __init__(
        self,
        req_to_token: torch.Tensor,
        page_size: int,
        to_window: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.req_to_token, self.page_size, self._to_window = req_to_token, page_size, to_window
        self.positions = req_to_token.shape[1]
        self._columns = torch.arange(
            -(-self.positions // page_size), dtype=torch.int64, device=req_to_token.device
        )

    def columns(self, keys: int) -> torch.Tensor:
        return self._columns[: -(-min(keys, self.positions) // self.page_size)]

    def of_requests(self, requests: torch.Tensor, keys: int) -> dict[str, Any]:
        """Return the tables of the pages that a request's first keys take."""
        slots = self._first_slots(requests, keys)
        tables = {"page_table": self._numbers(slots)}
        if self._to_window is not None:
            tables["window_table"] = self._numbers(self._to_window(slots))
        return tables

    def write(self, step: EngineStep, requests: torch.Tensor, keys: int) -> None:
        """Write the tables of `of_requests` to those of a step, which may have more columns. Raises
        ValueError for another number of requests."""
        slots = self._first_slots(requests, keys)
        if slots.shape[0] != step.page_table.shape[0]:
            # An `out` of another shape would get other memory than the graph reads.
            raise ValueError(
                f"a batch has {slots.shape[0]} requests; accepted: {step.page_table.shape[0]}, as "
                "many as its graph has"
            )
        self._write_numbers(step.page_table, slots)
        if self._to_window is not None:
            assert step.window_table is not None
            self._write_numbers(step.window_table, self._to_window(slots))

    def of_pages(self, requests: torch.Tensor, pages: torch.Tensor) -> dict[str, Any]:
        """Return the tables of chosen pages. pages: (pages,), or (requests, pages): numbers in the
        request's row; one past its end stands for a page that is not in use."""
        first = (pages * self.page_size).clamp(max=self.positions - 1)
        slots = self.req_to_token[requests[:, None], first]
        tables = {"page_table": self._numbers(slots)}
        if self._to_window is not None:
            tables["window_table"] = self._numbers(self._to_window(slots))
        return tables

    def in_window(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self._to_window is None else self._to_window(slots)

    def _first_slots(self, requests: torch.Tensor, keys: int) -> torch.Tensor:
        """Return the slot of the first row of each page, (requests, pages) int32."""
        first = self.req_to_token[:, : min(keys, self.positions) : self.page_size]
        return first.index_select(0, requests)

    def _numbers(self, slots: torch.Tensor) -> torch.Tensor:
        return (slots if self.page_size == 1 else slots // self.page_size).to(torch.int32)

    def _write_numbers(self, table: torch.Tensor, slots: torch.Tensor) -> None:
        """Write what `_numbers` returns, without a tensor between."""
        table = table[:, : slots.shape[1]]
        if self.page_size == 1:
            table.copy_(slots)
        else:
            torch.floor_divide(slots, self.page_size, out=table)


def draft_steps(
    tables: Tables, requests: torch.Tensor, lengths: torch.Tensor, shape: tuple[int, int], keys: int
) -> EngineStep:
    """Return all steps of a draft: each branch of a request is a sequence of one query.

    requests, lengths: (requests,), keys before the draft. shape: (branches, steps), of which the
    last one has no attention. keys: the most before the draft.

    A branch has pages of its own behind the request's last whole one. SGLang copies the rest of the
    last page there, and reserves pages for all branches in order.
    """
    branches, steps = shape
    page_size, device = tables.page_size, lengths.device
    columns = tables.columns(keys + steps)
    whole = lengths // page_size
    pages = (lengths % page_size + steps + page_size - 1) // page_size
    skipped = torch.arange(branches, device=device)[None] * pages[:, None]
    is_shared = columns[None, None] < whole[:, None, None]
    chosen = columns + torch.where(is_shared, 0, skipped[..., None])
    sequences = requests.shape[0] * branches
    counts = torch.arange(1, steps, device=device)[:, None]
    return EngineStep(
        torch.arange(sequences + 1, dtype=torch.int32, device=device),
        1,
        (lengths.repeat_interleave(branches)[None] + counts).to(torch.int32),
        min(keys + steps, tables.positions),
        **tables.of_pages(requests.repeat_interleave(branches), chosen.flatten(0, 1)),
    )


def tree_of(mask: torch.Tensor, lengths: torch.Tensor, nodes: int, of_nodes: bool) -> torch.Tensor:
    """Return which node sees which, (requests, nodes, nodes) bool. mask: flat. of_nodes: it has
    nodes x nodes values a request, else nodes x (length + nodes), keys before the tree among them.
    A request of padding, behind the mask, has anything."""
    requests, device = lengths.shape[0], lengths.device
    node = torch.arange(nodes, device=device)
    if of_nodes:
        begin = torch.arange(requests, device=device) * nodes**2
        places = begin[:, None, None] + node[:, None] * nodes + node
    else:
        widths = lengths.to(torch.int64) + nodes
        begin = nodes * (widths.cumsum(0) - widths)
        rows = begin[:, None] + node * widths[:, None] + lengths[:, None]
        places = rows[:, :, None] + node
    return mask[places.clamp(max=mask.shape[0] - 1)].to(torch.bool)


def node_tables(
    tables: Tables, requests: torch.Tensor, lengths: torch.Tensor, seen: torch.Tensor, reach: int
) -> dict[str, torch.Tensor]:
    """Return the fields of one sequence for each node of a tree: the last keys before it, then the
    nodes that it sees, each in its position. A sliding window counts positions, not a node's rows.
    seen: as `tree_of` returns it. reach: keys before its own that a query sees."""
    nodes, device = seen.shape[1], seen.device
    before = lengths.clamp(max=reach)[:, None, None]
    column = torch.arange(reach + nodes, device=device)
    # Nodes that are seen come first, in their order.
    order = (~seen).to(torch.int8).argsort(dim=2, stable=True)
    place = (column - before).clamp(0, nodes - 1).expand(-1, nodes, -1)
    position = lengths[:, None, None] + torch.where(
        column < before, column - before, order.gather(2, place)
    )
    slots = tables.req_to_token[
        requests[:, None, None], position.clamp(0, tables.positions - 1)
    ].flatten(0, 1)
    sequences = slots.shape[0]
    return {
        "node_starts": torch.arange(sequences + 1, dtype=torch.int32, device=device),
        "node_keys": (before[..., 0] + seen.sum(2)).flatten().to(torch.int32),
        "node_table": tables.in_window(slots).to(torch.int32),
    }


class GraphBuffers:
    """Tensors that captured graphs read, and that are filled again before each replay. Graphs of
    all batch sizes share them: no two of a backend run at once."""

    def __init__(self, most_requests: int) -> None:
        self._most_requests = most_requests
        self._flat: dict[str, torch.Tensor] = {}
        self._constants: list[torch.Tensor] = []

    def hold(self, step: EngineStep, requests: int, constant: Sequence[str] = ()) -> EngineStep:
        """Return a step of the same values in tensors of this object. constant: names of tensors
        that no replay writes, which stay the step's own."""
        held: dict[str, Any] = {}
        for name, tensor in step.tensors().items():
            if name in constant:
                # Also read by this graph when another capture takes its place in the backend.
                self._constants.append(tensor)
                continue
            flat = self._flat.get(name)
            # A graph captured before keeps the tensor that it has.
            if flat is None or flat.numel() < tensor.numel() or flat.dtype != tensor.dtype:
                room = -(-tensor.numel() // requests) * max(self._most_requests, requests)
                flat = self._flat[name] = tensor.new_empty(room)
            held[name] = flat[: tensor.numel()].view(tensor.shape)
            held[name].copy_(tensor)
        return replace(step, **held)

    @staticmethod
    def refill(held: EngineStep, step: EngineStep) -> None:
        """Write a step's values to a graph's; unread columns of its tables may be more."""
        for name, tensor in step.tensors().items():
            target = getattr(held, name)
            if name in ("page_table", "window_table"):
                target = target[:, : tensor.shape[1]]
            target.copy_(tensor)
