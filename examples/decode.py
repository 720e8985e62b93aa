"""A decoding loop over a cache in pages, beside PyTorch's SDPA over a padded one.

    python examples/decode.py                                   # tiny, without a GPU
    python examples/decode.py --batch 32 --prompt 8192 --steps 128 --heads 16 --kv-heads 8

One layer of attention at head_dim 256. Sequences begin at different lengths and get a row a step;
pages are taken from a pool as they grow. On a GPU each step is a CUDA graph, and tokens a second
are those of this layer alone. Without one the kernel runs in the simulator, whose times say nothing
of a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from fa4_hd256 import flash_attn_with_kvcache

HEAD_DIM = 256
WARM_UP = 3


class PagedCache:
    """Keys and values of sequences in pages of one pool, in no order.

    lengths: (batch,) int32 rows in use; table: (batch, most pages) int32.
    """

    def __init__(self, prompts: list[int], steps: int, options: argparse.Namespace, device: str):
        size = options.page_size
        most = -(-(max(prompts) + steps) // size)
        count = sum(-(-(prompt + steps) // size) for prompt in prompts)
        shape = count, size, options.kv_heads, HEAD_DIM
        self.k, self.v = (torch.randn(shape).to(device, torch.bfloat16) for _ in "kv")
        self.lengths = torch.tensor(prompts, dtype=torch.int32, device=device)
        self.table = torch.zeros(len(prompts), most, dtype=torch.int32, device=device)
        self.size, self.free = size, torch.randperm(count).tolist()
        self.pages, self.rows = [0] * len(prompts), list(prompts)
        self.reserve()

    def reserve(self, rows: int = 0) -> None:
        """Give each sequence the pages that it needs for so many rows more."""
        for sequence in range(len(self.rows)):
            self.rows[sequence] += rows
            while self.pages[sequence] * self.size < self.rows[sequence]:
                self.table[sequence, self.pages[sequence]] = self.free.pop()
                self.pages[sequence] += 1

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The attention of one row more of each sequence, which is written to its page."""
        out = flash_attn_with_kvcache(
            q, self.k, self.v, k, v, cache_seqlens=self.lengths, page_table=self.table, causal=True
        )
        self.lengths += 1
        return out

    def padded(self) -> PaddedCache:
        """Return the same rows, as many of every sequence as the longest may have."""
        return PaddedCache(
            *(pages[self.table.long()].flatten(1, 2) for pages in (self.k, self.v)),
            self.lengths.long(),
        )


class PaddedCache:
    """k, v: (batch, rows, kv_heads, 256); lengths: (batch,) int64."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor):
        self.k, self.v, self.lengths = k, v, lengths
        self.sequences, self.positions = (torch.arange(n, device=k.device) for n in k.shape[:2])

    def reserve(self, rows: int = 0) -> None:
        """Do nothing: all rows are there."""

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append rows and attend, by `scaled_dot_product_attention`."""
        for cache, rows in ((self.k, k), (self.v, v)):
            cache.index_put_((self.sequences, self.lengths), rows[:, 0])
        self.lengths += 1
        seen = (self.positions < self.lengths[:, None])[:, None, None]
        heads_first = (tensor.transpose(1, 2) for tensor in (q, self.k, self.v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, attn_mask=seen, enable_gqa=True
        )
        return out.transpose(1, 2)


def decode(
    cache: PagedCache | PaddedCache, inputs: list[tuple[torch.Tensor, ...]]
) -> tuple[list[torch.Tensor], float]:
    """Return (results, seconds) of the steps after the first `WARM_UP`."""
    on_gpu = inputs[0][0].is_cuda
    buffers = tuple(torch.empty_like(tensor) for tensor in inputs[0])
    run: Callable[[], torch.Tensor] = lambda: cache.step(*buffers)  # noqa: E731
    results, begin = [], 0.0
    for number, tensors in enumerate(inputs):
        cache.reserve(1)
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        if number == WARM_UP:
            if on_gpu:
                run = captured(run)
                torch.cuda.synchronize()
            begin = time.perf_counter()
        results.append(run().clone())
    if on_gpu:
        torch.cuda.synchronize()
    return results, time.perf_counter() - begin


def captured(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The step as a CUDA graph; the capture itself runs nothing."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, what in (
        ("batch", 3, "sequences"), ("prompt", 40, "rows of the longest one before the first step"),
        ("steps", 2, "steps that are timed"), ("heads", 4, "of queries"),
        ("kv-heads", 2, "of keys and values"), ("page-size", 16, "rows"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} ({default})")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    # From half of the longest prompt to all of it.
    prompts = [
        options.prompt - options.prompt * i // (2 * options.batch) for i in range(options.batch)
    ]
    steps = WARM_UP + options.steps
    paged = PagedCache(prompts, steps, options, device)
    padded = paged.padded()
    heads = options.heads, options.kv_heads, options.kv_heads
    inputs = [
        tuple(torch.randn(options.batch, 1, n, HEAD_DIM).to(device, torch.bfloat16) for n in heads)
        for _ in range(steps)
    ]
    print(f"{options.batch} sequences of {prompts[-1]} to {prompts[0]} rows, pages of "
          f"{options.page_size}, {options.heads}/{options.kv_heads} heads, on "
          f"{torch.cuda.get_device_name() if device == 'cuda' else 'the simulator'}")  # fmt: skip
    results = {}
    for name, cache in (("pages", paged), ("SDPA, padded", padded)):
        results[name], seconds = decode(cache, inputs)
        rate = options.batch * options.steps / seconds
        note = "" if device == "cuda" else "  (time of the simulator, or of PyTorch on this CPU)"
        print(f"{name:13} {rate:12.1f} tokens a second{note}")
    pairs = zip(*results.values(), strict=True)
    error = max((one - other).abs().max().item() for one, other in pairs)
    largest = max(one.abs().max().item() for one in results["pages"])
    print(f"largest difference {error:.1e} of {largest:.1e}")
    if not error <= 2**-6 * largest:
        raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
