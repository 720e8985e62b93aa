"""tcgen05.ld.red (sm_103a): what is loaded, and the least or greatest of it in each thread."""

import re

import numpy as np
import pytest

import sm100_sim
from sm100_sim import UnknownInstruction
from sm100_sim.timing.machine_code.events import ptx_kind, sass_kind
from sm100_sim.timing.machine_code.sass import Control, SassInstruction
from sm100_sim.tools.golden.instructions.tcgen05 import HEADER, frame, registers
from sm100_sim.tools.golden.ptx_text import KERNEL as NAME

COLUMNS, THREADS = 16, 128
NAN = 0x7FFFFFFF


def module(form, options, waits=True):
    """Every thread stores its row of p0 to its lane, loads it back and reduces it; p1: (threads,
    COLUMNS + 1), what it loads and the result."""
    count = COLUMNS if form == "32x32b" else COLUMNS // 2
    split = "" if form == "32x32b" else f", {count}"
    width = COLUMNS + 1
    loads = "".join(f"ld.global.b32 %w{i}, [%rd1+{4 * i}];\n" for i in range(COLUMNS))
    stores = "".join(f"st.global.b32 [%rd1+{4 * i}], %v{i};\n" for i in range(count))
    body = (
        f"ld.param.u64 %rd1, [p0];\nmul.wide.u32 %rd2, %thread, {4 * COLUMNS};\n"
        f"add.u64 %rd1, %rd1, %rd2;\n{loads}add.u32 %a, %taddr, %lanes;\n"
        f"tcgen05.st.sync.aligned.32x32b.x{COLUMNS}.b32 [%a], {registers('w', COLUMNS)};\n"
        "tcgen05.wait::st.sync.aligned;\n"
        f"tcgen05.ld.red.sync.aligned.{form}.x{count}.{options} {registers('v', count)}, %w0, "
        f"[%a]{split};\n"
        + "tcgen05.wait::ld.sync.aligned;\n"
        * waits
        + f"ld.param.u64 %rd1, [p1];\nmul.wide.u32 %rd2, %thread, {4 * width};\n"
        f"add.u64 %rd1, %rd1, %rd2;\n{stores}st.global.b32 [%rd1+{4 * COLUMNS}], %w0;\n"
    )
    ptx = frame(f".reg .b32 %w<{COLUMNS}>, %v<{COLUMNS}>;\n", body, 1, 2 * COLUMNS, 2)
    assert HEADER in ptx
    return ptx.replace(HEADER, ".version 9.0\n.target sm_103a\n.address_size 64\n")


def buffers(rows):
    """Return the buffers that the module reads and writes."""
    given = np.ascontiguousarray(rows).view(np.uint32)
    return [given, np.zeros((THREADS, COLUMNS + 1), np.uint32)]


def run(rows, form, options):
    """Run the module; return what it writes."""
    arguments = buffers(rows)
    sm100_sim.launch_ptx(module(form, options), NAME, arguments, block=THREADS)
    return arguments[1]


def rows_of(kind):
    generator = np.random.default_rng(0)
    if kind != "f32":
        return generator.integers(0, 1 << 32, (THREADS, COLUMNS), np.uint32)
    rows = generator.standard_normal((THREADS, COLUMNS)).astype(np.float32)
    rows[1, :3] = np.nan
    rows[2] = np.nan
    rows[3] = np.inf
    rows[4] = 0.0
    rows[4, ::2] = -0.0
    rows[5, 7] = -np.inf
    return rows


@pytest.mark.parametrize("kind", ["f32", "s32", "u32"])
@pytest.mark.parametrize("operation", ["min", "max"])
@pytest.mark.parametrize("form", ["32x32b", "16x32bx2"])
def test_what_is_loaded_and_its_reduction(form, operation, kind):
    rows = rows_of(kind)
    out = run(rows, form, f"{operation}.{kind}")
    loaded = loaded_rows(rows.view(np.uint32), form)
    assert np.array_equal(out[:, : loaded.shape[1]], loaded)
    if kind == "f32":
        pick = np.fmin if operation == "min" else np.fmax
        values = loaded.view(np.float32)
        want = pick.reduce(values, 1)
        assert np.array_equal(out[:, COLUMNS].view(np.float32), want, equal_nan=True)
        # Row 4 holds both zeros; the least is -0.
        assert out[4, COLUMNS] == (0x80000000 if operation == "min" else 0) or form != "32x32b"
        assert out[2, COLUMNS] == NAN or form != "32x32b"
    else:
        values = loaded.view(np.int32 if kind == "s32" else np.uint32)
        want = values.min(1) if operation == "min" else values.max(1)
        assert np.array_equal(out[:, COLUMNS].view(values.dtype), want)


def loaded_rows(rows, form):
    """Words (threads, registers) that the threads of each warp load."""
    if form == "32x32b":
        return rows
    half, found = COLUMNS // 2, []
    for warp in range(THREADS // 32):
        lanes = rows[32 * warp : 32 * warp + 16]
        found += [lanes[:, :half], lanes[:, half:]]
    return np.concatenate(found)


def test_absolute_values_and_nan_as_the_result():
    rows = rows_of("f32")
    for operation, reduce in (("min", np.fmin), ("max", np.fmax)):
        out = run(rows, "32x32b", f"{operation}.abs.f32")
        found = out[:, COLUMNS].view(np.float32)
        assert np.array_equal(found, reduce.reduce(np.abs(rows), 1), equal_nan=True)
        out = run(rows, "32x32b", f"{operation}.NaN.f32")
        want = (np.min if operation == "min" else np.max)(rows, 1)
        assert np.array_equal(out[:, COLUMNS].view(np.float32), want, equal_nan=True)
        assert out[1, COLUMNS] == NAN
    out = run(rows, "32x32b", "max.abs.NaN.f32")
    want = np.max(np.abs(rows), 1)
    assert np.array_equal(out[:, COLUMNS].view(np.float32), want, equal_nan=True)


@pytest.mark.parametrize(("form", "options", "said"), [
    ("32x32b", "add.f32", "min or .max"),
    ("32x32b", "max.abs.s32", "of .f32"), ("32x32b", "max.NaN.abs.f32", "in this order"),
    ("32x32b", "max.f16", "f32, .u32 or .s32"),
])  # fmt: skip
def test_other_forms_are_refused(form, options, said):
    with pytest.raises(UnknownInstruction, match=said):
        run(rows_of("f32"), form, options)


def test_another_shape_is_refused():
    text = module("32x32b", "max.f32").replace(f"32x32b.x{COLUMNS}.max", f"16x64b.x{COLUMNS}.max")
    with pytest.raises(UnknownInstruction, match="32x32b or 16x32bx2"):
        sm100_sim.launch_ptx(text, NAME, buffers(rows_of("f32")), block=THREADS)


def test_of_one_register_there_is_no_reduction():
    text = module("32x32b", "max.f32")
    text = text.replace(f"x{COLUMNS}.max.f32 {registers('v', COLUMNS)}", "x1.max.f32 {%v0}")
    with pytest.raises(UnknownInstruction, match="x2"):
        sm100_sim.launch_ptx(text, NAME, buffers(rows_of("f32")), block=THREADS)


@pytest.mark.parametrize("used", ["all", "result", "nothing"])
def test_the_sanitizer_sees_it_in_flight_until_something_of_it_is_used(used):
    """The use of either result says, without a wait, that all of it is there; what nobody uses is
    still being loaded when the memory is given back."""
    text = module("32x32b", "max.f32", waits=False)
    if used != "all":
        text = re.sub(r"st.global.b32 \[%rd1\+\d+\], %v\d+;\n", "", text)
    if used == "nothing":
        text = re.sub(r"st.global.b32 \[%rd1\+\d+\], %w0;\n", "", text)
    report = sm100_sim.launch_ptx(
        text, NAME, buffers(rows_of("f32")), block=THREADS,
        options=sm100_sim.Options(sanitize=True),
    )  # fmt: skip
    assert [finding.kind for finding in report.findings] == ["freed-in-use"] * (used == "nothing")


def test_its_site_in_the_sass():
    """ptxas 13.1 writes such a site for sm_103a; two loads of different width are never the
    same."""
    sites = {
        width: sass_kind(
            SassInstruction(
                0, "", f"LDTM.STAT.x{width}.MAX.F32", "R69, R4, tmem[UR4]", Control.decode(0)
            )
        )  # fmt: skip
        for width in (32, 64)
    }
    for width, site in sites.items():
        assert site == ptx_kind(f"tcgen05.ld.red.sync.aligned.32x32b.x{width}.max.f32")
    assert sites[32] != sites[64]
