"""Translated kernels on disk: found again, stale with what they rest on, harmless when broken."""

import ctypes
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from import_graph import import_graph
from kernel_text import kernel_text, run_kernel_text
from project import PACKAGE

from sm100_sim import LaunchConfig, launcher, settings
from sm100_sim.jit import cache as translation_cache
from sm100_sim.jit import native_cache
from sm100_sim.launcher import Options, run_host_code
from sm100_sim.translate import kernel as translation

BODY = """
mov.u32 %r0, %tid.x;
setp.lt.u32 %p0, %r0, 7;
mul.lo.u32 %r1, %r0, 3;
@%p0 add.u32 %r1, %r1, 100;
mul.wide.u32 %rd0, %r0, 4;
add.s64 %rd0, %rd0, %rd8;
st.global.b32 [%rd0], %r1;
"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    translation._runtime()  # has an entry of its own
    monkeypatch.setenv("SM100_SIM_CACHE_DIR", str(tmp_path))
    return tmp_path


def run():
    """Result and counts of the kernel, translated again as in a second process."""
    launcher.forget_kernels()
    out = np.zeros(32, np.uint32)
    report = run_kernel_text(BODY, [out])
    return out.tolist(), report.opcodes


def entries(directory):
    return sorted(path.name for path in directory.glob("*.o"))


def test_a_second_translation_compiles_nothing(directory, monkeypatch):
    first = run()
    assert first[0] == [3 * i + 100 * (i < 7) for i in range(32)]
    kept = entries(directory)
    assert len(kept) == 1

    def refuse(*_):
        raise AssertionError("compiled although the entry is there")

    monkeypatch.setattr(translation, "compile_module", refuse)
    assert run() == first
    assert entries(directory) == kept


def test_damaged_entries_are_replaced(directory):
    first = run()
    path = next(directory.glob("*.o"))
    path.write_bytes(b"\xff" * 20)
    assert run() == first
    assert path.stat().st_size > 100


def test_names_depend_on_everything(monkeypatch):
    ptx = kernel_text(BODY, 1)
    names = {translation_cache.entry_name(ptx, part) for part in ("avx2", "avx512f", True, False)}
    monkeypatch.setattr(translation_cache, "_source_digest", lambda: b"other sources")
    names.add(translation_cache.entry_name(ptx, "avx2"))
    assert len(names) == 5


def test_off_and_unwritable(directory, monkeypatch, tmp_path):
    monkeypatch.setenv("SM100_SIM_CACHE_DIR", "off")
    first = run()
    assert entries(directory) == []
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("SM100_SIM_CACHE_DIR", str(file))
    monkeypatch.setattr(native_cache, "_warned", set())
    with pytest.warns(RuntimeWarning, match="translated kernels cannot be kept.*Set SM100_SIM_CA"):
        assert run() == first


def test_a_directory_of_a_group_is_refused(directory, monkeypatch):
    first = run()
    directory.chmod(0o770)
    monkeypatch.setattr(native_cache, "_warned", set())
    monkeypatch.setattr(translation, "link", None)
    with pytest.warns(RuntimeWarning, match="its group may write it.*Set SM100_SIM_CACHE_DIR to"):
        assert run() == first


def test_an_entry_whose_time_cannot_be_set_is_used(directory, monkeypatch):
    """A directory that can only be read gives such an entry."""

    def refuse(*_):
        raise PermissionError

    first = run()
    monkeypatch.setattr(translation_cache.os, "utime", refuse)
    monkeypatch.setattr(translation, "compile_module", refuse)
    assert run() == first


def store(i):
    translation_cache.obtain(f"{i}.o", lambda: ({}, bytes(100)))


def test_entries_used_least_recently_go(directory, monkeypatch):
    for i in range(4):
        store(i)
        os.utime(directory / f"{i}.o", (i, i))
    store(0)  # used now
    size = (directory / "0.o").stat().st_size
    monkeypatch.setattr(translation_cache, "CACHE_LIMIT", 3 * size)
    store(4)
    assert entries(directory) == ["0.o", "3.o", "4.o"]


@pytest.mark.parametrize(
    ("options", "variants"),
    [
        ([{}], 1),
        ([{"sanitize": True}], 1),
        ([{"trace": True}], 1),
        ([{"sanitize": True}, {"seed": 3}, {"sanitize": "strict"}, {}], 2),
    ],
)
def test_a_launch_translates_what_it_runs_and_nothing_else(
    directory, monkeypatch, options, variants
):
    """The module is parsed once; plain and logged code are translated when one is first run."""
    calls = []

    def count(name):
        called = getattr(launcher, name)

        def counted(*args, **keywords):
            calls.append(name)
            return called(*args, **keywords)

        monkeypatch.setattr(launcher, name, counted)

    count("parse_module")
    count("translate")
    launcher.forget_kernels()
    out = np.zeros(32, np.uint32)
    pointer = ctypes.c_uint64(out.__array_interface__["data"][0])
    config = LaunchConfig(
        "test",
        (1, 1, 1),
        (32, 1, 1),
        (1, 1, 1),
        0,
        (ctypes.addressof(pointer),),
        ptx=kernel_text(BODY, 1),
    )
    ranges = [(pointer.value, pointer.value + out.nbytes, "out")]
    for choice in options:
        out[:] = 0
        run_host_code(lambda on_launch: on_launch(config), ranges, Options(**choice))
        assert out.tolist() == [3 * i + 100 * (i < 7) for i in range(32)]
    assert calls == ["parse_module", *["translate"] * variants]


def test_a_process_keeps_the_kernels_used_last():
    """A process that runs a thousand kernels, as a test worker does, does not hold them all."""

    def keep(*numbers):
        return [launcher.parsed_kernel(kernel_text(f"{BODY}// {n}\n", 1), "test") for n in numbers]

    launcher.forget_kernels()
    (first,) = keep(0)
    keep(*range(1, launcher.KEPT_KERNELS))
    assert keep(0)[0] is first
    keep(*range(1, launcher.KEPT_KERNELS + 1))
    assert keep(0)[0] is not first
    launcher.forget_kernels()


def test_the_directory(monkeypatch):
    """A user id may have no account, as containers run with."""

    def directory(**environment):
        return settings.read_settings(environment).cache_directory

    assert directory(SM100_SIM_CACHE_DIR="/x", XDG_CACHE_HOME="/y") == "/x"
    assert directory(XDG_CACHE_HOME="/y") == "/y/sm100_sim"
    monkeypatch.setattr(settings.os.path, "expanduser", lambda path: path.replace("~", "/base"))
    assert directory() == "/base/.cache/sm100_sim"
    monkeypatch.setattr(settings.os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(settings.tempfile, "gettempdir", lambda: "/scratch")
    monkeypatch.setattr(settings.os, "geteuid", lambda: 77)
    assert directory() == "/scratch/sm100_sim-77"


# ---------------------------------------------------------------- the sources behind an entry


@pytest.fixture
def copy(tmp_path):
    """A copy of the package's sources: an edit of a file, and the digest of what they mean."""
    package = tmp_path / "sm100_sim"
    original = Path(translation_cache.__file__).parents[1]
    shutil.copytree(original, package, ignore=shutil.ignore_patterns("__pycache__", "data"))

    def edit(name, before, after):
        path = package / name
        text = path.read_text()
        assert text.count(before) >= 1, f"{name} has no {before!r}"
        path.write_text(text.replace(before, after, 1))

    def digest():
        return native_cache.meaning_of(translation_cache.translating_sources(package))

    assert digest() == native_cache.meaning_of(translation_cache.translating_sources())
    return edit, digest


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("translate/blocks.py", '"""', '"""Another first line.\n\n'),
        ("translate/blocks.py", "\nfrom", "\n# A comment, and a line more.\n\nfrom"),
        ("ptx/parser.py", "hardware keeps the first KiB", "hardware keeps the very first KiB"),
        ("launcher.py", "STATE_LIMIT = 1 << 30", "STATE_LIMIT = 1 << 31"),
        ("tools/golden/cases.py", 'KERNEL = "golden"', 'KERNEL = "silver"'),
        ("timing/prediction.py", "RESOLUTION = 0.05", "RESOLUTION = 0.06"),
        ("attach/driver.py", "CUDA_VERSION = 13000", "CUDA_VERSION = 13010"),
        ("sanitizer/findings.py", '"race"', '"data race"'),
    ],
)
@pytest.mark.sampled('translate/blocks.py-"*')
def test_edits_that_leave_the_entries(copy, name, before, after):
    """Docstrings, comments, lines; whatever has no part in translation."""
    edit, digest = copy
    first = digest()
    edit(name, before, after)
    assert digest() == first


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("ptx/parser.py", "RESERVED_SHARED_BYTES = 1024", "RESERVED_SHARED_BYTES = 2048"),
        ("translate/kernel.py", "level: int = 0", "level: int = 1"),
        ("isa/arithmetic/integer.py", '"add"', '"plus"'),
        ("state/warp.py", "ALL_LANES", "EVERY_LANE"),
    ],
)
@pytest.mark.sampled("isa/*")
def test_edits_that_do_not(copy, name, before, after):
    edit, digest = copy
    first = digest()
    edit(name, before, after)
    assert digest() != first


#: Modules that the folders of `TRANSLATING` import besides: no code of a kernel comes from there.
BESIDES = {
    "sm100_sim", "sm100_sim/causes", "sm100_sim/devices", "sm100_sim/errors", "sm100_sim/settings",
    "sm100_sim/targets",
}  # fmt: skip


def test_translation_imports_nothing_else():
    """A module that takes part in translation and lies elsewhere would leave stale entries."""
    sources = PACKAGE.parent
    files = {path.relative_to(sources).as_posix(): path for path in sources.rglob("*.py")}
    graph = import_graph(files)
    parts = tuple(f"sm100_sim/{folder}" for folder in translation_cache.TRANSLATING)
    seen = {module for module in graph if f"{module}/".startswith(tuple(f"{p}/" for p in parts))}
    assert len(seen) > 50
    besides = set().union(*(graph[module] for module in seen)) - seen
    assert besides <= BESIDES
    assert set().union(*(graph[module] for module in besides - {"sm100_sim"})) <= BESIDES | seen


def test_what_sources_mean_is_kept(directory):
    """The meaning is found again by the bytes of the sources, and another docstring has the same
    meaning."""
    cache = translation_cache.disk_cache()
    sources = [("a.py", b'"""One."""\nx = 1\n')]
    first = cache.meaning(sources)
    (entry,) = directory.glob("*.sources")
    assert cache.read(entry.name) == ({"meaning": first}, [])
    assert cache.meaning(sources) == first
    other = [("a.py", b'"""Two."""\n\n# A remark.\nx = 1\n')]
    assert cache.meaning(other) == first and len(list(directory.glob("*.sources"))) == 2
    assert cache.meaning([("a.py", b"x = 2\n")]) != first
    assert cache.meaning([("b.py", sources[0][1])]) != first
