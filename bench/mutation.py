"""`python -m bench mutation`: the mutation score of this project's kernels and of flash-attn-4's.

Each target calls a public function with small shapes that together reach every synchronisation
instruction of its kernels, which `sm100_sim.mutation` then leaves out one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from fa4_hd256 import backends, flash_attn_func, flash_attn_varlen_func
from fa4_hd256.config import HEAD_DIM
from sm100_sim.launcher import Options
from sm100_sim.mutation import Collector, Score, captured


@dataclass(frozen=True)
class Shape:
    """One call of batch 1 with heads_q query heads and one KV head."""

    seqlen_q: int
    seqlen_k: int
    heads_q: int = 1

    def __str__(self) -> str:
        return f"{self.seqlen_q} x {self.seqlen_k}, heads {self.heads_q}/1"


#: A pair works on several tiles each time, of one to three key tiles, masked and not.
SHAPES = (Shape(520, 300), Shape(300, 256), Shape(520, 100))
#: (queries, keys) of packed sequences: tiles without keys first, between others and last.
LENGTHS = ((260, 0), (270, 290), (0, 130), (70, 260), (200, 0))


def inputs(shape: Shape) -> list[torch.Tensor]:
    """q, k, v of a shape, bf16; every second key tile has larger scores, so that the softmax moves
    its maximum and O is rescaled, in whichever order the tiles are visited."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, rows, heads, HEAD_DIM, generator=generator)
        for rows, heads in (
            (shape.seqlen_q, shape.heads_q), (shape.seqlen_k, 1), (shape.seqlen_k, 1)
        )
    )
    tiles = torch.arange(shape.seqlen_k) // 128
    k *= (1 + 6 * (tiles % 2)).reshape(1, -1, 1, 1)
    return [t.bfloat16() for t in (q, k, v)]


@dataclass(frozen=True)
class Target:
    """A kernel, or the kernels of one call, to be scored.

    run: makes the calls; it gets the shape. reading: of the sanitizer, True or "strict".
    kernel: what their names contain. accept: they have findings of their own, which are argued in
    docs/sanitizer.md.
    """

    name: str
    run: Callable[[Shape], Any]
    shapes: tuple[Shape, ...] = SHAPES
    reading: bool | str = "strict"
    kernel: str = ""
    accept: bool = False


def _forward(shape: Shape, **options: Any) -> None:
    flash_attn_func(*inputs(shape), **options)


def _packed(shape: Shape, **options: Any) -> None:
    q, k, v = inputs(shape)
    lengths = torch.tensor([[0, 0], *LENGTHS])
    offsets_q, offsets_k = lengths.cumsum(0).int().T.contiguous()
    rows_q, rows_k = (int(offsets[-1]) for offsets in (offsets_q, offsets_k))
    flash_attn_varlen_func(
        q[0, :rows_q], k[0, :rows_k], v[0, :rows_k], offsets_q, offsets_k,
        int(lengths[:, 0].max()), int(lengths[:, 1].max()), **options,
    )  # fmt: skip


def _targets() -> Iterator[Target]:
    packed = (Shape(*(sum(side) for side in zip(*LENGTHS, strict=True)), 2),)
    every = {"window_size": (400, 64), "softcap": 30.0, "learnable_sink": torch.linspace(-2, 2, 2)}
    for clc in (False, True):
        for name, run, options, shapes in (
            ("full", _forward, {}, SHAPES),
            ("causal", _forward, {"causal": True}, SHAPES),
            ("varlen, causal", _packed, {"causal": True}, packed),
            ("varlen, window, softcap, sink", _packed, every, packed),
        ):
            call = functools.partial(run, **options, use_clc=clc)
            yield Target(f"forward, {name}, {'dynamic' if clc else 'static'}", call, shapes)


def targets() -> dict[str, Target]:
    """What can be scored, by name."""
    return {target.name: target for target in _targets()}


def measure(
    target: Target, seeds: int = 20, confirm: int = 4, jobs: int = 1,
    write: Callable[[str], None] = lambda line: None,
) -> list[Score]:
    """Scores of the kernels of a target; one CTA pair does all tiles."""
    collector = Collector(
        Options(clusters=1, sanitize=target.reading), seeds, confirm, jobs=jobs,
        launches=len(target.shapes), kernel=target.kernel, accept=target.accept, write=write,
    )
    with captured(collector.take), mock.patch.object(backends, "SIMULATED_CLUSTERS", 1):
        for shape in target.shapes:
            target.run(shape)
    return collector.scores


def row(target: Target, score: Score, kernel: str) -> dict[str, Any]:
    """One line of the table."""
    return {
        "kernel": kernel,
        "shapes": [str(shape) for shape in target.shapes],
        "reading": "strict" if target.reading == "strict" else "default",
        "mutants": len(score.mutants),
        "caught": score.count("caught"),
        "redundant": score.count("redundant"),
        "survived": score.count("survived"),
        "unreached": len(score.unreached),
        "seeds": score.seeds,
        "seconds": round(score.seconds, 1),
    }


def as_text(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    if not rows:
        return ""
    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for entry in rows:
        cells = ["; ".join(v) if isinstance(v, list) else str(v) for v in entry.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
