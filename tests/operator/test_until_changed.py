"""What is kept of tensors while nobody writes to them."""

import torch

from fa4_hd256.until_changed import UntilChanged


def test_until_somebody_writes():
    kept, tensor, other = UntilChanged(), torch.zeros(3), torch.zeros(3)
    kept[tensor] = "known"
    assert kept.get(tensor) == "known" and kept.get(other) is None
    with torch.inference_mode():
        tensor[0] = 1
    assert kept.get(tensor) is None


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
