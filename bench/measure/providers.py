"""Implementations of attention that are measured side by side."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast
from unittest import mock

import torch

from bench.peers import flash_attn_4, frost
from bench.suite import BACKWARD, FORWARD, Case
from bench.tables.comparison import OURS, OURS_BF16
from fa4_hd256.gpus.family import describe_family, of_capability
from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
from fa4_hd256.kernels.limits import HEAD_DIM
from fa4_hd256.kernels.problem_class import E4M3

#: Compute capability of the GPUs that FROST's kernels are for, and flash-attn-4's for SM100.
BLACKWELL_MAJOR = 10

_NO_PAGES = "takes no keys in pages"
_PAGES_BACKWARD = "keys in pages have no gradients"


def capability() -> tuple[int, int]:
    """Return the capability of the GPU; where there is none, of the one that is modelled without
    one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (10, 0)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Pages:
    """Keys and values of equal sequences in pages. k, v: (pages, page_size, heads_kv, 256); table:
    (batch, pages of a sequence) int32; lengths: (batch,) int32 keys in use."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor, size: int, generator: torch.Generator) -> Pages:
        """Copies of k and v, (batch, seqlen_k, heads_kv, 256), in pages whose order is by chance;
        rows past the end of a sequence are 0."""
        batch, seqlen = k.shape[:2]
        count = -(-seqlen // size)
        order = torch.randperm(batch * count, generator=generator).to(k.device)
        table = order.view(batch, count)

        def pool(tensor: torch.Tensor) -> torch.Tensor:
            found = tensor.new_zeros(batch * count, size, *tensor.shape[2:])
            whole = seqlen // size
            # As integers: PyTorch indexes no e4m3.
            kind = torch.uint8 if tensor.element_size() == 1 else tensor.dtype
            pages = found.view(kind)
            for rows, numbers in zip(tensor.detach().view(kind), table, strict=True):
                pages[numbers[:whole]] = rows[: whole * size].unflatten(0, (whole, size))
                if whole < count:
                    pages[numbers[whole], : seqlen - whole * size] = rows[whole * size :]
            return found

        lengths = torch.full((batch,), seqlen, dtype=torch.int32, device=k.device)
        return cls(pool(k), pool(v), table.int(), lengths)


@dataclass
class Inputs:
    """Tensors of a case.

    q, dout: (batch, seqlen_q, heads, 256), k, v: (batch, seqlen_k, heads_kv, 256), or without the
    batch where sequences are packed; cu_seqlens: int32 (sequences + 1,) of queries and keys then.
    expected: what `checking` compares blocks of rows with, by block, once it has been computed.
    masks: what providers have made of the case's mask. block_scales: of k and v in NVFP4, which are
    bytes of two elements.
    """

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None
    expected: dict[Any, Any] = field(default_factory=dict)
    masks: dict[Any, Any] = field(default_factory=dict)
    block_scales: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def random(cls, case: Case, device: torch.device, dtype: torch.dtype) -> Inputs:
        """Standard normal, the same for every provider; in e4m3, rounded from bfloat16."""
        generator = torch.Generator(device).manual_seed(0)
        lengths_q, lengths_k = zip(*case.lengths)
        wide = dtype if dtype != E4M3 else torch.bfloat16

        def normal(lengths: tuple[int, ...], heads: int) -> torch.Tensor:
            rows = (sum(lengths),) if case.packed else (case.batch, lengths[0])
            shape = (*rows, heads, HEAD_DIM)
            tensor = torch.randn(shape, generator=generator, device=device, dtype=wide)
            return tensor.to(dtype)

        of_both = (lengths_q, case.heads), (lengths_k, case.heads_kv)
        q, k, v, dout = (normal(*of_both[side]) for side in (0, 1, 1, 0))
        offsets = None
        if case.packed:
            of_q = torch.tensor([0, *lengths_q], device=device).cumsum(0).int()
            # Self-attention gives the same tensor twice.
            of_k = of_q
            if lengths_k != lengths_q:
                of_k = torch.tensor([0, *lengths_k], device=device).cumsum(0).int()
            offsets = of_q, of_k
        return cls(case, q, k, v, dout, offsets)

    @cached_property
    def pages(self) -> Pages | None:
        """k and v in pages, None for a case without."""
        size, generator = self.case.page_size, torch.Generator().manual_seed(0)
        return None if size is None else Pages.of(self.k, self.v, size, generator)

    @cached_property
    def in_bf16(self) -> Inputs:
        """Return these tensors in bfloat16."""
        q, k, v, dout = (t.bfloat16() for t in (self.q, self.k, self.v, self.dout))
        return replace(self, q=q, k=k, v=v, dout=dout, expected={}, masks={})

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    @property
    def sequences(self) -> dict[str, Any]:
        """Return the arguments of a packed call that describe its sequences."""
        assert self.cu_seqlens is not None
        of_q, of_k = self.cu_seqlens
        return {
            "cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "max_seqlen_q": self.case.seqlen_q,
            "max_seqlen_k": self.case.seqlen_k,
        }  # fmt: skip

    def made(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what a provider makes of the case's mask, once for all of its calls."""
        if name not in self.masks:
            self.masks[name] = make()
        return self.masks[name]

    def sequence(self, tensor: torch.Tensor, index: int, side: int) -> torch.Tensor:
        """Return (seqlen, heads, 256) of one sequence; side: 0 for queries, 1 for keys."""
        if self.cu_seqlens is None:
            return tensor[index]
        begin, end = self.cu_seqlens[side][index : index + 2].tolist()
        return tensor[begin:end]


class Provider:
    """An implementation of attention, with its name in tables. environment: variables that are set
    around each of its calls."""

    environment: Mapping[str, str] = {}

    def __init__(self, name: str) -> None:
        self.name = name

    def missing(self) -> str | None:
        """Return why it cannot run here at all, None if it can."""
        return None

    def refuses(self, case: Case, direction: str) -> str | None:
        """Return why it does not offer this case, None if it does."""
        return None

    def concerns(self, case: Case) -> bool:
        """Return True if a table of the case has a place for it."""
        return True

    def computed(self, case: Case) -> Case:
        """Return the case that it computes, is checked on and counts the FLOP of in place of a
        case: a bound of others has an easier one."""
        return case

    def call(self, inputs: Inputs) -> torch.Tensor:
        """Return out, shaped like q; differentiable where the leaves require gradients."""
        raise NotImplementedError

    def around(self) -> AbstractContextManager:
        if not self.environment:
            return nullcontext()
        return mock.patch.dict(os.environ, self.environment)


class Ours(Provider):
    """Provider of this project's operator. config: of the forward, None for the default one."""

    def __init__(self, name: str = OURS, config: ForwardConfig | None = None) -> None:
        super().__init__(name)
        self._config = config

    def missing(self) -> str | None:
        if not torch.cuda.is_available():
            return "no CUDA device"
        capability = torch.cuda.get_device_capability()
        if not of_capability(capability):
            major, minor = capability
            return f"needs a {describe_family()}; this GPU has {major}.{minor}"
        return None

    def refuses(self, case: Case, direction: str) -> str | None:
        return _PAGES_BACKWARD if case.page_size and direction == BACKWARD else None

    def call(self, inputs: Inputs) -> torch.Tensor:
        import fa4_hd256

        case = inputs.case
        function: Callable[..., Any] = fa4_hd256.flash_attn_func
        tensors: tuple[torch.Tensor, ...] = inputs.leaves
        options: dict[str, Any] = {
            "causal": case.causal, "window_size": case.window, "softcap": case.softcap,
            "config": self._config,
        }  # fmt: skip
        if inputs.pages is not None:
            function, pages = fa4_hd256.flash_attn_with_kvcache, inputs.pages
            tensors = inputs.q, pages.k, pages.v
            options |= {"cache_seqlens": pages.lengths, "page_table": pages.table}
        elif inputs.block_scales is not None:
            function = fa4_hd256.flash_attn_with_kvcache
            names = "k_block_scale", "v_block_scale"
            options |= dict(zip(names, inputs.block_scales, strict=True))
        elif inputs.cu_seqlens is not None:
            function = fa4_hd256.flash_attn_varlen_func
            options |= inputs.sequences
        return cast(torch.Tensor, function(*tensors, **options))


class OursInBf16(Ours):
    """The operator on the values of e4m3 in bfloat16."""

    def __init__(self) -> None:
        super().__init__(OURS_BF16)

    def call(self, inputs: Inputs) -> torch.Tensor:
        return super().call(inputs.in_bf16)


class FlashAttention4(Provider):
    """The public flash-attn-4 through its own interface. only: the direction in which it differs
    from its defaults. options: of its calls."""

    def __init__(
        self, name: str = flash_attn_4.PACKAGE, only: str | None = None, **options: Any
    ) -> None:
        super().__init__(name)
        self._only, self._options = only, options

    def missing(self) -> str | None:
        return flash_attn_4.unavailable() or Ours().missing()

    def refuses(self, case: Case, direction: str) -> str | None:
        if self._only and direction != self._only:
            return f"its {direction} is that of {flash_attn_4.PACKAGE}"
        if direction == BACKWARD and case.page_size:
            return _PAGES_BACKWARD
        if direction == BACKWARD and capability()[0] == BLACKWELL_MAJOR:
            return flash_attn_4.backward_refusal(case.window != (None, None), bool(case.softcap))
        return None

    def call(self, inputs: Inputs) -> torch.Tensor:
        case = inputs.case
        options = {"causal": case.causal, "window_size": case.window, **self._options}
        if case.softcap:
            options["softcap"] = case.softcap
        if inputs.pages is not None:
            pages = inputs.pages
            options |= {"page_table": pages.table, "seqused_k": pages.lengths}
            return flash_attn_4.paged_attention(inputs.q, pages.k, pages.v, **options)
        packed = None
        if inputs.cu_seqlens is not None:
            of_q, of_k = inputs.cu_seqlens
            packed = (of_q, case.seqlen_q), (of_k, case.seqlen_k)
        return flash_attn_4.attention(*inputs.leaves, packed, **options)


class FlashAttention4FiveProducts(FlashAttention4):
    """flash-attn-4's backward with five GEMMs, which an environment variable selects."""

    environment = flash_attn_4.FIVE_PRODUCTS_ENVIRONMENT

    def __init__(self) -> None:
        super().__init__(flash_attn_4.FIVE_PRODUCTS, only=BACKWARD)


class Frost(Provider):
    """cuDNN's own CuTe DSL kernels (PyPI: nvidia-cudnn-frontend) with the plans they would take. A
    kernel object belongs to shapes and strides; it is kept, as its users keep it."""

    def __init__(self) -> None:
        super().__init__(frost.NAME)
        self.forward, self.backward = frost.Forward(), frost.Backward()

    def missing(self) -> str | None:
        major, _ = capability()
        if major != BLACKWELL_MAJOR:
            return f"needs compute capability {BLACKWELL_MAJOR}.x; this GPU has {major}.x"
        return frost.unavailable() or Ours().missing()

    def refuses(self, case: Case, direction: str) -> str | None:
        if case.page_size:
            return _NO_PAGES
        if direction == BACKWARD:
            return frost.backward_refusal(case.packed, bool(case.softcap), case.bounds)
        return frost.forward_refusal(case.packed, bool(case.softcap), case.bounds[1])

    def call(self, inputs: Inputs) -> torch.Tensor:
        case = inputs.case
        causal = case.bounds[1] is not None
        if any(leaf.requires_grad for leaf in inputs.leaves):
            found = _FrostAttention.apply(*inputs.leaves, self, causal)
            return cast(torch.Tensor, found)
        parts = 1
        if case.bounds[0] is None:
            sms = torch.cuda.get_device_properties(inputs.q.device).multi_processor_count
            parts = frost.chosen_splits(case.batch, case.lengths[0], case.heads, case.heads_kv, sms)
        out, _ = self.forward(*inputs.leaves, causal=causal, left=case.bounds[0], num_splits=parts)
        return out


class _FrostAttention(torch.autograd.Function):
    """FROST's forward, with its backward as the gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, owner: Frost, causal: bool
    ) -> torch.Tensor:
        rows = tuple(tensor.detach() for tensor in (q, k, v))
        out, lse = owner.forward(*rows, causal=causal)
        ctx.save_for_backward(*rows, out, lse)
        ctx.options = owner, causal
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        owner, causal = ctx.options
        return *owner.backward(*ctx.saved_tensors, grads[0], causal=causal), None, None


class PyTorchSdpa(Provider):
    """`scaled_dot_product_attention` with one back end, such as "CUDNN_ATTENTION" or "MATH"."""

    def __init__(self, name: str, backend: str) -> None:
        super().__init__(name)
        self._backend = backend

    def missing(self) -> str | None:
        if self._backend != "MATH" and not torch.cuda.is_available():
            return "no CUDA device"
        return None

    def refuses(self, case: Case, direction: str) -> str | None:
        if case.page_size:
            return _NO_PAGES
        if case.packed:
            return "takes no packed sequences"
        if case.softcap or case.window != (None, None):
            return "takes no softcap, and a window only as a mask of all scores"
        if case.causal and case.seqlen_q != case.seqlen_k:
            return "its causal mask is aligned to the top left"
        if self._backend != "MATH" or not torch.cuda.is_available():
            return None
        # Scores, probabilities and a float32 copy of them, for the backward twice that.
        scores = case.batch * case.heads * case.seqlen_q * case.seqlen_k
        needed = scores * (20 if direction == BACKWARD else 10)
        free = torch.cuda.mem_get_info()[0]
        if needed > free:
            return f"its scores need some {needed / 2**30:.0f} GiB; {free / 2**30:.0f} are free"
        return None

    def call(self, inputs: Inputs) -> torch.Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        case = inputs.case
        q, k, v = (tensor.transpose(1, 2) for tensor in inputs.leaves)
        with sdpa_kernel(getattr(SDPBackend, self._backend)):
            out = scaled_dot_product_attention(
                q, k, v, is_causal=case.causal, enable_gqa=case.heads != case.heads_kv
            )
        return out.transpose(1, 2)


def default_providers() -> list[Provider]:
    return [
        Ours(),
        FlashAttention4(),
        FlashAttention4FiveProducts(),
        # The forward with KV splits by its own rule.
        FlashAttention4(flash_attn_4.DIVIDED, only=FORWARD, num_splits=0),
        Frost(),
        PyTorchSdpa("cuDNN", "CUDNN_ATTENTION"),
        PyTorchSdpa("FlashAttention-2", "FLASH_ATTENTION"),
        PyTorchSdpa("PyTorch math", "MATH"),
    ]


def backward_call(provider: Provider, inputs: Inputs) -> Callable[[], Any]:
    """Run the forward once; return a function that runs the backward, as often as wanted."""
    for leaf in inputs.leaves:
        leaf.requires_grad_()
    with provider.around():
        out = provider.call(inputs)

    def call() -> Any:
        with provider.around():
            return torch.autograd.grad(out, inputs.leaves, inputs.dout, retain_graph=True)

    return call


def forward_call(provider: Provider, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """Return a function that runs the forward alone."""

    def call() -> torch.Tensor:
        with torch.no_grad(), provider.around():
            return provider.call(inputs)

    return call


def attempt(action: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return (result, None), or (None, why it failed): one provider's error must not end a long
    run. CuTe DSL's errors, for one, are of classes of their own."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            return action(), None
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None, "out of memory"
        except Exception as error:
            reasons = [str(w.message).splitlines()[0] for w in heard if "because" in str(w.message)]
            return None, "; ".join([first_line(error), *reasons])


def first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its text."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
