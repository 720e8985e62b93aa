"""Attention over ranks: what each rank of `ranks.Pool` runs, and what one process compares."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch

from fa4_hd256 import masks
from fa4_hd256.call.tile_mask import ASKED
from fa4_hd256.check import reference
from fa4_hd256.integrations.context_parallel.spans import (
    PositionMask,
    Units,
    parts_of,
    spans_by_rank,
    unit,
)
from fa4_hd256.interface import flash_attn_func, flash_attn_varlen_func
from fa4_hd256.kernels.mask.block_mask import FULL
from fa4_hd256.mask_mods import MaskMod
from fa4_hd256.run import compile
from fa4_hd256.score_mods import ScoreMod, alibi

#: Values by batch entry, or document, and head; by head and key; by query.
SLOPES = torch.linspace(0.02, 0.4, 6 * 4).view(6, 4)[torch.tensor([3, 0, 5, 2, 4, 1])]
OF_KEYS = torch.linspace(-2.0, 2.0, 4 * 128).view(4, 128).sin() * 2
OF_QUERIES = (torch.arange(128) * 7 % 3 - 1).int()


def by_places(score: Any, place: Any, tensors: tuple) -> Any:
    """Change a score by all that a place says."""
    slopes, of_keys, of_queries = tensors
    distance = cutlass.Float32(place.query + place.seqlen_k - place.seqlen_q - place.key)
    score = 0.5 * score - slopes[place.batch, place.head] * cute.arch.fmax(distance, -distance)
    score = score + of_keys[place.head, place.key] + cutlass.Float32(of_queries[place.query])
    return score + 0.01 * cutlass.Float32(place.seqlen_k)


def score_mod_on(name: str, device: str, sequences: int = 1, heads: int = 2) -> ScoreMod:
    """One of `SCORE_MODS`, for so many sequences and heads of q."""
    tensors = tuple(t.to(device) for t in (SLOPES, OF_KEYS, OF_QUERIES))
    if name == "alibi":
        return alibi(tensors[0][:sequences, :heads])
    return ScoreMod.of(by_places, lambda score, place, tensors: 0.5, tensors)


#: Functions for the reference; seqlen: of the batch entry.
SCORE_MODS: dict[str, Any] = {
    "alibi": lambda s, b, h, q, k, seqlen: s - SLOPES.double()[b, h] * (q - k).abs(),
    "places": lambda s, b, h, q, k, seqlen: (
        0.5 * s - SLOPES.double()[b, h] * (q - k).abs() + OF_KEYS.double()[h, k]
        + OF_QUERIES[q] + 0.01 * seqlen
    ),
}  # fmt: skip


#: Values by batch entry and query, of more queries than any call here has; by head.
LIMITS = (torch.arange(2 * 512, dtype=torch.int32) * 577 % 513).view(2, 512)
TURNS = torch.tensor([0.0, 2.0, 1.0, 3.0])


def seen_by_places(batch: Any, head: Any, query: Any, key: Any, tensors: tuple) -> Any:
    """Mask by all that a mask_mod gets."""
    limits, turns = tensors
    turn = cutlass.Int32(turns[head])
    return ((query * 7 + key * 3 + turn) % 5 > 1) & (key < limits[batch, query])


def _seen_of_torch(b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
    return ((q * 7 + k * 3 + TURNS.long()[h]) % 5 > 1) & (k < LIMITS[b, q])


def no_truth(batch: Any, head: Any, query: Any, key: Any, tensors: tuple) -> Any:
    return "seen"


def mask_mod_on(device: str) -> MaskMod:
    return MaskMod.of(seen_by_places, (LIMITS.to(device), TURNS.to(device)))


def _images(rows: int) -> torch.Tensor:
    """Numbers of blocks: one across the middle, one at the end."""
    blocks = torch.full((rows,), -1)
    blocks[rows // 2 - 20 : rows // 2 + 9], blocks[rows - 15 :] = 0, 1
    return blocks


def _flex(rows: int) -> Any:
    """A `BlockMask` for all heads, whose function tells them apart: documents, and the keys before
    a query, of the second head not the last ones."""
    from torch.nn.attention.flex_attention import create_block_mask

    ids = torch.arange(rows) // 45
    return create_block_mask(
        lambda b, h, q, k: (ids[q] == ids[k]) & (k + 9 * h <= q), None, None, rows, rows,
        device="cpu",
    )  # fmt: skip


def _of_heads(rows: int) -> masks.TileMask:
    """Make a random mask for each of two heads; some queries see nothing."""
    seen = torch.rand(1, 2, rows, rows, generator=torch.Generator().manual_seed(3)) < 0.4
    seen[:, :, 60:70] = False
    return masks.from_dense(seen)


def _lists(rows: int) -> masks.TileMask:
    """Full, partial and empty tiles at random, of each of two heads, for a mask_mod."""
    tiles = -(-rows // 128)
    kinds = torch.randint(0, 3, (1, 2, tiles, tiles), generator=torch.Generator().manual_seed(5))
    return masks.TileMask.of_kinds((rows, rows), kinds.to(torch.int8))


#: Masks of so many rows.
MASKS: dict[str, Any] = {
    "prefix": lambda rows: masks.prefix_lm(torch.tensor([rows // 3, 9]), rows),
    "images on a window": lambda rows: masks.bidirectional_blocks(_images(rows), window=30),
    "window and first tokens": lambda rows: masks.sliding_window(20, rows, first_tokens=3),
    "documents": lambda rows: masks.documents(torch.arange(rows) // 40),
    "of heads": _of_heads,
    "BlockMask": _flex,
    "lists": _lists,
}


@dataclass(frozen=True)
class Case:
    """A call over ranks. rows: of the whole sequence. options: of `ring_attention`. sink, lse:
    whether there is one, whether its gradient is given. score_mod: of `SCORE_MODS`, mask: of
    `MASKS`, "" for none. mask_mod: whether there is one, `seen_by_places`."""

    way: str = "ring_attention"
    order: str = "contiguous"
    rows: int = 128
    batch: int = 1
    heads: tuple[int, int] = (2, 1)
    documents: tuple[int, ...] | None = None
    sink: bool = False
    lse: bool = False
    score_mod: str = ""
    mask: str = ""
    mask_mod: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, dout, dlse, sink; the same in every process."""
        generator = torch.Generator().manual_seed(7)
        heads, heads_kv = self.heads

        def rows(count: int) -> torch.Tensor:
            shape = self.batch, self.rows, count, 256
            return torch.randn(shape, generator=generator).bfloat16()

        q, k, v, dout = rows(heads), rows(heads_kv), rows(heads_kv), rows(heads)
        dlse = torch.randn(self.batch, heads, self.rows, generator=generator)
        return q, k, v, dout, dlse, torch.randn(heads, generator=generator).bfloat16()

    @property
    def tiles(self) -> masks.TileMask:
        """Return the tiles of its mask."""
        mask = MASKS[self.mask](self.rows)
        return masks.as_tile_mask(mask, with_bits=not self.mask_mod, **self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes that `as_tile_mask` takes."""
        return {"batch": self.batch, "heads": self.heads[0]}

    def dense(self) -> torch.Tensor:
        """Return the dense mask of its mask and mask_mod, for every batch entry and head where
        there is the latter."""
        if not self.mask_mod:
            return self.tiles.dense()
        rows, wide = self.rows, self.tiles.tiles
        for dimension in (2, 3):
            wide = wide.repeat_interleave(128, dimension).narrow(dimension, 0, rows)
        wide = wide.expand(self.batch, self.heads[0], rows, rows)
        places = torch.meshgrid(*map(torch.arange, wide.shape), indexing="ij")
        return (wide == FULL) | ((wide == ASKED) & _seen_of_torch(*places))


def mask_on(case: Case, device: str) -> Any:
    """The mask of a case, which is made on the CPU."""
    mask = MASKS[case.mask](case.rows)
    if device == "cpu":
        return mask
    if isinstance(mask, masks.TileMask) and mask.bits is None:
        return masks.TileMask(mask.lengths, mask.tiles.to(device), None)
    return masks.from_dense(masks.as_tile_mask(mask, **case.sizes).dense().to(device))


def _options(case: Case, device: str) -> dict[str, Any]:
    """Return the options shared by a call over ranks and one of one process, but for the sink."""
    options = dict(case.options)
    if case.score_mod:
        sequences = case.batch if case.documents is None else len(case.documents) - 1
        options["score_mod"] = score_mod_on(case.score_mod, device, sequences, case.heads[0])
    if case.mask:
        options["block_mask"] = mask_on(case, device)
    if case.mask_mod:
        options["mask_mod"] = mask_mod_on(device)
    return options


def _attended(
    case: Case, attention: Any, tensors: list[torch.Tensor], options: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """out, lse and gradients by q, k, v, sink. tensors: q, k, v, dout, dlse, sink."""
    if case.documents is not None:
        tensors = [*(tensor.squeeze(0) for tensor in tensors[:-1]), tensors[-1]]
    q, k, v, dout, dlse, sink = tensors
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    if case.sink:
        leaves.append(sink.requires_grad_())
        options = {**options, "learnable_sink": sink}
    out, lse = attention(q, k, v, return_lse=True, **options)
    results, wanted = ((out, lse), (dout, dlse)) if case.lse else ((out,), (dout,))
    found = torch.autograd.grad(results, leaves, wanted)
    return {"out": out, "lse": lse, **dict(zip(("q", "k", "v", "sink"), found))}


def _arrays(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().float().cpu().numpy() for name, tensor in tensors.items()}


def run(rank: int, case: Case, device: str = "cpu") -> dict[str, np.ndarray]:
    """out, lse and gradients of the whole sequence, on every rank; dsink: of this rank alone."""
    from fa4_hd256.integrations import context_parallel

    *inputs, sink = (tensor.to(device) for tensor in case.inputs())
    place = {"order": case.order}
    dims = (1, 1, 1, 1, 2)
    own = [context_parallel.shard(t, dim=dim, **place) for t, dim in zip(inputs, dims, strict=True)]
    options = {**_options(case, device), **place}
    if case.documents is not None:
        options["cu_seqlens"] = case.documents
    attention = getattr(context_parallel, case.way)
    found = _attended(case, attention, [*own, sink], options)
    for name, tensor in found.items():
        if name != "sink":
            dim = tensor.ndim - (1 if name == "lse" else 3)
            found[name] = context_parallel.unshard(tensor, dim=dim, **place)
    return _arrays(found)


def run_alone(rank: int, case: Case, device: str = "cpu") -> dict[str, np.ndarray]:
    """`run` by each rank for itself: one call of all rows and heads."""
    if case.documents is None:
        attention: Any = flash_attn_func
    else:
        offsets = torch.tensor(case.documents, dtype=torch.int32, device=device)
        longest = int(offsets.diff().max())
        attention = functools.partial(
            flash_attn_varlen_func, cu_seqlens_q=offsets, cu_seqlens_k=offsets,
            max_seqlen_q=longest, max_seqlen_k=longest,
        )  # fmt: skip
    tensors = [tensor.to(device) for tensor in case.inputs()]
    return _arrays(_attended(case, attention, tensors, _options(case, device)))


def backwards_of_heads(rank: int, device: str) -> tuple[bool, bool, str]:
    """Run backwards of heads over ranks. Return (whether a backward whose graph is retained has the
    same bits again, whether a call without gradients has no graph, error of a backward whose graph
    is freed)."""
    from fa4_hd256.integrations.context_parallel import ulysses_attention

    *inputs, dout, _, _ = (tensor.to(device) for tensor in Case(heads=(4, 2)).inputs())
    leaves = [tensor[:, :64].contiguous().requires_grad_() for tensor in inputs]
    dout = dout[:, :64]
    out = ulysses_attention(*leaves, causal=True)
    one, other = (
        torch.autograd.grad(out, leaves, dout, retain_graph=keeps) for keeps in (True, False)
    )
    try:
        torch.autograd.grad(out, leaves, dout)
        raised = ""
    except RuntimeError as error:
        raised = str(error)
    with torch.no_grad():
        has_graph = ulysses_attention(*leaves, causal=True).requires_grad
    return all(map(torch.equal, one, other)), not has_graph, raised


def most_parts(case: Case, ranks: int) -> int:
    """The most calls whose results, each rounded to the type of q, are summed for one row."""
    if case.way == "ulysses_attention":
        return 1
    options = reference.AttentionOptions(**case.options)
    units = None
    if case.mask:
        rows = unit(case.order, case.rows // ranks)
        units = Units(rows, case.tiles.units(rows))
    mask = PositionMask(*options.window, case.documents, case.score_mod != "", units)
    places = spans_by_rank(case.order, ranks, case.rows // ranks)
    gathers = case.way == "all_gather_attention"
    of_queries, of_keys = torch.zeros(2, case.rows, dtype=torch.int64)
    everything = range(case.rows)
    for queries in places:
        for keys in ((everything,),) if gathers else places:
            for part in parts_of(queries, keys, mask):
                for count, held, rows in (
                    (of_queries, queries, part.queries), (of_keys, keys, part.keys),
                ):  # fmt: skip
                    positions = [position for span in held for position in span]
                    count[positions[rows.start : rows.stop]] += 1
    return int(max(of_queries.max(), of_keys.max()))


def errors(case: Case, found: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """Return the error of every result of rank 0, and of dsink of all ranks, in units of what is
    accepted, against the float64 reference: what a single call is granted, and a rounding for each
    part that is summed beyond the first."""
    more = most_parts(case, len(found)) - 1
    one = {name: torch.from_numpy(array) for name, array in found[0].items()}
    if case.sink:
        one["sink"] = torch.stack([torch.from_numpy(r["sink"]) for r in found]).sum(dim=0)
    q, k, v, dout, dlse, sink = case.inputs()
    options = {name: value for name, value in case.options.items() if name in _OF_REFERENCE}
    if case.sink:
        options["learnable_sink"] = sink
    if case.mask:
        options["mask"] = case.dense()
    worst: dict[str, float] = {}
    documents = case.documents or (0, case.rows)
    sinks = torch.zeros(case.heads[0], dtype=torch.float64), 0.0
    for number, (begin, end) in enumerate(zip(documents, documents[1:])):
        if begin == end:
            continue
        if case.score_mod:
            right = SCORE_MODS[case.score_mod]
            options["score_mod"] = lambda s, b, *place, of=right, more=number, seqlen=end - begin: (
                of(s, b + more, *place, seqlen)
            )
        rows = slice(begin, end)
        inputs = q[:, rows], k[:, rows], v[:, rows]
        own = {
            name: (tensor if case.documents is None else tensor.unsqueeze(0))
            for name, tensor in one.items() if name != "sink"
        }  # fmt: skip
        lse = own.pop("lse")[..., rows]
        own = {name: tensor[:, rows].bfloat16() for name, tensor in own.items()}
        compared = reference.compare(own.pop("out"), lse, inputs, **options)
        given = dlse[..., rows] if case.lse else None
        gradients = reference.compare_gradients(own, inputs, dout[:, rows], given, **options)
        ratios = {
            name: c.max_error / (c.tolerance + more * c.rounding)
            for name, c in {"out": compared, **gradients}.items()
        }
        ratios["lse"] = compared.lse_max_error / 1e-4
        for name, ratio in ratios.items():
            worst[name] = max(worst.get(name, 0.0), ratio)
        if case.sink:
            exact = reference.gradients(inputs, dout[:, rows], given, **options)["sink"]
            total, scale = sinks
            sinks = total + exact, max(scale, exact.abs().max().item())
    if case.sink:
        difference = (one["sink"].double() - sinks[0]).abs().max().item()
        worst["sink"] = difference / (2**-6 * max(sinks[1], 1.0))
    return worst


_OF_REFERENCE = ("softmax_scale", "causal", "window_size", "softcap")


def kernels_got(rank: int, case: Case) -> int:
    """Count the kernels that `run` compiles, or loads, which the process did not have."""
    before = compile.counters["compiled"] + compile.counters["disk"]
    run(rank, case)
    return compile.counters["compiled"] + compile.counters["disk"] - before


# Mistakes of ranks.


def other_rows(rank: int) -> None:
    """Rank 1 has fewer rows."""
    from fa4_hd256.integrations.context_parallel import ring_attention

    q = torch.randn(1, 32 - 16 * (rank == 1), 2, 256).bfloat16()
    ring_attention(q, q, q, causal=True)


def other_options(rank: int) -> None:
    """Rank 1 requests another mask."""
    from fa4_hd256.integrations.context_parallel import ring_attention

    q = torch.randn(1, 32, 2, 256).bfloat16()
    ring_attention(q, q, q, causal=rank != 1)


def other_mask_mod(rank: int) -> None:
    """Rank 1 gives fewer numbers."""
    from fa4_hd256.integrations.context_parallel import ring_attention

    q = torch.randn(1, 16, 2, 256).bfloat16()
    limits = LIMITS[:1, : 512 if rank == 0 else 32]
    ring_attention(
        q, q, q, block_mask=_lists(32), score_mod=score_mod_on("places", "cpu"),
        mask_mod=MaskMod.of(seen_by_places, (limits, TURNS)),
    )  # fmt: skip


def bad_call(rank: int) -> None:
    """Rank 1 gives what is not accepted."""
    from fa4_hd256.integrations.context_parallel import ring_attention

    q = torch.randn(1, 32, 2, 256).bfloat16()
    ring_attention(q, q, q, softcap=-1.0 if rank == 1 else 1.0)


def other_dtype(rank: int, names: str) -> None:
    """Rank 1 gives k and v, or one of them, in e4m3."""
    from fa4_hd256.integrations.context_parallel import ring_attention

    q = torch.randn(1, 32, 2, 256).bfloat16()
    given = {"k": q, "v": q}
    if rank == 1:
        given |= dict.fromkeys(names, q.to(torch.float8_e4m3fn))
    ring_attention(q, **given)


def no_tensor(rank: int, cu_seqlens: Any) -> None:
    """Rank 1 gives a list as v."""
    from fa4_hd256.integrations.context_parallel import ring_attention

    q = torch.randn(*(1, 32)[cu_seqlens is not None :], 2, 256).bfloat16()
    ring_attention(q, q, q.tolist() if rank == 1 else q, cu_seqlens=cu_seqlens)


def refusals(rank: int, arguments: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the errors of calls with these options; "alone": over a group that takes no other
    call, since this one fails behind the ranks' agreement."""
    from fa4_hd256.integrations import context_parallel

    found = []
    for given in arguments:
        options = dict(given)
        if options.pop("alone", False):
            options["group"] = torch.distributed.new_group()
        if isinstance(given.get("mask_mod"), MaskMod):  # of which this process knows no key yet
            options["mask_mod"] = MaskMod.of(given["mask_mod"].function, given["mask_mod"].tensors)
        heads, heads_kv = options.pop("heads", (2, 1))
        attention = getattr(context_parallel, options.pop("way", "ring_attention"))
        q = torch.randn(1, 32, heads, 256).bfloat16()
        k = torch.randn(1, options.pop("keys", 32), heads_kv, 256)
        k = k.to(options.pop("kv_dtype", torch.bfloat16))
        if "cu_seqlens" in options:
            q, k = q.squeeze(0), k.squeeze(0)
        try:
            attention(q, k, k, **options)
            found.append(("", ""))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found
