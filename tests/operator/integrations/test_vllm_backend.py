"""The backend inside vLLM's own classes: registry, checks, builder, layer, on CPU tensors too.

vLLM is not among what the tests install (`make test-engines` installs it).
"""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("vllm.v1.attention.backend", exc_type=ImportError)

from vllm import config as vllm_config
from vllm import platforms
from vllm.forward_context import set_forward_context
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from fa4_hd256.check import reference
from fa4_hd256.integrations.vllm import plugin
from fa4_hd256.integrations.vllm.backend import Backend, Builder, Impl

HEADS, HEADS_KV, BLOCK = 4, 2, 16
NAME = "model.layers.0.self_attn"


class OnCpu(Platform):
    """Platform whose tensors are in CPU memory, and whose GPU would be a B200."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    dispatch_key = "CPU"

    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(10, 0)

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=cls.get_device_capability(), **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(reasons)
        return selected_backend.get_path()

    @classmethod
    def check_and_update_config(cls, vllm_config):
        pass

    @classmethod
    def fp8_dtype(cls):
        return torch.float8_e4m3fn


@pytest.fixture
def config(monkeypatch):
    """vLLM's configuration with the backend selected by its name."""
    monkeypatch.setattr(platforms, "_current_platform", OnCpu())
    plugin.register()
    found = vllm_config.VllmConfig()
    found.attention_config.backend = AttentionBackendEnum["CUSTOM"]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with vllm_config.set_current_vllm_config(found):
        yield found
    torch.set_default_dtype(before)
    AttentionBackendEnum.CUSTOM.clear_override()


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


class Step:
    """A step of the engine: of each request so many queries, the last of so many keys."""

    def __init__(self, queries, keys, padding=0):
        self.queries, self.keys, self.padding = queries, keys, padding
        blocks = [-(-count // BLOCK) for count in keys]
        numbers = iter((torch.randperm(sum(blocks)) + 1).tolist())
        self.table = torch.zeros(len(keys), max(blocks) + 2, dtype=torch.int32)
        for row, count in enumerate(blocks):
            self.table[row, :count] = int32([next(numbers) for _ in range(count)])
        self.blocks = sum(blocks) + 1
        self.rows = sum(queries) + padding

    def slots(self, row, begin, end):
        positions = torch.arange(begin, end)
        return self.table[row, positions // BLOCK].long() * BLOCK + positions % BLOCK

    def common(self, **changed):
        """Return vLLM's metadata. Rows of padding have the slot -1."""
        starts = int32([0, *itertools.accumulate(self.queries)])
        new = [
            self.slots(row, count - queries, count)
            for row, (queries, count) in enumerate(zip(self.queries, self.keys))
        ]
        given = {
            "query_start_loc": starts, "query_start_loc_cpu": starts, "seq_lens": int32(self.keys),
            "num_reqs": len(self.keys), "num_actual_tokens": sum(self.queries),
            "max_query_len": max(self.queries), "max_seq_len": max(self.keys),
            "block_table_tensor": self.table,
            "slot_mapping": torch.cat([*new, torch.full((self.padding,), -1)]), "causal": True,
        }  # fmt: skip
        return CommonAttentionMetadata(**given | changed)

    def cached(self, cache, row):
        """Return the keys and values of a request, (1, rows, heads_kv, 256) each."""
        k, v = cache.transpose(1, 2).split(256, dim=-1)
        pages = self.table[row, : -(-self.keys[row] // BLOCK)].long()
        return [t[pages].flatten(0, 1)[None, : self.keys[row]] for t in (k, v)]


def new_cache(step, dtype=torch.bfloat16):
    """A layer's cache with old rows in it."""
    return torch.randn(step.blocks, HEADS_KV, BLOCK, 512).to(dtype)


def accurate(step, query, output, cache, **options):
    """Compare the output of a step with float64 attention over what the cache holds."""
    ends = [0, *itertools.accumulate(step.queries)]
    for row, (begin, end) in enumerate(itertools.pairwise(ends)):
        tensors = query[None, begin:end], *step.cached(cache, row)
        exact = reference.Expected.of(tensors, **options)
        errors = exact.compare(output[None, begin:end], exact.lse.float())
        assert errors.max_error <= errors.tolerance, errors


def layer_of(config, **options):
    """Return vLLM's own attention layer."""
    from vllm.model_executor.layers.attention import Attention

    config.compilation_config.static_forward_context.clear()
    return Attention(HEADS, 256, 0.07, HEADS_KV, prefix=NAME, **options)


def attended(config, layer, step, cache, metadata):
    """Call the layer as a model does. Return q, k, v and the output, rows first."""
    q, k, v = (torch.randn(step.rows, heads, 256) for heads in (HEADS, HEADS_KV, HEADS_KV))
    layer.kv_cache = cache
    slots = {NAME: metadata.slot_mapping}
    with set_forward_context({NAME: metadata}, config, slot_mapping=slots):
        output = layer(q.flatten(1), k.flatten(1), v.flatten(1))
    return q, k, v, output.view(step.rows, HEADS, 256)


def metadata_of(config, layer, step, **changed):
    builder = Builder(layer.get_kv_cache_spec(config), [NAME], config, torch.device("cpu"))
    return builder.build(0, step.common(**changed))


#: A decoding step, a part of a prompt, a whole prompt.
MIXED = [1, 9, 20], [37, 41, 20]


def test_vllm_selects_it(config):
    layer = layer_of(config)
    assert layer.attn_backend is Backend and isinstance(layer.impl, Impl)
    refused = {
        "head_size": 128, "dtype": torch.float32, "kv_cache_dtype": "fp8_e5m2", "block_size": 8,
        "use_mla": True, "use_mm_prefix": True, "use_dcp": True, "use_adaptive_verification": True,
    }  # fmt: skip
    accepted = {
        "head_size": 256, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 16,
        "use_mla": False, "has_sink": True, "use_sparse": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0),
        "attn_type": AttentionType.DECODER, "has_sliding_window": True, "use_non_causal": True,
        "use_batch_invariant": True,
    }  # fmt: skip
    assert Backend.validate_configuration(**accepted) == []
    for name, value in refused.items():
        assert len(Backend.validate_configuration(**accepted | {name: value})) == 1, name
    older = accepted | {"device_capability": DeviceCapability(8, 0)}
    assert Backend.validate_configuration(**older) == ["compute capability not supported"]


def test_another_plugin_keeps_its_backend(config, caplog):
    register_backend(AttentionBackendEnum.CUSTOM, "other.Backend")
    plugin.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "other.Backend"
    assert "CUSTOM is other.Backend" in caplog.text


@pytest.mark.parametrize(
    "layer_options, options",
    [
        ({}, {}),
        ({"per_layer_sliding_window": 12, "logits_soft_cap": 30.0},
         {"window_size": (11, 0), "softcap": 30.0}),
    ],
    ids=["plain", "Gemma 2"],
)  # fmt: skip
def test_a_mixed_step(config, layer_options, options):
    """The layer writes new rows to the cache, then attends to all; rows of padding do nothing."""
    layer, step = layer_of(config, **layer_options), Step(*MIXED, padding=2)
    cache = new_cache(step)
    before = cache.clone()
    q, k, v, output = attended(config, layer, step, cache, metadata_of(config, layer, step))
    slots = step.common().slot_mapping[:-2]
    written = cache.transpose(1, 2).flatten(0, 1)[slots]
    assert torch.equal(written, torch.cat((k, v), dim=-1)[:-2])
    others = torch.ones(step.blocks * BLOCK, dtype=torch.bool).index_fill(0, slots, False)
    unchanged = (t.transpose(1, 2).flatten(0, 1)[others] for t in (cache, before))
    assert torch.equal(*unchanged)
    accurate(step, q, output, cache, softmax_scale=0.07, causal=True, **options)


@pytest.mark.sampled
def test_decoding_over_e4m3(config):
    """The layer's scales are those of all keys and of all values."""
    config.cache_config.cache_dtype = "fp8"
    layer = layer_of(config, cache_config=config.cache_config)
    layer._k_scale.fill_(0.5)
    layer._v_scale.fill_(2.0)
    step = Step([1, 1], [37, 20])
    cache = new_cache(step, torch.float8_e4m3fn)
    whole = cache.view(torch.uint8)
    q, k, v, output = attended(config, layer, step, whole, metadata_of(config, layer, step))
    scales = (0.5, 2.0)
    for row in range(2):
        rows = [t.double() * scale for t, scale in zip(step.cached(cache, row), scales)]
        for new, cached in zip((k, v), rows):
            # Three bits of mantissa.
            torch.testing.assert_close(cached[0, -1], new[row].double(), rtol=2**-4, atol=2**-6)
        exact = reference.Expected.of((q[None, row : row + 1], *rows), softmax_scale=0.07)
        errors = exact.compare(output[None, row : row + 1], exact.lse.float())
        assert errors.max_error <= errors.tolerance, errors


@pytest.mark.sampled
def test_an_encoder(config):
    """Queries of a request see its keys on both sides, and nothing is written."""
    layer = layer_of(config, attn_type=AttentionType.ENCODER_ONLY)
    step = Step([9, 20], [9, 20], padding=1)
    q, k, v, output = attended(config, layer, step, None, metadata_of(config, layer, step))
    for rows in (slice(0, 9), slice(9, 29)):
        exact = reference.Expected.of([t[None, rows] for t in (q, k, v)], softmax_scale=0.07)
        errors = exact.compare(output[None, rows], exact.lse.float())
        assert errors.max_error <= errors.tolerance, errors


def test_refusals(config):
    layer, step = layer_of(config), Step([1], [3])
    with pytest.raises(NotImplementedError, match="causal is a tensor, one value for each request"):
        metadata_of(config, layer, step, causal=torch.ones(1, dtype=torch.int32))
    q, output = torch.zeros(1, HEADS, 256), torch.ones(1, HEADS, 256)
    with pytest.raises(NotImplementedError, match="output_scale is given"):
        layer.impl.forward(layer, q, q, q, new_cache(step), None, output, torch.ones(1))
    assert not layer.impl.forward(layer, q, q, q, new_cache(step), None, output).any()


def test_groups_of_layers_share_a_step(config):
    layer, step = layer_of(config), Step([1], [3])
    builder = Builder(layer.get_kv_cache_spec(config), [NAME], config, torch.device("cpu"))
    one = builder.build(0, step.common())
    table, slots = torch.ones(1, 5, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    other = builder.update_block_table(one, table, slots)
    assert other.block_table is table and other.slot_mapping is slots
    assert other.seq_lens is one.seq_lens and one.block_table is step.table
