"""The directory of compiled kernels, for modules that load neither PyTorch nor CuTe DSL, too."""

from __future__ import annotations

from .. import environment
from .native_cache import NativeCache


def disk_cache() -> NativeCache:
    return NativeCache(
        environment.cache_directory(), "compiled kernels", environment.CACHE_DIR.name
    )
