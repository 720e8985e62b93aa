"""The project's kernels against float64: each alone at its smallest shape, then masks, lengths,
heads and both tile schedulers.

The backward's kernels get out and lse of the float64 reference, so that a wrong forward does not
make them wrong.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.bringup.outcome import Outcome, Target
from fa4_hd256.gpus.family import describe_family, of_capability

#: Largest absolute error of an LSE, in nats; the mix of exp2 and polynomial leaves about 1e-4.
LSE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Call:
    """One call: (seqlen_q, seqlen_k), (heads, heads_kv), the operator's options, the scheduler."""

    lengths: tuple[int, int]
    heads: tuple[int, int] = (2, 1)
    options: dict[str, Any] = field(default_factory=dict)
    use_clc: bool = False
    dtype: str = "bfloat16"
    batch: int = 1


#: Rows of the ladder. A tile is 256 queries of a CTA pair and a step 128 keys: one row; a rest on
#: either side of a tile; a whole tile; several tiles; fewer keys than queries.
_LENGTHS = ((1, 1), (129, 129), (256, 384), (257, 255), (515, 131), (600, 1100))
_MASKS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}}
#: Windows change what happens at a tile's edge: two lengths with rests show it.
_WINDOWS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (100, 30)},
    "causal window": {"causal": True, "window_size": (200, 0)},
}
_WINDOWED = ((257, 255), (600, 1100))
#: Longer ones, for a GPU alone: many tiles per CTA pair.
_LONG = ((2048, 2048), (4096, 4096))

#: (queries, keys) of the sequences of a packed call: rests of tiles, whole ones, one row, none.
_PACKED = ((70, 70), (300, 300), (1, 1), (0, 40), (129, 260), (256, 128))

#: Queries of sequences that have no key: out is 0, LSE -inf, and no gradient is other than 0.
_UNSEEING = (70, 1, 300)


def _under_masks(
    lengths: Iterable[tuple[int, int]], masks: dict[str, dict[str, Any]]
) -> dict[str, Call]:
    """Return calls of these lengths and masks under both schedulers."""
    return {
        f"{mask} {n[0]}x{n[1]} {scheduler}": Call(n, options=options, use_clc=scheduler == "clc")
        for n, (mask, options), scheduler in itertools.product(
            lengths, masks.items(), ("static", "clc")
        )
    }


def _ladder(long: bool) -> dict[str, Call]:
    """Return the calls by name. long: with those for a GPU alone."""
    return {
        **_under_masks(_LENGTHS, _MASKS),
        **_under_masks(_WINDOWED, _WINDOWS),
        "causal 300x300 float16": Call((300, 300), options={"causal": True}, dtype="float16"),
        "causal 300x300 heads 8 of 1": Call((300, 300), (8, 1), {"causal": True}),
        "full 300x300 softcap": Call((300, 300), options={"softcap": 20.0}),
        "full 140x300 batch 3": Call((140, 300), batch=3),
        **(_under_masks(_LONG, _MASKS) if long else {}),
    }


def missing(target: Target) -> str:
    """Return what the kernels need and the machine lacks: CuTe DSL, PyTorch, a GPU of a family."""
    if importlib.util.find_spec("cutlass") is None:
        return "CuTe DSL is not installed (pip install nvidia-cutlass-dsl), and it compiles them"
    architecture = of_capability(target.capability)
    if architecture is None:
        major, minor = target.capability
        return f"the kernels need a {describe_family()}; this GPU has {major}.{minor}"
    from fa4_hd256.kernels.kernel_set import kernels_of

    try:
        kernels_of(architecture).forward_tiles()
        kernels_of(architecture).backward_set()
    except NotImplementedError as error:
        return str(error)
    if not target.is_gpu:
        return ""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed (pip install torch), and it holds the tensors"
    import torch

    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU; install a build for this driver's CUDA"
    return ""


def items(target: Target) -> list[str]:
    """List the smallest shapes, then the ladder of forward and backward."""
    packed = itertools.product(("packed causal", "packed without keys"), ("static", "clc"))
    calls = [*_ladder(long=target.is_gpu), *map(" ".join, packed)]
    ladder = [f"{which} {call}" for call in calls for which in ("forward", "backward")]
    return [*(f"smallest {kernel}" for kernel in SMALLEST), *ladder]


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """Run one kernel, or one call."""
    kind, _, name = item.partition(" ")
    is_backward, use_clc = kind == "backward", name.endswith("clc")
    if kind == "smallest":
        note(f"{name}, one tile")
        return SMALLEST[name](target)
    if name.startswith("packed without keys"):
        note(f"{kind}, {_UNSEEING} queries of sequences without keys")
        return _without_keys(is_backward, use_clc, target)
    if name.startswith("packed"):
        note(f"{kind}, sequences of {_PACKED}")
        return _packed(is_backward, use_clc, target)
    call = _ladder(long=True)[name]
    note(f"{kind} {call}")
    return _backward(call, target) if is_backward else _forward(call, target)


def tensors(call: Call, device: str) -> tuple[Any, ...]:
    """Return q, k, v and the gradient of out, random and the same every time."""
    import torch

    generator = torch.Generator().manual_seed(sum(call.lengths))
    dtype = getattr(torch, call.dtype)
    shapes = [(call.batch, n, h, 256) for n, h in zip(call.lengths, call.heads)]
    return tuple(
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in (*shapes, shapes[1], shapes[0])
    )


def _forward(call: Call, target: Target, **more: Any) -> Outcome:
    from fa4_hd256 import flash_attn_func
    from fa4_hd256.check import reference

    q, k, v, _ = tensors(call, target.device)
    out, lse = flash_attn_func(
        q, k, v, return_lse=True, use_clc=call.use_clc, **{"num_splits": 1, **more}, **call.options
    )
    found = reference.compare(out, lse, (q, k, v), **call.options)
    right = found.max_error <= found.tolerance and found.lse_max_error <= LSE_TOLERANCE
    values = found.max_error, found.tolerance, found.lse_max_error
    text = "largest error {:.2e} of {:.2e}, LSE {:.1e}".format(*values)
    return _judged(right, text, dict(zip(("error", "tolerance", "lse error"), values, strict=True)))


def _judged(right: bool, text: str, values: dict[str, float]) -> Outcome:
    """Return the outcome; JSON knows no infinity."""
    finite = {name: v if math.isfinite(v) else str(v) for name, v in values.items()}
    return Outcome("passed" if right else "failed", text, finite)


def _backward(call: Call, target: Target, **wanted: bool) -> Outcome:
    """Check gradients made of the reference's out and lse. wanted: fields of `backward.Wanted`."""
    from fa4_hd256.call.backward_problem import BackwardProblem
    from fa4_hd256.call.operator_arguments import BackwardTensors
    from fa4_hd256.call.options import Options
    from fa4_hd256.check import reference
    from fa4_hd256.check.single_kernels import run_backward
    from fa4_hd256.run.backward import Wanted

    q, k, v, dout = tensors(call, target.device)
    out, lse = reference.attention(q, k, v, **call.options)
    given = BackwardTensors(
        dout, None, q, k, v, out.to(q.dtype).to(q.device), lse.float().to(q.device)
    )
    chosen = reference.AttentionOptions(**call.options)
    options = Options.check(None, chosen.causal, chosen.window_size, chosen.softcap, call.use_clc)
    problem = BackwardProblem.describe(given, options)
    config = problem.forward.kernels.config("backward")()
    results = run_backward(given, problem, Wanted(**wanted), config)
    made = {"q": wanted.get("dq", True)} | dict.fromkeys("kv", wanted.get("dkdv", True))
    found = {name: g for name, g in zip("qkv", results) if made[name]}
    compared = reference.compare_gradients(found, (q, k, v), dout, **call.options)
    right = all(c.max_error <= c.tolerance for c in compared.values())
    text = ", ".join(f"d{n} {c.max_error:.2e} of {c.tolerance:.2e}" for n, c in compared.items())
    values = {f"d{n} error": c.max_error for n, c in compared.items()}
    return _judged(right, text, values)


def _packed(is_backward: bool, use_clc: bool, target: Target) -> Outcome:
    """Check `flash_attn_varlen_func`, causal; each sequence against the reference, the worst one
    told."""
    import torch

    from fa4_hd256.check import reference

    totals = tuple(sum(side) for side in zip(*_PACKED))
    q, k, v, dout = (t[0] for t in tensors(Call(totals), target.device))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    ends = [list(itertools.accumulate(side, initial=0)) for side in zip(*_PACKED)]
    out, lse = _varlen(leaves, ends, use_clc)
    gradients = torch.autograd.grad(out, leaves, dout) if is_backward else ()
    worst, right = 0.0, True
    for (a, b), (c, d) in zip(*(itertools.pairwise(e) for e in ends)):
        if a == b:
            continue
        one = tuple(t[None] for t in (q[a:b], k[c:d], v[c:d]))
        found: list[Any]
        if is_backward:
            parts = {n: g[i:j][None] for n, g, i, j in zip("qkv", gradients, (a, c, c), (b, d, d))}
            compared = reference.compare_gradients(parts, one, dout[a:b][None], causal=True)
            found = [*compared.values()]
        else:
            of_one = out[a:b][None].detach(), lse[None, :, a:b].detach()
            found = [reference.compare(*of_one, one, causal=True)]
            right &= found[0].lse_max_error <= LSE_TOLERANCE
        right &= all(f.max_error <= f.tolerance for f in found)
        # One key alone leaves out = v, with no tolerance.
        worst = max([worst, *(f.max_error / f.tolerance for f in found if f.tolerance)])
    text = f"{len(_PACKED)} sequences, largest error {worst:.0%} of the tolerance"
    return _judged(right, text, {"error over tolerance": worst})


def _varlen(leaves: list[Any], ends: list[list[int]], use_clc: bool) -> tuple[Any, Any]:
    """Return (out, lse) of causal packed sequences. ends: offsets of queries and of keys."""
    import torch

    from fa4_hd256 import flash_attn_varlen_func

    device = leaves[0].device
    of_queries, of_keys = (torch.tensor(e, dtype=torch.int32, device=device) for e in ends)
    longest = [max(1, *(b - a for a, b in itertools.pairwise(e))) for e in ends]
    found: Any = flash_attn_varlen_func(
        *leaves, cu_seqlens_q=of_queries, cu_seqlens_k=of_keys, max_seqlen_q=longest[0],
        max_seqlen_k=longest[1], causal=True, return_lse=True, use_clc=use_clc,
    )  # fmt: skip
    return found


def _without_keys(is_backward: bool, use_clc: bool, target: Target) -> Outcome:
    """Check sequences without keys, beside a row of K that belongs to none of them."""
    import torch

    q, k, v, dout = (t[0] for t in tensors(Call((sum(_UNSEEING), 1)), target.device))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    ends = [[0, *itertools.accumulate(_UNSEEING)], [0] * (len(_UNSEEING) + 1)]
    out, lse = _varlen(leaves, ends, use_clc)
    wrong = int((out != 0).sum()) + int((lse != -math.inf).sum())
    if is_backward:
        gradients = torch.autograd.grad(out, leaves, dout)
        wrong += sum(int((gradient != 0).sum()) for gradient in gradients)
    text = f"{len(_UNSEEING)} sequences, {wrong} elements that are not 0, or -inf of LSE"
    return Outcome("failed" if wrong else "passed", text, {"wrong": wrong})


def _preprocess(call: Call, target: Target) -> Outcome:
    """Check -LSE in base 2 and -rowsum(O dO) of every row."""
    import torch

    from fa4_hd256.call.backward_problem import BackwardProblem
    from fa4_hd256.call.operator_arguments import BackwardTensors
    from fa4_hd256.call.options import Options
    from fa4_hd256.check import reference
    from fa4_hd256.check.single_kernels import empty_stats, run_preprocess

    q, k, v, dout = tensors(call, target.device)
    out, lse = reference.attention(q, k, v)
    out, lse = out.to(q.dtype).to(q.device), lse.float().to(q.device)
    given = BackwardTensors(dout, None, q, k, v, out, lse)
    problem = BackwardProblem.describe(given, Options.check(None, False, (None, None), 0.0))
    stats = empty_stats(problem)
    run_preprocess(problem, {"out": out, "dout": dout, "lse": lse, "stats": stats})
    rows = call.lengths[0]
    got = stats[:, 0, :rows].double().cpu()
    delta = (out.double() * dout.double()).sum(3)[0, :, 0].cpu()
    wanted = torch.stack((-lse[0, 0].double().cpu() * math.log2(math.e), -delta))
    # float32 sums of 256 products of magnitude up to 20.
    right = torch.allclose(got, wanted, rtol=1e-6, atol=1e-4)
    worst = (got - wanted).abs().nan_to_num(nan=math.inf).max().item()
    return _judged(right, f"largest error {worst:.1e}", {"error": worst})


_ONE = Call((128, 128), (1, 1))
#: Kernels alone, as far as they can be: the gradients' kernels need the preprocess kernel.
SMALLEST: dict[str, Callable[[Target], Outcome]] = {
    "forward": partial(_forward, _ONE),
    "forward_combine": partial(_forward, Call((128, 256), (1, 1)), num_splits=2),
    "backward_preprocess": partial(_preprocess, _ONE),
    "backward_dkdv": partial(_backward, _ONE, dq=False),
    "backward_dq": partial(_backward, _ONE, dkdv=False),
    # dK and dQ as GEMMs of the dS that the kernel of dV stores.
    "backward_products": partial(_backward, _ONE),
}
