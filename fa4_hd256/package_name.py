"""The name that this copy of the package was loaded under.

An installed package is `fa4_hd256`. A Hugging Face kernel is loaded under a name of its own, and a
project may hold a copy inside its own package. Several copies may be loaded into one process.
"""

from __future__ import annotations

import re
import sys

#: The name under which this copy is in `sys.modules`.
NAME = __name__.rpartition(".")[0]

#: Namespace of this copy's operators in `torch.ops`: each copy registers its own.
NAMESPACE = re.sub(r"\W", "_", NAME)

_INSTALLED = "fa4_hd256"


def canonical(module: str) -> str:
    """Return a module's name in an installed package; other packages' names are kept."""
    return _renamed(module, NAME, _INSTALLED)


def loaded(module: str) -> str:
    return _renamed(module, _INSTALLED, NAME)


def is_of_package(module: str) -> bool:
    return _is_inside(module, NAME)


def package_version() -> str:
    """Return the version of this copy's sources, whichever version is installed."""
    return sys.modules[NAME].__version__


def _renamed(module: str, old: str, new: str) -> str:
    return new + module[len(old) :] if _is_inside(module, old) else module


def _is_inside(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")
