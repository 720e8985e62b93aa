"""Check of a provider's result, before it is timed, on the case that is timed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.suite import Case
from fa4_hd256.check import reference
from fa4_hd256.kernels.problem_class import E4M3
from fa4_hd256.quantize.nvfp4 import dequantize_nvfp4

from .masks import MaskedCase
from .providers import Inputs, Provider
from .scored import ScoredCase

#: Rows that are compared: as many at the start, the middle and the end of a sequence.
CHECKED_ROWS = 64
#: Longest sequence of the small problem on which whole gradients are compared.
CHECKED_SEQLEN = 384


@dataclass(frozen=True)
class Check:
    """Largest error against the reference, the largest that is accepted."""

    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance

    @property
    def failure(self) -> str:
        """Return the error text of a result that does not pass."""
        return f"wrong: error {self.error:.3g}, accepted {self.tolerance:.3g}"

    @property
    def severity(self) -> float:
        """Error in units of the tolerance."""
        if self.tolerance:
            return self.error / self.tolerance
        return math.inf if self.error else 0.0


def worst(checks: Iterable[Check]) -> Check:
    """The most severe one; one that passes if there is none."""
    return max(checks, key=lambda check: check.severity, default=Check(0.0, math.inf))


@dataclass(frozen=True)
class Block:
    """Rows of one sequence and some heads that share a key/value head. keys: up to the last one
    that the rows may see; with these a mask by bounds is bottom-right aligned again."""

    sequence: int
    rows: range
    keys: int
    heads: tuple[int, ...]
    head_kv: int

    def queries(self, inputs: Inputs, tensor: torch.Tensor) -> torch.Tensor:
        """Return (rows, heads, 256) of a tensor like q; a copy."""
        rows = inputs.sequence(tensor, self.sequence, 0)[self.rows.start : self.rows.stop]
        return rows[:, list(self.heads)]

    def operands(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v of the block on the CPU, with a batch of 1."""
        q = self.queries(inputs, inputs.q)
        k, v = (self._of_keys(inputs, tensor) for tensor in (inputs.k, inputs.v))
        if inputs.block_scales is not None:
            scales = (self._of_keys(inputs, of_one) for of_one in inputs.block_scales)
            k, v = (dequantize_nvfp4(t, of, dtype=q.dtype) for t, of in zip((k, v), scales))
        q, k, v = (t[None].detach().cpu() for t in (q, k, v))
        return q, k, v

    def _of_keys(self, inputs: Inputs, tensor: torch.Tensor) -> torch.Tensor:
        """Return (keys, 1, ..) of a tensor like k."""
        return inputs.sequence(tensor, self.sequence, 1)[: self.keys, self.head_kv, None]


def _blocks(case: Case) -> list[list[Block]]:
    """Blocks at the start, at the middle and at the end of the first, the longest and the last
    sequence, of the first and the last head. Raises ValueError for a mask under which the keys of a
    block cannot be cut off."""
    if case.bounds[1] != 0 and case.bounds != (None, None):
        raise ValueError(
            f"{case}: rows are compared for full attention and where nothing to the right is "
            "seen; with a left window choose --causal"
        )
    heads = defaultdict(list)
    for head in sorted({0, case.heads - 1}):
        heads[head // (case.heads // case.heads_kv)].append(head)
    longest = max(range(case.batch), key=lambda index: case.lengths[index][0])
    found: list[list[Block]] = [[], [], []]
    for index in sorted({0, longest, case.batch - 1}):
        seqlen_q, seqlen_k = case.lengths[index]
        count = min(CHECKED_ROWS, seqlen_q)
        begins = (0, (seqlen_q - count) // 2, seqlen_q - count)
        for place, begin in zip(found, begins, strict=True):
            rows = range(begin, begin + count)
            # Past the diagonal of the last row nothing is lost if the right side is bounded at 0.
            keys = seqlen_k - (seqlen_q - rows.stop) if case.bounds[1] == 0 else seqlen_k
            if isinstance(case, MaskedCase):
                keys = case.last_key(index, rows) + 1
            place += [
                Block(index, rows, max(keys, 0), tuple(of_group), head_kv)
                for head_kv, of_group in heads.items()
            ]
    return found


def _options(case: Case, block: Block | None = None) -> dict[str, Any]:
    """The reference's, of a case with neither a mask of its own nor a function, or of a block."""
    options: dict[str, Any] = {"window_size": case.bounds, "softcap": case.softcap}
    if isinstance(case, MaskedCase) and block is not None:
        options["mask"] = case.seen(block.sequence, block.rows, block.keys)[None, None]
    if isinstance(case, ScoredCase) and block is not None:
        options["score_mod"] = case.of_part(block.sequence, block.rows.start, block.heads)
    return options


@torch.no_grad()
def check_forward(inputs: Inputs, out: torch.Tensor) -> Check:
    """Compare rows of out with the float64 reference; which, `_blocks` says. The tolerance is that
    of `reference.Comparison`."""
    checks = []
    for block in (block for place in _blocks(inputs.case) for block in place):
        if block not in inputs.expected:
            operands, options = block.operands(inputs), _options(inputs.case, block)
            if inputs.q.dtype == E4M3:
                exact = tuple(operand.double() for operand in operands)
                expected = reference.Expected.of_e4m3(exact, torch.bfloat16, **options)
            else:
                expected = reference.Expected.of(operands, **options)
            inputs.expected[block] = expected
        found = block.queries(inputs, out)[None].cpu()
        # Only out is compared: providers do not all return LSE.
        lse = torch.zeros(1, len(block.heads), found.shape[1])
        compared = inputs.expected[block].compare(found, lse)
        checks.append(Check(compared.max_error, compared.tolerance))
    return worst(checks)


def check_gradients(provider: Provider, inputs: Inputs) -> Check:
    """Compare gradients with the reference.

    All of them on the case cut down to a short sequence, but for a case with a mask of its own,
    which a cut changes, or with a score_mod, which would be compiled for two shapes; on the case
    itself those of rows alone, for a gradient of out that vanishes in every other row.
    """
    rows = _check_rows(provider, inputs)
    if isinstance(inputs.case, MaskedCase | ScoredCase):
        return worst(rows)
    return worst([_check_small_gradients(provider, inputs), *rows])


def _check_small_gradients(provider: Provider, inputs: Inputs) -> Check:
    case = inputs.case
    queries, keys = (min(CHECKED_SEQLEN, length) for length in case.lengths[-1])
    small = Case(
        case.group, ((queries, keys),), case.heads, case.heads_kv, case.causal, case.window,
        case.softcap, case.packed,
    )  # fmt: skip
    cut = Inputs.random(small, inputs.q.device, inputs.q.dtype)
    found = _gradients(provider, cut, cut.dout)
    q, k, v, dout = (t.detach().reshape(1, -1, *t.shape[-2:]) for t in (*cut.leaves, cut.dout))
    named = {
        name: gradient.reshape(1, -1, *gradient.shape[-2:]) for name, gradient in found.items()
    }
    expected = reference.ExpectedGradients.of((q, k, v), dout, **_options(small))
    return _worst_gradient(named, expected)


def _check_rows(provider: Provider, inputs: Inputs) -> Iterator[Check]:
    for place in _blocks(inputs.case):
        dout = torch.zeros_like(inputs.dout)
        for block in place:
            rows = inputs.sequence(dout, block.sequence, 0)[block.rows.start : block.rows.stop]
            rows[:, list(block.heads)] = block.queries(inputs, inputs.dout)
        found = _gradients(provider, inputs, dout)
        for block in place:
            keys = (slice(block.keys), block.head_kv, None)
            named = {"q": block.queries(inputs, found["q"])[None]}
            unseen = 0.0
            for name in "kv":
                gradient = inputs.sequence(found[name], block.sequence, 1)
                named[name] = gradient[keys][None]
                beyond = gradient[block.keys :, block.head_kv]
                unseen = max(unseen, beyond.abs().max().item() if beyond.numel() else 0.0)
            key = "gradients", block
            if key not in inputs.expected:
                of_rows = block.queries(inputs, inputs.dout)[None].cpu()
                inputs.expected[key] = reference.ExpectedGradients.of(
                    block.operands(inputs), of_rows, **_options(inputs.case, block)
                )
            check = _worst_gradient(named, inputs.expected[key])
            # No row sees the keys beyond: their gradients are exactly 0.
            yield check if not unseen else Check(max(unseen, check.error), 0.0)


def _gradients(provider: Provider, inputs: Inputs, dout: torch.Tensor) -> dict[str, torch.Tensor]:
    for leaf in inputs.leaves:
        leaf.requires_grad_()
    with provider.around():
        found = torch.autograd.grad(provider.call(inputs), inputs.leaves, dout)
    return dict(zip("qkv", found, strict=True))


def _worst_gradient(found: dict[str, torch.Tensor], expected: reference.ExpectedGradients) -> Check:
    return worst(Check(c.max_error, c.tolerance) for c in expected.compare(found).values())
