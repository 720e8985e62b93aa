"""Kernel sets: what the folder of an architecture offers to the packages that call kernels.

Each has a module `architecture` with a `KERNELS` of this form; how a kernel plugs in is said in
docs/architecture.md.  Classes of kernels are named and imported when one is built: a forward
builds nothing of the backward. A kernel that an architecture lacks has no name there.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..architectures import ARCHITECTURES, Architecture
from .forward.tiles import ForwardTiles
from .problem_class import ProblemClass
from .small.combine_config import CombineRule

#: Kind of the forward kernel for scales of blocks, each of whose tiles is of one head.
MXFP8 = "forward_mxfp8"


@dataclass(frozen=True)
class KeyKernel:
    """Facts of the kernels of dK and dV from which a group of query heads is split into parts
    (docs/kernels.md).

    keys: of a tile. queries: of a step. seconds: of a step, modelled. overhead: what a tile takes
    beside its steps, in steps. part_bytes: of writing and summing a tile's part in float32.
    products: what the MMAs of a stored dS take of a step, each, in steps. cluster: CTAs that work
    on a tile. by_sections: the wait for the longest tiles follows from the sections of a launch, as
    measured; otherwise from the mean of tiles alone, as modelled.
    """

    keys: int
    queries: int
    seconds: float
    overhead: float
    part_bytes: float
    products: float = 0.0
    cluster: int = 2
    by_sections: bool = False


@dataclass(frozen=True)
class BackwardKernel:
    """One kernel of a backward. name: its kind is backward_<name>. results: which of "dq", "dk" and
    "dv" it makes, in the order of its arguments. has_ds: it writes or reads a stored dS.
    computes_scores: it is another one for each softcap, score_mod and mask_mod."""

    name: str
    results: tuple[str, ...]
    has_ds: bool = False
    computes_scores: bool = True

    @property
    def kind(self) -> str:
        return f"backward_{self.name}"


@dataclass(frozen=True)
class BackwardSet:
    """The kernels of a backward, in the order in which they run, and what the host must know.

    stored: with dS in global memory; recomputed: without.  Each makes dq, dk and dv once.
    stored_keys, recomputed_keys: of those that make dK and dV.  cluster: CTAs of a cluster, of all
    of them.
    """

    stored: tuple[BackwardKernel, ...]
    recomputed: tuple[BackwardKernel, ...]
    stored_keys: KeyKernel
    recomputed_keys: KeyKernel
    cluster: int

    def kernel(self, kind: str) -> BackwardKernel:
        return next(k for k in (*self.stored, *self.recomputed) if k.kind == kind)


@dataclass(frozen=True)
class KernelSet:
    """The kernels of one architecture.  A class, or a configuration, is text: "module:class" below
    the architecture's folder.  None, or no entry: the architecture has none."""

    architecture: Architecture
    #: Kind of kernel -> its class, called as `class(config, problem_class, parts)` with
    #: `context.KernelParts`.
    classes: Mapping[str, str] = field(default_factory=dict)
    #: Configurations of the forward, of the backward, and of the forward for a few query rows.
    forward_config: str | None = None
    backward_config: str | None = None
    decode_config: str | None = None
    #: Configurations of the forward for q in e4m3 and in mxfp8.
    e4m3_configs: tuple[str, ...] = ()
    #: Function of (tiles, causal, seqlen_k, gpu, paged): the default configuration of a forward
    #: with such `ForwardTiles`.  causal: the mask bounds the keys on the right; seqlen_k: of the
    #: longest key sequence; gpu: its rows of the tuning table; paged: keys lie in pages.
    tuned: Any = None
    #: Tiles that calls may get of the forward, for every dtype of K and V; the first that fit a
    #: call are preferred.
    forwards: tuple[ForwardTiles, ...] = ()
    #: Kernels of the backward, and of the one in mxfp8, with scales of blocks.
    backward: BackwardSet | None = None
    mxfp8_backward: BackwardSet | None = None
    mxfp8_backward_config: str | None = None
    #: The dynamic scheduler takes a counter in global memory.
    counts_tiles: bool = False
    #: Rule for the configuration of the combining kernel.
    combine: CombineRule = CombineRule()
    #: Function of a forward's configuration: the one for pages of any size.  None: every
    #: configuration takes them.
    gathering: Any = None
    #: The `forward.keys.KeySource` of these pages, below `kernels`.
    gathered_keys: str = "forward.gathered:GatheredRows"

    def kernel(self, kind: str) -> Any:
        """The class of a kernel. Raises NotImplementedError where it is not written."""
        return self._class(self.classes.get(kind), f"kernel {kind}")

    def config(self, direction: str) -> Any:
        """The class of a direction's configurations, "forward", "backward" or "mxfp8_backward".
        Raises as `kernel`. That of the forward has `tiles`, that of the backward `ds_bytes` and
        `of_kernel(kind)`."""
        return self._class(getattr(self, f"{direction}_config"), direction)

    def configs(self, direction: str) -> tuple[Any, ...]:
        """All classes of a direction's configurations, first that of `config`."""
        own = (self.config(direction),)
        if direction == "forward":
            more = (self.decode_config, *self.e4m3_configs)
            return (*own, *(self._class(one, direction) for one in more if one is not None))
        return own

    def keys_of(self, problem_class: ProblemClass) -> Any:
        if problem_class.gathers:
            return _named(self.gathered_keys)
        if problem_class.page_size is not None:
            return _named("forward.pages:KeysInPages")
        return _named(f"forward.keys:{'ListedKeys' if problem_class.lists_steps else 'KeySource'}")

    def plans_of(self, config: Any) -> tuple[Any, ...]:
        """Return the plans in a configuration with their steps, for `proof.plans`."""
        return self._class("proof.plans:plans_of", "proof")(config)

    def forward_tiles(
        self,
        config: Any = None,
        kv_dtype: torch.dtype | None = None,
        q_dtype: torch.dtype | None = None,
        is_mxfp8: bool = False,
    ) -> tuple[ForwardTiles, ...]:
        """Return the tiles of a configuration, or without one of `forwards`, for Q, K and V of such
        dtypes; q_dtype: None for that of out. kv_dtype: None for that of Q. is_mxfp8: of Q, K
        and V in mxfp8.

        Raises NotImplementedError where there is none, ValueError for a configuration of others.
        """
        requested = q_dtype, kv_dtype, is_mxfp8
        if config is not None:
            own = _key(config.tiles)
            if own != requested:
                raise ValueError(
                    f"config is for {_dtypes(*own)}, and the call has "
                    f"{_dtypes(*requested)}; accepted: None, or a configuration made for it"
                )
            return (config.tiles,)
        if not self.forwards:
            raise self._missing("forward")
        tiles = tuple(t for t in self.forwards if _key(t) == requested)
        if not tiles:
            accepted = "q, k and v" if q_dtype is None else "q"
            raise NotImplementedError(
                f"{_dtypes(*requested)}, which {self.architecture.name}, "
                f"{self.architecture.describe()}, has no kernel for: not yet offered there; "
                f"accepted: {accepted} in torch.bfloat16 or torch.float16"
            )
        return tiles

    def backward_set(self, is_mxfp8: bool = False) -> BackwardSet:
        found = self.mxfp8_backward if is_mxfp8 else self.backward
        if found is None:
            raise self._missing("backward in mxfp8" if is_mxfp8 else "backward")
        return found

    def _class(self, place: str | None, what: str) -> Any:
        if place is None:
            raise self._missing(what)
        return _named(f"{self.architecture.folder}.{place}")

    def _missing(self, what: str) -> NotImplementedError:
        others = "; ".join(
            f"{a.name}: {a.describe()}" for a in ARCHITECTURES if a is not self.architecture
        )
        return NotImplementedError(
            f"{self.architecture.name}, {self.architecture.describe()}, has no {what} yet; what "
            f"others have: {others}. CPU tensors take the architecture that FA4_HD256_ARCH names"
        )


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), name)


def _key(tiles: ForwardTiles) -> tuple[torch.dtype | None, torch.dtype | None, bool]:
    return tiles.q_dtype, tiles.kv_dtype, tiles.kind == MXFP8


def _dtypes(
    q_dtype: torch.dtype | None, kv_dtype: torch.dtype | None, is_mxfp8: bool = False
) -> str:
    if is_mxfp8:
        return "q, k and v in mxfp8, with scales of blocks"
    if q_dtype is not None:
        return f"q, k and v of the dtype {q_dtype}"
    of_codes = " (NVFP4)" if kv_dtype == torch.uint8 else ""
    return f"k and v of the dtype {kv_dtype or 'that of q'}{of_codes}"


@functools.cache
def kernels_of(architecture: Architecture) -> KernelSet:
    module = importlib.import_module(f".{architecture.folder}.architecture", __package__)
    return module.KERNELS


def kinds() -> set[str]:
    return {kind for a in ARCHITECTURES for kind in kernels_of(a).classes}
