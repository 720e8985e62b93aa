"""The package under another name, beside the installed one.

The Hub's `kernels` library loads the folder of a kernel as a module whose name is the kernel's id:
the folder's own name says nothing, and the package cannot import itself by the name it is given
elsewhere.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys

import pytest
from checkout import ROOT

from fa4_hd256.architectures import ARCHITECTURES
from fa4_hd256.package_name import NAME, NAMESPACE, canonical, loaded
from fa4_hd256.run import keys

#: In a process of its own: the copy in a folder, then the installed package.
#: Prints a dict of what the test compares.
BOTH = """
import base64, importlib, importlib.util, pkgutil, re, sys
import torch

COPY = "fa4_hd256-0d35a8c"
FOLDER = sys.argv[1]


class Refused:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("fa4_hd256", "schedulers", "softmax_emu"):
            raise ImportError(f"{name} is not installed")


refused = Refused()
sys.meta_path.insert(0, refused)
spec = importlib.util.spec_from_file_location(COPY, f"{FOLDER}/__init__.py")
copy = importlib.util.module_from_spec(spec)
sys.modules[COPY] = copy
spec.loader.exec_module(copy)
modules = [found.name for found in pkgutil.walk_packages(copy.__path__, f"{COPY}.")]
for name in modules:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Backends inside of engines, which are not installed here.
        if error.name.split(".")[0] not in ("vllm", "sglang"):
            raise


def inputs():
    torch.manual_seed(0)
    # Kernels that tests of the backward compile, too.
    shapes = ((140, 2), (200, 1), (200, 1))
    return [torch.randn(1, s, h, 256).bfloat16().requires_grad_() for s, h in shapes]


def ran(package):
    def layer(q, k, v):
        return package.flash_attn_func(q, k, v, causal=True)

    results = []
    for call in (layer, layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        tensors = inputs()
        out = call(*tensors)
        out.backward(torch.ones_like(out))
        results.append([out, *(t.grad for t in tensors)])
    return results


def compiled(package):
    return importlib.import_module(f"{package.__name__}.run.compile").counters["compiled"]


def named(package):
    names, keys, compile = (
        importlib.import_module(f"{package.__name__}.run.{name}")
        for name in ("kernel_names", "keys", "compile")
    )
    return {keys.cache_key(spec): names.name_of(spec) for spec, *_ in compile._memory}


def modules_in_objects(package):
    # Of the pickled signatures in host objects.
    kernels = importlib.import_module(f"{package.__name__}.run.compile")._memory.values()
    texts = [re.findall(b"[A-Za-z0-9+/]{200,}=*", kernel.host_object) for kernel in kernels]
    pickles = [base64.b64decode(found[0]) for found in texts]
    assert all(b"Signature" in one for one in pickles)
    return sorted({name for one in pickles for name in re.findall(rb"fa4_hd256[-\\w.]*", one)})


def described(package):
    score_mods = importlib.import_module(f"{package.__name__}.score_mods")
    exp2 = importlib.import_module(f"{package.__name__}.softmax_emu.exp2")

    def score_mod(score, place, tensors):
        return exp2.exp2_hardware(score)

    return score_mods.ScoreMod.of(score_mod).key


first = ran(copy)
sys.meta_path.remove(refused)
installed = importlib.import_module("fa4_hd256")
second = ran(installed)
kernels = named(installed)
again = importlib.import_module(f"{COPY}.run.kernel_names")
print({
    "modules": len(modules),
    "equal": all(map(torch.equal, sum(first, []), sum(second, []))),
    "compiled": compiled(installed),
    "kernels": len(kernels),
    "same names": named(copy) == kernels,
    "class": type(again.kernel_named(next(iter(kernels.values()))).config).__module__,
    "operators": [str(torch.ops.fa4_hd256_0d35a8c.forward), str(torch.ops.fa4_hd256.forward)],
    "modules in objects": modules_in_objects(installed),
    "same meaning": described(copy) == described(installed),
})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The package's files, links followed, in the folder of a kernel. Byte code goes with them: it
    takes seconds to make, and Python takes none that is older than its source."""
    place = tmp_path_factory.mktemp("build") / "torch-cuda"
    shutil.copytree(ROOT / "fa4_hd256", place)
    return place


@pytest.mark.sampled
def test_a_copy_runs_beside_the_installed_package(folder):
    """Modules, operators and graphs of each are its own; kernels of equal sources are shared."""
    command = [sys.executable, "-c", BOTH, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = ast.literal_eval(done.stdout.splitlines()[-1])
    assert found.pop("modules") > 200 and found.pop("kernels") >= 3
    assert found.pop("class").startswith("fa4_hd256-0d35a8c.kernels.")
    assert found == {
        "equal": True, "compiled": 0, "same names": True, "same meaning": True,
        "modules in objects": [],
        "operators": ["fa4_hd256_0d35a8c.forward", "fa4_hd256.forward"],
    }  # fmt: skip


def test_copies_of_other_sources_have_other_kernels(folder):
    row = ARCHITECTURES[0]
    assert keys.compiled_sources("forward", row, folder) == keys.compiled_sources("forward", row)
    path = folder / "kernels" / "limits.py"
    path.write_text(path.read_text().replace("TMA_ALIGNMENT = 16", "TMA_ALIGNMENT = 32"))
    assert keys.compiled_sources("forward", row, folder) != keys.compiled_sources("forward", row)


def test_names_of_modules():
    assert NAME == NAMESPACE == "fa4_hd256"
    for name in ("fa4_hd256", "fa4_hd256.run", "fa4_hd256_other.run", "torch"):
        assert canonical(name) == loaded(name) == name
