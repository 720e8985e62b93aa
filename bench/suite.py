"""The shapes that are measured and modelled: one suite for every command and both directions.

FLOP by the field's convention: forward 4 Sq Sk D for each head and sequence, half of it if causal
and as many queries as keys; with other lengths and with a window 4 D for each pair of a query and a
key that it sees; backward 2.5 times the forward, whatever a kernel computes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from fa4_hd256.kernels.limits import HEAD_DIM

FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = (FORWARD, BACKWARD)
#: Dense bf16 FLOP of an SM and clock, by compute capability: 4096 fused multiply-adds on SM100
#: (148 SMs at 1.86 GHz give the 2250 TFLOPS of the data sheet), half of that on SM90.
FLOP_PER_CLOCK = {(9, 0): 4096, (10, 0): 8192, (10, 3): 8192}
SM100_FLOP_PER_CLOCK = FLOP_PER_CLOCK[10, 0]
#: FLOP of the backward over that of the forward.
BACKWARD_FLOP = 2.5

#: Tokens of a dense case.
TOKENS = 32768
SEQLENS = tuple(512 << i for i in range(9))
#: (query heads, KV heads) of models; attention_facts: Qwen3.5-397B, Qwen3-Next, Qwen3.8, Gemma 7B
#: and GLM-5 on one of eight GPUs.
HEADS = ((32, 2), (16, 2), (24, 4), (16, 16), (8, 8))
GEMMA_HEADS = (8, 4)
#: Shapes that an H200 is measured on.
H200_TOKENS = 16384
H200_SEQLENS = tuple(512 << i for i in range(6))


@dataclass(frozen=True)
class Case:
    """One attention problem.

    lengths: (seqlen_q, seqlen_k) of each sequence; packed: they lie behind one another, as
    `flash_attn_varlen_func` takes them, otherwise all are equal. window: (left, right), None for
    unbounded. page_size: rows of the pages that hold keys and values, None where nothing is paged.
    """

    group: str
    lengths: tuple[tuple[int, int], ...]
    heads: int
    heads_kv: int
    causal: bool
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    packed: bool = False
    page_size: int | None = None

    def __post_init__(self) -> None:
        if not self.packed and len(set(self.lengths)) != 1:
            raise ValueError(f"sequences of different lengths {self.lengths[:4]} must be packed")
        if self.heads % self.heads_kv:
            raise ValueError(f"{self.heads} heads are no multiple of {self.heads_kv} KV heads")

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def seqlen_q(self) -> int:
        """Return the queries of the longest sequence."""
        return max(q for q, _ in self.lengths)

    @property
    def seqlen_k(self) -> int:
        return max(k for _, k in self.lengths)

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """(left, right) of the mask, the causal bound included."""
        return self.window[0], 0 if self.causal else self.window[1]

    @property
    def mask(self) -> str:
        """ "full", "causal" or the window."""
        text = "causal" if self.causal else "full"
        if self.window != (None, None):
            right = "0" if self.causal else self.window[1]
            text = f"window ({self.window[0]}, {right})"
        return f"{text}, softcap {self.softcap:g}" if self.softcap else text

    @property
    def shape(self) -> str:
        """Batch x seqlen, as tables name it."""
        kinds = sorted(set(self.lengths))
        if len(kinds) > 1:
            total = sum(q for q, _ in self.lengths)
            return f"{self.batch} ragged, {kinds[0][0]}..{kinds[-1][0]}, {total} tokens"
        q, k = kinds[0]
        text = f"{self.batch}x{q}" if q == k else f"{self.batch}x({q}, {k})"
        text = f"packed {text}" if self.packed else text
        return f"{text}, pages of {self.page_size}" if self.page_size else text

    @property
    def heads_text(self) -> str:
        return f"{self.heads}/{self.heads_kv}"

    def __str__(self) -> str:
        return f"{self.group}: {self.shape}, heads {self.heads_text}, {self.mask}"

    @property
    def kv_elements(self) -> int:
        return 2 * HEAD_DIM * self.heads_kv * sum(k for _, k in self.lengths)

    @property
    def _is_unequal(self) -> bool:
        return any(q != k for q, k in self.lengths)

    @property
    def pairs(self) -> float:
        """Return the pairs of a query and a key that it sees, by the convention in the module's
        docstring."""
        if self.window == (None, None) and not (self.causal and self._is_unequal):
            return sum(q * k for q, k in self.lengths) / (2 if self.causal else 1)
        return sum(_visible_pairs(q, k, *self.bounds) for q, k in self.lengths)

    def flop(self, direction: str, head_dim: int = HEAD_DIM) -> float:
        """Return the FLOP by the convention in the module's docstring."""
        forward = 4.0 * head_dim * self.heads * self.pairs
        return forward * BACKWARD_FLOP if direction == BACKWARD else forward


def _visible_pairs(seqlen_q: int, seqlen_k: int, left: int | None, right: int | None) -> int:
    level = np.arange(seqlen_q) + seqlen_k - seqlen_q
    first = np.zeros_like(level) if left is None else np.clip(level - left, 0, seqlen_k)
    last = np.full_like(level, seqlen_k) if right is None else level + right + 1
    return int(np.maximum(np.clip(last, 0, seqlen_k) - first, 0).sum())


def equal(batch: int, seqlen: int, seqlen_k: int | None = None) -> tuple[tuple[int, int], ...]:
    """Return the lengths of a batch of equal sequences, with as many keys unless given."""
    return ((seqlen, seqlen if seqlen_k is None else seqlen_k),) * batch


def _dense() -> Iterator[Case]:
    for (heads, heads_kv), causal, seqlen in product(HEADS, (False, True), SEQLENS):
        lengths = equal(max(1, TOKENS // seqlen), seqlen)
        yield Case("dense", lengths, heads, heads_kv, causal)


def ragged_lengths(
    count: int, longest: int, seed: int = 0, shortest: int = 1
) -> tuple[tuple[int, int], ...]:
    """`count` lengths from `shortest` to `longest`, log-uniform: most are short."""
    generator = np.random.default_rng(seed)
    lengths = np.exp(generator.uniform(np.log(shortest), np.log(longest), count)).astype(int)
    return tuple((int(n), int(n)) for n in np.clip(lengths, shortest, longest))


def _varlen() -> Iterator[Case]:
    for lengths in (
        *(equal(*of) for of in ((16, 1024), (4, 4096), (2, 8192), (1, 16384))),
        # A training batch of documents, and many sequences; the longest sets the grid.
        *(ragged_lengths(*of) for of in ((8, 8192), (64, 4096))),
        *(equal(count, 34) for count in (2048, 8192)),
    ):
        yield Case("varlen", lengths, 16, 2, True, packed=True)


def _windows() -> Iterator[Case]:
    yield Case("window", equal(1, 65536), *GEMMA_HEADS, True, (1023, None))
    for left, seqlen in product((512, 1024, 4096), (4096, 8192, 16384, 32768)):
        lengths = equal(TOKENS // seqlen, seqlen)
        yield Case("window", lengths, *GEMMA_HEADS, True, (left, None))
    # Gemma 2: alternate layers with a window, softcap 50.
    yield Case("window", equal(4, 8192), *GEMMA_HEADS, True, (4096, None), 50.0)


def _few_kv_heads() -> Iterator[Case]:
    for seqlen in (2048, 4096, 8192, 16384, 32768):
        yield Case("few KV heads", equal(1, seqlen), 32, 2, True)


def _unequal() -> Iterator[Case]:
    lengths = (1, 2048), (64, 1), (128, 4096), (255, 256), (512, 4096)
    # Causal rows of (64, 1) but the last see nothing; both masks are defined.
    for of_both, causal in product(lengths, (False, True)):
        yield Case("unequal", equal(8, *of_both), 16, 2, causal)


def _h200_dense() -> Iterator[Case]:
    for heads_kv, causal, seqlen in product((16, 2), (True, False), H200_SEQLENS):
        yield Case("dense", equal(H200_TOKENS // seqlen, seqlen), 16, heads_kv, causal)


def _h200_window() -> Iterator[Case]:
    windows = (511, 4096), (1023, 4096), (1023, 16384), (4095, 16384)
    for (left, seqlen), heads_kv in product(windows, (16, 2)):
        lengths = equal(H200_TOKENS // seqlen, seqlen)
        yield Case("window", lengths, 16, heads_kv, True, (left, None))


def _h200_varlen() -> Iterator[Case]:
    batches = equal(16, 1024), ragged_lengths(8, 8192), ragged_lengths(64, 4096)
    for heads_kv, lengths in product((16, 2), batches):
        yield Case("varlen", lengths, 16, heads_kv, True, packed=True)


def _mha() -> Iterator[Case]:
    for heads, seqlen in product(MHA_HEADS, (4096, 8192)):
        yield Case("mha", equal(1, seqlen), heads, heads, True)
    for heads, lengths in product(MHA_HEADS, MHA_BATCHES):
        yield Case("mha", lengths, heads, heads, True, packed=True)


def _prompts() -> Iterator[Case]:
    for heads in (16, 8, 4):
        for lengths in (
            *((seqlen, seqlen) for seqlen in (2048, 8192, 32768)),
            *product((512, 1024), (65536, 131072)),
        ):
            yield Case("prompts", equal(1, *lengths), heads, 1, True)


def _chunked_prefill() -> Iterator[Case]:
    for heads in (16, 8, 4):
        yield Case("chunked prefill", equal(1, 512, 65536), heads, 1, True)


def _decode() -> Iterator[Case]:
    shapes = (
        (1, 131072, 32, 2), (8, 8192, 16, 2), (1, 8192, 32, 2), (8, 8192, 24, 4),
        (128, 131072, 32, 2),
    )  # fmt: skip
    for (batch, keys, heads, heads_kv), queries in product(shapes, (1, 2, 4)):
        yield Case("decode", equal(batch, queries, keys), heads, heads_kv, False)


GROUPS = {
    "dense": _dense, "varlen": _varlen, "window": _windows, "few KV heads": _few_kv_heads,
    "unequal": _unequal,
}  # fmt: skip

#: Heads of MLA models whose K and V are expanded to head_dim 256 in prefill and training, without
#: GQA: GLM-4.7-Flash; GLM-5 and Hy4. Their packed batches: a few prompts, and many.
MHA_HEADS = (20, 64)
MHA_BATCHES = ragged_lengths(8, 8192, shortest=512), ragged_lengths(32, 4096, shortest=64)

#: Chosen by name, no parts of the whole suite: what docs/benchmarks.md has of an H200, and prompts
#: for which NVIDIA has published cuDNN's rates.
BY_NAME = {
    "h200 dense": _h200_dense, "h200 window": _h200_window, "h200 varlen": _h200_varlen,
    "chunked prefill": _chunked_prefill, "decode": _decode, "mha": _mha, "prompts": _prompts,
}  # fmt: skip


def cases(groups: Iterable[str] | None = None) -> list[Case]:
    """Return the suite, or some of its groups. Raises ValueError for a group that is not known."""
    names, known = list(GROUPS) if groups is None else list(groups), GROUPS | BY_NAME
    for name in names:
        if name not in known:
            raise ValueError(f"group {name!r}; accepted are {', '.join(known)}")
    return [case for name in names for case in known[name]()]


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Options that choose cases, as `selected` reads them."""
    group = parser.add_argument_group("cases", "the whole suite, unless chosen here")
    names = tuple(GROUPS | BY_NAME)
    known = f"one of {', '.join(names)}; repeatable"
    group.add_argument("--group", action="append", choices=names, metavar="NAME", help=known)
    group.add_argument("--heads", action="append", metavar="Q/KV", help="such as 32/2; repeatable")
    group.add_argument("--max-tokens", type=int, help="leave out cases with more query tokens")
    group.add_argument("--only", metavar="TEXT", help="cases whose description contains TEXT")


def selected(
    arguments: argparse.Namespace, default: Callable[[], Iterable[Case]] = cases
) -> list[Case]:
    """Return the cases chosen by `add_selection`'s options. default: what is chosen from where no
    group is. Raises ValueError if none is left."""
    heads, limit, only = arguments.heads, arguments.max_tokens, arguments.only or ""
    found = [
        case
        for case in (cases(arguments.group) if arguments.group else default())
        if (not heads or case.heads_text in heads)
        and (not limit or sum(q for q, _ in case.lengths) <= limit)
        and only in str(case)
    ]
    if not found:
        raise ValueError("no case is left; `--group dense --only 1x32768` alone would leave some")
    return found
