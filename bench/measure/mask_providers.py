"""Implementations of attention under a mask, or with a score_mod: ours, and what training takes
without it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

from bench.peers import flash_attn_4
from bench.suite import BACKWARD, Case
from bench.tables.comparison import BOUND, FUNCTION, OURS, SOFTCAP
from fa4_hd256 import flash_attn_func, flash_attn_varlen_func, interface
from fa4_hd256.kernels.mask.block_mask import FULL, MASK_TILE, NOTHING
from fa4_hd256.mask_mods import MaskMod

from .masks import MaskedCase, seen_in, seen_in_kernel
from .providers import (
    BLACKWELL_MAJOR,
    FlashAttention4,
    Inputs,
    Ours,
    Provider,
    capability,
    first_line,
    synchronize,
)
from .scored import CAPPED, ScoredCase

SDPA, FLEX = "SDPA, dense mask", "FlexAttention"

#: Times that a mask is made; the first does not count.
MADE = 6

#: Requests to FlexAttention, one after the other until one works at head_dim 256: its own choice,
#: then blocks whose tiles take less shared memory.
KERNEL_OPTIONS: tuple[dict[str, Any] | None, ...] = (
    None,
    {
        "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_stages": 1, "bwd_BLOCK_M1": 16,
        "bwd_BLOCK_N1": 16, "bwd_BLOCK_M2": 16, "bwd_BLOCK_N2": 16, "bwd_num_stages": 1,
    },
)  # fmt: skip


def _case_of(inputs: Inputs) -> MaskedCase:
    assert isinstance(inputs.case, MaskedCase)
    return inputs.case


def is_packed(case: Case) -> bool:
    """Return True for packed sequences under a mask of their own."""
    return isinstance(case, MaskedCase) and case.packed


class OursMasked(Ours):
    """`flash_attn_func` with `block_mask=`, a mask by its name, or with `score_mod=`, a function in
    CuTe DSL."""

    def call(self, inputs: Inputs) -> torch.Tensor:
        device = inputs.q.device
        if isinstance(inputs.case, ScoredCase):
            mod = inputs.made(OURS, partial(inputs.case.score_mod, device))
            out = flash_attn_func(*inputs.leaves, causal=True, score_mod=mod)
            return cast(torch.Tensor, out)
        case = _case_of(inputs)
        mask = inputs.made(OURS, partial(case.tile_mask, device))
        # The mask keeps packed sequences apart, so one dense row is the same call.
        q, k, v = (leaf[None] if case.packed else leaf for leaf in inputs.leaves)
        out = cast(torch.Tensor, flash_attn_func(q, k, v, block_mask=mask))
        return out[0] if case.packed else out


class OursFunction(Ours):
    """`flash_attn_func` with the same lists of tiles, and the mask_mod of the case, traced, inside
    the kernels in the place of bits."""

    def __init__(self) -> None:
        super().__init__(FUNCTION)

    def concerns(self, case: Case) -> bool:
        return isinstance(case, MaskedCase)

    def call(self, inputs: Inputs) -> torch.Tensor:
        from fa4_hd256.integrations.flex_attention import mask_mod_of

        case, device = _case_of(inputs), inputs.q.device
        options = {"block_mask": inputs.made(OURS, partial(case.tile_mask, device))}
        function: Callable[..., Any] = flash_attn_func
        if case.packed:
            function = flash_attn_varlen_func
            options |= inputs.sequences | {"mask_mod": inputs.made(
                FUNCTION, lambda: MaskMod.of(seen_in_kernel, (case.words(device),))
            )}  # fmt: skip
        else:
            options["mask_mod"] = inputs.made(
                FUNCTION, lambda: mask_mod_of(case.mask_mod(device), device)
            )
        return cast(torch.Tensor, function(*inputs.leaves, **options))


class OursCausal(Ours):
    """`flash_attn_func` with `causal=True`: of the same tensors another result, the bound of a mask
    that lies on the causal one."""

    def __init__(self) -> None:
        super().__init__(BOUND)

    def computed(self, case: Case) -> Case:
        return case.plain if isinstance(case, MaskedCase | ScoredCase) else case


class _AsSoftcap(Provider):
    """Mixin of providers that have softcap as an option: the case whose score_mod is one."""

    def concerns(self, case: Case) -> bool:
        return isinstance(case, ScoredCase) and case.function is CAPPED

    def computed(self, case: Case) -> Case:
        return case.capped if isinstance(case, ScoredCase) else case


class OursSoftcap(_AsSoftcap, Ours):
    """`flash_attn_func` with `softcap=`, what the function would cost that the kernels know."""

    def __init__(self) -> None:
        Ours.__init__(self, SOFTCAP)


class FlashAttention4Functions(_AsSoftcap, FlashAttention4):
    """flash-attn-4 with its own softcap, and with a mask_mod over packed sequences."""

    def __init__(self) -> None:
        FlashAttention4.__init__(self)

    def concerns(self, case: Case) -> bool:
        return is_packed(case) or super().concerns(case)

    def refuses(self, case: Case, direction: str) -> str | None:
        if not is_packed(case):
            return FlashAttention4.refuses(self, case, direction)
        if direction == BACKWARD and capability()[0] == BLACKWELL_MAJOR:
            return "its SM100 backward at head_dim 256 takes no mask_mod"
        return None

    def call(self, inputs: Inputs) -> torch.Tensor:
        if not is_packed(inputs.case):
            return FlashAttention4.call(self, inputs)
        case = _case_of(inputs)
        assert inputs.cu_seqlens is not None
        of_q, of_k = inputs.cu_seqlens
        padding = flash_attn_4.MASK_PADDING
        words = inputs.made(
            self.name, partial(case.words_of_sequences, inputs.q.device, *padding)
        )  # fmt: skip
        return flash_attn_4.attention(
            *inputs.leaves, ((of_q, case.seqlen_q), (of_k, case.seqlen_k)),
            **flash_attn_4.masked_by(words),
        )  # fmt: skip


class DenseSdpa(Provider):
    """`scaled_dot_product_attention` with a bool mask, or a bias of q's dtype, by the back end that
    PyTorch chooses. Fewer KV heads are repeated, as transformers does where there is a mask."""

    def __init__(self, name: str = SDPA) -> None:
        super().__init__(name)
        self.backend: str | None = None

    def refuses(self, case: Case, direction: str) -> str | None:
        if isinstance(case, ScoredCase) and not case.function.added:
            return "a bias is added to scores"
        return "takes no packed sequences" if case.packed else None

    def call(self, inputs: Inputs) -> torch.Tensor:
        from torch.nn.attention import SDPBackend

        case, device = inputs.case, inputs.q.device
        if isinstance(case, ScoredCase):
            mask = inputs.made(SDPA, partial(case.bias, device, inputs.q.dtype))
        else:
            mask = inputs.made(SDPA, partial(_case_of(inputs).dense, device))
        q, k, v = (tensor.transpose(1, 2) for tensor in inputs.leaves)
        group = case.heads // case.heads_kv
        if group > 1:
            k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
        # PyTorch's own rule, which has no public name.
        if choose := getattr(torch, "_fused_sdp_choice", None):
            self.backend = SDPBackend(choose(q, k, v, mask)).name
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2)


class FlexAttention(Provider):
    """`torch.nn.attention.flex_attention` by torch.compile, with a `BlockMask` of the mask_mod, or
    of the causal one and a score_mod. options: of `KERNEL_OPTIONS`, those that worked last;
    failure: what those before raised."""

    def __init__(self) -> None:
        super().__init__(FLEX)
        self.options: dict[str, Any] | None = None
        self.failure: str | None = None
        self._compiled: tuple[Any, Callable[..., torch.Tensor]] | None = None

    def call(self, inputs: Inputs) -> torch.Tensor:
        given = inputs.made(FLEX, partial(_flex_arguments, inputs.case, inputs.q.device))
        grad = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in inputs.leaves)
        key = inputs.case, grad
        if self._compiled is None or self._compiled[0] != key:
            self._compiled = key, self._first_that_works(inputs, given, grad)
        return self._compiled[1](inputs)

    def _first_that_works(
        self, inputs: Inputs, given: dict[str, Any], grad: bool
    ) -> Callable[[Inputs], torch.Tensor]:
        """Raises RuntimeError with what the first error says if nothing works."""
        import torch._functorch.config

        self.failure = None
        for options in KERNEL_OPTIONS:
            call = partial(self._attend, self._function(), given, options)
            try:
                # The backward runs more than once, which functions compiled otherwise refuse.
                with torch._functorch.config.patch(donated_buffer=False):
                    out = call(inputs)
                    if grad:
                        torch.autograd.grad(out, inputs.leaves, inputs.dout, retain_graph=True)
            except Exception as error:
                self.failure = self.failure or first_lines(error)
                continue
            self.options = options
            return call
        raise RuntimeError(self.failure)

    def _function(self) -> Callable[..., Any]:
        from torch.nn.attention.flex_attention import flex_attention

        # Shapes of cases before do not count towards dynamo's limit, past which nothing is
        # compiled.
        torch._dynamo.reset()
        return torch.compile(flex_attention, dynamic=False, fullgraph=True)

    @staticmethod
    def _attend(
        function: Callable[..., Any], given: dict[str, Any], options: dict[str, Any] | None,
        inputs: Inputs,
    ) -> torch.Tensor:  # fmt: skip
        packed = inputs.case.packed
        leaves = (leaf[None] for leaf in inputs.leaves) if packed else inputs.leaves
        q, k, v = (tensor.transpose(1, 2) for tensor in leaves)
        out = function(
            q, k, v, **given, enable_gqa=q.shape[1] != k.shape[1], kernel_options=options
        )
        rows = cast(torch.Tensor, out.transpose(1, 2))
        return rows[0] if packed else rows


def _flex_arguments(case: Case, device: torch.device) -> dict[str, Any]:
    """Return the arguments that FlexAttention takes of a case beside tensors."""
    from torch.nn.attention.flex_attention import create_block_mask

    lengths = case.seqlen_q, case.seqlen_k
    made = partial(create_block_mask, device=str(device), BLOCK_SIZE=MASK_TILE)
    if isinstance(case, ScoredCase):
        causal = made(lambda b, h, q, k: k <= q, None, None, *lengths)
        return {"block_mask": causal, "score_mod": case.torch_function(device)}
    assert isinstance(case, MaskedCase)
    if case.packed:
        return {"block_mask": _block_mask_of_row(case, device)}
    entries = case.batch if case.pattern.by_entry else None
    return {"block_mask": made(case.mask_mod(device), entries, None, *lengths)}


def _block_mask_of_row(case: MaskedCase, device: torch.device) -> Any:
    """Return the `BlockMask` of the packed row: the lists of ours, for which nobody needs a dense
    mask, and a mask_mod that reads the words."""
    from torch.nn.attention.flex_attention import BlockMask

    tiles = case.tile_mask(device).tiles

    def listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = (~chosen).int().argsort(dim=-1, stable=True)
        return chosen.sum(-1, dtype=torch.int32), order.int()

    return BlockMask.from_kv_blocks(
        *listed(tiles > NOTHING), *listed(tiles == FULL), BLOCK_SIZE=MASK_TILE,
        mask_mod=seen_in(case.words(device)), seq_lengths=(case.row[1], case.row[1]),
    )  # fmt: skip


def first_lines(error: BaseException) -> str:
    """Return the first line of the error, and of the one that it began with, which compilers
    wrap."""
    first, passed = first_line(error), {id(error)}
    while (inner := error.__cause__ or error.__context__) is not None and id(inner) not in passed:
        error = inner
        passed.add(id(error))
    line = first_line(error)
    return first if line in first else f"{first}, from {line}"


def mask_providers() -> list[Provider]:
    return [
        OursMasked(), OursFunction(), OursSoftcap(), OursCausal(), DenseSdpa(), FlexAttention(),
        FlashAttention4Functions(),
    ]  # fmt: skip


def mask_microseconds(case: MaskedCase, device: torch.device, gradients: bool) -> float:
    """Return the median time of making a mask by its name, and of it all that is made before
    kernels run: bits and lists of steps, with gradients those of the backward, too."""
    q, k = (
        torch.empty(*case.row, heads, 1, device=device, dtype=torch.bfloat16)
        for heads in (case.heads, case.heads_kv)
    )
    found, make = list[float](), case.mask_maker(device)
    for _ in range(MADE):
        synchronize(device)
        begin = time.perf_counter()
        interface.mask_tables(make(), q, k, gradients)
        synchronize(device)
        found.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(found[1:])
