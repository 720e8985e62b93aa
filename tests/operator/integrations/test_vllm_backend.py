"""The backend in vLLM's own classes: registry, checks, builder, and what is compiled before a step.

vLLM is not among what the tests install (`make test-engines` installs it).
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm.v1.attention.backend", exc_type=ImportError)

from planned_kernels import planned_kernels
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm_steps import (
    BLOCK,
    HEADS,
    HEADS_KV,
    NAME,
    SCALE,
    Step,
    attended,
    builder_of,
    configured,
    int32,
    layer_of,
    metadata_of,
    model_of,
    new_cache,
    place,
)

from fa4_hd256.integrations import engines
from fa4_hd256.integrations.vllm import kernels, plugin
from fa4_hd256.integrations.vllm.backend import Backend, Impl
from fa4_hd256.integrations.vllm.metadata import Builder
from fa4_hd256.run.compile import counters
from fa4_hd256.warm import WarmUp


@pytest.fixture
def config(monkeypatch, device):
    torch.manual_seed(0)
    with configured(monkeypatch, device) as found:
        yield found


def test_vllm_selects_it(config):
    layer = layer_of(config)
    assert layer.attn_backend is Backend and isinstance(layer.impl, Impl)
    refused = {
        "head_size": 128, "dtype": torch.float32, "kv_cache_dtype": "fp8_e5m2", "block_size": 8,
        "use_mla": True, "use_dcp": True, "use_pcp": True, "use_adaptive_verification": True,
        "use_rswa": True, "use_per_head_quant_scales": True, "use_sparse": True,
    }  # fmt: skip
    accepted = {
        "head_size": 256, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 16,
        "use_mla": False, "has_sink": True, "use_sparse": False, "use_mm_prefix": True,
        "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0),
        "attn_type": AttentionType.DECODER, "has_sliding_window": True, "use_non_causal": True,
        "use_batch_invariant": True,
    }  # fmt: skip
    assert Backend.validate_configuration(**accepted) == []
    for name, value in refused.items():
        assert len(Backend.validate_configuration(**accepted | {name: value})) == 1, name
    older = accepted | {"device_capability": DeviceCapability(8, 0)}
    assert Backend.validate_configuration(**older) == ["compute capability not supported"]


def test_kinds_of_layers_have_backends_of_their_own(config):
    """Gemma 4: layers with a window have head size 256, the others 512."""
    config.attention_config.backend = None
    config.attention_config.backend_per_kind = {"sliding_window": AttentionBackendEnum.CUSTOM}
    assert layer_of(config, per_layer_sliding_window=12).attn_backend is Backend
    assert layer_of(config).attn_backend.get_name() == "FLEX_ATTENTION"


def test_another_plugin_keeps_its_backend(config, caplog, monkeypatch):
    monkeypatch.setenv("FA4_HD256_VLLM_FLASH_ATTN", "1")
    for name in ("CUSTOM", "FLASH_ATTN"):
        register_backend(AttentionBackendEnum[name], "other.Backend")
    plugin.register()
    for name in ("CUSTOM", "FLASH_ATTN"):
        assert AttentionBackendEnum[name].get_path() == "other.Backend"
        assert f"{name} is other.Backend" in caplog.text


def of_head_size(config, head_size):
    """Return vLLM's layer of a head size, with the backend FLASH_ATTN."""
    from vllm.model_executor.layers.attention import Attention

    name = f"model.layers.{head_size}.self_attn"
    config.compilation_config.static_forward_context.pop(name, None)
    return Attention(HEADS, head_size, SCALE, HEADS_KV, prefix=name)


def test_flash_attn_is_ours_for_head_size_256_alone(config, monkeypatch):
    """An environment variable decides it. vLLM's own classes get every other head size."""
    config.attention_config.backend = AttentionBackendEnum.FLASH_ATTN
    assert not AttentionBackendEnum.FLASH_ATTN.is_overridden()
    monkeypatch.setenv("FA4_HD256_VLLM_FLASH_ATTN", "1")
    plugin.register()
    made = []
    known = "vllm.v1.attention.backends.flash_attn.FlashAttentionMetadataBuilder.__init__"
    monkeypatch.setattr(known, lambda self, *given: made.append(self))
    # It asks which of vLLM's compiled functions are there, and none is.
    monkeypatch.setattr(FlashAttentionImpl, "__init__", lambda self, *given: made.append(self))
    ours, others = (of_head_size(config, size) for size in (256, 128))
    assert ours.attn_backend is others.attn_backend
    assert ours.attn_backend.get_name() == "FLASH_ATTN"
    assert type(ours.impl) is Impl and type(others.impl) is FlashAttentionImpl
    specs = [layer.get_kv_cache_spec(config) for layer in (ours, others)]
    builder = ours.attn_backend.get_builder_cls()
    built = [builder(spec, [NAME], config, place()) for spec in specs]
    assert type(built[0]) is Builder and made == [others.impl, built[1]]
    supports = [builder.get_cudagraph_support(config, spec) for spec in specs]
    assert supports == [one.get_cudagraph_support(config, specs[0]) for one in map(type, built)]
    sizes = [ours.attn_backend.get_supported_kernel_block_sizes(spec)[0] for spec in specs]
    assert [size.base for size in sizes] == [16, 16]
    facts = {
        "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_dcp": True,
        "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0),
        "attn_type": AttentionType.DECODER,
    }  # fmt: skip
    # What is not offered at head size 256 is no call of vLLM's own kernels, either.
    assert ours.attn_backend.validate_configuration(head_size=256, **facts) == ["DCP not supported"]
    assert ours.attn_backend.validate_configuration(head_size=128, **facts) == []


def test_refusals(config):
    layer, step = layer_of(config), Step([1], [3])
    with pytest.raises(ValueError, match=r"causal has shape \(2,\); accepted: \(1,\), a value for"):
        metadata_of(config, layer, step, causal=int32([1, 1]))
    q, output = (torch.ones(1, HEADS, 256, device=place()) for _ in range(2))
    with pytest.raises(NotImplementedError, match="output_scale is given"):
        layer.impl.forward(layer, q, q, q, new_cache(step), None, output, torch.ones(1))
    assert not layer.impl.forward(layer, q, q, q, new_cache(step), None, output).any()
    with pytest.raises(NotImplementedError, match="alibi_slopes are given with logits_soft_cap 30"):
        layer_of(config, alibi_slopes=[0.5] * HEADS, logits_soft_cap=30.0)
    config.cache_config.cache_dtype = "fp8"
    with pytest.raises(NotImplementedError, match="alibi_slopes .* kv_cache_dtype fp8; accepted"):
        layer_of(config, alibi_slopes=[0.5] * HEADS, cache_config=config.cache_config)


def test_images_longer_than_a_window(config):
    """vLLM makes such images causal, unless layers clamp them; else we would hide keys."""
    layer, step = layer_of(config, per_layer_sliding_window=8), Step([20], [20])
    with pytest.raises(ValueError, match="an image has 9 rows; accepted: up to 8, the window"):
        metadata_of(config, layer, step, mm_req_doc_ranges={0: [(3, 11)]})
    with pytest.raises(ValueError, match="seq_lens_cpu_upper_bound is None with mm_req_doc_ranges"):
        ranges = {0: [(3, 5)]}
        metadata_of(config, layer, step, mm_req_doc_ranges=ranges, seq_lens_cpu_upper_bound=None)


def test_groups_of_layers_share_a_step(config):
    layer, step = layer_of(config), Step([1, 20], [3, 20])
    builder = builder_of(config, layer)
    one = builder.build(0, step.common(mm_req_doc_ranges={1: [(3, 11)]}))
    table, slots = step.table + 7, torch.zeros(1, dtype=torch.int64)
    other = builder.update_block_table(one, table, slots)
    assert other.slot_mapping is slots
    for row, (before, after) in enumerate(zip(one.requests, other.requests)):
        assert torch.equal(after.block_table, table[row : row + 1])
        assert after.seq_lens is before.seq_lens
    assert torch.equal(other.mm_prefix_range.block_table, table[1:])
    assert torch.equal(one.mm_prefix_range.block_table, step.table[1:])


def test_graphs_keep_their_tensors(config):
    """A uniform batch is one call on the runner's tensors; flags go to memory of the builder's."""
    layer = layer_of(config)
    builder, step = builder_of(config, layer), Step([1, 1], [3, 20])
    common = step.common()
    (requests,) = builder.build_for_cudagraph_capture(common).requests
    runner = common.query_start_loc, common.seq_lens, common.block_table_tensor
    held = requests.starts, requests.seq_lens, requests.block_table
    assert [t.data_ptr() for t in held] == [t.data_ptr() for t in runner]
    first = builder.build(0, step.common(causal=int32([1, 0]))).requests
    again = builder.build(0, step.common(causal=int32([0, 1]))).requests
    for one, two in zip(first, again):
        assert one.seq_lens.data_ptr() == two.seq_lens.data_ptr()
    assert [one.seq_lens.tolist() for one in again] == [[0, 20], [3, 0]]
    spec = layer.get_kv_cache_spec(config)
    assert Builder.get_cudagraph_support(config, spec) is AttentionCGSupport.UNIFORM_BATCH
    object.__setattr__(config, "model_config", model_of(is_mm_prefix_lm=True))
    alone = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert Builder.get_cudagraph_support(config, spec) is alone


def test_bounds_of_keys_are_few(config):
    """A request grows with every step: each bound is a plan, and none may be too small."""
    builder, step = builder_of(config, layer_of(config)), Step([1], [1000])
    room = step.table.shape[1] * BLOCK
    found = {}
    for longest in range(1, room + 1):
        (requests,) = builder.build(0, step.common(max_seq_len=longest)).requests
        assert longest <= requests.longest_k <= room
        found.setdefault(requests.longest_k, longest)
    assert found == {256: 1, 512: 257, 768: 513, 1024: 769, room: 1025}
    step.table = step.table.new_zeros(1, 1 << 14)
    bounds = [(4096, 4096), (4097, 5120), (5121, 6144), (7169, 8192), (130_000, 131_072)]
    for longest, bound in bounds:
        (requests,) = builder.build(0, step.common(max_seq_len=longest)).requests
        assert requests.longest_k == bound


# ---------------------------------------------------------------- what is compiled before a step

#: Steps: queries and keys of requests.
STEPS = [
    ([1], [5]), ([1] * 40, [600] * 40), ([1] * 300, [20] * 300), ([2, 2], [900, 30]),
    ([3] * 7, [1024] * 7), ([4], [1024]), ([16], [400]), ([17, 1], [17, 1024]),
    ([1, 1, 9, 300], [37, 1024, 41, 300]), ([500], [1000]), ([1, 64], [2, 64]),
    ([33, 5], [700, 800]), ([1000], [1000]), ([8] * 12, [777] * 12),
]  # fmt: skip
LAYERS = {
    "plain": {}, "Gemma 2": {"per_layer_sliding_window": 512, "logits_soft_cap": 50.0},
    "ALiBi": {"alibi_slopes": [0.5] * HEADS}, "sinks": {"sinks": torch.zeros(HEADS)},
    "encoder": {"attn_type": AttentionType.ENCODER_ONLY, "per_layer_sliding_window": 256},
    "e4m3": {}, "batch invariant": {}, "images": {"per_layer_sliding_window": 512},
}  # fmt: skip
KINDS = sorted(LAYERS)


def steps_of(config, layer, kind):
    """Run the steps of `STEPS`."""
    for queries, keys in STEPS:
        keys = queries if kind == "encoder" else keys
        step = Step(queries, keys)
        prompt = len(keys) - 1
        given = {"is_prefilling": torch.tensor([n > 4 for n in queries])}
        if kind == "images" and queries[prompt] > 16:
            given["mm_req_doc_ranges"] = {prompt: [(keys[prompt] - 12, keys[prompt] - 3)]}
        metadata = metadata_of(config, layer, step, **given)
        cache = new_cache(step)
        if kind == "e4m3":
            cache = cache.to(torch.float8_e4m3fn).view(torch.uint8)
        attended(config, layer, step, None if kind == "encoder" else cache, metadata)


def layer_of_kind(config, kind, monkeypatch):
    if kind == "e4m3":
        config.cache_config.cache_dtype = "fp8"
    if kind == "batch invariant":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    object.__setattr__(config, "model_config", model_of(is_mm_prefix_lm=kind == "images"))
    options = {"cache_config": config.cache_config} if kind == "e4m3" else dict(LAYERS[kind])
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(place())
    return layer_of(config, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheduler", ["0", "1", None], ids=["static", "dynamic", "by rule"])
def test_kernels_of_steps_are_known_before(config, monkeypatch, kind, scheduler):
    """Every kernel of varied steps is among those that the builder compiles."""
    monkeypatch.delenv("FA_CLC", raising=False)
    if scheduler is not None:
        monkeypatch.setenv("FA_CLC", scheduler)
    layer = layer_of_kind(config, kind, monkeypatch)
    with planned_kernels(monkeypatch) as found:
        steps_of(config, layer, kind)
    device = place()
    spec = layer.get_kv_cache_spec(config)
    known = kernels.kernels_of_layers(spec, [NAME], config, device)
    # Of encoders there are three on Hopper.
    assert len(found) >= 3
    assert found <= set(known), found - set(known)


def test_the_builder_compiles_them(config, monkeypatch):
    """All of them, and where vLLM's option is off none."""
    layer, loaded = layer_of(config), []
    monkeypatch.setattr(
        engines, "load", lambda specs, place: loaded.append(specs) or WarmUp(len(specs), 0, 0.0)
    )
    builder_of(config, layer)
    assert not loaded
    config.kernel_config.enable_jit_warmup = True
    builder_of(config, layer)
    device = place()
    spec = layer.get_kv_cache_spec(config)
    assert loaded == [kernels.kernels_of_layers(spec, [NAME], config, device)]


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_compiles_anything(config, monkeypatch, kind):
    """On a GPU, after the builder."""
    layer = layer_of_kind(config, kind, monkeypatch)
    config.kernel_config.enable_jit_warmup = True
    builder_of(config, layer)
    config.kernel_config.enable_jit_warmup = False
    before = counters["compiled"]
    steps_of(config, layer, kind)
    assert counters["compiled"] == before
