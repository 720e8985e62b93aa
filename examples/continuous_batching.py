"""Continuous batching of transformers on this attention, beside SDPA.

    python examples/continuous_batching.py                          # tiny, without a GPU
    python examples/continuous_batching.py --requests 64 --layers 12 --new-tokens 128

A Gemma with random weights answers requests of several lengths, more than fit into one pass: new
ones join as others end. On a GPU tokens a second are those of the whole model. Without one the
kernels run in the simulator, whose times say nothing of a GPU. Needs transformers.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
)

from fa4_hd256.integrations import transformers as integration

HEAD_DIM = 256
WINDOW = 512


def model_of(options: argparse.Namespace, device: str) -> Any:
    """Five layers of six with a window, as Gemma 3 has them."""
    config = Gemma3TextConfig(
        vocab_size=512, hidden_size=64 * options.heads, intermediate_size=128 * options.heads,
        num_hidden_layers=options.layers, num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads, head_dim=HEAD_DIM, sliding_window=WINDOW,
        query_pre_attn_scalar=HEAD_DIM, max_position_embeddings=32768,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).to(device, torch.bfloat16).eval()


def answers(model: Any, prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Chosen tokens and their log-probabilities by request, and the seconds of all."""
    generation = GenerationConfig(
        max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    rows = sum(len(prompt) + options.new_tokens for prompt in prompts)
    batching = ContinuousBatchingConfig(
        max_batch_tokens=options.tokens_a_pass, page_size=options.page_size,
        num_blocks=len(prompts) + -(-rows // options.page_size), return_logprobs=True,
        use_cuda_graph=False,
    )  # fmt: skip
    begin = time.perf_counter()
    found = model.generate_batch(
        prompts, generation_config=generation, continuous_batching_config=batching,
        progress_bar=False,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    given = [(one.generated_tokens, one.logprobs) for _, one in sorted(found.items())]
    return {"requests": given, "seconds": seconds}


def difference(one: list, other: list) -> float:
    """The largest of log-probabilities up to the first token that differs: from there on the texts
    are others."""
    largest = 0.0
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(one, other, strict=True):
        for token, value, other_token, other_value in zip(
            tokens, logprobs, other_tokens, other_logprobs, strict=True
        ):
            largest = max(largest, abs(value - other_value))
            if token != other_token:
                break
    return largest


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, what in (
        ("requests", 3, "of different lengths"), ("longest", 20, "tokens of the longest prompt"),
        ("new-tokens", 3, "for each request"), ("tokens-a-pass", 16, "of all requests together"),
        ("layers", 1, "of the model"), ("heads", 2, "of queries"),
        ("kv-heads", 1, "of keys and values"), ("page-size", 16, "rows of a page of the cache"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} ({default})")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = model_of(options, device)
    lengths = [max(1, options.longest * (i + 1) // options.requests)
               for i in range(options.requests)]  # fmt: skip
    prompts = [torch.randint(1, 512, (length,)).tolist() for length in lengths]
    print(f"{options.requests} requests of {lengths[0]} to {lengths[-1]} tokens, "
          f"{options.tokens_a_pass} a pass, {options.layers} layers on "
          f"{torch.cuda.get_device_name() if device == 'cuda' else 'the simulator'}")  # fmt: skip
    model.set_attn_implementation("sdpa")
    results = {"SDPA": answers(model, prompts, options)}
    integration.use_in_continuous_batching(model)
    results["fa4_hd256"] = answers(model, prompts, options)
    note = "" if device == "cuda" else "  (time of the simulator, or of PyTorch on this CPU)"
    for name, found in results.items():
        rate = options.requests * options.new_tokens / found["seconds"]
        print(f"{name:10} {rate:10.1f} tokens a second{note}")
    error = difference(*(found["requests"] for found in results.values()))
    print(f"largest difference of log-probabilities {error:.1e}")
    if not error <= 0.05:
        raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
