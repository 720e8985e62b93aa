"""Predicted time of kernels in PTX, Triton and CUDA C++, by machine code of ptxas from a wheel."""

import json

import numpy as np
import pytest

import sm100_sim
from sm100_sim import timing
from sm100_sim.timing.machine_code.assembling import assembled

pytestmark = pytest.mark.simulator

triton = pytest.importorskip("triton")  # it brings ptxas
torch = pytest.importorskip("torch")
pytest.importorskip("numba")
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402


@triton.jit
def product(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(a.load([0, k]), b.load([k, 0]), total)
    c.store([0, 0], total)


#: Each step, four warps wait for each other and multiply; in the PTX of a future version.
STEPS = """.version 99.0
.target sm_100a
.address_size 64
.visible .entry steps(.param .u64 out, .param .u32 count)
{
.reg .pred %p0; .reg .b32 %r<4>; .reg .f32 %f<2>; .reg .b64 %rd<3>;
ld.param.u32 %r0, [count];
mov.u32 %r1, %tid.x;
cvt.rn.f32.u32 %f0, %r1;
NEXT:
bar.sync 0;
fma.rn.f32 %f0, %f0, %f0, %f0;
add.u32 %r0, %r0, -1;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra NEXT;
ld.param.u64 %rd0, [out];
mul.wide.u32 %rd1, %r1, 4;
add.u64 %rd0, %rd0, %rd1;
st.global.f32 [%rd0], %f0;
ret;
}
"""


#: The same steps, each warp for itself: nothing is synchronised.
ALONE = STEPS.replace("bar.sync 0;", "")
#: A barrier at the start alone; the steps take exponentials.
BEHIND = ALONE.replace("NEXT:", "bar.sync 0;\nNEXT:").replace(
    "fma.rn.f32 %f0, %f0, %f0, %f0;", "ex2.approx.ftz.f32 %f0, %f0;"
)

#: The same steps, in which each warp also stores and loads half rows of tensor memory.
HALVES = (
    STEPS.replace("%r<4>", "%r<8>")
    .replace(
        "NEXT:\n",
        """.shared .align 4 .b32 place;
mov.u32 %r2, place;
setp.lt.u32 %p0, %r1, 32;
@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
bar.sync 0;
ld.shared.u32 %r2, [%r2];
shr.u32 %r3, %r1, 5;
shl.b32 %r3, %r3, 21;
add.u32 %r3, %r3, %r2;
NEXT:
tcgen05.st.sync.aligned.16x32bx2.x2.b32 [%r3], 2, {%r1, %r0};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {%r4, %r5}, [%r3], 2;
tcgen05.wait::ld.sync.aligned;
add.u32 %r1, %r4, %r5;
""",
    )
    .replace("mul.wide.u32 %rd1, %r1, 4", "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd1, %r1, 4")
    .replace(
        "ret;",
        """bar.sync 0;
setp.lt.u32 %p0, %r1, 32;
@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
ret;""",
    )
)


def clocks(text, count):
    out = np.zeros(128, np.float32)
    (prediction,) = timing.predict_launches(
        lambda options: sm100_sim.launch_ptx(
            text, "steps", [out, count], block=128, options=options
        ),
        draws=1,
    )
    assert prediction.compiled.unmatched == 0 and "utilisation: " in prediction.as_text()
    return prediction.clocks[0]


@pytest.mark.parametrize(
    ("text", "least"),
    [(STEPS, 10), (ALONE, 4), (BEHIND, 8), (HALVES, 100)],
    ids=["steps", "alone", "behind", "half rows"],
)
@pytest.mark.sampled("steps", "alone", "behind")
def test_twice_the_steps_take_twice_the_time(text, least):
    """An FMA takes 4 clocks until the next one has its result, an exponential 8 for a warp.
    Of half rows ptxas makes two loads and two stores, all of which are found."""
    few, many = clocks(text, 64), clocks(text, 128)
    each = (many - few) / 64
    assert least < each < 200 and abs(few - 64 * each) < 1500


def test_what_ptxas_refuses_is_said():
    with pytest.raises(ValueError, match="ptxas refuses the module:(.|\\n)*nothing"):
        assembled(STEPS.replace("bar.sync 0;", "nothing.b32 %r0;"))


def test_the_command_predicts_a_kernel_and_names_perfetto(tmp_path, capsys):
    from sm100_sim.__main__ import main

    (tmp_path / "steps.ptx").write_text(STEPS)
    arguments = ["--kernel", "steps", "--block", "128", "--arg", "f32[128]", "--arg", "u32=32"]
    trace = tmp_path / "steps.json"
    command = ["predict", "--draws", "1", "--trace", str(trace), str(tmp_path / "steps.ptx")]
    assert main([*command, *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("steps on b200 (modelled") and "utilisation: " in out
    assert "critical path of the whole run" in out and "https://ui.perfetto.dev" in out
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.sampled
def test_triton_kernels():
    a, b = torch.randn(128, 512).half(), torch.randn(512, 128).half()
    tiles = (a, [128, 64]), (b, [64, 128]), (torch.zeros(128, 128), [128, 128])
    operands = [TensorDescriptor.from_tensor(tensor, tile) for tensor, tile in tiles]
    (prediction,) = timing.predict_launches(
        lambda options: sm100_sim.launch_triton(
            product, 1, *operands, 512, BM=128, BN=128, BK=64, options=options
        ),
        draws=1,
    )
    assert prediction.compiled.unmatched == 0 and "tensor core busy for 256" in prediction.as_text()
