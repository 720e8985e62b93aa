"""Every exception of ours comes through a pool of processes: it can be pickled as it is."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fa4_hd256 import ForwardConfig
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.run.catalogue import KernelSpec

PACKAGES = ("fa4_hd256", "sm100_sim", "bench")
#: Modules that run something when they are imported.
LEFT_OUT = ("__main__",)
#: Packages without which some modules cannot be imported.
ENGINES = ("vllm", "sglang")

SPEC = KernelSpec("forward", ForwardConfig(), ProblemClass(torch.bfloat16))
#: Arguments of exceptions that take more than a text.
ARGUMENTS = {
    "MissingKernelError": (SPEC, "python -m fa4_hd256 build", None),
    "MissingExtra": ("attached()", "attach", ModuleNotFoundError("no torch", name="torch")),
}


def modules() -> Iterator[ModuleType]:
    for package in PACKAGES:
        paths = importlib.import_module(package).__path__
        for found in pkgutil.walk_packages(paths, f"{package}."):
            if not found.name.endswith(LEFT_OUT):
                try:
                    yield importlib.import_module(found.name)
                except ModuleNotFoundError as error:
                    if (error.name or "").split(".")[0] not in ENGINES:
                        raise


def exceptions() -> dict[str, type[BaseException]]:
    found = {}
    for module in modules():
        for value in vars(module).values():
            is_ours = isinstance(value, type) and value.__module__.startswith(PACKAGES)
            if is_ours and issubclass(value, BaseException):
                found[f"{value.__module__}:{value.__qualname__}"] = value
    return found


def told(error: BaseException) -> tuple:
    """Describe an exception, exceptions inside by what they say."""
    fields = {name: repr(value) for name, value in vars(error).items()}
    return type(error), str(error), repr(error.args), getattr(error, "name", None), fields


def test_all_of_them():
    found = exceptions()
    assert len(found) > 25 and {"MissingKernelError", "MissingExtra", "Hang"} <= {
        name.rpartition(":")[2] for name in found
    }
    broken = {}
    for name, kind in found.items():
        try:
            error = kind(*ARGUMENTS.get(kind.__name__, ("what went wrong",)))
            if told(pickle.loads(pickle.dumps(error))) != told(error):
                broken[name] = "comes back as another one"
        except Exception as trouble:
            broken[name] = repr(trouble)
    assert not broken


def test_an_error_of_a_launch_with_its_place():
    from sm100_sim.errors import Hang
    from sm100_sim.ptx.parser import parse_module

    module = parse_module(
        ".version 8.7\n.target sm_100a\n.address_size 64\n.visible .entry k() { ret; }\n"
    )
    (kernel,) = module.values()
    instruction = next(iter(kernel.instructions))
    error = Hang("nobody can run").at(instruction=instruction, cta=(0, 0, 0), warp=1, lane=2)
    error.findings, error.kernel = ("a race",), "k"
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.kernel == "k" and again.findings == error.findings


@pytest.mark.parametrize("extra", ["numba", "nvidia-cuda-nvdisasm"])
def test_a_command_without_an_extra_says_so_at_once(extra, monkeypatch, capsys):
    import importlib.metadata
    import importlib.util

    from bench import __main__ as command
    from bench import command_line

    def version(name, before=importlib.metadata.version):
        if name == extra:
            raise importlib.metadata.PackageNotFoundError(name)
        return before(name)

    def find_spec(name, before=importlib.util.find_spec):
        return None if name == extra else before(name)

    def import_module(name, before=importlib.import_module):
        return before(name) if name.endswith(".options") else pytest.fail(f"imports {name}")

    monkeypatch.setattr(command_line, "importlib", SimpleNamespace(
        import_module=import_module,
        metadata=SimpleNamespace(
            version=version, PackageNotFoundError=importlib.metadata.PackageNotFoundError),
        util=SimpleNamespace(find_spec=find_spec),
    ))  # fmt: skip
    monkeypatch.setattr(command, "has_driver", lambda: False)
    assert command.main(["throughput", "--jobs", "2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"error: python -m bench throughput needs {extra}; pip install -e")
    with pytest.raises(SystemExit):
        command.main(["throughput", "--jobbs", "2"])
    assert "unrecognized arguments: --jobbs" in capsys.readouterr().err
    monkeypatch.setattr(command, "has_driver", lambda: True)
    assert command_line.missing_extra(command.PROGRAM, ["throughput"]) == ""
    assert command_line.missing_extra(command.PROGRAM, ["throughput", "--modelled"])
