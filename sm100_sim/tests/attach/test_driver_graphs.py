"""Test CUDA graphs that attached programs make through cuda.bindings, and CuTe DSL's benchmarks."""

import pytest
import torch

import sm100_sim

pytestmark = pytest.mark.simulator

cute = pytest.importorskip("cutlass.cute")
import cuda.bindings.driver as driver  # noqa: E402
import cuda.bindings.runtime as runtime  # noqa: E402
from cutlass import testing  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

MODE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@cute.kernel
def add_kernel(a: cute.Tensor, b: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    b[thread] = a[thread] + b[thread]


@cute.jit
def add_on(a: cute.Tensor, b: cute.Tensor, stream: driver.CUstream):
    add_kernel(a, b).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def done(answer):
    """Return what a function of cuda.bindings returns besides the status, which is success."""
    status, *values = answer
    assert int(status) == 0
    return values[0] if len(values) == 1 else tuple(values)


class Program:
    """A compiled addition, its tensors and two streams."""

    def __init__(self):
        self.session = sm100_sim.attach._active[0]
        self.a, self.b = (torch.ones(32, device="cuda") for _ in range(2))
        self.stream, self.other = (done(driver.cuStreamCreate(1)) for _ in range(2))
        self.tensors = from_dlpack(self.a), from_dlpack(self.b)
        self.compiled = cute.compile(add_on, *self.tensors, self.stream)

    def launch(self, stream=None):
        self.compiled(*self.tensors, self.stream if stream is None else stream)

    def begin(self):
        done(driver.cuStreamBeginCapture(self.stream, MODE))

    def end(self):
        return done(driver.cuStreamEndCapture(self.stream))


@pytest.fixture
def program():
    with sm100_sim.attached():
        yield Program()


def test_replays_take_the_memory_as_it_is_then(program):
    program.begin()
    program.launch()
    program.launch()
    graph = program.end()
    assert not program.session.reports and (program.b == 1).all(), "a capture computes nothing"
    assert done(driver.cuGraphGetNodes(graph))[1] == 2
    executable = done(driver.cuGraphInstantiate(graph, 0))
    done(driver.cuGraphDestroy(graph))
    for value in (3, 5):
        program.a.fill_(value)
        program.b.zero_()
        done(driver.cuGraphLaunch(executable, program.stream))
        assert (program.b == 2 * value).all()
    assert len(program.session.reports) == 4
    done(driver.cuGraphExecDestroy(executable))
    with pytest.raises(RuntimeError, match="cuGraphLaunch: 0x.* is no executable graph"):
        driver.cuGraphLaunch(executable, program.stream)


def test_the_runtime_s_functions_copy_and_fill_in_the_order_of_the_stream(program):
    stream, kind = done(runtime.cudaStreamCreate()), runtime.cudaMemcpyKind.cudaMemcpyDefault
    memory = done(runtime.cudaMalloc(128))
    mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal
    done(runtime.cudaStreamBeginCapture(stream, mode))
    status = runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
    assert done(runtime.cudaStreamIsCapturing(stream)) == status
    done(runtime.cudaMemsetAsync(program.b.data_ptr(), 0, 128, stream))
    program.launch(stream)
    done(runtime.cudaMemcpyAsync(memory, program.b.data_ptr(), 128, kind, stream))
    graph = done(runtime.cudaStreamEndCapture(stream))
    done(runtime.cudaFree(memory))
    assert (program.b == 1).all() and done(runtime.cudaGraphGetNodes(graph)) == ([], 3)
    executable = done(runtime.cudaGraphInstantiate(graph, 0))
    done(runtime.cudaGraphLaunch(executable, stream))
    done(runtime.cudaGraphLaunch(executable, stream))
    assert (program.b == 1).all() and len(program.session.reports) == 2


def test_operators_of_pytorch_on_the_stream_are_captured(program):
    aside = torch.cuda.Stream()
    assert aside.cuda_stream and torch.cuda.current_stream().cuda_stream == 0
    done(driver.cuStreamBeginCapture(aside.cuda_stream, MODE))
    program.a.add_(1)
    with torch.cuda.stream(aside):
        assert torch.cuda.is_current_stream_capturing()
        program.b.add_(program.a)
    assert not torch.cuda.is_current_stream_capturing()
    graph = done(driver.cuStreamEndCapture(aside.cuda_stream))
    assert (program.a == 2).all() and (program.b == 1).all()
    done(driver.cuGraphLaunch(done(driver.cuGraphInstantiate(graph, 0)), aside.cuda_stream))
    assert (program.b == 3).all()


def test_kernels_of_triton_and_of_tvm_ffi_run_on_the_current_stream(program):
    triton = pytest.importorskip("triton")
    import triton.language as tl

    @triton.jit
    def double(b):
        tl.store(b + tl.arange(0, 32), 2 * tl.load(b + tl.arange(0, 32)))

    fake = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    vector = cute.runtime.make_fake_tensor(cute.Float32, (32,), stride=(1,))
    by_tvm_ffi = cute.compile(add_on, vector, vector, fake, options="--enable-tvm-ffi")
    aside = torch.cuda.Stream()
    done(driver.cuStreamBeginCapture(aside.cuda_stream, MODE))
    with torch.cuda.stream(aside):
        by_tvm_ffi(program.a, program.b)
        double[(1,)](program.b)
    graph = done(driver.cuStreamEndCapture(aside.cuda_stream))
    assert not program.session.reports and done(driver.cuGraphGetNodes(graph))[1] == 2
    done(driver.cuGraphLaunch(done(driver.cuGraphInstantiate(graph, 0)), aside.cuda_stream))
    assert (program.b == 4).all()
    by_tvm_ffi(program.a, program.b)
    assert (program.b == 5).all()


def test_a_launch_on_another_stream_is_none_of_the_capture_s(program):
    program.begin()
    program.launch(program.other)
    assert (program.b == 2).all() and len(program.session.reports) == 1
    assert done(driver.cuGraphGetNodes(program.end()))[1] == 0


def test_graphs_of_graphs(program):
    program.begin()
    program.launch()
    inner = done(driver.cuGraphInstantiate(program.end(), 0))
    program.begin()
    for _ in range(3):
        done(driver.cuGraphLaunch(inner, program.stream))
    outer = done(driver.cuGraphInstantiate(program.end(), 0))
    done(driver.cuGraphExecDestroy(inner))
    assert (program.b == 1).all()
    done(driver.cuGraphLaunch(outer, program.stream))
    assert (program.b == 4).all()


def _benchmark(program, stream, **options):
    return testing.benchmark(
        program.compiled,
        kernel_arguments=testing.JitArguments(*program.tensors, program.stream),
        warmup_iterations=2, iterations=3, stream=stream, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("options", "launches"), [({"use_cuda_graphs": True}, 5), ({}, 5)])
def test_benchmarks_of_cute_dsl(program, options, launches):
    assert _benchmark(program, program.stream, **options) > 0
    assert len(program.session.reports) == launches and (program.b == 1 + launches).all()


def test_benchmarks_on_another_stream_say_so(program):
    for graphs in (False, True):
        with pytest.raises(ValueError, match="does not match the stream"):
            _benchmark(program, program.other, use_cuda_graphs=graphs)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p: p.begin(), RuntimeError, "do not nest"),
        (lambda p: driver.cuStreamSynchronize(p.stream), RuntimeError,
         "cuStreamSynchronize: not permitted"),
        (lambda p: runtime.cudaDeviceSynchronize(), RuntimeError, "cudaDeviceSynchronize: not"),
        (lambda p: torch.cuda.synchronize(), RuntimeError, "torch.cuda.synchronize: not permitted"),
        (lambda p: driver.cuStreamEndCapture(p.other), RuntimeError,
         "cuStreamEndCapture: 0x.* is not being captured"),
        (lambda p: torch.cuda.Stream().wait_stream(torch.cuda.ExternalStream(int(p.stream))),
         NotImplementedError, "wait_stream: .* joins a capture"),
        (lambda p: driver.cuGraphAddKernelNode(0), NotImplementedError,
         "cuGraphAddKernelNode is not simulated.*cuGraphLaunch"),
        (lambda p: runtime.cudaGraphExecUpdate(0, 0), NotImplementedError,
         "cudaGraphExecUpdate is not simulated"),
        (lambda p: driver.cuLaunchKernelEx(0), NotImplementedError, "cuLaunchKernelEx is not"),
        (lambda p: driver.cuMemAllocAsync(4, 0), NotImplementedError, "cuMemAllocAsync is not"),
    ],
)  # fmt: skip
def test_what_a_capture_refuses_is_named(program, call, error, words):
    program.begin()
    with pytest.raises(error, match=words):
        call(program)
    program.end()
    done(driver.cuStreamSynchronize(program.stream))


def test_the_default_stream_is_not_captured(program):
    with pytest.raises(RuntimeError, match="cuStreamBeginCapture: the default stream"):
        driver.cuStreamBeginCapture(0, MODE)
    with pytest.raises(NotImplementedError, match="cuGraphInstantiate: flags 4"):
        program.begin()
        driver.cuGraphInstantiate(program.end(), 4)


def test_events_of_a_capture(program):
    """Order streams by events that have no time; a stream that waits for one would join."""
    inside, outside = (done(driver.cuEventCreate(0)) for _ in range(2))
    done(driver.cuEventRecord(outside, program.other))
    program.begin()
    done(driver.cuEventRecord(inside, program.stream))
    done(driver.cuStreamWaitEvent(program.stream, inside, 0))
    with pytest.raises(NotImplementedError, match="cuStreamWaitEvent: .* joins a capture"):
        driver.cuStreamWaitEvent(program.other, inside, 0)
    with pytest.raises(RuntimeError, match="cuStreamWaitEvent: .* from outside"):
        driver.cuStreamWaitEvent(program.stream, outside, 0)
    program.end()
    with pytest.raises(RuntimeError, match="cuEventElapsedTime: .* recorded in a capture"):
        driver.cuEventElapsedTime(outside, inside)


def test_memory_that_a_graph_no_longer_has_is_reported():
    """A replay may touch what lives then; a tensor that is known by its address may be gone."""

    @cute.jit
    def at(a: cute.Pointer, b: cute.Tensor, stream: driver.CUstream):
        add_kernel(cute.make_tensor(a, cute.make_layout(32)), b).launch(
            grid=(1, 1, 1), block=(32, 1, 1), stream=stream
        )

    with sm100_sim.attached():
        a, b = (torch.ones(1 << 20, device="cuda") for _ in range(2))
        stream = done(driver.cuStreamCreate(1))
        pointer = cute.runtime.make_ptr(cute.Float32, a.data_ptr(), cute.AddressSpace.gmem,
                                        assumed_align=16)  # fmt: skip
        compiled = cute.compile(at, pointer, from_dlpack(b), stream)
        done(driver.cuStreamBeginCapture(stream, MODE))
        compiled(pointer, from_dlpack(b), stream)
        executable = done(driver.cuGraphInstantiate(done(driver.cuStreamEndCapture(stream)), 0))
        done(driver.cuGraphLaunch(executable, stream))
        del a
        with pytest.raises(sm100_sim.errors.MemoryFault, match="outside"):
            driver.cuGraphLaunch(executable, stream)


def test_a_capture_ends_with_the_context():
    with sm100_sim.attached():
        Program().begin()
    with sm100_sim.attached():
        assert not torch.cuda.is_current_stream_capturing()
        program = Program()
        program.launch()
        assert (program.b == 2).all()
