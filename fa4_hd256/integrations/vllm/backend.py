"""vLLM's attention backend for head size 256.

vLLM makes one `Impl` for each layer, and one `Builder` for each group of layers that share a cache.
In each step it calls the builder once, then for each layer `Impl.do_kv_cache_update` and
`Impl.forward`.

    cache of a layer    (blocks, heads_kv, block size, 512), keys before values in a row, in any
                        memory order; uint8 if it holds e4m3
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

from ...gpus.gpu import of_capability
from ...interface import flash_attn_varlen_func
from ...kernels.limits import HEAD_DIM, PAGE_MULTIPLE
from ...score_mods import ScoreMod, alibi
from ..given_out import written_to

__all__ = ["Backend", "Builder", "Impl", "Metadata"]

#: Names of caches in e4m3.
_E4M3 = ("fp8", "fp8_e4m3")
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class Backend(AttentionBackend):
    """Answers of the backend to vLLM's checks. vLLM refuses all that is not answered here: masks of
    image prefixes, context parallelism (DCP, PCP), MLA and scales per head."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *_E4M3]
    forward_includes_kv_cache_update = False

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
        return attn_type in (AttentionType.DECODER, *_ENCODERS)

    @classmethod
    def supports_sink(cls) -> bool:
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


@dataclass
class Metadata(AttentionMetadata):
    """Facts of a step that its layers share.

    num_actual_tokens: rows of q that count. query_start_loc: (requests + 1,) int32, offsets of
    queries. seq_lens: (requests,) int32, keys. max_query_len, max_seq_len: bounds of both.
    block_table: (requests, blocks) int32.
    """

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool


class Builder(AttentionMetadataBuilder[Metadata]):
    """Builds the metadata of a step out of tensors that live as long as vLLM's runner.

    A CUDA graph keeps `max_query_len`, from which grids follow. So it serves batches whose requests
    have as many queries, or fewer.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        """Raises NotImplementedError for requests of which some are causal."""
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError(
                "causal is a tensor, one value for each request; accepted: True or False for all "
                "requests of a step"
            )
        return Metadata(
            common.num_actual_tokens,
            common.query_start_loc,
            common.seq_lens,
            common.max_query_len,
            common.max_seq_len,
            common.block_table_tensor,
            common.slot_mapping,
            common.causal,
        )

    def update_block_table(
        self, metadata: Metadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Metadata:
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class Impl(AttentionImpl[Metadata]):
    """Attention of one layer."""

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
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.sinks = num_kv_heads, sinks
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.softcap = logits_soft_cap or 0.0
        self.reach = None if sliding_window is None else sliding_window - 1
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
        """Write the attention of the step's rows to output, and return it.

        query, output: (rows, heads, 256); key, value: (rows, heads_kv, 256). Rows past
        num_actual_tokens are padding. attn_metadata: None while vLLM measures its memory.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale is given; accepted: None, results in 16 bits")
        if attn_metadata is None:
            return output.fill_(0)
        rows = slice(attn_metadata.num_actual_tokens)
        q, causal = query[rows], attn_metadata.causal
        if self.attn_type in _ENCODERS:
            causal = False
            k, v = key[rows], value[rows]
            keys = {"cu_seqlens_k": attn_metadata.query_start_loc}
        else:
            k, v = self._caches(kv_cache)
            keys = self._paged(layer, attn_metadata)
        options: dict[str, Any] = keys | {
            "cu_seqlens_q": attn_metadata.query_start_loc,
            "max_seqlen_q": attn_metadata.max_query_len,
            "max_seqlen_k": attn_metadata.max_seq_len,
            "softmax_scale": self.scale,
            "causal": causal,
            "window_size": (self.reach, 0 if causal else self.reach),
            "softcap": self.softcap,
            "learnable_sink": self.sinks,
            "score_mod": self._score_mod(query.device),
            "batch_invariant": self.batch_invariant,
        }

        def attend(**more: Any) -> Any:
            return flash_attn_varlen_func(q, k, v, **options, **more)

        written_to(output[rows], q, attend, False)
        return output

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
        if self.attn_type in _ENCODERS:
            return
        if key.device.type == "cpu":
            scales = layer._k_scale, layer._v_scale
            _write_rows((key, value), self._caches(kv_cache), slot_mapping, scales)
            return
        from vllm._custom_ops import reshape_and_cache_flash

        # vLLM's kernel takes e4m3 as the bytes that the cache holds.
        reshape_and_cache_flash(
            key, value, *self._halves(kv_cache), slot_mapping, self.kv_cache_dtype, layer._k_scale,
            layer._v_scale,
        )  # fmt: skip

    def _halves(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of keys and of values, (blocks, block size, heads_kv, 256)."""
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return k_cache, v_cache

    def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `_halves` in the dtype of their values."""
        is_e4m3 = self.kv_cache_dtype in _E4M3
        return self._halves(kv_cache.view(torch.float8_e4m3fn) if is_e4m3 else kv_cache)

    def _paged(self, layer: AttentionLayer, metadata: Metadata) -> dict[str, Any]:
        """Return the arguments for keys in the cache."""
        keys: dict[str, Any] = {
            "page_table": metadata.block_table,
            "seqused_k": metadata.seq_lens,
        }
        if self.kv_cache_dtype in _E4M3:
            shape = metadata.seq_lens.shape[0], self.num_kv_heads
            keys["k_descale"] = layer._k_scale.expand(shape)
            keys["v_descale"] = layer._v_scale.expand(shape)
        return keys

    def _score_mod(self, device: torch.device) -> ScoreMod | None:
        if self._slopes is not None and self._alibi is None:
            self._alibi = alibi(torch.tensor(self._slopes, dtype=torch.float32, device=device))
        return self._alibi


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
