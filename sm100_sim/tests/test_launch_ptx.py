"""`launch_ptx`: arguments of every kind, shapes, options, errors in the user's words."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

import sm100_sim
from sm100_sim import LaunchError, Options, launch_ptx
from sm100_sim.settings import read_settings
from sm100_sim.state import memory as memory_state

pytestmark = pytest.mark.simulator

HEAD = ".version 8.6\n.target sm_100a\n.address_size 64\n"

#: Thread i of all stores a value made from the scalars; b is stored by the first thread alone.
SCALARS = (
    HEAD
    + """
.visible .entry scalars(.param .u64 out, .param .u32 word, .param .f32 factor, .param .f64 exact,
                        .param .align 8 .b8 pair[8], .param .s16 small)
{
.reg .b16 %h;
.reg .b32 %i, %n, %b, %word, %low, %high;
.reg .f32 %f;
.reg .f64 %d, %e;
.reg .b64 %out, %offset;
mov.u32 %i, %tid.x;
mov.u32 %n, %ntid.x;
mov.u32 %b, %ctaid.x;
mad.lo.u32 %i, %b, %n, %i;
ld.param.u32 %word, [word];
ld.param.f32 %f, [factor];
ld.param.f64 %d, [exact];
ld.param.u32 %low, [pair];
ld.param.u32 %high, [pair+4];
ld.param.s16 %h, [small];
add.u32 %word, %word, %low;
sub.u32 %word, %word, %high;
cvt.s32.s16 %low, %h;
add.u32 %word, %word, %low;
cvt.rn.f64.s32 %e, %word;
cvt.f64.f32 %d, %f;
add.f64 %e, %e, %d;
ld.param.f64 %d, [exact];
add.f64 %e, %e, %d;
ld.param.u64 %out, [out];
mul.wide.u32 %offset, %i, 8;
add.u64 %out, %out, %offset;
st.global.f64 [%out], %e;
ret;
}
"""
)


@pytest.mark.parametrize("kind", ["numpy", "torch", "cute"])
def test_arguments(kind):
    """Arrays by address, scalars by the size of their parameter, bytes as they are."""
    out = given = np.zeros(64)
    if kind == "torch":
        given = torch.from_numpy(out)
    if kind == "cute":
        given = pytest.importorskip("cutlass.cute.runtime").from_dlpack(torch.from_numpy(out))
    pair = np.array([5, 2], np.uint32).tobytes()
    report = launch_ptx(
        SCALARS, "scalars", [given, -3, 0.5, np.float64(0.25), pair, np.int16(-1)], grid=2, block=32
    )
    assert out.tolist() == [-3 + 5 - 2 - 1 + 0.5 + 0.25] * 64
    assert (report.grid, report.block, report.cluster) == ((2, 1, 1), (32, 1, 1), (1, 1, 1))
    assert sm100_sim.last_reports()[-1] is report


@pytest.mark.parametrize(
    ("place", "value", "error", "message"),
    [
        (1, 1 << 32, LaunchError, "4294967296 does not fit parameter word of 4 bytes"),
        (1, np.uint64(1), LaunchError, "parameter word has 4 bytes; uint64 has 8"),
        (1, np.zeros(4), LaunchError, "parameter word has 4 bytes; ndarray has 8"),
        (5, 0.5, TypeError, "parameter small got a float; accepted: arrays, numpy scalars, int, "),
        (4, b"four", LaunchError, "parameter pair has 8 bytes; bytes has 4"),
        (0, [1, 2], TypeError, "parameter out got a list"),
        (0, None, TypeError, "parameter out got a NoneType"),
    ],
)
def test_arguments_that_do_not_fit(place, value, error, message):
    arguments = [np.zeros(32), 1, 1.0, 1.0, bytes(8), 1]
    arguments[place] = value
    with pytest.raises(error, match=message):
        launch_ptx(SCALARS, "scalars", arguments, block=32)


def test_a_number_of_arguments():
    with pytest.raises(LaunchError, match="1 arguments given, scalars has 6 parameters: out, word"):
        launch_ptx(SCALARS, "scalars", [np.zeros(32)], block=32)


def test_a_kernel_that_is_not_there():
    with pytest.raises(LaunchError, match=r"no kernel 'scalar'; it has \['scalars'\]"):
        launch_ptx(SCALARS, "scalar", [], block=32)


def test_what_is_no_ptx():
    with pytest.raises(sm100_sim.PtxSyntaxError):
        launch_ptx(HEAD + ".visible .entry k()\n{\nbra NOWHERE;\n}\n", "k", [], block=32)


@pytest.mark.parametrize("shape", [{"grid": 0}, {"block": (1, 2, 3, 4)}, {"cluster": "2"}])
def test_shapes_that_are_none(shape):
    (name,) = shape
    with pytest.raises(LaunchError, match=f"{name} is .*; accepted: one to three whole numbers"):
        launch_ptx(SCALARS, "scalars", [np.zeros(32), 1, 1.0, 1.0, bytes(8), 1],
                   **{"block": 32, **shape})  # fmt: skip


RANKS = (
    HEAD
    + """
.extern .shared .align 16 .b8 pool[];
.visible .entry ranks(.param .u64 out)
{
.reg .b32 %rank, %i, %y, %x, %bytes;
.reg .b64 %out, %offset;
mov.u32 %rank, %cluster_ctarank;
mov.u32 %x, %ctaid.x;
mov.u32 %y, %ctaid.y;
mad.lo.u32 %i, %y, 4, %x;
mov.u32 %bytes, %dynamic_smem_size;
add.u32 %rank, %rank, %bytes;
ld.param.u64 %out, [out];
mul.wide.u32 %offset, %i, 4;
add.u64 %out, %out, %offset;
st.global.u32 [%out], %rank;
ret;
}
"""
)


def test_clusters_and_shared_memory():
    out = np.zeros((2, 4), np.uint32)
    report = launch_ptx(RANKS, "ranks", [out], grid=(4, 2), block=1, cluster=(2, 1, 1),
                        dynamic_smem=200 << 10)  # fmt: skip
    assert (out - (200 << 10)).tolist() == [[0, 1, 0, 1]] * 2
    assert report.dynamic_smem == 200 << 10


#: Each warp reads in its own part of the pair's sums what the other has stored, with no barrier.
RACE = (
    HEAD
    + """
.visible .entry race(.param .u64 out)
{
.shared .align 4 .b32 words[64];
.reg .b32 %i, %other, %at, %x;
.reg .b64 %out, %offset;
mov.u32 %i, %tid.x;
mul.lo.u32 %at, %i, 4;
mov.u32 %x, words;
add.u32 %at, %at, %x;
st.shared.u32 [%at], %i;
xor.b32 %other, %at, 128;
ld.shared.u32 %x, [%other];
ld.param.u64 %out, [out];
mul.wide.u32 %offset, %i, 4;
add.u64 %out, %out, %offset;
st.global.u32 [%out], %x;
ret;
}
"""
)


def test_options_and_the_environment(monkeypatch, tmp_path):
    """Options are taken as they are; without them the variables count. The report goes to the file
    in both cases."""
    file = tmp_path / "reports.jsonl"
    monkeypatch.setenv("SM100_SIM_REPORT", str(file))
    seen = []
    options = Options(seed=3, observe=lambda config, report: seen.append((config, report)))
    report = launch_ptx(RACE, "race", [np.zeros(64, np.uint32)], block=64, options=options)
    assert report.seed == 3 and not report.findings
    ((config, observed),) = seen
    assert observed is report and isinstance(config, sm100_sim.LaunchConfig)
    monkeypatch.setenv("SM100_SIM_SANITIZE", "1")
    report = launch_ptx(RACE, "race", [np.zeros(64, np.uint32)], block=64)
    kinds = {finding.kind for finding in report.findings}
    assert kinds & {"race", "uninitialised-read"} and report.seed is None
    assert all(isinstance(finding, sm100_sim.Finding) for finding in report.findings)
    assert all(isinstance(cause, sm100_sim.Cause) for cause in report.causes)
    assert [json.loads(line)["kernel"] for line in file.read_text().splitlines()] == ["race"] * 2


def test_an_error_names_the_kernel():
    with pytest.raises(sm100_sim.MemoryFault) as caught:
        launch_ptx(RACE, "race", [np.zeros(32, np.uint32)], block=64)
    assert caught.value.kernel == "race"
    assert "`st.global.u32 [%out], %x`" in str(caught.value)


@pytest.mark.parametrize(
    ("directives", "moves"), [("", False), (".maxnreg 64", True), (".minnctapersm 1", True)]
)
def test_setmaxnreg_counts_where_ptxas_keeps_it(directives, moves):
    """ptxas drops it without either directive: a warp that requests too many then goes on."""
    ptx = HEAD + (
        f".visible .entry moves()\n.reqntid 128, 1, 1\n{directives}\n{{\n"
        "setmaxnreg.inc.sync.aligned.u32 240;\nret;\n}\n"
    )
    configs = []
    options = Options(observe=lambda config, report: configs.append(config))
    try:
        launch_ptx(ptx, "moves", [], block=128, options=options)
        ended = "done"
    except sm100_sim.SimulationError as error:
        ended = type(error).__name__
    if moves and directives.startswith(".maxnreg"):
        assert ended == "Hang"
    else:
        assert ended == "done" and configs[0].moves_registers == moves


def test_devices():
    assert sm100_sim.device("gb300:19") == sm100_sim.device("gb300").__class__(
        "gb300", (10, 3), 19, sm100_sim.DEVICES["gb300"].memory_bytes
    )
    assert sm100_sim.device() == sm100_sim.DEVICES["b200"]
    with pytest.raises(ValueError, match="'b100'; accepted are b200"):
        sm100_sim.device("b100")


def test_errors_come_without_the_frames_of_the_simulator():
    """A stranger's traceback ends at the call, and says what is wrong with the kernel."""
    text = """.version 8.6
.target sm_100a
.address_size 64
.visible .entry stores(.param .u64 p) { .reg .b64 %rd; ld.param.u64 %rd, [p];
st.global.b64 [%rd], 1; ret; }"""
    with pytest.raises(sm100_sim.MemoryFault) as raised:
        sm100_sim.launch_ptx(text, "stores", [64], block=32)
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [Path(frame.filename).name for frame in frames] == ["test_launch_ptx.py", "errors.py"]
    assert raised.value.__suppress_context__


#: One thread accesses the four bytes behind the two words of an array.
BEHIND = (
    HEAD
    + """
.visible .entry behind(.param .u64 data)
{
.reg .b32 %x;
.reg .b64 %data;
ld.param.u64 %data, [data];
mov.u32 %x, 0;
ACCESS
ret;
}
"""
)


def test_loads_of_the_padding_behind_a_tensor():
    pages = np.zeros(2048, np.uint32)
    data = pages[-pages.ctypes.data % 4096 // 4 :][:2]
    load, store = "ld.global.u32 %x, [%data+8];", "st.global.u32 [%data+8], %x;"
    far = "ld.global.u32 %x, [%data+512];"
    padded = Options(padded=True)
    with pytest.raises(sm100_sim.MemoryFault, match="it ends 0 bytes before"):
        launch_ptx(BEHIND.replace("ACCESS", load), "behind", [data], block=1)
    report = launch_ptx(BEHIND.replace("ACCESS", load), "behind", [data], block=1, options=padded)
    assert report.warp_instructions
    for refused in (store, far):
        with pytest.raises(sm100_sim.MemoryFault):
            launch_ptx(BEHIND.replace("ACCESS", refused), "behind", [data], block=1, options=padded)


def test_padding_ends_at_the_next_tensor_and_page():
    parameters = np.zeros(16, np.uint8)
    ranges = [(8192, 8208, "a"), (8448, 9472, "b"), (12000, 12280, "c"), (20480, 20992, "d")]
    rows = memory_state.GlobalMemory(ranges, parameters, True).table.tolist()
    read_only = [row for row in rows if not row[2]]
    assert read_only == [[8208, 8448, 0], [12280, 12288, 0]]
    assert rows == sorted(rows)


def test_padded_is_a_variable():
    assert read_settings({"SM100_SIM_PADDED": "1"}).padded
    with pytest.raises(ValueError, match="SM100_SIM_PADDED is 'yes'; accepted are 0 and 1"):
        read_settings({"SM100_SIM_PADDED": "yes"})
