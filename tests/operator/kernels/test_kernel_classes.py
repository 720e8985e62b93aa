"""Classes of the kernels: few enough bases that a reader finds a method at once."""

import pytest

from fa4_hd256.architectures import ARCHITECTURES
from fa4_hd256.kernels.kernel_set import kernels_of

#: Classes in which a kernel's methods may stand, its own included.
MOST_CLASSES = 4
KERNELS = [(a, kind) for a in ARCHITECTURES for kind in kernels_of(a).classes]


@pytest.mark.parametrize(
    ("architecture", "kind"), KERNELS, ids=lambda one: getattr(one, "name", one)
)
def test_a_kernel_has_few_classes(architecture, kind):
    kernel = kernels_of(architecture).kernel(kind)
    classes = [one.__name__ for one in kernel.__mro__ if one is not object]
    assert len(classes) <= MOST_CLASSES, classes
