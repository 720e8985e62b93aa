"""A GPU that is not the current one, and two at the same time."""

from __future__ import annotations

import threading

import pytest
import torch
from cuda_cases import CASES, differing

pytestmark = pytest.mark.cuda(2)

SCHEDULERS = pytest.mark.parametrize("use_clc", [False, True], ids=["static", "dynamic"])
DEVICES = ("cuda:0", "cuda:1")


def on_host(results):
    return {name: tensor.cpu() for name, tensor in results.items()}


@SCHEDULERS
@pytest.mark.parametrize("name", CASES)
def test_a_device_that_is_not_current(name, use_clc):
    """Results lie where the tensors do, with the bits of the other GPU; the current one stays."""
    with torch.cuda.device(0):
        found = [CASES[name].run(CASES[name].tensors(one), use_clc) for one in DEVICES]
        assert torch.cuda.current_device() == 0
    for results, one in zip(found, DEVICES):
        assert {str(tensor.device) for tensor in results.values()} == {one}
    assert differing(*map(on_host, found)) == []


@SCHEDULERS
def test_both_devices_at_the_same_time(use_clc):
    """Each device has a thread, whose current device is the other one."""
    case = CASES["grouped"]
    tensors = [case.tensors(one) for one in DEVICES]
    expected = on_host(case.run(tensors[0], use_clc))
    found = []

    def work(index):
        with torch.cuda.device(1 - index):
            found.extend(on_host(case.run(tensors[index], use_clc)) for _ in range(5))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 10 and all(differing(one, expected) == [] for one in found)


@SCHEDULERS
def test_a_graph_of_the_second_device(use_clc):
    case = CASES["grouped"]
    with torch.cuda.device(1):
        tensors = case.tensors("cuda:1")
        expected = on_host(case.run(tensors, use_clc))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            results = case.run(tensors, use_clc)
    graph.replay()
    torch.cuda.synchronize(1)
    assert differing(on_host(results), expected) == []


def test_tensors_of_two_devices_are_refused():
    from fa4_hd256 import flash_attn_func

    q, k = (torch.zeros(1, 4, 1, 256, dtype=torch.bfloat16, device=one) for one in DEVICES)
    with pytest.raises(ValueError, match="must share one device; got q cuda:0, k cuda:1"):
        flash_attn_func(q, k, k)
