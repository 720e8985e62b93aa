"""Several streams and threads at once, and gradients across streams."""

from __future__ import annotations

import threading

import pytest
import torch
from cuda_cases import CASES, differing

pytestmark = pytest.mark.cuda

SCHEDULERS = pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
STREAMS, ROUNDS = 6, 5


@SCHEDULERS
def test_streams_at_the_same_time(use_clc, device):
    """Each with its own inputs and kernels: the bits of a call by itself."""
    calls = [(CASES[name], CASES[name].tensors(device, seed))
             for seed, name in zip(range(STREAMS), [*CASES, *CASES])]  # fmt: skip
    expected = [case.run(tensors, use_clc) for case, tensors in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    found = [[] for _ in calls]
    for _ in range(ROUNDS):
        for (case, tensors), stream, results in zip(calls, streams, found):
            with torch.cuda.stream(stream):
                results.append(case.run(tensors, use_clc))
    torch.cuda.synchronize()
    for wanted, results in zip(expected, found):
        assert all(differing(one, wanted) == [] for one in results)


@SCHEDULERS
def test_threads(use_clc, device):
    """Host threads that call at the same time, a stream each."""
    calls = [(CASES["grouped"], CASES["grouped"].tensors(device, seed)) for seed in range(4)]
    expected = [case.run(tensors, use_clc) for case, tensors in calls]
    torch.cuda.synchronize()
    wrong = []

    def work(index):
        case, tensors = calls[index]
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(ROUNDS):
                found = case.run(tensors, use_clc)
                torch.cuda.current_stream().synchronize()
                wrong.extend(differing(found, expected[index]))
        done.append(index)

    done: list[int] = []
    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1, 2, 3] and wrong == []


def test_work_queued_before_a_call(device):
    """A call reads what its stream has yet to write, and is read by what follows."""
    case = CASES["grouped"]
    tensors = case.tensors(device)
    wanted = case.run(tensors)
    late = {name: torch.zeros_like(t) for name, t in tensors.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        for name, tensor in tensors.items():
            late[name].copy_(tensor)
        found = {name: t.clone() for name, t in case.run(late).items()}
        torch.cuda.current_stream().synchronize()
    assert differing(found, wanted) == []


def test_backward_of_a_forward_on_another_stream(device):
    """Autograd runs the backward where the forward ran."""
    from fa4_hd256 import flash_attn_func

    case = CASES["grouped"]
    tensors = case.tensors(device)
    found = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        leaves = [tensors[name].detach().requires_grad_() for name in "qkv"]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = flash_attn_func(*leaves, causal=True)
        torch.cuda.current_stream().wait_stream(stream)
        out.backward(tensors["dout"], retain_graph=True)
        once = [leaf.grad.clone() for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        # The graph runs a second time.
        out.backward(tensors["dout"])
        torch.cuda.synchronize()
        assert all(torch.equal(a, leaf.grad) for a, leaf in zip(once, leaves, strict=True))
        found.append(once)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
