"""Options and fixtures of the whole suite.

The same tests run in the simulator (default, CPU tensors) and on a real GPU: `pytest --device
cuda`. The kernels are those of the GPU's architecture, in the simulator of `--arch`; tests that
know one architecture's kernels carry the mark `architecture("sm_100a")` and are skipped elsewhere.
Tests of what only a GPU has, such as streams and graphs, carry the mark `cuda`, or `cuda(2)` for
two GPUs.
"""

from __future__ import annotations

import os
import re

import held_memory
import isolated  # noqa: F401
import pytest
import replays
import source_lines
import torch
from checkout import ROOT
from operator_memory import forget_calls

from fa4_hd256.architectures import ARCHITECTURES, named
from fa4_hd256.gpus.family import architecture_of
from fa4_hd256.kernels.kernel_set import kernels_of

pytest_plugins = ["suite", "kernel_times", "kernel_count"]

# `isolated` does the same for the simulator.
os.environ.setdefault("FA4_HD256_CACHE_DIR", str(ROOT / ".cache" / "fa4_hd256"))

source_lines.trace_quickly()

# Other settings of the user for his own runs do not reach the tests.
for _name in (
    "FA4_HD256_ARCH", "FA4_HD256_CHECK", "FA4_HD256_CHECK_PAGES", "FA4_HD256_DS_BYTES",
    "FA4_HD256_JIT", "FA4_HD256_PREBUILT", "FA4_HD256_PROGRESS", "FA4_HD256_RESERVED_SMS",
):  # fmt: skip
    os.environ.pop(_name, None)
# Workers of pytest share the cores.
os.environ["FA4_HD256_JOBS"] = "1"

# Both schedulers are tested: the static one here, the dynamic one by tests that select it and by
# the part of `make test` that sets this variable.
os.environ.setdefault("FA_CLC", "0")


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cpu: the simulator (default); cuda: a real GPU",
    )
    parser.addoption(
        "--arch",
        default=ARCHITECTURES[0].name,
        choices=[architecture.name for architecture in ARCHITECTURES],
        help="architecture whose kernels run in the simulator",
    )


def pytest_configure(config):
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: PyTorch finds no CUDA device here")
    # CPU tensors in a session on a GPU are planned for that GPU's architecture.
    os.environ["FA4_HD256_ARCH"] = config.getoption("--arch")
    os.environ["FA4_HD256_ARCH"] = tested_architecture(config)


def pytest_collection_modifyitems(config, items):
    on_gpu, name = config.getoption("--device") == "cuda", tested_architecture(config)
    skip = pytest.mark.skip(reason="tests the simulator; not run with --device cuda")
    for item in items:
        # Workers of pytest-xdist refuse to run where each collects other names.
        if re.search(r"\bat 0x[0-9a-f]+", item.name):
            raise pytest.UsageError(
                f"{item.nodeid}: an address in the name; accepted: `ids=` that say the same in "
                "every process"
            )
        if on_gpu and item.get_closest_marker("simulator"):
            item.add_marker(skip)
        mark = item.get_closest_marker("architecture")
        if mark is not None and name not in mark.args:
            item.add_marker(pytest.mark.skip(reason=f"tests kernels of {', '.join(mark.args)}"))
        mark = item.get_closest_marker("cuda")
        if mark is not None and (missing := missing_gpus(on_gpu, *mark.args)):
            item.add_marker(pytest.mark.skip(reason=missing))


def missing_gpus(on_gpu: bool, wanted: int = 1) -> str:
    """Return why a test that needs so many GPUs cannot run; empty where it can."""
    if not on_gpu:
        return "needs a real GPU; run with --device cuda"
    count = torch.cuda.device_count()
    return f"needs {wanted} GPUs; PyTorch finds {count}" if count < wanted else ""


def tested_architecture(config) -> str:
    """Return the architecture whose kernels run: the GPU's, or in the simulator what --arch
    says."""
    return architecture_of(torch.device(config.getoption("--device"))).name


@pytest.fixture
def device(request) -> str:
    """Return the device on which attention runs in this session."""
    return request.config.getoption("--device")


@pytest.fixture
def architecture(request) -> str:
    """Return the architecture whose kernels run in this session, as FA4_HD256_ARCH names it."""
    return tested_architecture(request.config)


@pytest.fixture
def forward_config(architecture) -> type:
    """The class of the forward's configurations."""
    return kernels_of(named(architecture)).config("forward")


@pytest.fixture
def backward_config(architecture) -> type:
    """The class of the backward's configurations."""
    return kernels_of(named(architecture)).config("backward")


@pytest.fixture(params=[False, True], ids=["static", "clc"])
def use_clc(request) -> bool:
    """Both tile schedulers."""
    return request.param


@pytest.fixture
def divisions(monkeypatch) -> list:
    """Record how backwards were split, one after the other."""
    from fa4_hd256.run import backward

    found, divide = [], backward.divide

    def noted(*arguments):
        found.append(divide(*arguments))
        return found[-1]

    monkeypatch.setattr(backward, "divide", noted)
    return found


@pytest.fixture
def launched(monkeypatch):
    """Kinds of the kernels that repeated calls launch, which keep their plans as on a GPU."""
    yield replays.simulated(monkeypatch)
    replays.forget()


@pytest.fixture(autouse=True, scope="module")
def _memory_is_given_back():
    """Keep a worker small: caches above a limit go, and their memory is returned."""
    yield
    held_memory.release_above(held_memory.LIMIT, forget_calls)


@pytest.fixture(autouse=True)
def _first_calls():
    """No call has come before one of this test: what it replaces in the package is used."""
    from fa4_hd256.plans import forget_plans

    forget_plans()


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """monkeypatch, with a cache of its own for kernels that are wrong on purpose."""
    from fa4_hd256.run import compile

    monkeypatch.setenv("FA4_HD256_CACHE_DIR", str(tmp_path))
    compile.forget()
    yield monkeypatch
    compile.forget()


@pytest.fixture
def combined(monkeypatch):
    """(problem, out and lse of the splits) of each call whose keys were split."""
    from fa4_hd256.run import execute
    from fa4_hd256.run import forward as run_of_forward

    problems, seen = [], []
    add, maker = run_of_forward.add_combine, execute._maker

    def noted(builder, problem, *given):
        problems.append(problem)
        return add(builder, problem, *given)

    def noting_maker(allocation, device):
        make = maker(allocation, device)
        if allocation.name != run_of_forward.SPLITS:
            return make
        problem = problems[-1]

        def made():
            seen.append((problem, run_of_forward.split_results(problem, tensor := make())))
            return tensor

        return made

    monkeypatch.setattr(run_of_forward, "add_combine", noted)
    monkeypatch.setattr(execute, "_maker", noting_maker)
    return seen
