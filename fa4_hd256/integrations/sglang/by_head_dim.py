"""Models some of whose layers have another head_dim: those layers keep SGLang's own backend."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from .backend import SGLangBackend
from .checks import OURS, dims_of, head_dims
from .kernels import warm_up_layers

#: SGLang's backend of all head dimensions, pages and masks.
OTHERS = "triton"


def create(runner: Any) -> AttentionBackend:
    """Return the backend of a model. Raises ValueError if none of its layers has head_dim 256."""
    dims = head_dims(runner)
    if OURS not in dims:
        raise ValueError(
            f"the model's layers have head_dim {sorted(dims)} (of q and k, of v); accepted by "
            f"fa4_hd256: {OURS}; use another --attention-backend"
        )
    ours = SGLangBackend(runner)
    if torch.device(runner.device).type == "cuda":
        warm_up_layers(runner)
    if dims == {OURS}:
        return ours
    logging.getLogger("fa4_hd256").info("layers of head_dim %s use %s", dims - {OURS}, OTHERS)
    return ByHeadDim(ours, ATTENTION_BACKENDS[OTHERS](runner))


class ByHeadDim(AttentionBackend):
    def __init__(self, ours: SGLangBackend, others: AttentionBackend) -> None:
        super().__init__()
        self.ours, self.others = ours, others
        self.attn_backend_list = [ours, others]
        # SGLang's models give their masks of images to the backend of this name.
        self.prefill_backend = others
        self.req_to_token_pool = ours.req_to_token_pool
        self.token_to_kv_pool = ours.token_to_kv_pool
        self.kv_index_translator = ours.kv_index_translator
        self.kv_cache_dtype = self.data_type = ours.kv_cache_dtype
        self.max_context_len = ours.max_context_len
        self.needs_cpu_seq_lens = others.needs_cpu_seq_lens
        self.extend_dummy_seqs_capped_by_req_pool = others.extend_dummy_seqs_capped_by_req_pool

    def of_layer(self, layer: Any) -> AttentionBackend:
        return self.ours if dims_of(layer) == OURS else self.others

    @property
    def verify_mask(self) -> VerifyMask | None:
        # The form that both read is that of SGLang's kernel.
        return self.others.verify_mask or self.ours.verify_mask

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        return SharedReadEnds.max_of(one.shared_read_ends(fm) for one in self.attn_backend_list)

    def get_fused_kv_write_buffers(self, layer: Any, forward_batch: ForwardBatch) -> Any:
        return self.of_layer(layer).get_fused_kv_write_buffers(layer, forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.others.get_cuda_graph_seq_len_fill_value()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backend_list:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.ours.read_mask(self.verify_mask)
        for backend in self.attn_backend_list:
            backend.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self.ours.read_mask(self.verify_mask)
        for backend in self.attn_backend_list:
            backend.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backend_list:
            backend.init_forward_metadata_in_graph(forward_batch)

    def on_after_cuda_graph_warmup(self) -> None:
        for backend in self.attn_backend_list:
            backend.on_after_cuda_graph_warmup()

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        for backend in self.attn_backend_list:
            backend.update_verify_buffers_to_fill_after_draft(spec_info, cuda_graph_bs)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **options: Any) -> Any:
        return self.of_layer(layer).forward_extend(q, k, v, layer, *args, **options)

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **options: Any) -> Any:
        return self.of_layer(layer).forward_decode(q, k, v, layer, *args, **options)
