"""Steps of vLLM, made of its own classes: platform, configuration, block tables, metadata, layer.

On the CPU nothing of vLLM that is compiled exists, so PyTorch writes the cache and its slots.
"""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import torch
import vllm.v1.utils
from vllm import config as vllm_config
from vllm import platforms
from vllm.forward_context import set_forward_context
from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.block_table import BlockTable

from fa4_hd256.check import reference
from fa4_hd256.integrations.vllm import plugin

HEADS, HEADS_KV, BLOCK = 4, 2, 16
#: Keys of a request at most.
MODEL_LEN = 1024
SCALE = 0.07
NAME = "model.layers.0.self_attn"


class Tested(Platform):
    """Platform of the tests' device. CPU tensors pass for those of a B200."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    dispatch_key = "CPU"

    @classmethod
    def get_device_capability(cls, device_id=0):
        if cls.device_type == "cuda":
            return DeviceCapability(*torch.cuda.get_device_capability())
        return DeviceCapability(10, 0)

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        selected = selected_backend or AttentionBackendEnum.FLEX_ATTENTION
        if selected_backend is not None:
            reasons = selected.get_class().validate_configuration(
                device_capability=cls.get_device_capability(), **attn_selector_config._asdict()
            )
            if reasons:
                raise ValueError(reasons)
        return ".".join(selected.get_class().full_cls_name())

    @classmethod
    def check_and_update_config(cls, vllm_config):
        pass

    @classmethod
    def fp8_dtype(cls):
        return torch.float8_e4m3fn


class TestedGpu(Tested):
    device_name = device_type = "cuda"
    dispatch_key = "CUDA"


def model_of(**changed):
    """Return what builders read of a model's configuration."""
    given = {"is_mm_prefix_lm": False, "is_diffusion": False, "max_model_len": MODEL_LEN}
    facts = given | {"rswa_window": None, "dtype": torch.bfloat16} | changed
    return SimpleNamespace(**facts, get_head_size=lambda: 256)


@contextlib.contextmanager
def configured(monkeypatch, device):
    """vLLM's configuration with the backend selected by its name; builders compile nothing."""
    monkeypatch.setattr(
        platforms, "_current_platform", TestedGpu() if device == "cuda" else Tested()
    )
    monkeypatch.setattr(vllm.v1.utils, "PIN_MEMORY", device == "cuda")
    if device == "cuda":
        _write_without_compiled_parts(monkeypatch)
    plugin.register()
    found = vllm_config.VllmConfig()
    found.attention_config.backend = AttentionBackendEnum["CUSTOM"]
    found.kernel_config.enable_jit_warmup = False
    object.__setattr__(found, "model_config", model_of())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with vllm_config.set_current_vllm_config(found):
        yield found
    torch.set_default_dtype(before)
    for member in (AttentionBackendEnum.CUSTOM, AttentionBackendEnum.FLASH_ATTN):
        member.clear_override()


def _write_without_compiled_parts(monkeypatch):
    """Let vLLM's kernel in Triton write the cache, unless the compiled one is there."""
    from vllm import _custom_ops
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    if not hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash"):
        name = "reshape_and_cache_flash"
        monkeypatch.setattr(_custom_ops, name, triton_reshape_and_cache_flash)


def place():
    """Return the device of the session. No default device: a mode would be between calls and us."""
    return torch.device(platforms.current_platform.device_type)


def int32(numbers, device=None):
    return torch.tensor(numbers, dtype=torch.int32, device=device or place())


def random(*shape):
    return torch.randn(shape, device=place())


class Step:
    """A step of the engine: of each request so many queries, the last of so many keys.

    padding: rows behind them. shared: first blocks that all requests share.
    """

    def __init__(self, queries, keys, padding=0, shared=0):
        self.queries, self.keys, self.padding = queries, keys, padding
        blocks = [-(-count // BLOCK) for count in keys]
        numbers = iter((torch.randperm(sum(blocks)) + 1).tolist())
        table = BlockTable(BLOCK, len(keys), max(blocks) + 2, 8192, False, place(), 1)
        prefix = [next(numbers) for _ in range(shared)]
        for row, count in enumerate(blocks):
            table.add_row([*prefix, *(next(numbers) for _ in range(count - shared))], row)
        table.commit_block_table(len(keys))
        self.table = table.get_device_tensor(len(keys))
        self.blocks, self.rows = sum(blocks) + 1, sum(queries) + padding

    @property
    def ends(self):
        return list(itertools.accumulate(self.queries))

    def slots(self, row, begin, end):
        positions = torch.arange(begin, end, device=place())
        return self.table[row, positions // BLOCK].long() * BLOCK + positions % BLOCK

    def common(self, **changed):
        """Return vLLM's metadata. Rows of padding have the slot -1."""
        starts = [0, *self.ends]
        new = [
            self.slots(row, count - queries, count)
            for row, (queries, count) in enumerate(zip(self.queries, self.keys))
        ]
        given = {
            "query_start_loc": int32(starts), "query_start_loc_cpu": int32(starts, "cpu"),
            "seq_lens": int32(self.keys), "seq_lens_cpu_upper_bound": int32(self.keys, "cpu"),
            "num_reqs": len(self.keys), "num_actual_tokens": sum(self.queries),
            "max_query_len": max(self.queries), "max_seq_len": max(self.keys),
            "block_table_tensor": self.table,
            "slot_mapping": torch.cat([*new, torch.full((self.padding,), -1, device=place())]),
            "causal": True,
        }  # fmt: skip
        return CommonAttentionMetadata(**given | changed)

    def cached(self, cache, row):
        """Return the keys and values of a request, (1, rows, heads_kv, 256) each."""
        k, v = cache.transpose(1, 2).split(256, dim=-1)
        pages = self.table[row, : -(-self.keys[row] // BLOCK)].long()
        return [t[pages].flatten(0, 1)[None, : self.keys[row]] for t in (k, v)]


def new_cache(step, dtype=torch.bfloat16, heads_kv=HEADS_KV):
    """A layer's cache with old rows in it."""
    return random(step.blocks, heads_kv, BLOCK, 512).to(dtype)


def accurate(step, query, output, cache, scales=None, of=lambda row: {}, **options):
    """Compare the output of a step with float64 attention over what the cache holds.

    scales: of keys and of values in e4m3. of: options of one request.
    """
    ends = [0, *step.ends]
    for row, (begin, end) in enumerate(itertools.pairwise(ends)):
        keys = step.cached(cache, row)
        if scales is not None:
            keys = [t.double() * scale for t, scale in zip(keys, scales)]
        tensors = [t.cpu() for t in (query[None, begin:end], *keys)]
        exact = reference.Expected.of(tensors, softmax_scale=SCALE, **options | of(row))
        errors = exact.compare(output[None, begin:end].cpu(), exact.lse.float())
        assert errors.max_error <= errors.tolerance, (row, errors)


def layer_of(config, name=NAME, heads_kv=HEADS_KV, **options):
    """Return vLLM's own attention layer."""
    from vllm.model_executor.layers.attention import Attention

    config.compilation_config.static_forward_context.pop(name, None)
    return Attention(HEADS, 256, SCALE, heads_kv, prefix=name, **options).to(place())


def builder_of(config, layer):
    """Return the builder of the layer's own backend."""
    kind = layer.attn_backend.get_builder_cls()
    return kind(layer.get_kv_cache_spec(config), [NAME], config, place())


def metadata_of(config, layer, step, **changed):
    return builder_of(config, layer).build(0, step.common(**changed))


def attended(config, layer, step, cache, metadata, q=None):
    """Call the layer as a model does. Return q, k, v and the output, rows first."""
    heads_kv = layer.num_kv_heads
    q = random(step.rows, HEADS, 256) if q is None else q
    k, v = (random(step.rows, heads_kv, 256) for _ in "kv")
    layer.kv_cache = cache
    slots = {NAME: metadata.slot_mapping}
    with set_forward_context({NAME: metadata}, config, slot_mapping=slots):
        output = layer(q.flatten(1), k.flatten(1), v.flatten(1))
    return q, k, v, output.view(step.rows, HEADS, 256)
