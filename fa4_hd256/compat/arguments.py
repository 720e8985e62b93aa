"""Fate of each argument of another library's functions: one table for each library.

The tables of flash-attention's libraries are also those of docs/api.md.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..call.memory import check_tensor
from ..call.options import flags_of
from ..kernels.limits import HEAD_DIM

#: Fates of an argument. Honoured: its meaning is kept. Neutral: any value gives the same result.
#: Refused: only values that request nothing are accepted.
HONOURED, NEUTRAL, REFUSED = "honoured", "neutral", "refused"


@dataclass(frozen=True)
class Argument:
    """Fate of an argument. fate: `HONOURED`, `NEUTRAL` or `REFUSED`. note: how, why, or what to do
    instead. accepted: the values of a refused argument that request nothing. ours: the name of an
    honoured argument in our functions, where it is another one."""

    fate: str
    note: str
    accepted: tuple[Any, ...] = (None,)
    ours: str = ""


@dataclass(frozen=True)
class Library:
    """A library whose functions are offered here. name, module: its name, and the module with its
    functions. arguments: of all of its functions, by name."""

    name: str
    module: str
    arguments: dict[str, Argument]

    def checked(self, function: str, values: dict[str, Any], *tensors: Any) -> Any:
        """Return the library's own function for tensors of another head_dim, else None.

        values: all arguments of the call, by name. tensors: those with a head_dim. Raises
        NotImplementedError for a refused argument that requests something, TypeError for a tensor
        that is none, ValueError for another head_dim where the library is not installed.
        """
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                name = next(name for name, value in values.items() if value is tensor)
                check_tensor(name, tensor)
            elif tensor.ndim and tensor.shape[-1] != HEAD_DIM:
                return self.original(function, tensor.shape[-1])
        self.refuse(function, values)
        return None

    def refuse(self, function: str, values: dict[str, Any]) -> None:
        """Raise NotImplementedError for a refused argument that requests something, TypeError for
        a name that the table does not have."""
        for name, value in values.items():
            argument = self.arguments.get(name)
            if argument is None:
                raise TypeError(f"{self.name}'s {function} got an unexpected argument {name!r}")
            if argument.fate != REFUSED or _is_one_of(value, argument.accepted):
                continue
            shown = " or ".join(map(repr, argument.accepted))
            what = repr(value) if isinstance(value, (bool, int, float)) else type(value).__name__
            raise NotImplementedError(
                f"{name} of {self.name}'s {function} is {what}; accepted at head_dim {HEAD_DIM}: "
                f"{shown}. {argument.note}"
            )

    def original(self, function: str, head_dim: int) -> Callable[..., Any]:
        """Return the library's own function. Raises ValueError where it is not installed, and for a
        package of its name without that function, as flash-attn-4's is of flash-attn's."""
        module: Any = sys.modules.get(self.module)
        if module is None:
            try:
                module = importlib.import_module(self.module)
            except ImportError as error:
                raise ValueError(
                    f"{function} is given head_dim {head_dim}; accepted: {HEAD_DIM}, or another "
                    f"one where {self.name} is installed, which it is not ({error})"
                ) from error
        original: Callable[..., Any] | None = getattr(module, function, None)
        if original is None:
            raise ValueError(
                f"{function} is given head_dim {head_dim}; accepted: {HEAD_DIM}, or another one "
                f"where {self.name} is installed: the module {self.module} here has no {function}"
            )
        if original.__module__.startswith(__package__ or "fa4_hd256.compat"):
            raise ValueError(
                f"{function} is given head_dim {head_dim}; accepted: {HEAD_DIM}, since the module "
                f"{self.module} of this process is fa4_hd256's own"
            )
        return original


def check_requests(arguments: dict[str, Any]) -> None:
    """Raise TypeError, with the library's name, for a request of lse that is not True or False."""
    for name in ("return_attn_probs", "return_softmax_lse"):
        if name in arguments:
            flags_of(**{name: arguments[name]})


def given(arguments: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of these names that are not None.

    NOTE [locals].  The functions of this package collect their arguments by `locals()`. Before
    Python 3.12 a comprehension makes a cell of every variable that it reads, and torch.compile
    refuses `locals()` in a function with a cell that is still empty. So they call this function.
    """
    return {name: arguments[name] for name in names if arguments[name] is not None}


def parts_of(name: str, packed: torch.Tensor, count: int, rows: str) -> tuple[torch.Tensor, ...]:
    """Return the tensors that are packed in one, in the dimension before the heads.

    count: of the tensors. rows: names of the dimensions before. Raises ValueError for another
    shape.
    """
    dimensions = rows.count(",") + 4
    if packed.ndim != dimensions or packed.shape[-3] != count:
        raise ValueError(
            f"{name} has shape {tuple(packed.shape)}; accepted: ({rows}, {count}, heads, "
            f"{HEAD_DIM})"
        )
    return packed.unbind(dim=-3)


def _is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Compare numbers by value, and all else by identity: comparing tensors may wait for a GPU."""
    plain = (bool, int, float, str)
    return any(
        value is one or (isinstance(value, plain) and isinstance(one, plain) and value == one)
        for one in accepted
    )


def document(library: Library) -> str:
    """Return a library's table as Markdown; arguments of one fate share a row."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, argument in library.arguments.items():
        fate = argument.fate
        if fate == REFUSED:
            fate += " unless " + " or ".join(f"`{one!r}`" for one in argument.accepted)
        names.setdefault((fate, argument.note), []).append(f"`{name}`")
    rows = [f"| {', '.join(of)} | {fate} | {note} |" for (fate, note), of in names.items()]
    return "\n".join(["| arguments | | what becomes of them |", "|---|---|---|", *rows])


def honoured(note: str = "as there", ours: str = "") -> Argument:
    return Argument(HONOURED, note, ours=ours)


def neutral(note: str) -> Argument:
    return Argument(NEUTRAL, note)


def refused(note: str, *accepted: Any) -> Argument:
    return Argument(REFUSED, note, accepted or (None,))


_TENSORS = honoured("as there; another head_dim goes to the library itself")
_PACK_GQA = neutral("query heads of a group share tiles wherever that helps")
_SM_MARGIN = neutral("no call reserves SMs; `FA4_HD256_RESERVED_SMS` does for a process")
_DETERMINISTIC = neutral("results and gradients are deterministic in any case")
_QV = refused("A second query for V belongs to MLA at head_dim 64")
_CHUNK = refused("Use a block_mask of fa4_hd256.flash_attn_func for chunked attention", 0)
_WINDOW = honoured("keys before and behind; a negative number is unbounded")
#: Lengths of packed sequences, which all three libraries and our functions name alike.
SEQUENCES = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "seqused_q",
    "seqused_k",
)
_SEQUENCES = dict.fromkeys(SEQUENCES, honoured())
_CACHE = {
    "k_cache": _TENSORS,
    "v_cache": _TENSORS,
    "rotary_cos": honoured(),
    "rotary_sin": honoured(),
    "cache_seqlens": honoured(),
    "cache_batch_idx": honoured(),
    "cache_leftpad": honoured("with pages, too"),
    "rotary_interleaved": honoured(),
    "return_softmax_lse": honoured("True: `(out, lse)`"),
}
_COMBINED = {
    "out_partial": honoured("any head_dim; in PyTorch's operations"),
    "lse_partial": honoured(),
    "out": honoured(),
    "out_dtype": honoured("the partial results' if None"),
}

FLASH_ATTN_4 = Library("flash-attn-4", "flash_attn.cute.interface", {
    "q": _TENSORS, "k": _TENSORS, "v": _TENSORS, **_SEQUENCES,
    "page_table": honoured("pages of any number of rows"),
    "softmax_scale": honoured(),
    "causal": honoured("ignored with mask_mod, as there"),
    "window_size": honoured(
        "two negative numbers are unbounded, one shifts the window; ignored with mask_mod, as there"
    ),
    "learnable_sink": honoured(), "softcap": honoured(),
    "num_splits": honoured("below 1: the operator's own rule"),
    "return_lse": honoured(
        "the result is a pair in any case; without it lse is None unless there are gradients, and "
        "has none itself"
    ),
    "score_mod": honoured("translated; called with vectors of one score"),
    "score_mod_bwd": honoured("translated: its result for a gradient of 1 is the slope"),
    "mask_mod": honoured("translated; refused with cu_seqlens, seqused or pages"),
    "aux_tensors": honoured(
        "up to 4, or 2 where a score_mod reads offsets of cu_seqlens; 16-bit floats are read as "
        "copies in float32"
    ),
    "aux_scalars": honoured("compiled in: a new value is a new kernel"),
    "block_sparse_tensors": honoured(
        "a mask of tiles; block_size: multiples of 128; refused with cu_seqlens, seqused or pages"
    ),
    "block_sparse_tensors_bwd": neutral("gradients follow block_sparse_tensors"),
    "deterministic": _DETERMINISTIC, "pack_gqa": _PACK_GQA,
    "min_seqlen_k": neutral("only its gathered keys need it"),
    "scheduler_metadata": neutral("the operator's own rule splits the work"),
    "disable_scheduler_metadata": neutral("as scheduler_metadata"),
    "qv": _QV,
    "gather_kv_indices": refused("Gathered keys belong to sparse MLA"),
    "gather_bwd_recompute_p": refused("It belongs to gather_kv_indices", False),
    "gather_bwd_token_chunk": refused("It belongs to gather_kv_indices"),
    "seqlen_k_per_split": refused("Use batch_invariant=True of fa4_hd256's own function"),
    **_COMBINED,
    "cu_seqlens": neutral("rows are combined one by one"),
    "seqused": neutral("rows past those in use are combined, too"),
    "virtual_batch_idx": refused("It belongs to a scheduler that sorts sequences"),
})  # fmt: skip

FLASH_ATTN_3 = Library("flash-attn-3", "flash_attn_interface", {
    "q": _TENSORS, "k": _TENSORS, "v": _TENSORS, "qkv": _TENSORS, **_SEQUENCES, **_CACHE,
    "cu_seqlens_k_new": honoured("ignored without k and v, as there"),
    "rotary_seqlens": honoured("ignored without rotary tables, as there"),
    "page_table": honoured("pages of any number of rows"),
    "softmax_scale": honoured(), "causal": honoured(), "window_size": _WINDOW,
    "softcap": honoured(),
    "q_descale": honoured("with q in e4m3; ignored with another, as there"),
    "k_descale": honoured(), "v_descale": honoured(),
    "num_splits": honoured("0: the operator's own rule"),
    "num_heads_q": honoured("of flash_attn_qkvpacked_func"),
    "return_attn_probs": honoured("True: `(out, lse)`, as there"),
    "deterministic": _DETERMINISTIC, "pack_gqa": _PACK_GQA, "sm_margin": _SM_MARGIN,
    "scheduler_metadata": neutral("the operator's own rule splits the work"),
    "qv": _QV, "attention_chunk": _CHUNK,
    **_COMBINED,
    **dict.fromkeys(
        ("batch_size", "num_heads_kv", "headdim", "qkv_dtype", "headdim_v",
         "page_size", "max_seqlen_k_new", "has_softcap"),
        neutral("get_scheduler_metadata returns None: no plan is needed"),
    ),
})  # fmt: skip

FLASH_ATTN_2 = Library("flash-attn", "flash_attn", {
    "q": _TENSORS, "k": _TENSORS, "v": _TENSORS, "kv": _TENSORS, "qkv": _TENSORS,
    **{name: note for name, note in _SEQUENCES.items() if not name.startswith("seqused")},
    "cu_seqlens": honoured(), "max_seqlen": honoured(), **_CACHE,
    "block_table": honoured("pages of any number of rows"),
    "dropout_p": refused("There is no dropout; apply it to the result of the layer", 0.0),
    "softmax_scale": honoured(), "causal": honoured(), "window_size": _WINDOW,
    "softcap": honoured("0 and below: none"),
    "alibi_slopes": honoured("`fa4_hd256.score_mods.alibi`; no gradient to them"),
    "num_splits": honoured("0: the operator's own rule"),
    "return_attn_probs": honoured("True: `(out, lse, S)`, S empty as there without dropout"),
    "deterministic": _DETERMINISTIC,
})  # fmt: skip
