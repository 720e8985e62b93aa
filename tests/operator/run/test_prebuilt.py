"""Kernels built ahead of time: they run without a compiler, and what does not fit is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from checkout import ROOT

from fa4_hd256 import __version__, flash_attn_func, use_prebuilt
from fa4_hd256.__main__ import main
from fa4_hd256.run import compile, keys
from fa4_hd256.run.ahead import build as builder
from fa4_hd256.run.ahead import prebuilt
from fa4_hd256.run.ahead.build import TARGETS, build
from fa4_hd256.run.catalogue import KernelSpec
from fa4_hd256.run.kernel_names import kernel_named, name_of

pytestmark = [pytest.mark.simulator, pytest.mark.architecture("sm_100a")]

#: A process in which nothing can be compiled: MLIR's passes, and what traces a function, are gone.
#: argv: the inputs, then where results go.
WITHOUT_COMPILER = """
import sys, types
import torch

class Refused:
    def __init__(self, *_, **__):
        raise AssertionError("a pass manager was made")
    parse = __init__

passes = types.ModuleType("cutlass._mlir.passmanager")
passes.PassManager = Refused
sys.modules["cutlass._mlir.passmanager"] = passes
import cutlass.base_dsl.compiler as compiler
from cutlass.cutlass_dsl import CuTeDSL

def refuse(*_, **__):
    raise AssertionError("the compiler was called")

for place, names in (
    (compiler.Compiler, ("compile", "jit", "compile_and_jit")),
    (compiler.CompileCallable, ("__call__", "_compile")),
    (CuTeDSL, ("_func", "generate_original_ir", "compile_and_cache", "generate_mlir")),
):
    for name in names:
        if hasattr(place, name):
            setattr(place, name, refuse)
import cutlass.cute as cute
try:
    @cute.jit
    def traced():
        pass
    cute.compile(traced)
except AssertionError:
    pass
else:
    raise SystemExit("the compiler still works: this test proves nothing")
import fa4_hd256
q = torch.load(sys.argv[1])
out, lse = fa4_hd256.flash_attn_func(q, q, q, return_lse=True)
from fa4_hd256.run.compile import counters
assert dict(counters) == {"prebuilt": 1}, counters
torch.save((out, lse), sys.argv[2])
"""


@pytest.fixture(autouse=True)
def _as_before():
    """Undo what a test chose."""
    compile.forget()
    yield
    use_prebuilt(None)
    prebuilt.forget()
    compile.forget()


@pytest.fixture(scope="module")
def inputs():
    torch.manual_seed(7)
    return torch.randn(1, 70, 1, 256).bfloat16()


def attend(q):
    return flash_attn_func(q, q, q, return_lse=True)


@pytest.fixture(scope="module")
def spec(inputs):
    """The kernel of a call."""
    found = []
    own = compile._obtain

    def note(spec):
        found.append(spec)
        return own(spec)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile, "_obtain", note)
        compile.forget()
        attend(inputs)
    return found[0]


@pytest.fixture(scope="module")
def built(spec, tmp_path_factory):
    """A directory with that kernel alone, and the kernel for B300, too."""
    directory = tmp_path_factory.mktemp("built") / "kernels"
    build({"sm_100a": [spec]}, directory)
    return directory


@pytest.fixture
def copied(built, tmp_path):
    """One to break."""
    return shutil.copytree(built, tmp_path / "kernels")


@pytest.fixture
def no_jit(monkeypatch, tmp_path):
    """Nothing may be compiled, and nothing was before."""
    monkeypatch.setenv("FA4_HD256_JIT", "0")
    monkeypatch.setenv("FA4_HD256_CACHE_DIR", str(tmp_path / "empty"))


def edited(directory, **changes):
    """A manifest with other contents, well-formed."""
    cache = prebuilt.storage(directory)
    manifest, parts = cache.read(prebuilt.MANIFEST)
    cache.write(prebuilt.MANIFEST, manifest | changes, parts)


def test_a_call_without_a_compiler(built, inputs, tmp_path):
    """A directory that can only be read gives, bit for bit, what was compiled here."""
    expected = attend(inputs)
    torch.save(inputs, tmp_path / "q.pt")
    os.chmod(built, 0o555)
    environment = {
        **os.environ, "FA4_HD256_PREBUILT": str(built), "FA4_HD256_JIT": "0",
        "FA4_HD256_CACHE_DIR": str(tmp_path / "none"), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-c", WITHOUT_COMPILER, tmp_path / "q.pt", tmp_path / "out.pt"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    os.chmod(built, 0o755)
    assert done.returncode == 0, done.stderr
    for own, other in zip(expected, torch.load(tmp_path / "out.pt"), strict=True):
        assert torch.equal(own, other)
    assert not (tmp_path / "none").exists(), "nothing is written where nothing is compiled"


@pytest.mark.usefixtures("no_jit")
def test_a_missing_kernel_is_named_and_its_command_builds_it(copied, inputs, monkeypatch, capsys):
    use_prebuilt(copied)
    q = inputs.half()
    with pytest.raises(compile.MissingKernelError) as caught:
        attend(q)
    text = str(caught.value)
    assert "forward for sm_100a (dtype float16" in text and str(copied) in text
    words = shlex.split(next(line for line in text.splitlines() if line.startswith("python -m")))
    assert words[:3] == ["python", "-m", "fa4_hd256"] and caught.value.command in text
    monkeypatch.setenv("FA4_HD256_JIT", "1")
    monkeypatch.setenv("FA4_HD256_CACHE_DIR", str(ROOT / ".cache" / "fa4_hd256"))
    assert main(words[3:]) == 0
    assert "1 kernels built, 2 in" in capsys.readouterr().out
    monkeypatch.setenv("FA4_HD256_JIT", "0")
    # One process finds it, too.
    before = compile.counters["prebuilt"]
    attend(q)
    attend(inputs)
    assert compile.counters["prebuilt"] == before + 2


@pytest.mark.usefixtures("no_jit")
def test_no_jit_without_a_directory(inputs):
    with pytest.raises(compile.MissingKernelError, match="no prebuilt directory is in") as caught:
        attend(inputs)
    assert "--out DIR\n" in str(caught.value) and "FA4_HD256_JIT=1" in str(caught.value)


def test_what_is_missing_is_compiled_where_that_is_allowed(built, inputs):
    use_prebuilt(built, jit=True)
    with pytest.warns(RuntimeWarning, match="lacks a kernel that a call needs.*build --kernel"):
        attend(inputs.half())


@pytest.mark.usefixtures("no_jit")
def test_the_switch_of_the_call_wins(built, inputs, monkeypatch):
    monkeypatch.setenv("FA4_HD256_JIT", "1")
    use_prebuilt(built, jit=False)
    with pytest.raises(compile.MissingKernelError):
        attend(inputs.half())


def test_a_wrong_switch(monkeypatch, inputs):
    monkeypatch.setenv("FA4_HD256_JIT", "no")
    monkeypatch.setattr(compile, "cache_key", lambda spec: "0" * 32)
    with pytest.raises(ValueError, match="FA4_HD256_JIT is 'no'; accepted: 0 or 1"):
        attend(inputs)


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fa4-hd256": "0.0.9"}, "built with fa4-hd256 0.0.9, but fa4-hd256 is 0.1"),
        ({"nvidia-cutlass-dsl": "4.7.0"}, "built with nvidia-cutlass-dsl 4.7.0, but"),
        ({"machine": "aarch64"}, "built with machine aarch64, but machine is"),
        ({"format": 0}, "built with format 0"),
        ({"sources": {"forward sm_100a": "0"}}, r"from other sources of fa4-hd256 \(forward sm_1"),
        ({"sources": {"forward sm_800": "0"}}, "from other sources"),
        ({"cpu": ["sse2", "avx9001"]}, "on a CPU that has avx9001, which this one lacks"),
    ],
)
def test_a_directory_of_another_version(copied, changes, message):
    edited(copied, **changes)
    with pytest.raises(ValueError, match=message):
        use_prebuilt(copied)


def test_the_environment_is_checked_the_same_way(copied, inputs, monkeypatch):
    edited(copied, **{"fa4-hd256": "0.0.9"})
    monkeypatch.setenv("FA4_HD256_PREBUILT", str(copied))
    with pytest.raises(ValueError, match=r"0\.0\.9.*build them again: python -m fa4_hd256 build"):
        attend(inputs)


def test_another_architecture(built, inputs, monkeypatch):
    """The directory has none for it: an error even where compiling is allowed."""
    use_prebuilt(built, jit=True)
    monkeypatch.setenv("FA4_HD256_ARCH", "sm_90a")
    message = "compiled for sm_100f, but this process needs some for sm_90a; add.*--arch sm_90a"
    with pytest.raises(ValueError, match=message):
        attend(inputs)


def test_keys_tell_targets_sources_and_compilers_apart(spec, monkeypatch):
    first = keys.prebuilt_key(spec)
    found = {first}
    for name in ("sm_103a", "sm_90a"):
        target = TARGETS[name]
        with compile.family.as_if_seen(target.capability):
            found.add(keys.prebuilt_key(
                KernelSpec(spec.kind, spec.config, spec.problem_class, target.architecture)
            ))  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(keys, "content_digest", lambda *asked: "others")
        found.add(keys.prebuilt_key(spec))
    with monkeypatch.context() as patch:
        patch.setattr(keys.importlib.metadata, "version", lambda name: "4.9.0")
        found.add(keys.prebuilt_key(spec))
    with monkeypatch.context() as patch:
        patch.setattr(keys.platform, "machine", lambda: "aarch64")
        found.add(keys.prebuilt_key(spec))
    monkeypatch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
    found.add(keys.prebuilt_key(spec))
    assert len(found) == 7
    monkeypatch.delenv("CUTE_DSL_ENABLE_ASSERTIONS")
    # Neither the exact CPU nor Python: the machine that builds is not the one that runs.
    monkeypatch.setattr(keys, "cpu_features", lambda: ["sse2"])
    monkeypatch.setattr(keys.platform, "python_version", lambda: "3.10.0")
    assert keys.prebuilt_key(spec) == first


def test_the_version_is_that_of_the_sources(tmp_path, monkeypatch):
    """The sources need not be installed, and another version of them may be."""
    found = prebuilt.importlib.metadata.version

    def version(name):
        return "0.0.0" if name == "fa4-hd256" else found(name)

    monkeypatch.setattr(prebuilt.importlib.metadata, "version", version)
    build({}, tmp_path / "kernels")
    assert prebuilt.read_manifest(tmp_path / "kernels")["fa4-hd256"] == __version__


def kernel_file(directory):
    return next(path for path in directory.iterdir() if path.suffix == ".kernel")


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "of others"])
def test_a_damaged_kernel(copied, inputs, damage):
    path = kernel_file(copied)
    content = path.read_bytes()
    expected = "is damaged"
    if damage == "cut":
        path.write_bytes(content[:-1])
    elif damage == "flipped":
        path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    elif damage == "gone":
        path.unlink()
        expected = "cannot be read: No such file"
    else:
        path.chmod(0o666)
        expected = "is not used: everybody may write it"
    use_prebuilt(copied, jit=True)
    with pytest.raises(RuntimeError, match=f"{path.name}, a prebuilt forward, {expected}.*again"):
        if damage == "of others":
            with pytest.warns(RuntimeWarning, match="is not used"):
                attend(inputs)
        else:
            attend(inputs)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("manifest cut", "manifest is damaged"),
        ("no manifest", "holds no prebuilt kernels: it has no manifest"),
        ("no directory", "holds no prebuilt kernels: No such file"),
        ("of a group", "is not used: its group may write it.*chmod go-w"),
    ],
)
def test_a_directory_that_is_refused(copied, state, message):
    path = copied / prebuilt.MANIFEST
    if state == "manifest cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif state == "no manifest":
        path.unlink()
    elif state == "no directory":
        shutil.rmtree(copied)
    else:
        copied.chmod(0o775)
    with pytest.raises(ValueError, match=message):
        use_prebuilt(copied)


def test_a_build_replaces_what_no_longer_fits(copied, spec):
    """Kernels that fit are left alone."""
    assert build({"sm_100a": [spec]}, copied).kernels == 1
    stale = "0" * 32
    cache = prebuilt.storage(copied)
    manifest, parts = cache.read(prebuilt.MANIFEST)
    manifest["fa4-hd256"] = "0.0.9"
    manifest["kernels"][stale] = {"kind": "forward", "target": "sm_100f"}
    cache.write(prebuilt.MANIFEST, manifest, parts)
    (copied / f"{stale}.kernel").write_bytes(b"")
    assert build({"sm_100a": [spec]}, copied).kernels == 1
    assert not (copied / f"{stale}.kernel").exists()
    assert {oct(path.stat().st_mode)[-3:] for path in copied.iterdir()} == {"644"}


@pytest.fixture
def instant(monkeypatch):
    """Kernels of any bytes, at once."""
    monkeypatch.setattr(builder, "jit_entry", lambda spec: ({"x": 1}, [b"a" * 1000, b"b", b"c"]))


@pytest.fixture
def many(spec):
    """Kernels that differ in their pages."""
    return [
        replace(spec, problem_class=replace(spec.problem_class, page_size=16 * n))
        for n in range(1, 7)
    ]


def build_with_others(barrier, spec, directories):
    for directory in directories:
        barrier.wait()
        build({"sm_100a": [spec]}, directory)


@pytest.mark.usefixtures("instant")
def test_builds_into_one_directory_at_once(many, tmp_path):
    """Each adds its kernel to those of the others."""
    context = multiprocessing.get_context("fork")
    directories = [tmp_path / str(n) for n in range(12)]
    barrier = context.Barrier(len(many))
    processes = [
        context.Process(target=build_with_others, args=(barrier, one, directories)) for one in many
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(many)
    counts = [len(prebuilt.Prebuilt.open(directory).kernels) for directory in directories]
    assert counts == [len(many)] * len(directories)
    assert all(path.suffix == ".kernel" or path.name == prebuilt.MANIFEST
               for directory in directories for path in directory.iterdir())  # fmt: skip


@pytest.mark.usefixtures("instant")
def test_modes_of_directories(many, tmp_path):
    """Whoever runs the container reads what a build has made; what is there stays as it is."""
    ours, made = tmp_path / "ours", tmp_path / "made" / "here"
    ours.mkdir(mode=0o700)
    before = os.umask(0o077)
    try:
        for place in (ours, made):
            build({"sm_100a": many[:1]}, place)
    finally:
        os.umask(before)
    assert [oct(place.stat().st_mode)[-3:] for place in (ours, made)] == ["700", "755"]


@pytest.mark.usefixtures("instant")
def test_a_missing_kernel_is_built_again_or_leaves_the_manifest(many, tmp_path):
    build({"sm_100a": many[:2]}, tmp_path)
    lost = kernel_file(tmp_path)
    lost.unlink()
    with pytest.warns(RuntimeWarning, match=f"{lost.name}.*is missing.*--arch sm_100f"):
        assert build({"sm_100a": many[2:3]}, tmp_path).kernels == 2
    assert build({"sm_100a": many[:2]}, tmp_path).kernels == 3
    lost.unlink()
    assert build({"sm_100a": many[:2]}, tmp_path).kernels == 3
    assert lost.exists()


@pytest.mark.parametrize(
    ("directory", "jobs", "error", "message"),
    [
        ("", 1, ValueError, "directory is ''; accepted: the path"),
        (b"kernels", 1, TypeError, "directory is b'kernels'; accepted: a path as a str"),
        ("kernels", 0, ValueError, "jobs is 0; accepted: 1 or more"),
        ("kernels", -3, ValueError, "jobs is -3; accepted: 1 or more"),
        ("kernels", True, TypeError, "jobs is True; accepted: an int"),
        ("file", 1, ValueError, "file cannot be made a directory: File exists; accepted"),
        ("file/below", 1, ValueError, "below cannot be made a directory: Not a directory"),
    ],
)
def test_builds_that_are_not_accepted(directory, jobs, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(error, match=message):
        build({}, directory, jobs)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("",), ValueError, "directory is ''"),
        ((b"kernels",), TypeError, "directory is b'kernels'"),
        ((None, 1), TypeError, "jit is 1; accepted: True, False or None"),
        ((None, "no"), TypeError, "jit is 'no'; accepted"),
    ],
)
def test_what_is_no_directory_or_switch(arguments, error, message):
    with pytest.raises(error, match=message):
        use_prebuilt(*arguments)


@pytest.mark.parametrize("given", ["argument", "environment"])
def test_a_relative_directory_stays_where_it_is(copied, given, tmp_path, monkeypatch):
    monkeypatch.chdir(copied.parent)
    if given == "argument":
        use_prebuilt(copied.name)
    else:
        monkeypatch.setenv("FA4_HD256_PREBUILT", copied.name)
        prebuilt.active()
    monkeypatch.chdir("/")
    found = prebuilt.active()
    assert found.directory == copied
    assert all(found.read(key) for key in found.kernels)


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("wanted", [None, "1", "0"])
def test_kernels_are_told_as_each_is_built(wanted, spec, tmp_path, monkeypatch, capfd):
    """On a pipe by a line each; on a terminal a bar counts those that are left, too."""
    monkeypatch.delenv("FA4_HD256_PROGRESS", raising=False)
    if wanted is not None:
        monkeypatch.setenv("FA4_HD256_PROGRESS", wanted)
    kernels = [spec, replace(spec, config=replace(spec.config, rescale_threshold=4.0))]
    build({"sm_100a": kernels}, tmp_path / "kernels")
    told = capfd.readouterr().err
    lines = ["1/2 forward (sm_100f)", "2/2 forward (sm_100f)"]
    assert all((line in told) == (wanted != "0") for line in lines), told
    assert ("compiling" in told and "1 left" in told) == (wanted == "1")
    assert wanted is not None or told.splitlines() == lines


@pytest.mark.usefixtures("instant")
def test_commands_quote_paths(spec, tmp_path, capsys):
    place = tmp_path / "of a model"
    command = ["build", "--kernel", name_of(spec), "--arch", "sm_100a", "--out", str(place)]
    assert main(command) == 0
    assert f"FA4_HD256_PREBUILT={shlex.quote(str(place))} or" in capsys.readouterr().out
    (place / prebuilt.MANIFEST).write_text("x")
    assert main(command) == 2
    told = capsys.readouterr().err
    assert f"manifest is damaged. Delete {place} and build it again" in told
    assert f"--out {shlex.quote(str(place))}`" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_100a"], "nothing to build; accepted: --model, --heads or --kernel"),
        (["--arch", "sm_100a", "--heads", "16"], "--heads is '16'; accepted: Q/KV"),
        (["--arch", "sm_100a", "--heads", "16/3"], "16 query heads over 3 key/value heads"),
        (["--arch", "sm_100a", "--heads", "2/1", "--window", "0"], "--window is 0; accepted"),
        (["--arch", "sm_100a", "--heads", "2/1", "--softcap", "-1"], "softcap is -1.0; accepted"),
        (["--arch", "sm_100a", "--heads", "2/1", "--softcap", "nan"], "softcap is nan; accepted"),
        (["--arch", "sm_100a", "--heads", "2/1", "--softcap", "inf"], "softcap is inf; accepted"),
        *(
            (["--arch", "sm_90a", "--model", "gemma-3-4b", *own], f"{own[0]} without --heads; acc")
            for own in (["--softcap", "0"], ["--sink"], ["--full"], ["--window", "0"])
        ),
        (["--arch", "sm_90a", "--heads", "2/1", "--jobs", "0"], "jobs is 0; accepted: 1 or more"),
        (["--arch", "sm_100a", "--kernel", "{}"], "names no kernel: it has other parts"),
        (["--arch", "sm_100a", "--kernel", "x"], "names no kernel"),
        (["--arch", "sm_90a", "--model", "gemma-3-4b", "--tensor-parallel", "3"], "3 ranks for 8"),
    ],
)
def test_commands_that_are_not_accepted(arguments, message, tmp_path, capsys):
    assert main(["build", *arguments, "--out", str(tmp_path / "none")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_kernel_of_another_architecture_is_no_kernel_of_this(spec, tmp_path, capsys):
    command = ["build", "--kernel", name_of(spec), "--arch", "sm_90a", "--out", str(tmp_path)]
    assert main(command) == 2
    assert "--arch sm_90a: none of the kernels given is sm_90a's" in capsys.readouterr().err


@pytest.mark.parametrize("planted", ["os:system", "fa4_hd256.run.ahead.build:build", "torch.save"])
def test_a_name_makes_nothing_but_configurations(spec, planted):
    """A name comes from a command line, and goes to `importlib`."""
    read = json.loads(name_of(spec))
    read["config"] = {"class": planted}
    with pytest.raises(ValueError, match="names no kernel"):
        kernel_named(json.dumps(read))


# ---------------------------------------------------------------- graphs


def test_compiling_while_a_graph_is_captured_is_refused(inputs, monkeypatch):
    attend(inputs)
    monkeypatch.setattr(compile, "is_capturing", lambda: True)
    attend(inputs)  # it is loaded
    compile.forget()
    message = "a CUDA graph is being captured.*forward for sm_100a.*before capturing.*warm_up"
    with pytest.raises(RuntimeError, match=message):
        attend(inputs)


def test_loading_while_a_graph_is_captured_is_refused(inputs, monkeypatch, spec):
    function = SimpleNamespace(to=lambda device: "loaded")
    found = replace(compile.compile_kernel(spec), in_process=compile.InProcess())
    found.in_process.linked = None, function
    monkeypatch.setattr(compile, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured.*not loaded"):
        found.load()
    with monkeypatch.context() as outside:
        outside.setattr(compile, "is_capturing", lambda: False)
        assert found.load() == "loaded"
    assert found.load() == "loaded"


def test_a_kernel_whose_loading_failed_is_not_loaded(monkeypatch, spec):
    """A capture that comes later is refused, too."""

    def fail(device):
        raise OSError("cudaErrorNoKernelImageForDevice")

    found = replace(compile.compile_kernel(spec), in_process=compile.InProcess())
    found.in_process.linked = None, SimpleNamespace(to=fail)
    with pytest.raises(OSError, match="NoKernelImage"):
        found.load()
    monkeypatch.setattr(compile, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured.*not loaded"):
        found.load()
