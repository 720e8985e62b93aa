"""Write the Hugging Face kernel: a build without compiled code, for every GPU of the package.

    OUT/build.toml
    OUT/build/torch-cuda/__init__.py        the functions that users of the kernel call
    OUT/build/torch-cuda/metadata.json      name, version and dependencies, read by `kernels`
    OUT/build/torch-cuda/fa4_hd256/         a copy of this package

`kernels` imports the folder as a module whose name is the metadata's id. The copy is a package
inside it, so that several builds, and the installed package, can be in one process.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from ...package_name import package_version

#: Name of the kernel on the Hub.
NAME = "fa4-hd256"
#: Version of the functions that the kernel offers: the major one, which users of the Hub select.
KERNEL_VERSION = 1
LICENSE = "BSD-3-Clause"
#: Packages that the Hub's closed list allows and this one imports, by backend.
PYTHON_DEPENDS = ["nvidia-cutlass-dsl"]

_PACKAGE = Path(__file__).resolve().parents[2]
_INIT = '''"""Attention at head_dim 256 for Blackwell and Hopper: fa4_hd256 {version}."""

from .fa4_hd256.integrations.hub.functions import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__version__ = "{version}"

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
'''
_BUILD = f"""[general]
name = "{NAME}"
version = {KERNEL_VERSION}
license = "{LICENSE}"
edition = 5
backends = ["cuda"]

[general.cuda]
python-depends = {json.dumps(PYTHON_DEPENDS)}

[torch-noarch]
"""


def write(out: Path) -> Path:
    """Write the kernel into `out` and return the folder that `kernels` imports. Raises
    FileExistsError if `out` is a folder with files of something else."""
    variant = out / "build" / "torch-cuda"
    if out.exists() and any(out.iterdir()) and not (variant / "metadata.json").exists():
        raise FileExistsError(f"{out} is not empty; accepted: a new folder or an earlier kernel")
    if variant.exists():
        shutil.rmtree(variant)
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    # Links to schedulers and softmax_emu become folders.
    shutil.copytree(_PACKAGE, variant / "fa4_hd256", symlinks=False, ignore=ignored)
    (variant / "__init__.py").write_text(_INIT.format(version=package_version()))
    metadata = {
        "id": f"fa4_hd256_{_digest(variant)}",
        "name": NAME,
        "version": KERNEL_VERSION,
        "license": LICENSE,
        "python-depends": PYTHON_DEPENDS,
        "backend": {"type": "cuda"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (out / "build.toml").write_text(_BUILD)
    return variant


def _digest(folder: Path) -> str:
    """Return 12 hexadecimal digits of the files' paths and contents: the id of a build."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
