"""tensormap.replace and tensormap.cp_fenceproxy against the driver's encoding of descriptors."""

import dataclasses

import numpy as np
import pytest
from harness import compile_body
from kernel_text import run_kernel_text

from sm100_sim.errors import Misaligned, SimulationError, UnknownInstruction
from sm100_sim.state.tensormap import TENSORMAP_BYTES, TensorMap, decode, encode

MAP = TensorMap(address=0x12_3456_7890, dtype="bf16", sizes=(1 << 20, 77, 3), box=(64, 32, 2),
                strides=(1 << 21, (1 << 36) + 4096), element_strides=(1, 2, 1), swizzle=128,
                atom=32, nan_fill=True, version=0)  # fmt: skip


def replaced(t: TensorMap, elemtype: int, place: str = "[%r1]", space: str = ".shared::cta") -> str:
    """PTX that writes every field of a descriptor."""
    lines = [
        f"global_address{space}.b1024.b64 {place}, {t.address}",
        f"rank{space}.b1024.b32 {place}, {t.rank - 1}",
        f"elemtype{space}.b1024.b32 {place}, {elemtype}",
        f"interleave_layout{space}.b1024.b32 {place}, 0",
        f"swizzle_mode{space}.b1024.b32 {place}, {(0, 32, 64, 128).index(t.swizzle)}",
        f"swizzle_atomicity{space}.b1024.b32 {place}, {t.atom // 32}",
        f"fill_mode{space}.b1024.b32 {place}, {int(t.nan_fill)}",
    ]
    for n in range(t.rank):
        lines += [
            f"global_dim{space}.b1024.b32 {place}, {n}, {t.sizes[n]}",
            f"box_dim{space}.b1024.b32 {place}, {n}, {t.box[n]}",
            f"element_stride{space}.b1024.b32 {place}, {n}, {t.element_strides[n]}",
        ]
    for n, stride in enumerate(t.strides):
        lines.append(f"global_stride{space}.b1024.b64 {place}, {n}, {stride}")
    return "".join(f"@%p1 tensormap.replace.tile.{line};\n" for line in lines)


COPY = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
START = """mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; mov.u32 %r1, smem;
shl.b32 %r2, %r0, 2; add.u32 %r2, %r1, %r2; st.shared.b32 [%r2], 0; bar.warp.sync -1;
"""


def place_for_descriptor() -> np.ndarray:
    raw = np.zeros(3 * TENSORMAP_BYTES, np.uint8)
    skip = -raw.__array_interface__["data"][0] % TENSORMAP_BYTES
    return raw[skip : skip + TENSORMAP_BYTES]


@pytest.mark.parametrize(
    "dtype, elemtype, change",
    [
        ("bf16", 10, {}),
        ("u8", 0, {"nan_fill": False, "swizzle": 32, "atom": 16, "box": (32, 4, 1)}),
        ("f32", 11, {"tf32": True, "box": (32, 4, 1)}),
        ("b4x16_p64", 14, {"nan_fill": False, "box": (128, 4, 1)}),
    ],
)
def test_a_descriptor_is_made_field_by_field(dtype, elemtype, change):
    t = dataclasses.replace(MAP, dtype=dtype, **change)
    if dtype == "b4x16_p64":
        t = dataclasses.replace(t, address=t.address & ~31)
    out = place_for_descriptor()
    run_kernel_text(
        START
        + replaced(t, elemtype)
        + f"""fence.proxy.async.shared::cta;
        {COPY} [%rd8], [%r1], 128;
        fence.proxy.tensormap::generic.acquire.gpu [%rd8], 128;
        prefetch.tensormap [%rd8];""",
        [out],
    )
    assert out.tobytes() == encode(t) and decode(out.tobytes()) == t


def test_one_field_of_a_descriptor_in_global_memory_changes():
    out = place_for_descriptor()
    out[:] = np.frombuffer(encode(MAP), np.uint8)
    run_kernel_text(
        """mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; mov.u32 %r2, 999;
        @%p1 tensormap.replace.tile.global_dim.global.b1024.b32 [%rd8], 1, %r2;
        @%p1 tensormap.replace.tile.global_stride.b1024.b64 [%rd8], 0, 65536;""",
        [out],
    )
    want = dataclasses.replace(MAP, sizes=(1 << 20, 999, 3), strides=(65536, MAP.strides[1]))
    assert out.tobytes() == encode(want)


@pytest.mark.parametrize(
    "line, error",
    [
        ("box_dim.global.b1024.b32 [%rd8], 0, 257", SimulationError),
        ("global_stride.global.b1024.b64 [%rd8], 0, 8", Misaligned),
        ("rank.global.b1024.b32 [%rd8+64], 1", Misaligned),
    ],
)
def test_values_that_do_not_fit_are_errors(line, error):
    with pytest.raises(error, match="tensormap.replace|128-byte aligned"):
        run_kernel_text(f"tensormap.replace.tile.{line};", [place_for_descriptor()])


@pytest.mark.parametrize(
    "line",
    [
        "replace.tile.rank.global.b1024.b64 [%a], %a",
        "replace.tile.colour.global.b1024.b32 [%a], 1",
        "replace.tile.box_dim.global.b1024.b32 [%a], 5, 1",
        "replace.im2col.rank.b1024.b32 [%a], 1",
        "replace.tile.elemtype.global.b1024.b32 [%a], 16",
        "cp_fenceproxy.global [%a], [%a], 128",
    ],
)
def test_other_forms_are_errors(line):
    with pytest.raises(UnknownInstruction, match="tensormap"):
        compile_body(f".reg .b64 %a; tensormap.{line};")
