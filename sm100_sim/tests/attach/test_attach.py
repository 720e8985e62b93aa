"""`attached()` and `python -m sm100_sim`: device queries, CUDA tensors, ways to call a kernel."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from cross_compile import targeting
from project import PACKAGE

import sm100_sim
from sm100_sim.host.program import program_of

pytestmark = pytest.mark.simulator

cutlass = pytest.importorskip("cutlass")
import cute_add  # noqa: E402
from cutlass import cute  # noqa: E402


@cute.kernel
def scale_kernel(source: cute.Tensor, target: cute.Tensor, factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * 32 + thread
    target[index] = source[index] * factor


@cute.jit
def scale(source: cute.Tensor, target: cute.Tensor, factor: cutlass.Float32):
    scale_kernel(source, target, factor).launch(grid=(2, 1, 1), block=(32, 1, 1))


@cute.jit
def count_up(target: cute.Tensor, first: cutlass.Int32):
    for index in cutlass.range(cute.size(target)):
        target[index] = first + index


@cute.jit
def scale_at(source: cute.Pointer, target: cute.Pointer, factor: cutlass.Float32 = 2.0):
    layout = cute.make_layout(64)
    scale_kernel(cute.make_tensor(source, layout), cute.make_tensor(target, layout), factor).launch(
        grid=(2, 1, 1), block=(32, 1, 1)
    )


@cute.kernel
def gather_kernel(table: cute.Tensor, target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    pointer = cute.make_ptr(cutlass.Float32, table[block], cute.AddressSpace.gmem,
                            assumed_align=16)  # fmt: skip
    target[block * 32 + thread] = cute.make_tensor(pointer, cute.make_layout(32))[thread]


@cute.jit
def gather(table: cute.Tensor, target: cute.Tensor):
    gather_kernel(table, target).launch(grid=(2, 1, 1), block=(32, 1, 1))


def test_functions_without_kernels_run_on_the_host():
    from cutlass.cute.runtime import from_dlpack

    called, compiled = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    with sm100_sim.attached() as session:
        count_up(from_dlpack(called), 3)
        cute.compile(count_up, from_dlpack(compiled), 5)(from_dlpack(compiled), 5)
    assert called.tolist() == list(range(3, 11)) and compiled.tolist() == list(range(5, 13))
    assert session.reports == []


@pytest.mark.parametrize("lines", [True, False])
def test_line_information_ends_with_the_context(lines):
    """Kernels that are compiled later are those that would have been compiled without it."""
    from cutlass.cute.runtime import from_dlpack

    source, target = torch.ones(2, 64)

    def ptx():
        arguments = from_dlpack(source), from_dlpack(target)
        with sm100_sim.keeping_ptx():
            return program_of(cute.compile(scale, *arguments, 2.0)).ptx

    with sm100_sim.attached(lines=lines):
        assert (".loc" in ptx()) == lines
    with targeting():
        assert ".loc" not in ptx()


def test_device_queries_answer_as_a_b200():
    import cuda.bindings.driver as driver

    there_is_a_gpu = torch.cuda.is_available()
    with sm100_sim.attached():
        assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (10, 0)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 148
        assert cutlass.utils.HardwareInfo().get_max_active_clusters(2) == 74
        assert cutlass.utils.HardwareInfo().get_l2_cache_size_in_bytes() == 132_644_864
        assert driver.cuDeviceGetCount() == (driver.CUresult.CUDA_SUCCESS, 1)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
        torch.cuda.synchronize()
        assert start.elapsed_time(end) >= 0
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside), torch.cuda.nvtx.range("annotated"), torch.cuda.stream(None):
            assert torch.cuda.current_stream() is aside and aside.cuda_stream
        assert torch.cuda.current_stream().cuda_stream == 0
    assert torch.cuda.is_available() == there_is_a_gpu
    assert torch.zeros(1).device.type == "cpu" and not torch.zeros(1).is_cuda


def test_cuda_tensors_lie_in_host_memory():
    with sm100_sim.attached():
        made = torch.arange(6, device="cuda", dtype=torch.float32)
        assert made.is_cuda and made.device == torch.device("cuda", 0)
        host = torch.ones(6, pin_memory=True)
        moved = host.cuda()
        moved += made.to("cuda:0")
        assert torch.equal(host, torch.ones(6)) and torch.equal(moved.cpu(), made + 1)
        assert torch.empty_like(made, device="cuda").new_zeros(2, device="cuda").sum() == 0
    assert torch.equal(moved, torch.arange(6) + 1.0)


def _call(how):
    source = torch.arange(64, device="cuda", dtype=torch.float32)
    target = torch.zeros(64, device="cuda")
    arguments = [
        cute.runtime.from_dlpack(t, enable_tvm_ffi=how.startswith("tvm")) for t in (source, target)
    ]
    if how == "direct":
        scale(*arguments, cutlass.Float32(3))
    elif how == "plain":
        cute.compile(scale, *arguments, cutlass.Float32(1))(*arguments, cutlass.Float32(3))
    else:
        compiled = cute.compile(scale, *arguments, cutlass.Float32(1), options="--enable-tvm-ffi")
        if how == "tvm-ffi on torch tensors":
            arguments = [source, target]
        compiled(*arguments, 3.0)
    return target


@pytest.mark.parametrize("how", ["direct", "plain", "tvm-ffi", "tvm-ffi on torch tensors"])
def test_every_way_to_call_a_kernel(how):
    with sm100_sim.attached(clusters=1) as session:
        target = _call(how)
    assert torch.equal(target, 3.0 * torch.arange(64))
    assert [report.grid for report in session.reports] == [(2, 1, 1)]
    assert session.reports[0].resident_clusters == 1


class Earlier:
    """A compiled function as CuTe DSL 4.4 returns it: other names, fewer conversions."""

    def __init__(self, compiled):
        self._compiled = compiled
        self.args_spec = compiled.execution_args
        if hasattr(compiled, "_create_tvm_ffi_function"):
            self.args_spec = object()

    def __getattr__(self, name):
        if name == "execution_args":
            raise AttributeError(name)
        return getattr(self._compiled, name)


@pytest.mark.parametrize("options", ["", "--enable-tvm-ffi"])
def test_functions_of_an_earlier_cute_dsl_are_called(options):
    grids = []
    with sm100_sim.attached():
        arguments = [
            cute.runtime.from_dlpack(torch.zeros(64), enable_tvm_ffi=bool(options))
            for _ in range(2)
        ]
        compiled = cute.compile(scale, *arguments, cutlass.Float32(1), options=options)
        for function in (compiled, Earlier(compiled)):
            program_of(function).run(
                (*arguments, 3.0), lambda config: grids.append(config.grid), {}
            )
    assert grids == 2 * [(2, 1, 1)]


def test_a_table_of_addresses_tells_which_tensors_a_kernel_may_touch():
    from cutlass.cute.runtime import from_dlpack

    sources = [torch.randn(40) for _ in range(3)]
    target = torch.zeros(64)
    with sm100_sim.attached():
        table = torch.tensor([sources[0].data_ptr() + 16, sources[2].data_ptr()])
        gather(from_dlpack(table), from_dlpack(target))
        assert torch.equal(target, torch.cat([sources[0][4:36], sources[2][:32]]))
        table[0] = sources[0].data_ptr() + 48  # The last eight elements lie past its end.
        with pytest.raises(sm100_sim.errors.MemoryFault, match="outside"):
            gather(from_dlpack(table), from_dlpack(target))


def test_tensors_without_memory_may_be_alive():
    """torch.compile traces with such tensors, which it may leave behind; torch.func wraps them."""
    from cutlass.cute.runtime import from_dlpack
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    functional = torch._to_functional_tensor(torch.ones(3))
    with pytest.raises(RuntimeError):
        functional.untyped_storage().data_ptr()
    wrapped = []
    torch.func.grad(lambda x: wrapped.append(x) or x.sum())(torch.ones(3))
    with pytest.raises(NotImplementedError):
        wrapped[0].untyped_storage()
    source, target = torch.randn(64), torch.zeros(64)
    with sm100_sim.attached(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*data pointer")
        table = torch.tensor([source.data_ptr(), source.data_ptr() + 128])
        gather(from_dlpack(table), from_dlpack(target))
    assert torch.equal(target, source) and len(fake) == len(functional) == 3


def test_the_function_of_tvm_ffi_takes_addresses_by_position():
    pytest.importorskip("tvm_ffi")
    source, target = torch.randn(64), torch.zeros(64)
    with sm100_sim.attached() as session:
        pointers = [
            cute.runtime.make_ptr(cutlass.Float32, 16, cute.AddressSpace.gmem, assumed_align=16)
            for _ in range(2)
        ]
        compiled = cute.compile(scale_at, *pointers, cutlass.Float32(1), options="--enable-tvm-ffi")
        compiled.__tvm_ffi_object__()(source.data_ptr(), target.data_ptr(), 3.0)
        assert torch.equal(target, 3 * source) and len(session.reports) == 1
        with pytest.raises(sm100_sim.errors.MemoryFault, match="outside"):
            compiled.__tvm_ffi_object__()(source.data_ptr(), target.data_ptr() + (1 << 45), 3.0)


def test_device_memory_is_aligned_as_on_a_gpu():
    with sm100_sim.attached():
        weight = torch.randn(3, 5, device="cuda", requires_grad=True)
        made = [
            weight,
            torch.empty(7, device=0),
            torch.ones(9).cuda(),
            torch.ones(9).to("cuda"),
            torch.randn(4, 6).t().cuda(),
            weight.to("cuda", torch.bfloat16),
            weight.new_zeros(3, device="cuda"),
            torch.zeros(1 << 20, device="cuda"),
        ]
        assert [tensor.data_ptr() % 512 for tensor in made] == 8 * [0]
        assert made[4].stride() == (1, 6) and weight.is_leaf and weight.requires_grad
        moved = weight.cuda()
        (moved * moved).sum().backward()
        assert torch.equal(weight.grad, 2 * weight) and torch.equal(moved, weight)


def test_copies_are_aligned_as_on_a_gpu():
    with sm100_sim.attached():
        weight = torch.randn(3, 5, device="cuda", requires_grad=True)
        made = [weight.clone(), torch.clone(weight), weight.t().contiguous()]
        made += [torch.empty_like(weight), torch.randn_like(weight), weight.new_empty(3)]
        made += [tensor.clone() for tensor in made]
        assert [tensor.data_ptr() % 512 for tensor in made] == 12 * [0]
        assert weight.contiguous() is weight and torch.equal(made[2], weight.t())
        (made[0] * made[1]).sum().backward()
        assert torch.equal(weight.grad, 2 * weight)


def test_errors_of_a_kernel_come_through_tvm_ffi():
    with sm100_sim.attached():
        source, target = torch.zeros(64, device="cuda"), torch.zeros(40, device="cuda")
        layouts = [
            cute.runtime.make_fake_tensor(cutlass.Float32, (cute.sym_int(),), stride=(1,))
            for _ in range(2)
        ]
        compiled = cute.compile(scale, *layouts, 1.0, options="--enable-tvm-ffi")
        with pytest.raises(sm100_sim.SimulationError, match="outside the tensors of the launch"):
            compiled(source, target, 3.0)


def test_every_export_of_a_tensor_says_that_it_is_on_the_gpu():
    tvm_ffi = pytest.importorskip("tvm_ffi")
    had = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    with sm100_sim.attached():
        tensor = torch.ones(4)
        assert tensor.__dlpack_device__() == (2, 0)
        assert not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
        assert tvm_ffi.from_dlpack(tensor).device.type == "cuda"
        assert torch.equal(torch.nn.Parameter(tensor), tensor)
    assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__") == had
    assert tvm_ffi.from_dlpack(torch.ones(4)).device.type == "cpu"


def test_does_not_nest():
    with sm100_sim.attached():
        with pytest.raises(RuntimeError, match="does not nest"):
            sm100_sim.attached().__enter__()


def test_functions_of_the_experimental_language():
    """cute.experimental compiles by settings of its own."""
    from cutlass.cute import experimental
    from cutlass.cute.runtime import from_dlpack

    with sm100_sim.attached() as session:
        a, b = (torch.ones(32, device="cuda") for _ in range(2))
        compiled = experimental.compile(
            cute_add.functions(experimental, smem=1024), from_dlpack(a), from_dlpack(b)
        )
        compiled(from_dlpack(a), from_dlpack(b))
        assert (b == 2).all() and len(session.reports) == 1


def test_a_profiler_of_the_gpu_follows_the_host():
    """NVIDIA's MoE examples print such a profile."""
    with sm100_sim.attached():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.ones(4, device="cuda") + 1
        assert "aten::add" in profile.key_averages().table(sort_by="cuda_time_total")


def test_script_runner(tmp_path):
    paths = os.pathsep.join([str(PACKAGE.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "sm100_sim", cute_add.__file__, "5"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths}, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"sum {32 * 11}" in done.stdout
    assert "sm100_sim: 2 launches of 1 kernels" in done.stdout and "add_kernel" in done.stdout
