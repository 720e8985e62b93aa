"""SGLang's attention backend for head_dim 256.

SGLang makes one `SGLangBackend` for a model, and for a drafting model one for each step of a draft
(`SGLangDraft`). Before the layers of a step it calls `init_forward_metadata`, or with CUDA graphs
`init_forward_metadata_out_graph`; then for each layer `forward_extend` or `forward_decode`.

    cache of a layer    (slots, heads_kv, 256); a page is as many slots in a row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode, per_step_draft_out_cache_loc

from ...interface import flash_attn_varlen_func
from ...kernels.limits import HEAD_DIM
from ...kv_cache import flash_attn_with_kvcache
from ...masks import tree_words
from ..given_results import written_to
from .checks import OURS, check_layer, check_runner, head_dims
from .metadata import EngineStep, GraphBuffers, ImageRows, Tables, draft_steps, node_tables, tree_of

#: More queries than a tile has. Rows of prompts then take the kernel for many rows, where their
#: bits depend neither on their number nor on their place in a tile.
_MANY_QUERIES = 257


class SGLangBackend(AttentionBackend):
    """Attention of a model's layers. draft_step: of the draft step served here, else None."""

    # Bounds follow from the lengths on the host where SGLang has them, else from the context.
    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, draft_step: int | None = None) -> None:
        super().__init__()
        check_runner(runner)
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = runner.kv_index_translator
        self.kv_cache_dtype = self.data_type = runner.kv_cache_dtype
        self.page_size = runner.page_size
        self.max_context_len = runner.model_config.context_len
        self.forward_metadata: EngineStep | None = None
        self.batch_invariant = bool(get_exec().deterministic.enable_deterministic_inference)
        pool = self.token_to_kv_pool
        has_window_cache = isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0
        self._tables = Tables(
            self.req_to_token_pool.req_to_token,
            self.page_size,
            pool.translate_loc_from_full_to_swa if has_window_cache else None,
        )
        self._has_window_cache = has_window_cache
        self._window = runner.sliding_window_size
        self._has_window = self._window is not None and self._window >= 0
        self.topk = get_spec().speculative_eagle_topk or 0
        self._draft_step = draft_step
        self._verify_mask = self._new_verify_mask(runner)
        self._graphs: dict[tuple[ForwardMode, int, int], EngineStep] = {}
        self._buffers: GraphBuffers | None = None
        self._checked: WeakSet[Any] = WeakSet()
        # SGLang's models have this method where rows of an image see each other.
        self._has_images = hasattr(runner.model, "prepare_attn_masks")

    # What SGLang asks.

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._verify_mask

    def read_mask(self, mask: VerifyMask | None) -> None:
        self._verify_mask = mask

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Do nothing: the stream that prepares a verification waits for the draft, so the mask is
        whole when it is read."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._buffers = GraphBuffers(max_bs)

    # Metadata of a step.

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        is_empty = forward_batch.batch_size == 0
        self.forward_metadata = None if is_empty else self._step(forward_batch)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        ahead = self._ahead(forward_batch)
        if in_capture or ahead is None:
            constant = () if ahead is None else ("cu_seqlens_q",)
            step = self.graph_step(forward_batch, in_capture, self._step, constant)
        else:
            step = self._graphs[_graph_of(forward_batch)]
            self._rewrite(step, forward_batch, ahead)
        self.forward_metadata = step

    def graph_step(
        self,
        forward_batch: ForwardBatch,
        in_capture: bool,
        build: Callable[[ForwardBatch, bool], EngineStep],
        constant: Sequence[str] = (),
    ) -> EngineStep:
        """Return the filled step of a graph; launches of a capture have the largest bounds.
        constant: as in `GraphBuffers.hold`."""
        key = _graph_of(forward_batch)
        step = build(forward_batch, in_capture)
        if not in_capture:
            GraphBuffers.refill(self._graphs[key], step)
        elif self._buffers is None:
            raise RuntimeError("init_cuda_graph_state has not been called before a capture")
        else:
            self._graphs[key] = self._buffers.hold(step, forward_batch.batch_size, constant)
        return self._graphs[key]

    def _ahead(self, batch: ForwardBatch) -> int | None:
        """Return the queries of a request that seq_lens does not count, in a step whose graph fixes
        the queries of all requests: of decoding, and of drafts in a chain. Else None."""
        mode = batch.forward_mode
        if mode.is_target_verify() and self.topk <= 1:
            _check_equal_drafts(batch)
            return batch.positions.numel() // batch.batch_size
        is_draft = self._draft_step is not None and batch.spec_info is not None
        return 0 if mode.is_decode_or_idle() and not is_draft else None

    def _rewrite(self, step: EngineStep, batch: ForwardBatch, more: int) -> None:
        """Write what `_chains` returns to the step of a graph. Offsets of queries stay as captured,
        and results go to the graph's tensors at once: the host bounds a small model's step, so
        each operation costs. more: as `_ahead` returns it."""
        step.seqused_k.copy_(batch.seq_lens)
        if more:
            step.seqused_k.add_(more)
        keys = self._most_keys(batch, in_capture=False) + more
        self._tables.write(step, batch.req_pool_indices, keys)
        if self._has_window_cache and batch.out_cache_loc is not None:
            assert step.window_slots is not None
            slots = self._tables.in_window(batch.out_cache_loc)
            used = slots.shape[0]
            step.window_slots[:used].copy_(slots)
            if used < step.window_slots.shape[0]:
                # Rows of padding: `_window_slots`.
                step.window_slots[used:].zero_()

    def _step(self, batch: ForwardBatch, in_capture: bool = False) -> EngineStep:
        mode = batch.forward_mode
        if mode.is_target_verify():
            return self._verification(batch, in_capture)
        if mode.is_decode_or_idle():
            if self._draft_step is not None and batch.spec_info is not None:
                return self.draft(batch, in_capture).of_draft(self._draft_step)
            return self._chains(batch, 1, 0, in_capture)
        return self._extension(batch, in_capture)

    def draft(self, batch: ForwardBatch, in_capture: bool = False) -> EngineStep:
        steps = get_spec().speculative_num_steps
        shape = max(self.topk, 1), steps
        keys = self._most_keys(batch, in_capture)
        step = draft_steps(self._tables, batch.req_pool_indices, batch.seq_lens, shape, keys)
        if self._has_window_cache and batch.out_cache_loc is not None:
            slots = self._tables.in_window(batch.out_cache_loc)
            slots = per_step_draft_out_cache_loc(slots, batch.batch_size, *shape)
            step = replace(step, window_slots=slots.contiguous())
        return self._bounded(step)

    def _chains(self, batch: ForwardBatch, queries: int, more: int, in_capture: bool) -> EngineStep:
        requests, keys = batch.batch_size, self._most_keys(batch, in_capture) + more
        device = batch.seq_lens.device
        end = requests * queries + 1
        lengths = batch.seq_lens if more == 0 else batch.seq_lens + more
        return self._bounded(
            EngineStep(
                torch.arange(0, end, queries, dtype=torch.int32, device=device),
                queries,
                lengths.to(torch.int32),
                min(keys, self._tables.positions),
                **self._tables.of_requests(batch.req_pool_indices, keys),
                **self._window_slots(batch),
            )
        )

    def _extension(self, batch: ForwardBatch, in_capture: bool) -> EngineStep:
        counts, counts_cpu = batch.extend_seq_lens, batch.extend_seq_lens_cpu
        rows, keys = batch.positions.numel(), self._most_keys(batch, in_capture)
        if counts is None:
            # A draft that verified rows extend has equally many for each request.
            return self._chains(batch, rows // batch.batch_size, 0, in_capture)
        starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        longest = max(counts_cpu) if counts_cpu and not in_capture else rows
        first = None
        if batch.forward_mode.is_dllm_extend() and self._has_window:
            first = (batch.seq_lens - counts - self._window).clamp(min=0).to(torch.int32)
        return self._bounded(
            EngineStep(
                starts,
                max(longest, _MANY_QUERIES) if self.batch_invariant else longest,
                batch.seq_lens.to(torch.int32),
                keys,
                window_first=first,
                images=self._images(batch),
                **self._tables.of_requests(batch.req_pool_indices, keys),
                **self._window_slots(batch),
            )
        )

    def _images(self, batch: ForwardBatch) -> ImageRows | None:
        """Return the images of a step of prompts whose rows see each other."""
        if not (self._has_images and batch.forward_mode == ForwardMode.EXTEND and batch.mm_inputs):
            return None
        spans = [
            (request, first, last)
            for request, inputs in enumerate(batch.mm_inputs)
            if inputs is not None
            for item in inputs.mm_items
            if item.is_image()
            for first, last in item.offsets
        ]
        new, before = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
        return ImageRows.of(spans, new, before, batch.seq_lens.device)

    def _verification(self, batch: ForwardBatch, in_capture: bool) -> EngineStep:
        _check_equal_drafts(batch)
        nodes = batch.positions.numel() // batch.batch_size
        step = self._chains(batch, nodes, nodes, in_capture)
        if self.topk <= 1:
            return step
        seen = self._tree(batch, nodes, in_capture)
        fields: dict[str, Any] = {"tree_mask": tree_words(seen)}
        if self._has_window:
            lengths, requests = batch.seq_lens, batch.req_pool_indices
            fields |= node_tables(self._tables, requests, lengths, seen, self._window)
        return replace(step, **fields)

    def _tree(self, batch: ForwardBatch, nodes: int, in_capture: bool) -> torch.Tensor:
        """Return which node sees which, (requests, nodes, nodes) bool."""
        lengths, info = batch.seq_lens, batch.spec_info
        if in_capture:
            # No tree is there yet: each node sees itself.
            own = torch.eye(nodes, dtype=torch.bool, device=lengths.device)
            return own.expand(batch.batch_size, -1, -1)
        mask, filled = info.custom_mask, self._verify_mask
        if filled is not None and mask is filled.buffer:
            of_nodes = filled.mode == TreeMaskMode.QLEN_ONLY
        else:
            of_nodes = mask.numel() == info.positions.numel() * nodes
        return tree_of(mask, lengths, nodes, of_nodes)

    def _most_keys(self, batch: ForwardBatch, in_capture: bool) -> int:
        if in_capture or batch.seq_lens_cpu is None:
            return self._tables.positions
        return int(batch.seq_lens_cpu.max())

    def _bounded(self, step: EngineStep) -> EngineStep:
        # The bound decides how keys are divided, which must not depend on the batch.
        return replace(step, max_seqlen_k=self._tables.positions) if self.batch_invariant else step

    def _window_slots(self, batch: ForwardBatch) -> dict[str, Any]:
        if not self._has_window_cache or batch.out_cache_loc is None:
            return {}
        slots = self._tables.in_window(batch.out_cache_loc)
        # Rows of padding in a graph write to slot 0, which no request has.
        padding = batch.positions.numel() - slots.shape[0]
        if padding > 0:
            slots = torch.nn.functional.pad(slots, (0, padding))
        return {"window_slots": slots}

    # Attention of a layer.

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Any:
        """Write new keys and values to the cache, and return the attention of new queries.

        q: (rows, heads * 256); k, v: (rows, heads_kv, 256), or None where another layer has written
        them. options: sinks, (heads,); return_lse. Returns (rows, heads * 256), or with return_lse
        also (rows, heads) float32. Raises NotImplementedError for any other option.
        """
        step = self.forward_metadata
        if step is None:
            raise RuntimeError("init_forward_metadata has not been called before a layer")
        if layer not in self._checked:
            check_layer(layer)
            self._checked.add(layer)
        sinks, wants_lse = options.pop("sinks", None), options.pop("return_lse", False)
        unknown = [name for name, value in options.items() if value is not None]
        if unknown:
            raise NotImplementedError(
                f"{', '.join(unknown)} is given; accepted: sinks and return_lse"
            )
        if k is not None and save_kv_cache:
            where = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=step.window_slots)
            scales = layer.k_scale, layer.v_scale
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, *scales)
        out = getattr(forward_batch, "_attn_output", None)
        shape = q.shape[0], layer.tp_q_head_num, HEAD_DIM
        out = None if out is None else out.view(shape)
        result = self._attend(q.reshape(shape), layer, forward_batch, out, sinks)
        return (
            (result[0].flatten(1), result[1].T.contiguous()) if wants_lse else result[0].flatten(1)
        )

    def forward_decode(self, *args: Any, **options: Any) -> Any:
        return self.forward_extend(*args, **options)

    def _attend(
        self,
        q: torch.Tensor,
        layer: Any,
        batch: ForwardBatch,
        out: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step, window = self.forward_metadata, layer.sliding_window_size
        assert step is not None
        reach = window if window is not None and window >= 0 else None
        options = (
            _keys_of(step, self._window, reach)
            | self._scales(layer)
            | {
                "softmax_scale": layer.scaling,
                "softcap": layer.logit_cap,
                "learnable_sink": sinks,
                "batch_invariant": self.batch_invariant,
            }
        )
        page_size = 1 if options["page_table"] is step.node_table else self.page_size
        k, v = (
            paged_kv_view(cache, page_size, layer.tp_k_head_num, HEAD_DIM)
            for cache in self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        )
        sees_ahead = layer.attn_type != AttentionType.DECODER and not batch.forward_mode.is_decode()
        right = 0 if reach is not None and not sees_ahead else reach
        masks = {"causal": not sees_ahead, "window_size": (reach, right)}
        attend: Callable[..., Any] = partial(flash_attn_varlen_func, q, k, v, **options | masks)
        if sees_ahead and step.window_first is not None and reach is not None:
            if reach != self._window:
                raise ValueError(
                    f"layer {layer.layer_id} has a sliding window of {reach + 1} keys; accepted in "
                    f"a diffusion model: {self._window + 1}, which the model has"
                )
            # Rows of a block see the same keys before it, so no window of theirs says which.
            block = {"cache_seqlens": options.pop("seqused_k"), "cache_leftpad": step.window_first}
            attend = partial(flash_attn_with_kvcache, q, k, v, **options | block)
        result = written_to(out, q, attend, True)
        if step.images is None or sees_ahead:
            return result
        images, own = step.images, step.images.rows
        see_each_other = options | images.keys_of(options["page_table"])
        found = flash_attn_varlen_func(
            q[own], k, v, **see_each_other, window_size=(reach, None), return_lse=True
        )
        result[0][own], result[1][:, own] = found
        return result

    def _scales(self, layer: Any) -> dict[str, torch.Tensor]:
        scales = layer.k_scale, layer.v_scale
        if self.kv_cache_dtype != torch.float8_e4m3fn or scales == (None, None):
            return {}
        one = torch.ones((), dtype=torch.float32, device=self._tables.req_to_token.device)
        k_scale, v_scale = (one if scale is None else scale.detach() for scale in scales)
        return {"k_descale": k_scale, "v_descale": v_scale}

    def _new_verify_mask(self, runner: Any) -> VerifyMask | None:
        nodes = get_spec().speculative_num_draft_tokens
        if runner.is_draft_worker or not nodes:
            return None
        requests = self.req_to_token_pool.size
        room = torch.zeros(requests * nodes**2, dtype=torch.bool, device=runner.device)
        return VerifyMask(room, TreeMaskMode.QLEN_ONLY, requests, is_read=self.topk > 1)


class SGLangDraft:
    """The backends of all steps of a draft but the last, which share their page tables."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, topk: int, speculative_num_steps: int) -> None:
        """Raises ValueError for a draft that has layers of another head_dim."""
        dims = head_dims(runner)
        if dims != {OURS}:
            raise ValueError(
                f"the draft's layers have head_dim {sorted(dims)} (of q and k, of v); accepted by "
                f"fa4_hd256: {OURS}; use another --speculative-draft-attention-backend"
            )
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.kv_index_translator = runner.kv_index_translator
        self.attn_backends = [
            SGLangBackend(runner, step) for step in range(speculative_num_steps - 1)
        ]
        self.attn_backend_list = self.attn_backends
        self.forward_metadata: EngineStep | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.batch_size:
            self._share(self.attn_backends[0].draft(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.attn_backends[0].init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        first = self.attn_backends[0]
        self._share(first.graph_step(forward_batch, in_capture, first.draft))

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Do nothing: tables are filled before a replay."""

    def _share(self, draft: EngineStep) -> None:
        for step, backend in enumerate(self.attn_backends):
            backend.forward_metadata = draft.of_draft(step)


def _graph_of(batch: ForwardBatch) -> tuple[ForwardMode, int, int]:
    """Return the key of a batch's graph."""
    return batch.forward_mode, batch.batch_size, batch.positions.numel()


def _check_equal_drafts(batch: ForwardBatch) -> None:
    if getattr(batch.spec_info, "ragged_verify_layout", None) is not None:
        raise NotImplementedError(
            "drafts of different lengths are verified (SGLANG_RAGGED_VERIFY_MODE); accepted: "
            "equally many of each request"
        )


def _keys_of(step: EngineStep, window: int | None, reach: int | None) -> dict[str, Any]:
    """Return the arguments that say which queries and keys a layer has. window: the model's. reach:
    the layer's, None if it has none."""
    if reach is None or step.tree_mask is None:
        own = reach is not None and step.window_table is not None
        return {
            "cu_seqlens_q": step.cu_seqlens_q,
            "max_seqlen_q": step.max_seqlen_q,
            "seqused_k": step.seqused_k,
            "max_seqlen_k": step.max_seqlen_k,
            "page_table": step.window_table if own else step.page_table,
            "tree_mask": step.tree_mask,
        }
    if step.node_table is None or window is None or reach > window:
        raise ValueError(
            f"a layer has a sliding window of {reach + 1} keys and drafts are a tree, where the "
            f"model's is {window}; accepted: no larger one"
        )
    return {
        "cu_seqlens_q": step.node_starts,
        "max_seqlen_q": 1,
        "seqused_k": step.node_keys,
        "max_seqlen_k": step.node_table.shape[1],
        "page_table": step.node_table,
    }
