"""A case: a kernel that is not ours, its sizes in the simulator and on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .cuda_kernels import TEXTBOOK, Source

Call = Callable[[], Any]
Extent = tuple[int, int, int]


class World(Protocol):
    """A place where kernels run: the simulator, or a GPU."""

    def tensor(self, *shape: int, dtype: str, low: int | None = None) -> Any:
        """Return a tensor of normal numbers; of whole ones below `low` if that is given."""

    def launch(
        self, kernel: str, grid: Extent, block: Extent, *arguments: Any, source: Source = TEXTBOOK
    ) -> None:
        """Launch a kernel of a source; arguments: tensors and numbers of 32 bits."""


@dataclass(frozen=True)
class Case:
    """One kernel. language: "Triton", "CUDA C++" or "CuTe DSL". origin: whose it is.

    prepare: makes the tensors of sizes, and returns the call that launches. few, many: sizes in
    the simulator and on the GPU. clusters, hbm_bytes: of the launch on the GPU. part: of the names
    of the kernels that count; a call may launch others. work: FLOP, where they are what counts.
    """

    name: str
    language: str
    origin: str
    prepare: Callable[..., Call]
    few: dict[str, int]
    many: dict[str, int]
    clusters: int
    hbm_bytes: float
    part: str = ""
    work: float = 0.0
