"""Triton kernels: `launch_triton`, `attached()`, findings in lines of the kernel."""

import importlib.metadata
import re
import runpy
import shutil

import numpy as np
import pytest
from project import PROJECT

import sm100_sim
from sm100_sim import triton_launcher

pytestmark = pytest.mark.simulator

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402


@triton.jit(noinline=True)
def twice(x):
    return x + x


@triton.jit
def scaled_sum(x, y, out, n, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    total = tl.load(x + i, inside) + twice(scale) * tl.load(y + i, inside)
    tl.store(out + i, total, inside)


@triton.jit
def product(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(a.load([m, k]), b.load([k, n]), total)
    c.store([m, n], total)


@triton.jit
def two_writers(out):
    tl.store(out + tl.arange(0, 32), tl.program_id(0))  # every program stores here


@triton.autotune([triton.Config({"BLOCK": 1 << n}) for n in (7, 8)], key=["n"])
@triton.jit
def tuned(out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, i, i < n)


def operands(kind, n=100):
    rng = np.random.default_rng(0)
    x, y, out = rng.standard_normal((3, n)).astype(np.float32)
    return (x, y, out) if kind == "numpy" else tuple(map(torch.from_numpy, (x, y, out)))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_arrays_and_tensors_are_written_in_place(kind):
    """The kernel has a device function, a scalar, and a grid that depends on a constexpr."""
    x, y, out = operands(kind)
    report = sm100_sim.launch_triton(
        scaled_sum, lambda meta: (triton.cdiv(100, meta["BLOCK"]),), x, y, out, 100, 0.5, BLOCK=64
    )
    want = np.asarray(x) + np.asarray(y)
    assert np.abs(np.asarray(out) - want).max() < 1e-6
    assert report.grid == (2, 1, 1) and report.block == (128, 1, 1)


def test_no_memory_but_the_arguments_may_be_touched():
    x, y, out = operands("numpy")
    with pytest.raises(sm100_sim.MemoryFault, match="outside the tensors") as raised:
        sm100_sim.launch_triton(scaled_sum, 1, x, y, out, 128, 0.5, BLOCK=128)
    file, line = raised.value.instruction.source
    assert file.endswith("test_triton.py") and line > 1


def descriptors(m=128, n=128, k=128):
    rng = np.random.default_rng(1)
    a, b = (torch.from_numpy(rng.standard_normal(s).astype(np.float16)) for s in ((m, k), (k, n)))
    c = torch.zeros(m, n)
    blocks = [128, 64], [64, 128], [128, 128]
    return a, b, c, [TensorDescriptor.from_tensor(t, s) for t, s in zip((a, b, c), blocks)]


def test_tensor_descriptors_and_tensor_cores():
    """Triton's TMA, mbarriers and tcgen05.mma run right, and have two causes of findings (docs)."""
    a, b, c, made = descriptors()
    report = sm100_sim.launch_triton(
        product, (1, 1), *made, 128, BM=128, BN=128, BK=64,
        options=sm100_sim.Options(sanitize=True),
    )  # fmt: skip
    assert (c - a.float() @ b.float()).abs().max() < 1e-4
    assert report.tma["load_bytes"] == 2 * 2 * 128 * 128 and "tcgen05.mma" in report.instructions
    kinds = {cause.kinds for cause in report.causes}
    assert kinds == {("barrier-not-visible",), ("missing-proxy-fence",)}


@pytest.mark.parametrize("planted", [False, True])
def test_a_left_out_wait_for_tensor_memory_is_found_by_its_reading_alone(planted, monkeypatch):
    """The product stays right without its tcgen05.wait::ld; `wait-ld` alone finds that, and nothing
    but that."""
    code_of = triton_launcher._code_of

    def without_wait(name, key):
        ptx, cubin = code_of(name, key)
        assert ptx.count("tcgen05.wait::ld.sync.aligned;") == 1
        return ptx.replace("tcgen05.wait::ld.sync.aligned;", ""), cubin

    if planted:
        monkeypatch.setattr(triton_launcher, "_code_of", without_wait)
    kinds = {}
    for reading in (True, "wait-ld"):
        a, b, c, made = descriptors(k=64)
        report = sm100_sim.launch_triton(
            product, (1, 1), *made, 64, BM=128, BN=128, BK=64, num_warps=8 if planted else 4,
            options=sm100_sim.Options(sanitize=reading),
        )  # fmt: skip
        assert (c - a.float() @ b.float()).abs().max() < 1e-4, "right all the same"
        kinds[reading] = {kind for cause in report.causes for kind in cause.kinds}
    assert kinds["wait-ld"] == ({"load-not-waited"} if planted else set())
    assert kinds[True] == {"barrier-not-visible", "missing-proxy-fence"}


def test_a_finding_names_the_line_and_its_text():
    report = sm100_sim.launch_triton(
        two_writers, (2,), np.zeros(32, np.int32), options=sm100_sim.Options(sanitize=True)
    )
    (cause,) = report.causes
    head, first, second, missing = str(cause).splitlines()
    assert head.startswith("two-writers in global memory: 1 finding")
    for line, label in ((first, "first"), (second, "second")):
        assert re.match(rf"{label}: +\S*test_triton.py:\d+: tl.store\(out \+ tl.arange", line)
        assert "every program stores here" in line
    assert missing.startswith("missing: each output element belongs to one CTA")


WRITERS = """
import triton
import triton.language as tl


@triton.jit
def two_writers_of_a_checkout(out):
    tl.store(out + tl.arange(0, 32), tl.program_id(0))  # in one file
"""


def test_a_cached_kernel_names_the_checkout_that_runs_it(tmp_path, monkeypatch):
    """Triton's cache knows a kernel by its text, not by the folder it lies in."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    for parent, name in (("", "first"), ("deeper", "second")):
        file = tmp_path / parent / name / "kernels" / "writers.py"
        file.parent.mkdir(parents=True)
        file.write_text(WRITERS)
        kernel = runpy.run_path(str(file))["two_writers_of_a_checkout"]
        report = sm100_sim.launch_triton(
            kernel, (2,), np.zeros(32, np.int32), options=sm100_sim.Options(sanitize=True)
        )
        (cause,) = report.causes
        assert str(cause).count(f"/{name}/kernels/writers.py:8: tl.store") == 2, str(cause)
        shutil.rmtree(tmp_path / parent / name)


def test_autotuning_takes_the_first_configuration_that_fits():
    out = np.zeros(300, np.int32)
    report = sm100_sim.launch_triton(tuned, lambda meta: (-(-300 // meta["BLOCK"]),), out, 300)
    assert (out == np.arange(300)).all() and report.grid == (3, 1, 1)


def test_attached_programs_launch_triton_kernels():
    """A script's device queries, tensors "on the GPU" and launch work unchanged."""
    with sm100_sim.attached(sanitize=True) as session:
        device = triton.runtime.driver.active.get_active_torch_device()
        x, y = torch.ones(2, 256, device=device)
        out = torch.empty_like(x)
        scaled_sum[(2,)](x, y, out, 256, 3.0, BLOCK=128)
    assert (out == 7).all()
    assert [r.grid for r in session.reports] == [(2, 1, 1)] and not session.reports[0].findings
    assert "scaled_sum" in session.modules


def test_the_table_of_versions_names_what_is_installed():
    """The page's compatibility table holds the versions that these tests run with."""
    page = (PROJECT / "README.md").read_text()
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([\w.]+) \|", page, re.M))
    assert {"triton", "nvidia-cuda-nvrtc", "nvidia-cutlass-dsl", "torch"} <= set(rows)
    for name, version in rows.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        assert installed.partition("+")[0] == version, name
