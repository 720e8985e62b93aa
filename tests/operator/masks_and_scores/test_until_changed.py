"""Facts of tensors that are cached while nobody writes to them."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.weak import WeakTensorKeyDictionary

from fa4_hd256.call.functions.until_changed import UntilChanged
from fa4_hd256.call.process import is_lasting


def test_until_somebody_writes():
    kept, tensor, other = UntilChanged(), torch.zeros(3), torch.zeros(3)
    kept[tensor] = "known"
    assert kept.get(tensor) == "known" and kept.get(other) is None
    with torch.inference_mode():
        tensor[0] = 1
    assert kept.get(tensor) is None


def shared(values):
    """A tensor and a NumPy array of the same memory."""
    array = np.array(values, dtype=np.int32)
    return torch.from_numpy(array), array


def of_data(values):
    tensor = torch.tensor(values, dtype=torch.int32)
    return tensor, tensor.data


@pytest.mark.parametrize("make", [shared, of_data])
def test_until_somebody_else_writes(make):
    """A writer that shares the memory may bypass PyTorch's count of changes."""
    kept = UntilChanged()
    tensor, other = make([0, 15, 40])
    kept[tensor] = "known"
    version = tensor._version
    assert kept.get(tensor) == "known"
    other[1] = 20
    assert tensor._version == version and kept.get(tensor) is None


def test_one_thread_at_a_time():
    """Without a lock one thread lets go of what another one is about to."""
    inside, most = [], []

    class Watched(WeakTensorKeyDictionary):
        def pop(self, *given):
            inside.append(given)
            time.sleep(0.01)
            most.append(len(inside))
            inside.pop()
            return super().pop(*given)

    kept, tensors = UntilChanged(2), [torch.zeros(1) for _ in range(6)]
    kept._kept = Watched()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda tensor: kept.__setitem__(tensor, "known"), tensors))
    assert most == [1] * 6


def test_nothing_of_tensors_whose_changes_are_not_counted():
    kept = UntilChanged()
    with torch.inference_mode():
        tensor = torch.zeros(3)
    kept[tensor] = "known"
    assert kept.get(tensor) is None


def test_the_oldest_goes():
    kept, tensors = UntilChanged(2), [torch.zeros(1) for _ in range(3)]
    for number, tensor in enumerate(tensors):
        kept[tensor] = number
    assert [kept.get(tensor) for tensor in tensors] == [None, 1, 2]


def by_func(call):
    torch.func.grad(lambda x: (call(), x.sum())[1])(torch.ones(2))


def by_vmap(call):
    torch.vmap(lambda x: (call(), x)[1])(torch.ones(2))


def with_fake_tensors(call):
    with FakeTensorMode(allow_non_fake_inputs=True):
        call()


def in_inference_mode(call):
    with torch.inference_mode():
        call()


@pytest.mark.parametrize("first", [by_func, by_vmap, with_fake_tensors, in_inference_mode])
def test_what_a_call_of_another_kind_makes(first):
    """Later calls find no stand-in and no inference tensor; what was known stays."""
    known, tensor = UntilChanged(), torch.ones(3)

    def made(key):
        return known.made(tensor, lambda: tensor * 2, key)

    first(lambda: made("first"))
    before = made("second")
    first(lambda: made("third"))
    for found in (made("first"), made("third"), before):
        assert type(found) is torch.Tensor and is_lasting(found) and not found.is_inference()
        assert torch.equal(found, tensor * 2)
    assert made("second") is before
