"""SGLang's pools, batches and layers around a backend, on the tensors of a test's device.

SGLang's own test kit has the runner.
"""

from __future__ import annotations

import itertools

import absent_packages  # noqa: F401
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.test.kits.attention_unittest.attention_methods.dense_attention import (
    DenseAttentionCase,
    MockModelRunner,
    TinyModelConfig,
)

from fa4_hd256.check import reference

HEADS, HEADS_KV, SCALE = 4, 2, 0.07
#: Positions of a request, where nothing else is said.
CONTEXT = 128


class Engine:
    """A server of one layer, or with a cache of its own for windows of two: 0 and the window's 1.

    Requests have rows 1, 2, ... of the table, and pages in a random order.
    """

    def __init__(
        self, device, requests=2, page_size=16, window=None, cache_dtype=torch.bfloat16,
        has_window_cache=False, context=CONTEXT, **server
    ):  # fmt: skip
        self.device, self.page_size, self.requests = device, page_size, requests
        self.context = context
        case = DenseAttentionCase(
            "", "fa4_hd256", ForwardMode.EXTEND, HEADS, HEADS_KV, page_size, (0,) * requests,
            (1,) * requests, window,
        )  # fmt: skip
        config = TinyModelConfig(
            num_heads=HEADS, num_kv_heads=HEADS_KV, head_dim=256, hidden_size=64,
            context_len=context, sliding_window_size=window,
        )  # fmt: skip
        config.swa_head_dim = 256
        self.runner = runner = MockModelRunner(
            case=case, model_config=config, dtype=torch.bfloat16, device=device,
            max_context_len=context, head_dim=256,
        )  # fmt: skip
        self._server = get_context().override_server_args(
            **{"attention_backend": "fa4_hd256", "speculative_eagle_topk": 0} | server
        )
        runner.server_args = self._server.install()
        slots = page_size + requests * context
        self._fill_table(slots)
        runner.kv_cache_dtype = cache_dtype
        runner.kv_cache_dtype_str = "auto" if cache_dtype == torch.bfloat16 else "fp8_e4m3"
        sizes = {
            "page_size": page_size, "head_num": HEADS_KV, "head_dim": 256, "device": device,
            "enable_memory_saver": False, "dtype": cache_dtype,
        }  # fmt: skip
        if has_window_cache:
            pool = SWAKVPool(
                size=slots, size_swa=slots, swa_attention_layer_ids=[1],
                full_attention_layer_ids=[0], enable_alt_stream=False, **sizes,
            )  # fmt: skip
            pool.register_mapping(self._other_pages(slots))
        else:
            pool = MHATokenToKVPool(size=slots, layer_num=1, enable_alt_stream=False, **sizes)
        runner.token_to_kv_pool = self.pool = pool
        runner.init_kv_index_translator()
        for layer in range(1 + has_window_cache):
            for cache in pool.get_kv_buffer(layer):
                cache.copy_(torch.randn(cache.shape, device=device).to(cache.dtype))

    def close(self):
        self._server.restore()
        self.runner._server_args_override.restore()

    def backend(self):
        return ATTENTION_BACKENDS["fa4_hd256"](self.runner)

    def layer(self, window=-1, layer_id=0, **options):
        heads = {"num_heads": HEADS, "num_kv_heads": HEADS_KV, "head_dim": 256}
        return RadixAttention(
            scaling=SCALE, layer_id=layer_id, sliding_window_size=window, **heads | options
        )

    def tensor(self, values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=self.device)

    def batch(self, mode, queries, keys, **fields):
        """Return a batch. queries: new rows of each request; keys: of each, new ones among them.
        Of a verification and of a draft, seq_lens does not count those."""
        requests = range(1, len(keys) + 1)
        ends = self.tensor(keys)
        places = [
            (request, position)
            for request, count, end in zip(requests, queries, keys)
            for position in range(end - count, end)
        ]
        table = self.runner.req_to_token_pool.req_to_token
        slots = table[tuple(self.tensor(list(zip(*places)), torch.int64))].long()
        is_ahead = mode.is_target_verify()
        lengths = ends - self.tensor(queries) if is_ahead else ends
        counts = {}
        if mode.is_extend() and not is_ahead:
            before = [end - count for count, end in zip(queries, keys)]
            counts = {
                "extend_seq_lens": self.tensor(queries), "extend_seq_lens_cpu": list(queries),
                "extend_prefix_lens": self.tensor(before), "extend_prefix_lens_cpu": before,
                "extend_num_tokens": sum(queries),
            }  # fmt: skip
        values = {
            "forward_mode": mode, "batch_size": len(keys), "out_cache_loc": slots,
            "input_ids": torch.zeros_like(slots), "positions": torch.zeros_like(slots),
            "req_pool_indices": self.tensor(list(requests), torch.int64),
            "seq_lens": lengths.long(), "seq_lens_cpu": lengths.long().cpu(),
            "seq_lens_sum": int(lengths.sum()),
        }  # fmt: skip
        return ForwardBatch(**values | counts | fields)

    def attended(self, backend, layer, batch, rows, **options):
        """Call the layer as a model does. Return q, k, v and the result, rows first."""
        shapes = ((rows, heads, 256) for heads in (HEADS, HEADS_KV, HEADS_KV))
        q, k, v = (torch.randn(s, device=self.device).to(torch.bfloat16) for s in shapes)
        # A cache in e4m3 divides new rows in place.
        given = [t.clone().flatten(1) for t in (q, k, v)]
        with forward_context(ForwardContext(attn_backend=backend)):
            out = layer(*given, batch, **options)
        return q, k, v, out

    def cached(self, request, positions, layer=0, scales=(1.0, 1.0)):
        """Return keys and values at positions of a request, (1, rows, heads_kv, 256) each."""
        slots = self.runner.req_to_token_pool.req_to_token[request + 1][positions]
        if layer == 1:
            slots = self.pool.translate_loc_from_full_to_swa(slots)
        rows = [cache[slots.long()][None] for cache in self.pool.get_kv_buffer(layer)]
        return [t if scale == 1 else t.double() * scale for t, scale in zip(rows, scales)]

    def accurate(self, q, out, queries, keys, layer=0, scales=(1.0, 1.0), **options):
        """Compare a step's result with float64 attention over what the cache holds."""
        ends = [0, *itertools.accumulate(queries)]
        out = out.view(-1, HEADS, 256)
        for request, (begin, end) in enumerate(itertools.pairwise(ends)):
            k, v = self.cached(request, slice(keys[request]), layer, scales)
            own = {
                name: value[request] if name == "mask" else value for name, value in options.items()
            }
            judged(q[begin:end], k, v, out[begin:end], softmax_scale=SCALE, **own)

    def _fill_table(self, slots):
        pages = torch.randperm(slots // self.page_size - 1) + 1
        rows = pages[:, None] * self.page_size + torch.arange(self.page_size)
        table = self.runner.req_to_token_pool.req_to_token
        table[1:].copy_(rows.flatten()[: self.requests * self.context].view(self.requests, -1))

    def _other_pages(self, slots):
        """Return the slot of each slot in the cache of windows: another page, the same row."""
        pages = torch.cat((torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(
            slots // self.page_size)))  # fmt: skip
        rows = pages[:, None] * self.page_size + torch.arange(self.page_size)
        return rows.flatten().to(self.device)


def judged(q, k, v, out, **options):
    """Compare with float64 attention. q, out: rows first; k, v: with a batch of 1 before them."""
    exact = reference.Expected.of((q[None], k, v), **options)
    errors = exact.compare(out[None], exact.lse.float())
    assert errors.max_error <= errors.tolerance, errors
    return exact


# Attention of a single rank, without torch.distributed.
get_parallel().override(attn_tp_size=1, attn_dcp_rank=0).__enter__()
