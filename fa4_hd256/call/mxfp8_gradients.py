"""A backward in mxfp8: its tensors, checks of what users give for it, and its description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..kernels.block_scales import ATOM_ROWS, SCALE_DTYPES
from ..kernels.functions.user_functions import FUNCTION_TENSORS
from ..kernels.mask.block_mask import MASK_TABLES
from ..kernels.problem_class import E4M3, OF_BLOCKS
from .backward_problem import BackwardProblem
from .checks import reads_contents, said
from .chunks import BackwardDivision
from .memory import check_tensor, require_dense
from .mxfp8_scales import OF_ROWS, check_alone, check_order, check_packed, check_shape
from .operator_arguments import BackwardTensors, ForwardTensors, ForwardValues, given_batches
from .options import Options

#: Tensors that calls with gradients in mxfp8 may have beside q, k, v and their scales.
ACCEPTED = ("cu_seqlens_q", "cu_seqlens_k", "q_descale", "k_descale", "v_descale")
#: Values that such calls may have; of others they have the default. listed_tiles: of a block mask.
ACCEPTED_VALUES = (
    "softmax_scale", "window_left", "window_right", "max_seqlen_q", "max_seqlen_k", "use_clc",
    "config", "backward_config", "num_splits", "backward_use_clc", "listed_tiles",
)  # fmt: skip
_REFUSED_VALUES = ForwardValues.beside(ACCEPTED_VALUES)
#: Operands that users give for gradients, and the tensor that each is of.
GIVEN = {"v_columns": "v", "q_rows": "q", "k_rows": "k"}


class Mxfp8BackwardTensors(NamedTuple):
    """Tensors of a backward: as `BackwardTensors`, then operands of kernels and their scales."""

    dout: torch.Tensor
    dlse: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    q: torch.Tensor
    k: torch.Tensor
    v_columns: torch.Tensor
    dout_columns: torch.Tensor
    q_rows: torch.Tensor
    k_rows: torch.Tensor
    dout_rows: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_columns_descale: torch.Tensor
    dout_columns_descale: torch.Tensor
    q_rows_descale: torch.Tensor
    k_rows_descale: torch.Tensor
    dout_rows_descale: torch.Tensor

    def with_batches(self) -> Mxfp8BackwardTensors:
        """Return packed sequences with a batch of 1: scales have the form of packed ones still."""
        return self._replace(**given_batches(self, ("dout", "out", *CODES)))


_FIRST = Mxfp8BackwardTensors._fields.index("q")
#: The operands, and their scales.
CODES, SCALES = Mxfp8BackwardTensors._fields[_FIRST:][:7], Mxfp8BackwardTensors._fields[-7:]


def refuse_others(tensors: ForwardTensors, values: ForwardValues, beside: Sequence[str]) -> None:
    """Raise NotImplementedError for a call with something whose gradients in mxfp8 are not offered.
    beside: names of further arguments that are given."""
    given = [
        "block_mask" if name in MASK_TABLES else said(name)
        for name in tensors.others()
        # Of a function its key says that it is given.
        if name not in (*ACCEPTED, *FUNCTION_TENSORS)
    ]
    given += ["learnable_sink"] * (tensors.sink is not None) + values.given(_REFUSED_VALUES)
    names = dict.fromkeys((*given, *beside))
    if names:
        raise NotImplementedError(
            f"mxfp8_gradients with {', '.join(names)}: not offered; accepted: dense q, k and v, or "
            "packed ones with cu_seqlens_q and cu_seqlens_k, under causal and window_size"
        )


def check_given(given: Any, tensors: ForwardTensors) -> None:
    """Raise TypeError or ValueError unless `quantize.Mxfp8Gradients` fits the call's q, k and v."""
    if tensors.q_descale is None or tensors.q_descale.dtype not in SCALE_DTYPES:
        raise ValueError(
            "mxfp8_gradients given without scales of blocks; accepted: with q, k and v in mxfp8 "
            "(fa4_hd256.quantize.quantize_mxfp8_training)"
        )
    for name, tensor in given._asdict().items():
        check_tensor(f"mxfp8_gradients.{name}", tensor)
    for name in "qkv":
        exact, codes = getattr(given, name), getattr(tensors, name)
        _check(f"mxfp8_gradients.{name}", exact, codes, (torch.bfloat16, torch.float16))
        if exact.dtype != given.q.dtype:
            raise TypeError(
                f"mxfp8_gradients.{name} has dtype {exact.dtype}; accepted: that of its q, "
                f"{given.q.dtype}"
            )
    for name, of in GIVEN.items():
        codes = getattr(tensors, of)
        _check(f"mxfp8_gradients.{name}", getattr(given, name), codes, (E4M3,))
        scale, descale = getattr(given, f"{name}_descale"), f"{name}_descale"
        require_dense(descale, scale)
        if scale.dtype not in SCALE_DTYPES:
            raise TypeError(
                f"mxfp8_gradients.{descale} has dtype {scale.dtype}; accepted: "
                f"{' or '.join(map(str, SCALE_DTYPES))}"
            )
        if scale.device != codes.device:
            raise ValueError(
                f"mxfp8_gradients.{descale} is on {scale.device}; accepted: {codes.device}, like "
                "the codes"
            )
        is_packed = codes.ndim == 3
        rows = codes.unsqueeze(0) if is_packed else codes
        check_shape(descale, tuple(scale.shape), rows, is_packed)
        check_order(descale, scale, is_packed)
        if descale in OF_ROWS:
            check_alone(f"mxfp8_gradients.{descale}", scale)
    if reads_contents(tensors.q.device):
        scales = {f"{name}_descale": getattr(given, f"{name}_descale") for name in GIVEN}
        sides = {f"{name}_descale": "q" if of == "q" else "k" for name, of in GIVEN.items()}
        check_packed({**tensors.others(), **scales}, sides)


def _check(
    name: str, tensor: torch.Tensor, like: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}; accepted: {' or '.join(map(str, dtypes))}"
        )
    if tensor.shape != like.shape or tensor.device != like.device:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} on {tensor.device}; accepted: "
            f"{tuple(like.shape)} on {like.device}, like the codes"
        )


def described(
    tensors: Mxfp8BackwardTensors, options: Options, longest: tuple[int | None, int | None]
) -> BackwardProblem:
    """Describe a backward.  tensors: packed ones with a batch of 1.  longest: max_seqlen_q and
    max_seqlen_k.  Raises as `BackwardProblem.describe` does."""
    # The description knows no tensors, but checks them: stand-ins of 16 bits, like those that were
    # quantized.
    keys = torch.empty(tensors.k.shape, dtype=tensors.out.dtype, device=tensors.k.device)
    like = BackwardTensors(
        tensors.dout, tensors.dlse, tensors.out, keys, keys, tensors.out, tensors.lse,
        cu_seqlens_q=tensors.cu_seqlens_q, cu_seqlens_k=tensors.cu_seqlens_k,
    )  # fmt: skip
    problem = BackwardProblem.describe(like, options, *longest)
    forward = replace(problem.forward, q_dtype=E4M3, kv_dtype=E4M3, descale=OF_BLOCKS)
    return replace(problem, forward=forward)


def check_division(division: BackwardDivision) -> None:
    """Raise NotImplementedError for chunks: kernels in mxfp8 store dS, with scales by tiles."""
    problem = division.problem
    is_empty = problem.has_no_queries or problem.has_no_keys
    starts = [chunk.keys.start for chunk in division.chunks if chunk.problem.adds]
    if is_empty or problem.keeps_ds and not any(start % ATOM_ROWS for start in starts):
        return
    raise NotImplementedError(
        f"gradients in mxfp8 keep dS of a KV head, {problem.ds_bytes_of_head} bytes here of all "
        f"sequences, and ds_bytes allows less; accepted: backward_config=Mxfp8BackwardConfig"
        f"(ds_bytes={problem.ds_bytes_of_head}) or more"
    )
