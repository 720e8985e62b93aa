"""The figures of a GPU that the operator needs, and the GPUs that kernels run on.

This module needs neither PyTorch nor a driver.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import environment
from ..architectures import ARCHITECTURES, Architecture

#: Compute capability -> the GPUs that have it, of all architectures.
FAMILY = {
    capability: names
    for architecture in ARCHITECTURES
    for capability, names in architecture.gpus.items()
}


def of_capability(capability: tuple[int, int]) -> Architecture | None:
    return next((one for one in ARCHITECTURES if tuple(capability) in one.gpus), None)


def describe_family() -> str:
    return ", ".join(architecture.describe() for architecture in ARCHITECTURES)


@dataclass(frozen=True)
class Gpu:
    """Figures of a GPU that the operator needs. pairs: CTA pairs, one CTA per SM, that it holds at
    once."""

    capability: tuple[int, int]
    sms: int
    pairs: int
    l2_bytes: int
    hbm_bytes_per_second: float

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise ValueError(
                f"the device holds no CTA pair: it has {self.sms} SMs, of which no two are peers; "
                "accepted: a GPU, or a slice of one, with at least one pair of SMs"
            )

    def describe(self) -> str:
        return (
            f"{self.sms} SMs, {self.pairs} CTA pairs at once, {self.grid_clusters(2)} in a "
            f"static grid, L2 {self.l2_bytes / 1e6:.1f} MB, HBM "
            f"{self.hbm_bytes_per_second / 1e12:.2f} TB/s, tuned as {self.tuning_name}"
        )

    @property
    def tuning_name(self) -> str:
        """Return the GPU whose rows of the tuning table apply: the first of its compute
        capability."""
        return FAMILY[self.capability][0]

    @property
    def l2_bytes_for_tiles(self) -> int:
        """Half of L2, for what the tiles of a section share. It is rounded to 4 MiB: lengths that
        are powers of two then fill it, though a GPU has somewhat less (126.5 MB)."""
        step = 4 << 20
        return max(1, round(self.l2_bytes / 2 / step)) * step

    def clusters(self, size: int) -> int:
        return {1: self.sms, 2: self.pairs}[size]

    def grid_clusters(self, size: int) -> int:
        """Return the clusters of a static grid: all but those of RESERVED_SMS."""
        reserved = environment.reserved_sms()
        if reserved >= self.sms:
            raise ValueError(
                f"{environment.RESERVED_SMS.name} is {reserved}; accepted here: 0 to "
                f"{self.sms - 1}, as the device has {self.sms} SMs"
            )
        return max(1, self.clusters(size) - -(-reserved // size))
