"""Scheduler metadata: numbers derived once, for the calls of all layers, from the lengths of ragged
sequences. They say how keys are split, and where dS begins."""

from __future__ import annotations

from typing import Any

import torch

from .call.cache_checks import check_int32, check_lengths, check_whole, of_batch
from .call.checks import DTYPES
from .call.forward_problem import Problem
from .call.options import Options
from .call.packed_ds import BackwardMetadata, begins_of, lengths_between, read_offsets
from .call.process import is_intercepted
from .call.scheduler_metadata import mark, marked, scheduler_metadata_of
from .gpus.devices import gpu_of, is_captured
from .kernels.nvfp4_format import BLOCK_SCALES, CACHE_DTYPES, NVFP4, NVFP4_BLOCK
from .kernels.problem_class import E4M3, KV_DTYPES
from .words import shown


def get_scheduler_metadata(  # noqa: PLR0913
    cache_seqlens: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    kv_dtype: torch.dtype | None = None,
    q_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`scheduler_metadata` for calls of decoding steps with these bounds: which part of which
    sequence's keys is whose work, balanced by the sequences' lengths.

    cache_seqlens: (batch,) int32, keys in use of each sequence, on the device of the calls; a CPU
    tensor for the simulator. max_seqlen_q, max_seqlen_k: of the calls; of keys in pages the rows of
    all pages of a row of page_table, unless the calls are given another. causal, window_size: of
    the calls. kv_dtype: of k and v, torch.uint8 for NVFP4, None for that of q. q_dtype: of q, None
    for bfloat16 or float16.

    Returns an int32 vector. Nothing waits for the device; in a CUDA graph it follows the lengths at
    each replay. Other lengths only balance it worse. Bits of a result depend on it as on
    num_splits. It begins with what it was made for. A call of another batch, number of query heads
    or bound of queries raises ValueError; where the tensor is a copy on a GPU, which nobody reads,
    its results are NaN instead.

    Raises TypeError or ValueError as the calls do.
    """
    check_int32("cache_seqlens", cache_seqlens)
    of_batch("cache_seqlens", cache_seqlens, cache_seqlens.numel(), cache_seqlens.device)
    check_whole(
        {
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            "num_heads_q": num_heads_q,
            "num_heads_kv": num_heads_kv,
        }
    )
    kinds = ("kv_dtype", kv_dtype, CACHE_DTYPES), ("q_dtype", q_dtype, KV_DTYPES)
    for name, dtype, narrow in kinds:
        if dtype not in (None, *DTYPES, *narrow):
            accepted = ", ".join(map(str, (*DTYPES, *narrow)))
            raise TypeError(f"{name} is {shown(dtype)}; accepted: None or {accepted}")
    if cache_seqlens.device.type == "cpu" and not is_intercepted():
        check_lengths(cache_seqlens, max_seqlen_k, "max_seqlen_k")
    number = torch.zeros((), dtype=torch.bfloat16, device=cache_seqlens.device)
    batch = cache_seqlens.shape[0]
    q, k = (
        number.expand(batch, rows, heads, 256)
        for rows, heads in ((max_seqlen_q, num_heads_q), (max_seqlen_k, num_heads_kv))
    )
    q = q.to(q_dtype) if q_dtype in KV_DTYPES else q
    k, tensors = _keys(k, kv_dtype or q.dtype, {"seqused_k": cache_seqlens})
    options = Options.check(None, causal, window_size, 0.0)
    problem = Problem.describe((q, k, k), options, None, tensors)
    gpu = gpu_of(cache_seqlens.device)
    made = scheduler_metadata_of(problem, gpu, cache_seqlens)
    if not torch.compiler.is_compiling():
        mark(made, problem, gpu)
    return made


def _keys(
    k: torch.Tensor, dtype: torch.dtype, tensors: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return (keys of a dtype, the tensors of the call by name). k: in bfloat16."""
    if dtype not in CACHE_DTYPES:
        return k, tensors
    if dtype != NVFP4:
        return k.to(dtype), tensors
    scale = k[..., : k.shape[-1] // NVFP4_BLOCK].to(E4M3)
    return k[..., : k.shape[-1] // 2].to(dtype), tensors | dict.fromkeys(BLOCK_SCALES, scale)


def get_backward_metadata(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    device: torch.device | str | None = None,
) -> BackwardMetadata:
    """`backward_metadata` for calls of `flash_attn_varlen_func` with these offsets and this mask:
    dS of their gradients then takes the tiles that are visible, and no more (docs/training.md).

    cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, of the calls or copies of these; cu_seqlens_k
    None where it is cu_seqlens_q. Their contents are read, which waits for a GPU that has them, and
    for none where they lie on the CPU. device: of the calls, None for that of cu_seqlens_q.

    One serves all layers of a mask as long as lengths stay as they are. With other lengths all
    gradients are NaN on a GPU; on the CPU, or with FA4_HD256_CHECK=1, they are a ValueError.

    Raises TypeError or ValueError for offsets or a mask that calls do not accept, and RuntimeError
    in a CUDA graph's capture or under torch.compile, where nothing can be read.
    """
    window = Options.check(None, causal, window_size, 0.0).window
    offsets = cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    found = []
    for side, tensor in zip("qk", offsets):
        name = f"cu_seqlens_{side}"
        check_int32(name, tensor)
        if torch.compiler.is_compiling() or is_captured(tensor.device):
            raise RuntimeError(
                "get_backward_metadata reads lengths, which neither torch.compile nor the capture "
                "of a CUDA graph can do; accepted: what it made before, outside"
            )
        found.append(read_offsets(name, tensor))
    begins, tiles = begins_of(lengths_between(*found), window)
    target = torch.device(cu_seqlens_q.device if device is None else device)
    # No inference tensor, which a training could not save. From pinned memory, so that the copy
    # waits for nothing either.
    with torch.inference_mode(False):
        made = torch.tensor(begins, dtype=torch.int32, pin_memory=target.type == "cuda")
        return BackwardMetadata(made.to(target, non_blocking=True), tiles, window)


def is_ours(value: Any) -> bool:
    """Return True if `get_scheduler_metadata` made this tensor itself, no copy or part of it.
    Engines have plans of other kernels under the same name."""
    return isinstance(value, torch.Tensor) and marked(value) is not None
