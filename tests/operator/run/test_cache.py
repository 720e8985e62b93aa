"""Compiled kernels are kept: in memory, on disk, and for other processes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import style
import torch
from checkout import ROOT

from fa4_hd256 import ForwardConfig
from fa4_hd256.architectures import ARCHITECTURES, named
from fa4_hd256.gpus import family
from fa4_hd256.kernels.blackwell.backward.config import (
    BackwardConfig,
    BackwardWarpPlan,
    DkdvPlan,
    DqPlan,
    ProductsPlan,
)
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.run import compile, keys, native_cache
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.softmax_emu.pattern import Ex2Pattern

pytestmark = pytest.mark.architecture("sm_100a")

CLASS = ProblemClass(torch.bfloat16)
SPEC = KernelSpec("forward", ForwardConfig(), CLASS)

OTHER_PROCESS = """
import torch
from fa4_hd256 import ForwardConfig
from fa4_hd256.run import compile
from fa4_hd256.kernels.blackwell.backward.config import (
    BackwardConfig,
    BackwardWarpPlan,
    DkdvPlan,
    DqPlan,
    ProductsPlan,
)
from fa4_hd256.kernels.problem_class import ProblemClass
from fa4_hd256.run.catalogue import KINDS, KernelSpec
def refuse(*_):
    raise AssertionError("compiled again")
compile.trace_and_compile = refuse
found = compile.compile_kernel(KernelSpec("forward", ForwardConfig(), ProblemClass(torch.bfloat16)))
print(found.key, found.from_disk, len(found.ptx), callable(found.function))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, with one compiled kernel put into it from the suite's own."""
    kept = compile.compile_kernel(SPEC)
    monkeypatch.setenv("FA4_HD256_CACHE_DIR", str(tmp_path))
    parts = [kept.host_object, kept.ptx.encode(), kept.cubin]
    header = {name: getattr(kept, name) for name in ("function_name", "object_prefix")}
    keys.disk_cache().write(f"{kept.key}.kernel", header, parts)
    compile.forget()
    compile.counters.clear()
    yield tmp_path
    compile.forget()


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(compile, "trace_and_compile", refuse)


@pytest.mark.usefixtures("cache", "no_compiler")
def test_memory_after_disk():
    first = compile.compile_kernel(SPEC)
    assert compile.compile_kernel(SPEC) is first
    assert first.from_disk
    assert compile.counters == {"disk": 1, "memory": 1}


@pytest.mark.usefixtures("cache")
def test_targets_are_kept_apart_in_memory(stand_in):
    """A process may compile for other GPUs than its own, as the bench does for modelled ones."""
    with family.as_if_seen((10, 3)):
        there = compile.compile_kernel(SPEC)
    here = compile.compile_kernel(SPEC)
    assert stand_in == [SPEC] and here.ptx != there.ptx == "// again"
    with family.as_if_seen((10, 3)):
        assert compile.compile_kernel(SPEC) is there
        with family.as_if_seen((10, 0), (10, 3)):
            assert compile.compile_kernel(SPEC) is here


def test_another_process_does_not_compile(cache):
    environment = {**os.environ, "FA4_HD256_CACHE_DIR": str(cache)}
    result = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    found = compile.compile_kernel(SPEC)
    assert result.stdout.split() == [found.key, "True", str(len(found.ptx)), "True"]


@pytest.mark.usefixtures("cache")
def test_a_restored_kernel_is_what_was_compiled():
    found = compile.compile_kernel(SPEC)
    assert ".target sm_100f" in found.ptx and "tcgen05.mma" in found.ptx
    assert found.cubin.startswith(b"\x7fELF")
    assert list(found.execution_args.signature.parameters)[:4] == ["q", "k", "v", "results"]
    assert found.dump_to_object(found.object_prefix).startswith(b"\x7fELF")
    with pytest.raises(ValueError, match="symbols start with"):
        found.dump_to_object("other")


@pytest.mark.usefixtures("no_compiler")
def test_the_directory_may_go_once_a_kernel_is_loaded(cache):
    """The checked bytes run, wherever the files went meanwhile."""
    found = compile.compile_kernel(SPEC)
    shutil.rmtree(cache)
    assert callable(found.function)
    assert found.dump_to_object(found.object_prefix) == found.host_object


@pytest.fixture
def stand_in(monkeypatch, cache):
    """Let the compiler return the cached kernel with another PTX; count its calls."""
    kept = compile.compile_kernel(SPEC)
    compile.forget()
    compiled = []

    def function(spec):
        compiled.append(spec)
        artifacts = SimpleNamespace(PTX="// again", CUBIN=kept.cubin)
        return SimpleNamespace(
            artifacts=artifacts,
            dump_to_object=lambda prefix: kept.host_object,
            function_name=kept.function_name,
        )

    monkeypatch.setattr(compile, "trace_and_compile", function)
    return compiled


def test_a_damaged_entry_is_compiled_again(cache, stand_in):
    entry = cache / f"{keys.cache_key(SPEC)}.kernel"
    entry.write_bytes(entry.read_bytes()[:-100])
    for _ in range(2):
        found = compile.compile_kernel(SPEC)
        assert found.ptx == "// again" and callable(found.function)
        compile.forget()
    assert len(stand_in) == 1 and found.from_disk


@pytest.mark.parametrize("state", ["not writable", "of a group"])
def test_a_directory_that_cannot_be_used(tmp_path, monkeypatch, stand_in, state):
    """The kernel is there all the same, compiled once in this process; one warning says why."""
    if state == "of a group":
        directory = tmp_path / "group"
        directory.mkdir()
        directory.chmod(0o770)
        message = "its group may write it.*Set FA4_HD256_CACHE_DIR to a directory of your own"
    else:
        directory = tmp_path / "file"
        directory.write_text("")
        message = "compiled kernels cannot be kept.*Set FA4_HD256_CACHE_DIR to a directory that"
    monkeypatch.setenv("FA4_HD256_CACHE_DIR", str(directory))
    monkeypatch.setattr(native_cache, "_warned", set())
    with pytest.warns(RuntimeWarning, match=message) as warned:
        found = compile.compile_kernel(SPEC)
    assert len(warned) == 1 and callable(found.function)
    assert compile.compile_kernel(SPEC) is found
    assert len(stand_in) == 1 and not found.from_disk


@pytest.mark.parametrize("full", [(), ("tmp",), ("tmp", "shm")], ids=str)
def test_a_full_temporary_directory(tmp_path, monkeypatch, full):
    """LLVM would end the process; memory serves, and where that is full, too, an error says so."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setattr(
        compile.shutil,
        "disk_usage",
        lambda place: SimpleNamespace(free=4096 if Path(place).name in full else 1 << 30),
    )
    if "shm" in full:
        with pytest.raises(RuntimeError, match="a kernel takes 16 MiB of disk.*set TMPDIR"):
            with compile.room_for_files():
                pass
    else:
        with compile.room_for_files():
            assert tempfile.gettempdir() == ("/dev/shm" if full else str(directory))
    assert tempfile.gettempdir() == str(directory)


def test_what_the_key_covers(monkeypatch):
    def key(config=None, problem_class=CLASS, kind="forward"):
        return keys.cache_key(KernelSpec(kind, config or ForwardConfig(), problem_class))

    first = key()
    others = {
        key(ForwardConfig(rescale_threshold=0.0)),
        key(ForwardConfig(ex2_pattern=Ex2Pattern(4, 3))),
        key(problem_class=ProblemClass(torch.float16)),
        key(problem_class=ProblemClass(torch.bfloat16, bounded_left=True)),
        key(problem_class=ProblemClass(torch.bfloat16, bounded_right=True)),
        key(problem_class=ProblemClass(torch.bfloat16, negative_scale=True)),
        key(problem_class=ProblemClass(torch.bfloat16, softcap=True)),
        key(problem_class=ProblemClass(torch.bfloat16, sink=True)),
        key(problem_class=ProblemClass(torch.bfloat16, ragged=("seqused_k",))),
        key(problem_class=ProblemClass(torch.bfloat16, use_clc=True)),
        key(problem_class=ProblemClass(torch.bfloat16, packed_heads=2)),
        key(problem_class=ProblemClass(torch.bfloat16, split=True)),
        key(problem_class=ProblemClass(torch.bfloat16, page_size=16)),
        key(kind="backward_preprocess"),
        key(kind="forward_combine"),
    }
    monkeypatch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
    others.add(key())
    monkeypatch.delenv("CUTE_DSL_ENABLE_ASSERTIONS")
    with monkeypatch.context() as patch:
        patch.setattr(keys, "_source_digest", lambda *asked: "another source")
        others.add(key())
    monkeypatch.setattr(keys, "cpu_features", lambda: ["avx2"])
    others.add(key())
    others.add(keys.cache_key(replace(SPEC, architecture=named("sm_90a"))))
    assert len(others) == 19 and first not in others


def test_features_of_the_cpu():
    """Code for one CPU is not loaded on another that shares the directory."""
    found = keys.cpu_features()
    if platform.machine() == "x86_64" and sys.platform == "linux":
        assert {"sse2", "fxsr"} <= set(found)


def test_what_the_key_does_not_cover(monkeypatch):
    first = keys.cache_key(SPEC)
    monkeypatch.setenv("CUTE_DSL_KEEP", "ptx")
    assert keys.cache_key(SPEC) == first


@pytest.mark.parametrize("kind", ["backward_dkdv", "backward_dq", "backward_products"])
def test_what_of_the_backward_is_compiled_in(kind):
    """Neither the memory for dS, which the host minds, nor the plans of the other kernels."""
    default = BackwardConfig().of_kernel(kind)
    assert BackwardConfig(ds_bytes=0).of_kernel(kind) == default
    fewer = BackwardWarpPlan(registers_other=BackwardWarpPlan().registers_other - 8)
    changed = {
        "backward_dkdv": BackwardConfig(dkdv=DkdvPlan(ring_stages=3)),
        "backward_dq": BackwardConfig(dq=DqPlan(warps=fewer)),
        "backward_products": BackwardConfig(products=ProductsPlan(stages=2)),
    }
    assert {name for name, config in changed.items() if config.of_kernel(kind) != default} == {kind}


def test_an_unknown_kind_of_kernel():
    with pytest.raises(ValueError, match="kind is 'sideways'; accepted: .*forward"):
        KernelSpec("sideways", ForwardConfig(), CLASS)


@pytest.fixture
def copy(tmp_path):
    """A copy of the sources: an edit of a file, and the digest of what is compiled in."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fa4_hd256", tmp_path / "fa4_hd256", ignore=ignored)

    def edit(name, before, after):
        path = tmp_path / name
        text = path.read_text()
        assert before in text, f"{name} has no {before!r}"
        path.write_text(text.replace(before, after, 1))

    def digest(direction="forward", architecture=ARCHITECTURES[0]):
        sources = keys.compiled_sources(direction, architecture, tmp_path / "fa4_hd256")
        return native_cache.meaning_of(sources)

    for direction in keys.OTHER:
        for architecture in ARCHITECTURES:
            here = keys.compiled_sources(direction, architecture)
            copied = keys.compiled_sources(direction, architecture, tmp_path / "fa4_hd256")
            assert copied == here
    return edit, digest


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("fa4_hd256/kernels/mask/masking.py", '"""', '"""Another first line.\n\n'),
        ("fa4_hd256/kernels/mask/masking.py", "\nfrom", "\n# A comment, and a line more.\n\nfrom"),
        ("fa4_hd256/kernels/blackwell/forward/kernel.py", "    def ", "\n    def "),
        ("fa4_hd256/softmax_emu/fit.py", "\ndef ", "\nOTHER = 1\n\n\ndef "),
        ("fa4_hd256/softmax_emu/reference_twin.py", "\ndef ", "\nOTHER = 1\n\n\ndef "),
        ("fa4_hd256/interface.py", "\ndef ", "\nOTHER = 1\n\n\ndef "),
        ("fa4_hd256/check/demo.py", "\ndef ", "\nOTHER = 1\n\n\ndef "),
        ("fa4_hd256/run/launch.py", "PROGRESS_AFTER = 3.0", "PROGRESS_AFTER = 4.0"),
    ],
)
@pytest.mark.sampled("*demo.py-*")
def test_edits_that_compile_nothing_again(copy, name, before, after):
    """Docstrings, comments, lines; whatever is not compiled in."""
    edit, digest = copy
    first = digest()
    edit(name, before, after)
    assert digest() == first


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("fa4_hd256/kernels/limits.py", "TMA_ALIGNMENT = 16", "TMA_ALIGNMENT = 32"),
        ("fa4_hd256/kernels/blackwell/forward/output.py", "cute.arch", "cute.another"),
        ("fa4_hd256/run/argument_types.py", "range(3)", "range(4)"),
        ("fa4_hd256/schedulers/coordinates.py", "divmod(first + in", "divmod(first - in"),
        ("fa4_hd256/softmax_emu/pattern.py", "0x1.54f8d6p-1", "0x1.54f8d8p-1"),
    ],
)
@pytest.mark.sampled("*output.py-*")
def test_edits_that_do(copy, name, before, after):
    edit, digest = copy
    first = digest()
    edit(name, before, after)
    assert digest() != first


@pytest.mark.parametrize(
    ("name", "before", "after", "directions"),
    [
        (
            "fa4_hd256/kernels/blackwell/backward/dq.py",
            "cute.arch",
            "cute.another",
            ["backward", "tail"],
        ),
        ("fa4_hd256/kernels/small/forward_combine.py", "cute.arch", "cute.another", ["forward"]),
        ("fa4_hd256/kernels/small/append_rows.py", "cute.arch", "cute.another", ["append"]),
        (
            "fa4_hd256/kernels/mask/masking.py",
            "cutlass.",
            "another.",
            ["append", "backward", "forward", "tail"],
        ),
        ("fa4_hd256/kernels/small/tail_rows.py", "cute.arch", "cute.another", ["tail"]),
    ],
)
@pytest.mark.sampled("*dq.py-*")
def test_edits_that_one_direction_minds(copy, name, before, after, directions):
    edit, digest = copy
    first = {direction: digest(direction) for direction in keys.OTHER}
    edit(name, before, after)
    assert sorted(d for d in keys.OTHER if digest(d) != first[d]) == directions


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
@pytest.mark.sampled
def test_edits_that_other_architectures_do_not_mind(copy, architecture):
    edit, digest = copy
    name = f"fa4_hd256/kernels/{architecture.folder}/architecture.py"
    first = {other: digest("forward", other) for other in ARCHITECTURES}
    edit(name, "KERNELS = ", "OTHERS = ")
    assert [a for a in ARCHITECTURES if digest("forward", a) != first[a]] == [architecture]


#: Modules that the sources in `COMPILED_IN` import besides, and why the key need not cover it.
BESIDES = {
    # For host code, which is not compiled; see `TYPES`.
    "fa4_hd256/call", "fa4_hd256/gpus", "fa4_hd256",
    # Settings of the compiler are in the key.
    "fa4_hd256/environment",
    # Names and targets of architectures: the target is in the key.
    "fa4_hd256/architectures",
    # Storage of entries; FORMAT is in the key.
    "fa4_hd256/run", "fa4_hd256/run/native_cache",
    # Names alone.
    "softmax_emu",
    # Texts of errors.
    "fa4_hd256/words",
}  # fmt: skip
#: Imports of `call` and `gpus`: types of calls, and the target, which is in the key.
TYPES = {"BackwardProblem", "Gpu", "Problem", "family"}


#: Modules that name every kernel, of either direction; what they say of one is in its own modules.
OF_BOTH = {
    "fa4_hd256/kernels/kernel_set",
    "fa4_hd256/run/argument_types",
    "fa4_hd256/run/building",
    "fa4_hd256/run/catalogue",
    "fa4_hd256/run/tracing",
    "fa4_hd256/kernels/blackwell/architecture",
    "fa4_hd256/kernels/hopper/architecture",
}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
@pytest.mark.parametrize("direction", keys.OTHER)
@pytest.mark.sampled("forward-*", "backward-*", "append-sm_100a", "tail-sm_90a")
def test_what_is_compiled_in_imports_nothing_else(direction, architecture):
    """A module that is compiled in and not among the sources would leave stale kernels."""
    graph = style.import_graph(ROOT)
    sources = dict(keys.compiled_sources(direction, architecture))
    names = (name.removesuffix(".py").removesuffix("/__init__") for name in sources)
    modules = {style.at_the_top(f"fa4_hd256/{name}") for name in names}
    others = {
        f"fa4_hd256/kernels/{a.folder}/architecture" for a in ARCHITECTURES if a is not architecture
    }
    assert len(modules) > 20 and OF_BOTH - others < modules <= graph.keys()
    besides = set().union(*(graph[module] for module in modules - OF_BOTH)) - modules
    hosts = ("fa4_hd256/call/", "fa4_hd256/gpus/")
    assert {name for name in besides if not name.startswith(hosts)} <= BESIDES
    imported = re.findall(rb"^from \.+(?:call|gpus)[\w.]* import (.*)$",
                          b"\n".join(sources.values()), re.M)  # fmt: skip
    assert imported and {name for names in imported for name in names.decode().split(", ")} <= TYPES
