"""Facts of tensors that are cached while nobody writes to them."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fa4_hd256.until_changed import UntilChanged


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
