"""A stand-in for torchvision, which SGLang imports and no attention needs.

torchvision's wheel does not load beside PyTorch's CPU build. Names of the stand-in are empty
classes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

from transformers.utils import is_torchvision_available


class _Empty(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _NoTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "torchvision":
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
    sys.meta_path.insert(0, _NoTorchvision())
