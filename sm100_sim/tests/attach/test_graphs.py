"""Test CUDA graphs of attached programs: a capture computes nothing, replays take new inputs."""

import pytest

import sm100_sim

pytestmark = pytest.mark.simulator

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402


@triton.jit
def add(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(out + i, mask=i < n) + tl.load(x + i, mask=i < n), mask=i < n)


@pytest.fixture
def session():
    with sm100_sim.attached(sanitize=True) as session:
        yield session


def test_launches_and_operators_run_in_their_order_at_each_replay(session):
    x, out = torch.ones(64, device="cuda"), torch.full((64,), 7.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        doubled = x * 2
        out.zero_()
        add[(1,)](doubled, out, 64, BLOCK=128)
        more = out.view(8, 8)[0] + torch.ones(8, device="cuda")
    assert not session.reports and (out == 7).all(), "a capture computes nothing"
    for value in (3, 5):
        x.fill_(value)
        graph.replay()
        assert (out == 2 * value).all() and (more == 2 * value + 1).all()
    assert len(session.reports) == 2 and not any(r.findings for r in session.reports)
    graph.reset()
    with pytest.raises(RuntimeError, match="no capture"):
        graph.replay()


def test_functions_of_cute_dsl_compiled_or_called_directly():
    """Each call of a replay may touch its own tensors; the default stream is not captured."""
    cute = pytest.importorskip("cutlass.cute")
    from cuda.bindings.driver import CUstream
    from cute_add import functions
    from cutlass.cute.runtime import from_dlpack

    add_on, add_by_default = functions(cute, on_stream=True), functions(cute)
    with sm100_sim.attached() as session:
        a, b, c = (torch.ones(32, device="cuda") for _ in range(3))
        compiled = cute.compile(add_on, from_dlpack(a), from_dlpack(b), CUstream(0))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stream = CUstream(torch.cuda.current_stream().cuda_stream)
            compiled(from_dlpack(a), from_dlpack(b), stream)
            add_on(from_dlpack(b), from_dlpack(c), stream)
            add_on(from_dlpack(a), from_dlpack(a), stream)
            with pytest.raises(sm100_sim.errors.LaunchError, match="on the default stream"):
                add_by_default(from_dlpack(a), from_dlpack(b))
        assert not session.reports and (b == 1).all()
        graph.replay()
        assert (b == 2).all() and (c == 3).all() and len(session.reports) == 3


def test_memory_made_in_a_capture_stays_with_the_graph(session):
    """Kernels may know it by its address alone, as PyTorch's pool of a graph allows."""
    graph = torch.cuda.CUDAGraph()
    x, out = torch.full((1 << 16,), 3.0, device="cuda"), torch.zeros(1 << 16, device="cuda")

    @triton.jit
    def copy(source, target, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        values = tl.load(source.to(tl.pointer_type(tl.float32)) + i)
        tl.store(target.to(tl.pointer_type(tl.float32)) + i, values)

    with torch.cuda.graph(graph):
        made = torch.empty(1 << 16, device="cuda")
        copy[(1,)](x.data_ptr(), made.data_ptr(), BLOCK=64)
        copy[(1,)](made.data_ptr(), out.data_ptr(), BLOCK=64)
    del made
    graph.replay()
    assert (out[:64] == 3).all() and not session.reports[1].findings


def test_custom_operators_are_replayed_as_a_whole(session):
    @torch.library.custom_op("sm100_sim_tests::twice", mutates_args=(), device_types="cuda")
    def twice(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for _ in range(2):
            add[(1,)](x, out, x.numel(), BLOCK=128)
        return out

    sm100_sim.attach.torch_cuda.register_custom_operators()
    x, graph = torch.ones(64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = twice(x)
    assert not session.reports
    x.fill_(4)
    graph.replay()
    assert (y == 8).all() and len(session.reports) == 2


def test_what_a_capture_refuses(session):
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="the default stream cannot be captured"):
        graph.capture_begin()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="not permitted while a CUDA graph"):
            x.sum().item()
        with pytest.raises(RuntimeError, match="captures do not nest"):
            torch.cuda.CUDAGraph().capture_begin()
        with pytest.raises(NotImplementedError, match="writes into arguments and returns new"):
            torch._fused_moving_avg_obs_fq_helper(
                x, *[torch.ones(1, dtype=torch.int32)] * 2, *[torch.ones(1)] * 3,
                torch.ones(1, dtype=torch.int32), 0.1, 0, 255, 0,
            )  # fmt: skip
    assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(NotImplementedError, match="capture with torch.cuda.graph"):
        torch.cuda.make_graphed_callables(lambda x: x, (x,))
