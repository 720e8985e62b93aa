"""Stand-ins for packages that SGLang imports and no attention needs, where they are absent.

torchvision's wheel does not load beside PyTorch's CPU build. sgl_kernel has SGLang's own compiled
kernels, which a GPU's branch of SGLang imports. Names of a stand-in are empty classes: a call of
one fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from importlib.util import find_spec

from transformers.utils import is_torchvision_available


class _Empty(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package):
        self._package = package

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == self._package:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = self._name
        return module

    @staticmethod
    def _name(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})

    def exec_module(self, module):
        pass


# transformers remembers the answer, so it goes on without torchvision.
if not is_torchvision_available():
    sys.meta_path.insert(0, _StandIn("torchvision"))
if find_spec("sgl_kernel") is None:
    sys.meta_path.insert(0, _StandIn("sgl_kernel"))
