"""What the operator wants to know of the GPU that tensors lie on.

NOTE [pairs that fit].  CTA pairs resident at once are what the driver says: SMs come in groups, and
one that is odd, or a slice of a GPU (MIG), leaves an SM without a peer.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import torch

from fa4_hd256 import environment

from . import driver
from .family import FAMILY, of_capability

__all__ = ["Gpu", "cuda_gpu", "is_captured", "sms_are_shared"]

#: Whether this PyTorch has torch.distributed.
_IS_DISTRIBUTED = torch.distributed.is_available()


@dataclass(frozen=True)
class Gpu:
    """What the operator asks of a GPU.

    capability: compute capability.  pairs: CTA pairs, one CTA an SM, that it holds at once.
    """

    capability: tuple[int, int]
    sms: int
    pairs: int
    l2_bytes: int
    hbm_bytes_per_second: float

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise ValueError(
                f"the device holds no CTA pair: it has {self.sms} SMs, of which no two are peers; "
                "accepted are GPUs and slices with a pair of SMs or more"
            )

    def describe(self) -> str:
        """All of it in a line."""
        return (
            f"{self.sms} SMs, {self.pairs} CTA pairs at once, {self.grid_clusters(2)} in a "
            f"static grid, L2 {self.l2_bytes / 1e6:.1f} MB, HBM "
            f"{self.hbm_bytes_per_second / 1e12:.2f} TB/s, tuned as {self.tuning_name}"
        )

    @property
    def tuning_name(self) -> str:
        """Its rows in the tuning table are those of the first GPU of its compute capability."""
        return FAMILY[self.capability][0]

    @property
    def l2_bytes_for_tiles(self) -> int:
        """Half of L2, for what the tiles of a section share. To the nearest 4 MiB: lengths that are
        powers of two then fill it, though a GPU has somewhat less than one (126.5 MB)."""
        step = 4 << 20
        return max(1, round(self.l2_bytes / 2 / step)) * step

    def clusters(self, size: int) -> int:
        """Clusters of 1 or 2 CTAs, one CTA an SM, that it holds at once."""
        return {1: self.sms, 2: self.pairs}[size]

    def grid_clusters(self, size: int) -> int:
        """Clusters of so many CTAs of a static grid: all but those left to other kernels
        (RESERVED_SMS)."""
        reserved = environment.reserved_sms()
        if reserved >= self.sms:
            raise ValueError(
                f"{environment.RESERVED_SMS.name} is {reserved}; accepted here: 0 to "
                f"{self.sms - 1}, as the device has {self.sms} SMs"
            )
        return max(1, self.clusters(size) - -(-reserved // size))


def cuda_gpu(device: torch.device) -> Gpu:
    """The GPU that a CUDA device is, asked once for each of the process's devices.

    Raises ValueError for one that holds no CTA pair.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda_gpu(index)


@functools.cache
def _cuda_gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    sms = properties.multi_processor_count
    try:
        pairs, hbm = driver.resident_pairs(index), driver.hbm_bytes_per_second(index)
    except driver.DriverError as error:
        warnings.warn(
            f"the driver does not say how many CTA pairs cuda:{index} holds ({error}); half of its "
            f"{sms} SMs are taken",
            RuntimeWarning,
            stacklevel=3,
        )
        pairs, hbm = sms // 2, 0.0
    capability = properties.major, properties.minor
    if not hbm:
        architecture = of_capability(capability)
        hbm = sms * architecture.hbm_of_sm if architecture else 0.0
    return Gpu(capability, sms, pairs, properties.L2_cache_size, hbm)


def is_captured(device: torch.device) -> bool:
    """Whether this thread's calls on a device go into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def sms_are_shared() -> bool:
    """Whether kernels of other streams may hold SMs while ours run: in a process that is one of
    several of torch.distributed, whose communication (NCCL) overlaps with computing, unless SMs
    are left to them (RESERVED_SMS). It selects a scheduler, never a result."""
    group = torch.distributed
    return (
        _IS_DISTRIBUTED
        and group.is_initialized()
        and group.get_world_size() > 1
        and not environment.reserved_sms()
    )
