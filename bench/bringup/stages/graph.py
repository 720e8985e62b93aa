"""CUDA graphs: forward and backward captured once and replayed give the bits of plain calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.bringup.outcome import Outcome, Target
from bench.bringup.stages import kernels

#: A call with several tiles, where a replay with stale arguments would show.
_CALL = kernels.Call((600, 1100), (4, 2), {"causal": True})


def missing(target: Target) -> str:
    """Graphs are the CUDA driver's."""
    return kernels.missing(target) if target.is_gpu else "CUDA graphs need a GPU"


def items(target: Target) -> list[str]:
    return [
        f"{which} {scheduler}"
        for which in ("forward", "forward and backward")
        for scheduler in ("static", "clc")
    ]


def run(item: str, target: Target, note: Callable[[str], None]) -> Outcome:
    """Capture, replay twice, on inputs that changed in place after the capture."""
    import torch

    which, _, scheduler = item.rpartition(" ")
    call, use_clc = _CALL, scheduler == "clc"
    q, k, v, dout = kernels.tensors(call, target.device)
    q, k, v = inputs = tuple(t.requires_grad_() for t in (q, k, v))
    note(f"{which}, capture")

    def work() -> tuple[torch.Tensor, ...]:
        from fa4_hd256 import flash_attn_func

        out, lse = flash_attn_func(q, k, v, return_lse=True, use_clc=use_clc, **call.options)
        if which == "forward":
            return out, lse
        return (out, lse, *torch.autograd.grad(out, inputs, dout))

    graph, captured = capture(work)
    with torch.no_grad():
        for tensor in inputs:
            tensor.mul_(0.75).add_(0.125)
    wanted = [t.clone() for t in work()]
    for turn in (1, 2):
        note(f"{which}, replay {turn}")
        for tensor in captured:
            tensor.detach().zero_()
        graph.replay()
        torch.cuda.synchronize()
        wrong = [i for i, (a, b) in enumerate(zip(captured, wanted)) if not torch.equal(a, b)]
        if wrong:
            names = ("out", "lse", "dq", "dk", "dv")
            return Outcome(
                "failed", f"replay {turn}: other bits in " + ", ".join(names[i] for i in wrong)
            )
    return Outcome("passed", f"{len(wanted)} results, the same bits in two replays")


def capture(work: Callable[[], Any]) -> tuple[Any, Any]:
    """Return (graph of a call, its results), which a replay writes."""
    import torch

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        # Compiles, and lets allocator and autograd settle before the capture.
        work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    return graph, captured
