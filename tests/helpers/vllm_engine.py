"""vLLM's engine on CPU tensors: a process that serves prompts with a model of a folder.

    python vllm_engine.py FOLDER < [[tokens of a prompt], ...] > [[generated tokens], ...]

Of vLLM's compiled parts an engine on the CPU needs three: they are written here in PyTorch. The
platform is replaced before vLLM is imported, since modules read it then. Steps go to stderr, a line
for each call of the builder: queries and keys of its calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

#: Tokens that are generated for each prompt, tokens of a step, and those of a request at most.
TOKENS, STEP, MODEL_LEN = 5, 48, 256


def main(folder: str) -> int:
    prompts = json.load(sys.stdin)
    results, steps = sys.stdout, sys.stderr
    with contextlib.redirect_stdout(steps):
        found = _served(folder, prompts)
    json.dump(found, results)
    return 0


def prepare():
    """Let vLLM run in this process, which has not imported it yet."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    import torch
    from vllm import platforms

    # vLLM's products for CPUs with AMX are compiled parts, too.
    torch.cpu._is_amx_tile_supported = lambda: False
    platforms._current_platform = _platform(platforms)()
    _define_compiled_parts(torch)


def _served(folder, prompts):
    prepare()
    from vllm import LLM, SamplingParams

    from fa4_hd256.integrations.vllm import plugin
    from fa4_hd256.integrations.vllm.metadata import Builder

    plugin.register()
    build = Builder.build

    def told(self, *given, **named):
        made = build(self, *given, **named)
        print("step", [[r.longest_q, r.longest_k] for r in made.requests])
        return made

    Builder.build = told
    engine = LLM(
        folder, skip_tokenizer_init=True, enforce_eager=True, seed=0, dtype="bfloat16",
        attention_backend="CUSTOM", kernel_config={"enable_jit_warmup": False},
        max_model_len=MODEL_LEN, max_num_seqs=4, max_num_batched_tokens=STEP,
        kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.05, enable_prefix_caching=True,
        compilation_config={"mode": 0, "custom_ops": ["none"]},
    )  # fmt: skip
    options = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    # The last prompt comes when blocks of the others are in the cache.
    served = []
    for batch in (prompts[:-1], prompts[-1:]):
        tokens = [{"prompt_token_ids": prompt} for prompt in batch]
        done = engine.generate(tokens, options, use_tqdm=False)
        served += [list(one.outputs[0].token_ids) for one in done]
        print("cached", [one.num_cached_tokens for one in done])
    return served


def _platform(platforms):
    """Return a platform of CPU tensors that pass for those of a B200."""
    import torch
    from vllm.platforms.interface import DeviceCapability, Platform, PlatformEnum

    class Simulated(Platform):
        _enum = PlatformEnum.OOT
        device_name = device_type = "cpu"
        dispatch_key = "CPU"
        simple_compile_backend = "eager"
        dist_backend = "gloo"
        is_cpu = support_hybrid_kv_cache = classmethod(lambda cls: True)
        is_pin_memory_available = classmethod(lambda cls: False)
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(10, 0))
        get_device_total_memory = classmethod(lambda cls, device_id=0: 1 << 33)
        fp8_dtype = classmethod(lambda cls: torch.float8_e4m3fn)
        inference_mode = classmethod(lambda cls: torch.no_grad())
        manual_seed_all = classmethod(lambda cls, seed: torch.manual_seed(seed))

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
            vllm_config.parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"
            vllm_config.cache_config.block_size = 16

    return Simulated


def _define_compiled_parts(torch):
    library = torch.library.Library("_C", "FRAGMENT")
    for name, schema, function in (
        ("init_cpu_memory_env", "(int[] nodes) -> ()", lambda nodes: None),
        ("greedy_argmax", "(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1)),
    ):
        library.define(name + schema)
        library.impl(name, function, "CompositeExplicitAutograd")
    from vllm.v1.worker.block_table import BlockTable

    BlockTable.library = library  # as long as the process

    def slots(self, requests, starts, positions):
        counts = (starts[1 : requests + 1] - starts[:requests]).long()
        rows = torch.repeat_interleave(torch.arange(requests), counts)
        at = positions[: rows.shape[0]].long()
        blocks = self.block_table.gpu[rows, at // self.block_size].long()
        self.slot_mapping.gpu.fill_(-1)
        self.slot_mapping.gpu[: rows.shape[0]] = blocks * self.block_size + at % self.block_size

    BlockTable.compute_slot_mapping = slots


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
