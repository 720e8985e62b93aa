"""vLLM's attention backend for head size 256.

vLLM makes one `Impl` for each layer, and one `Builder` for each group of layers that share a cache.
In each step it calls the builder once, then for each layer `Impl.do_kv_cache_update` and
`Impl.forward`.

    cache of a layer    (blocks, heads_kv, block size, 512), keys before values in a row, in any
                        memory order; uint8 if it holds e4m3
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionType,
    MultipleOf,
)

from ...gpus.gpu import of_capability
from ...interface import flash_attn_varlen_func
from ...kernels.limits import HEAD_DIM, PAGE_MULTIPLE
from ...score_mods import ScoreMod, alibi
from ..given_results import written_to
from .metadata import Builder, Images, Metadata, Requests

#: Names of caches in e4m3.
_E4M3 = ("fp8", "fp8_e4m3")
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class Backend(AttentionBackend):
    """Answers of the backend to vLLM's checks. vLLM refuses all that is not answered here: context
    parallelism (DCP, PCP), MLA, R-SWA, the square root of ALiBi and scales per head."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *_E4M3]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE_MULTIPLE)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [HEAD_DIM]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return of_capability((capability.major, capability.minor)) is not None

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *_ENCODERS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        # Grids follow the host's longest query, which such a batch may exceed on the device.
        return False


class Impl(AttentionImpl[Metadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """sliding_window: keys that a query sees, its own among them. sinks: (heads,) logits."""
        is_e4m3 = kv_cache_dtype in _E4M3
        if alibi_slopes is not None and (logits_soft_cap or is_e4m3):
            given = f"logits_soft_cap {logits_soft_cap}, kv_cache_dtype {kv_cache_dtype}"
            raise NotImplementedError(
                f"alibi_slopes are given with {given}; accepted: no softcap and a cache in 16 bits"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.sinks = num_kv_heads, sinks
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.softcap = logits_soft_cap or 0.0
        #: Keys to the left of a query's own that it sees, None for all.
        self.reach = None if sliding_window is None else sliding_window - 1
        self.kv_dtype = torch.float8_e4m3fn if is_e4m3 else None
        self.is_encoder, self.has_alibi = attn_type in _ENCODERS, alibi_slopes is not None
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self._slopes = alibi_slopes
        self._alibi: ScoreMod | None = None

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the attention of the step's rows to output, and return it. query, output: (rows,
        heads, 256); key, value: (rows, heads_kv, 256), which encoders alone read. Rows past
        num_actual_tokens are padding. attn_metadata: None while vLLM measures its memory."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale is given; accepted: None, results in 16 bits")
        if attn_metadata is None:
            return output.fill_(0)
        for requests in attn_metadata.requests:
            if self.is_encoder and requests.each is not None:
                # New keys are packed, so that queries are, too.
                requests = requests._replace(each=None)
            q, out = _of_requests(query, requests), _of_requests(output, requests)
            causal = requests.causal and not self.is_encoder
            sides = self.reach, 0 if causal else self.reach
            if self.is_encoder:
                keys = key[requests.rows], value[requests.rows]
            else:
                keys = self._caches(kv_cache)
            attend = self._attention(layer, requests, (q, *keys), sides)
            if requests.adds:
                out.add_(attend())
            else:
                written_to(out, q, attend, False)
        images = attn_metadata.mm_prefix_range
        if images is not None and not self.is_encoder:
            self._see_images(layer, images, (query, kv_cache, output))
        return output

    def _see_images(
        self,
        layer: AttentionLayer,
        images: Images,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Compute rows of images again, `metadata`, NOTE [images]. A window ends with the image.
        vLLM lets a row see its image left of the window only where none is longer than the
        window, and then the window has all of it. tensors: query, the cache, output."""
        query, kv_cache, output = tensors
        inputs = query[images.rows], *self._caches(kv_cache)
        attend = self._attention(layer, images, inputs, (self.reach, None))
        output.index_copy_(0, images.rows, attend())

    def _attention(
        self,
        layer: AttentionLayer,
        requests: Requests | Images,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        sides: tuple[int | None, int | None],
    ) -> Callable[..., Any]:
        """Return a call without `out`. inputs: q of `_of_requests`, k, v. sides: visible keys."""
        options: dict[str, Any] = {
            "max_seqlen_k": requests.longest_k,
            "softmax_scale": self.scale,
            "window_size": sides,
            "softcap": self.softcap,
            "learnable_sink": self.sinks,
            "score_mod": self._score_mod(inputs[0].device),
            "batch_invariant": self.batch_invariant,
        }
        if requests.each is None:
            options["cu_seqlens_q"] = requests.starts
            options["max_seqlen_q"] = requests.longest_q
        if self.is_encoder:
            options["cu_seqlens_k"] = requests.starts
            options["max_seqlen_k"] = requests.longest_q
        else:
            options["page_table"] = requests.block_table
            options["seqused_k"] = requests.seq_lens
        if self.kv_dtype is not None and not self.is_encoder:
            shape = requests.seq_lens.shape[0], self.num_kv_heads
            options["k_descale"] = layer._k_scale.expand(shape)
            options["v_descale"] = layer._v_scale.expand(shape)
        return partial(flash_attn_varlen_func, *inputs, **options)

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new keys and values to the cache. slot_mapping: int64, block * block size + row;
        below 0 for rows of padding. key, value: at least as many rows."""
        if self.is_encoder:
            return
        if key.device.type == "cpu":
            scales = layer._k_scale, layer._v_scale
            _write_rows((key, value), self._caches(kv_cache), slot_mapping, scales)
            return
        from vllm._custom_ops import reshape_and_cache_flash

        # vLLM's kernel takes e4m3 as the bytes that the cache holds.
        reshape_and_cache_flash(
            key,
            value,
            *self._halves(kv_cache),
            slot_mapping,
            self.kv_cache_dtype,
            layer._k_scale,
            layer._v_scale,
        )

    def _halves(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of keys and of values, (blocks, block size, heads_kv, 256)."""
        # PyTorch's `split` takes twice as long, a method of Python.
        halves = self.head_size, self.head_size
        k_cache, v_cache = kv_cache.transpose(1, 2).split_with_sizes(halves, -1)
        return k_cache, v_cache

    def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._halves(kv_cache if self.kv_dtype is None else kv_cache.view(self.kv_dtype))

    def _score_mod(self, device: torch.device) -> ScoreMod | None:
        if self._slopes is not None and self._alibi is None:
            self._alibi = alibi(torch.tensor(self._slopes, dtype=torch.float32, device=device))
        return self._alibi


def _of_requests(tensor: torch.Tensor, requests: Requests) -> torch.Tensor:
    """Return a call's rows, (rows, heads, 256), or dense (requests, queries, heads, 256)."""
    rows = requests.rows
    if rows.stop - rows.start != tensor.shape[0]:
        tensor = tensor[rows]
    return tensor if requests.each is None else tensor.unflatten(0, (-1, requests.each))


def _write_rows(
    rows: tuple[torch.Tensor, torch.Tensor],
    caches: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Write new keys and values to caches in CPU memory, where vLLM's own kernel cannot."""
    used = slots >= 0
    block, row = slots[used] // caches[0].shape[1], slots[used] % caches[0].shape[1]
    for new, cache, scale in zip(rows, caches, scales):
        new = new[: slots.shape[0]][used]
        if cache.dtype == torch.float8_e4m3fn:
            largest = torch.finfo(cache.dtype).max
            new = (new.float() / scale).clamp(-largest, largest)
        cache[block, row] = new.to(cache.dtype)
