"""Facts of a step, and the builder that makes them: once for all layers that share a cache.

A step's requests are served by one call, or by two:

    requests that decode           up to `reorder_batch_threshold` queries, first in the batch
    requests with prompts          all behind them

Each gets the kernel and the KV splits of its own lengths. Where requests have a causal flag each,
the two are those that are causal and those that are not. The other's requests then have no keys,
so their rows are 0, and the results are added.

NOTE [dense].  Where all requests that decode have equally many queries, q is a dense tensor. The
call then has no offsets, and no kernel that fills rows behind the last one. In a graph's batch the
requests of padding have no keys, so that their rows are 0.

NOTE [images].  Rows of an image see all of its rows, those behind them too (vLLM's mm_prefix). They
are computed with all rows, then again: each image is a request of its own that ends where the image
ends, and is not causal. The second result replaces the first.

NOTE [bounds].  A call's plan is found again by its bounds, among other things. The longest request
grows with every step, and a new plan takes the host longer than a step. So the bound of keys is
rounded up, to four values between a power of two and the next. It is a bound and no length.

NOTE [batch invariance].  Calls are never dense: rows of prompts and of decoding have the same
kernels. A row's bits depend on the kernel and on the KV splits, which follow from
the bounds of a call. So these bounds are fixed: by the model, not by the batch. Rows of prompts
always take the kernel for many rows, where a row's bits do not depend on its place in a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from .kernels import MOST_DENSE, warm_up

#: Requests up to this long have eight bounds.
_FEWEST_KEYS = 2048
#: More queries than a tile has: NOTE [batch invariance].
_MANY_QUERIES = 257
#: Places of all requests. `_at` takes no view then: a view takes the host longer than the rest.
_ALL = slice(None)


class Requests(NamedTuple):
    """Requests that one call serves. A tuple, since each step makes one for each group of layers,
    and a frozen dataclass takes the host several times as long.

    rows: of q. places: of the requests in the batch. starts: (requests + 1,) int32, offsets of
    queries, from 0. seq_lens: (requests,) int32, keys. longest_q, longest_k: bounds of both. adds:
    whether results are added to those of the call before. each: queries of every request where the
    call is dense, else None: NOTE [dense].
    """

    rows: slice
    places: slice
    starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    longest_q: int
    longest_k: int
    causal: bool
    adds: bool = False
    each: int | None = None


@dataclass(frozen=True)
class Images:
    """Rows of a step that lie in images. A span is what a step has of an image. rows: (n,) int64,
    places in q. places: (spans,) int64, of their requests in the batch. The others are as in
    `Requests`, for spans."""

    rows: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    longest_q: int
    longest_k: int
    each: None = None


@dataclass
class Metadata(AttentionMetadata):
    """Facts of a step that its layers share.

    num_actual_tokens: rows of q that count, padding of graphs among them. slot_mapping: where new
    rows go, for vLLM's own layers. requests: by call. mm_prefix_range: images. vLLM's Gemma 4 sets
    it to None, by this name, for layers whose images are causal.
    """

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    requests: tuple[Requests, ...]
    mm_prefix_range: Images | None = None


class Builder(AttentionMetadataBuilder[Metadata]):
    """Builds the metadata of a step.

    A CUDA graph keeps the bounds, from which grids and KV splits follow, and addresses. vLLM
    captures with the model's bound of keys. So a graph serves batches whose requests have as many
    queries or fewer, and whose tensors are the runner's own: one call, without images.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        """Compile and load the layers' kernels, unless `enable_jit_warmup` is off."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.is_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        #: Keys of causal requests and of the others, where flags are tensors: graphs keep these.
        self._lengths: tuple[torch.Tensor, torch.Tensor] | None = None
        self._largest_image = self._image_bound()
        if vllm_config.kernel_config.enable_jit_warmup:
            warm_up(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """A single query of a request sees the same with images and without. Several do not."""
        model = vllm_config.model_config
        if model is not None and model.is_mm_prefix_lm:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        """Build metadata. common_prefix_len is 0; shared prefixes are in all block tables."""
        common = common_attn_metadata
        has_images = common.mm_req_doc_ranges and common.causal is True
        images = self._images(common) if has_images else None
        return Metadata(
            common.num_actual_tokens, common.slot_mapping, self._requests(common), images
        )

    def update_block_table(
        self, metadata: Metadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Metadata:
        requests = tuple(
            one._replace(block_table=_at(one.places, blk_table)) for one in metadata.requests
        )
        images = metadata.mm_prefix_range
        if images is not None:
            images = replace(images, block_table=blk_table[images.places])
        return replace(
            metadata, slot_mapping=slot_mapping, requests=requests, mm_prefix_range=images
        )

    def _longest_k(self, common: CommonAttentionMetadata) -> int:
        """NOTE [batch invariance], NOTE [bounds]"""
        if self.is_invariant:
            return int(self.vllm_config.model_config.max_model_len)
        if self.kv_cache_spec is None:  # of encoders
            return common.max_seq_len
        room = common.block_table_tensor.shape[1] * self.kv_cache_spec.block_size
        return max(min(_rounded_up(common.max_seq_len), room), common.max_seq_len)

    def _longest_q(self, longest: int, is_prompt: bool) -> int:
        """NOTE [batch invariance]"""
        if not self.is_invariant:
            return longest
        return max(longest, _MANY_QUERIES) if is_prompt else self._decode_queries

    @property
    def _decode_queries(self) -> int:
        return self.reorder_batch_threshold or 1

    def _requests(self, common: CommonAttentionMetadata) -> tuple[Requests, ...]:
        longest = common.max_query_len
        if isinstance(common.causal, torch.Tensor):
            return self._by_causality(common)
        if longest <= self._decode_queries and not self.is_invariant:
            return (self._of(common, _ALL, 0, longest),)
        # The last rows of a prompt may be few: NOTE [batch invariance].
        by_length = not self.is_invariant or common.is_prefilling is None
        decodes, prompts, rows, _ = split_decodes_and_prefills(
            common, self._decode_queries, treat_short_extends_as_decodes=by_length
        )
        found = []
        if decodes:
            most = self._longest_q(min(longest, self._decode_queries), is_prompt=False)
            found.append(self._of(common, slice(decodes), 0, most, rows))
        if prompts:
            most = self._longest_q(longest, is_prompt=True)
            found.append(self._of(common, slice(decodes, None), rows, most))
        return tuple(found)

    def _of(
        self,
        common: CommonAttentionMetadata,
        places: slice,
        begin: int,
        longest_q: int,
        end: int | None = None,
    ) -> Requests:
        starts = common.query_start_loc
        if places is not _ALL:
            last = None if places.stop is None else places.stop + 1
            starts = starts[places.start : last]
        end = common.num_actual_tokens if end is None else end
        return Requests(
            slice(begin, end),
            places,
            starts - begin if begin else starts,
            _at(places, common.seq_lens),
            _at(places, common.block_table_tensor),
            longest_q,
            self._longest_k(common),
            common.causal is True,
            each=self._each(longest_q, starts.shape[0] - 1, end - begin),
        )

    def _each(self, longest: int, count: int, rows: int) -> int | None:
        """NOTE [dense]. longest: bound of the queries of so many requests and rows."""
        is_few = longest <= min(self._decode_queries, MOST_DENSE)
        return longest if is_few and longest * count == rows and not self.is_invariant else None

    def _by_causality(self, common: CommonAttentionMetadata) -> tuple[Requests, ...]:
        """Return two calls of all requests. The host does not know the flags."""
        assert isinstance(common.causal, torch.Tensor)
        count, keys = common.seq_lens.shape[0], common.seq_lens
        if common.causal.shape != (count,):
            raise ValueError(
                f"causal has shape {tuple(common.causal.shape)}; accepted: ({count},), a value for "
                "each request"
            )
        if self._lengths is None or self._lengths[0].shape[0] < count:
            most = max(count, self.vllm_config.scheduler_config.max_num_seqs)
            self._lengths = keys.new_zeros(most), keys.new_zeros(most)
        causal, others = (lengths[:count] for lengths in self._lengths)
        torch.mul(keys, common.causal != 0, out=causal)
        torch.sub(keys, causal, out=others)
        is_prompt = common.max_query_len > self._decode_queries
        longest = self._longest_q(common.max_query_len, is_prompt)
        one = self._of(common, _ALL, 0, longest)._replace(causal=True, seq_lens=causal)
        return one, one._replace(causal=False, seq_lens=others, adds=True)

    def _images(self, common: CommonAttentionMetadata) -> Images | None:
        """NOTE [images]"""
        spans = _spans(common, self._largest_image)
        if not spans:
            return None
        counts = [span.count for span in spans]
        starts = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
        rows = torch.cat([torch.arange(span.row, span.row + span.count) for span in spans])
        ends = torch.tensor([span.end for span in spans], dtype=torch.int32)
        places = self._on_device(torch.tensor([span.place for span in spans]))
        return Images(
            self._on_device(rows),
            places,
            self._on_device(starts),
            self._on_device(ends),
            common.block_table_tensor[places],
            self._longest_q(max(counts), is_prompt=True),
            self._longest_k(common),
        )

    def _image_bound(self) -> int | None:
        """Return the most rows of an image: those of the smallest window which bounds what a row
        sees before it, but not what it sees of its image. None for any number."""
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        windows = [
            layer.sliding_window
            for layer in layers.values()
            if layer.sliding_window is not None and not layer.mm_prefix_clamp_sliding_window
        ]
        return min(windows, default=None)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor


def _at(places: slice, tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of requests. The slice itself says that these are all."""
    return tensor if places is _ALL else tensor[places]


def _rounded_up(keys: int) -> int:
    """NOTE [bounds]"""
    step = max(_FEWEST_KEYS, 1 << keys.bit_length()) // 8
    return -(-keys // step) * step


@dataclass(frozen=True)
class _Span:
    """Rows of a step in one image. row: the first in q; end: keys up to the last."""

    place: int
    row: int
    count: int
    end: int


def _spans(common: CommonAttentionMetadata, largest: int | None) -> Sequence[_Span]:
    """Return the spans of a step. One of a single row sees what a causal row sees. Raises
    ValueError for an image of more rows than the largest."""
    if not common.mm_req_doc_ranges or common.max_query_len < 2:
        return ()
    bounds, starts = common.seq_lens_cpu_upper_bound, common.query_start_loc_cpu.tolist()
    if bounds is None:
        raise ValueError(
            "seq_lens_cpu_upper_bound is None with mm_req_doc_ranges; accepted: a length of each "
            "request"
        )
    found = []
    for place, ranges in common.mm_req_doc_ranges.items():
        queries, keys = starts[place + 1] - starts[place], int(bounds[place])
        for first, last in ranges:
            if largest is not None and last + 1 - first > largest:
                raise ValueError(
                    f"an image has {last + 1 - first} rows; accepted: up to {largest}, the window "
                    "of its layers, where these do not clamp images"
                )
            # As positions; an image may begin before the step's rows, and end behind them.
            begin, end = max(first, keys - queries), min(last + 1, keys)
            if end - begin > 1:
                row = starts[place] + begin - (keys - queries)
                found.append(_Span(place, row, end - begin, end))
    return found
