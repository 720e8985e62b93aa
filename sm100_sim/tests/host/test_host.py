"""Host interception: a compiled function's own host code runs here and its launch is caught."""

import ctypes
import dataclasses
import gc
import importlib.metadata
import os
import re
import struct
import subprocess

import cutlass
import numpy as np
import pytest
import torch
from cross_compile import compile_sm100, targeting
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

import sm100_sim
from sm100_sim.errors import LaunchError
from sm100_sim.host import host_code
from sm100_sim.host import program as host_program
from sm100_sim.host.arguments import (
    LOWEST_ADDRESS,
    possible_addresses,
    strided_extent,
    tensor_ranges,
)
from sm100_sim.host.cubin import launch_registers, loaded_cubin, moving_registers
from sm100_sim.state.tensormap import decode

pytestmark = pytest.mark.simulator


@cute.kernel
def scale_kernel(source: cute.Tensor, target: cute.Tensor, factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    target[block * 64 + thread] = source[block * 64 + thread] * factor


@cute.jit
def scale(source: cute.Tensor, target: cute.Tensor, factor: cutlass.Float32, blocks: cutlass.Int32):
    scale_kernel(source, target, factor).launch(
        grid=[blocks, 1, 1], block=[64, 1, 1], cluster=[2, 1, 1], smem=4096
    )


@cute.kernel
def shape_kernel(target: cute.Tensor):
    x, y, _ = cute.arch.block_in_cluster_dim()
    block, _, _ = cute.arch.block_idx()
    target[block] = x * 16 + y


@cute.jit
def prefer(target: cute.Tensor):
    shape_kernel(target).launch(
        grid=[8, 1, 1], block=[32, 1, 1], cluster=[4, 1, 1], fallback_cluster=[2, 1, 1]
    )


@cute.kernel
def tensor_map_kernel(atom: cute.CopyAtom, tensor: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        cute.nvgpu.cpasync.prefetch_descriptor(atom)


@cute.jit
def launch_tensor_map(source: cute.Tensor):
    layout = cute.make_layout((8, 64), stride=(64, 1))
    atom, tensor = cute.nvgpu.cpasync.make_tiled_tma_atom(
        cute.nvgpu.cpasync.CopyBulkTensorTileG2SOp(), source, layout, (8, 64)
    )
    tensor_map_kernel(atom, tensor).launch(grid=[1, 1, 1], block=[32, 1, 1])


@pytest.fixture(scope="module")
def compiled():
    a, b = torch.zeros(256), torch.zeros(256)
    return compile_sm100(scale, from_dlpack(a), from_dlpack(b), cutlass.Float32(1), 2)


def launches(compiled, *args):
    return sm100_sim.launch_configs(compiled, *args)


def test_launch_configuration(compiled):
    a, b = torch.zeros(256), torch.zeros(256)
    (config,) = launches(compiled, from_dlpack(a), from_dlpack(b), 2.5, 4)
    assert "scale_kernel" in config.kernel_name
    assert config.kernel_name in config.ptx
    assert (config.grid, config.block, config.cluster) == ((4, 1, 1), (64, 1, 1), (2, 1, 1))
    assert config.dynamic_smem == 4096
    assert config.attributes["cooperative"] == 0
    assert len(config.param_pointers) == 3


def registers_by_cuobjdump(cubin: bytes, folder) -> int:
    """Return the registers of the one kernel of a cubin, as NVIDIA's own tool reports them."""
    files = importlib.metadata.files("nvidia-cuda-cuobjdump") or []
    (tool,) = [file.locate() for file in files if file.stem == "cuobjdump"]
    (folder / "a.cubin").write_bytes(cubin)
    command = [str(tool), "--dump-resource-usage", str(folder / "a.cubin")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (count,) = re.findall(r"REG:(\d+)", text)
    return int(count)


def test_the_registers_of_a_launch_are_those_of_its_machine_code(compiled, tmp_path):
    """Read from the cubin that the host code loads, whether the DSL was told to keep it or not."""
    a, b = torch.zeros(256), torch.zeros(256)
    (config,) = launches(compiled, from_dlpack(a), from_dlpack(b), cutlass.Float32(1), 4)
    assert compiled.artifacts.CUBIN is None
    assert config.registers == registers_by_cuobjdump(config.cubin, tmp_path) > 0
    plain = ctypes.create_string_buffer(config.cubin)
    assert loaded_cubin(ctypes.addressof(plain)) == config.cubin
    compressed = struct.pack("<IHHQHHIQ", 0xBA55ED50, 1, 16, 24, 2, 0x101, 16, 8) + b"squeezed"
    buffer = ctypes.create_string_buffer(compressed)
    assert loaded_cubin(ctypes.addressof(buffer)) == b""
    assert launch_registers(b"") == {}


def test_preferred_clusters_are_those_that_run():
    target = torch.zeros(8, dtype=torch.int32)
    function = compile_sm100(prefer, from_dlpack(target))
    (config,) = launches(function, from_dlpack(target))
    assert config.cluster == (4, 1, 1) and config.attributes["preferred_cluster_dimension"] == 4
    report = sm100_sim.launch(function, from_dlpack(target))
    assert target.tolist() == 8 * [4 * 16 + 1] and report.cluster == (4, 1, 1)


def test_parameters_are_the_arguments(compiled):
    a, b = torch.zeros(256), torch.zeros(256)
    seen = []

    def look(config):
        pointers = config.param_pointers
        seen.append(ctypes.c_uint64.from_address(pointers[0]).value)
        seen.append(ctypes.c_uint64.from_address(pointers[1]).value)
        seen.append(ctypes.c_float.from_address(pointers[2]).value)

    host_program.program_of(compiled).run((from_dlpack(a), from_dlpack(b), 2.5, 4), look)
    assert seen == [a.data_ptr(), b.data_ptr(), 2.5]


def test_repeated_and_keyword_calls_and_one_program(compiled):
    a, b = from_dlpack(torch.zeros(256)), from_dlpack(torch.zeros(256))
    program = host_program.program_of(compiled)
    assert host_program.program_of(compiled) is program
    grids = []
    for blocks in (2, 4, 6):
        named = {"target": b, "factor": 1.0, "blocks": blocks}
        program.run((a,), lambda config: grids.append(config.grid[0]), named)
    assert grids == [2, 4, 6]


def test_two_functions_in_one_process(compiled):
    source = from_dlpack(torch.zeros(64, 64, dtype=torch.bfloat16), assumed_align=16)
    other = compile_sm100(launch_tensor_map, source)
    maps = []

    def look(config):
        maps.extend(decode(ctypes.string_at(p, 128)) for p in config.param_pointers[:1])

    a, b = from_dlpack(torch.zeros(256)), from_dlpack(torch.zeros(256))
    nested = []

    def launch_inside(config):
        host_program.program_of(other).run((source,), look)
        nested.append(config.kernel_name)

    host_program.program_of(compiled).run((a, b, 1.0, 2), launch_inside)
    assert "scale_kernel" in nested[0]
    assert maps[0].sizes == (64, 64) and maps[0].box == (64, 8) and maps[0].dtype == "bf16"
    assert maps[0].address == source.data_ptr


def test_errors_surface_as_exceptions(compiled):
    a, b = from_dlpack(torch.zeros(256)), from_dlpack(torch.zeros(256))

    def fail(config):
        raise ZeroDivisionError("inside the launch")

    program = host_program.program_of(compiled)
    with pytest.raises(ZeroDivisionError, match="inside the launch"):
        program.run((a, b, 1.0, 2), fail)
    grids = []
    program.run((a, b, 1.0, 2), lambda config: grids.append(config.grid))
    assert grids == [(2, 1, 1)]


@pytest.mark.skipif("ptx" in os.environ.get("CUTE_DSL_KEEP", ""), reason="PTX is always kept")
def test_missing_ptx_says_what_to_do(compiled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = torch.zeros(128), torch.zeros(128)
    with targeting():
        bare = cute.compile(scale, from_dlpack(a), from_dlpack(b), cutlass.Float32(1), 2)
    # Keeping PTX ended with its context: no file is written afterwards.
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LaunchError, match="keeping_ptx"):
        host_code.HostProgram(bare)
    with pytest.raises(LaunchError, match="PTX"):
        host_code.HostProgram(lambda: None)


def test_program_goes_with_its_function():
    a, b = torch.zeros(192), torch.zeros(192)
    mine = compile_sm100(scale, from_dlpack(a), from_dlpack(b), cutlass.Float32(1), 2)
    gc.collect()
    before = len(host_program._programs)
    host_program.program_of(mine)
    assert len(host_program._programs) == before + 1
    del mine
    gc.collect()
    assert len(host_program._programs) == before


# ---------------------------------------------------------------- extents of the arguments


def test_ranges_of_slices_and_nested_tensors():
    @dataclasses.dataclass
    class Pair:
        k: object
        v: object

    fused = torch.zeros(2, 8, 3, 4, 16, dtype=torch.bfloat16)
    q = fused[:, :, 0]
    k = torch.zeros(5, 7).t()
    v = np.zeros((6, 4), np.float32)[::-1]
    ranges = tensor_ranges((q, (1, Pair(from_dlpack(k), v))), {"out": torch.zeros(0, 4)})
    by_name = {name: (start, end) for start, end, name in ranges}
    assert set(by_name) == {"args[0]", "args[1][1].k", "args[1][1].v"}
    last = q[-1, -1, -1, -1:].data_ptr() + 2
    assert by_name["args[0]"] == (q.data_ptr(), last)
    assert by_name["args[1][1].k"] == (k.data_ptr(), k.data_ptr() + 140)
    low = v.__array_interface__["data"][0] - 5 * 16
    assert by_name["args[1][1].v"] == (low, low + 96)
    assert ranges == sorted(ranges)


def test_broadcast_extent():
    assert strided_extent(1000, (4, 8), (0, 1), 16) == (1000, 1016)
    assert strided_extent(1000, (4, 8), (-8, 1), 16) == (1000 - 48, 1016)
    assert strided_extent(1000, (4, 0), (8, 1), 16) is None
    assert strided_extent(1000, (3,), (1,), 4) == (1000, 1002)


@cute.kernel
def grow_kernel(target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    if thread < 128:
        cute.arch.setmaxregister_increase(232)
    else:
        cute.arch.setmaxregister_decrease(24)
    target[thread] = thread


@cute.jit
def grow(target: cute.Tensor, residents: cutlass.Constexpr):
    grow_kernel(target).launch(grid=[1, 1, 1], block=[256, 1, 1], min_blocks_per_mp=residents)


@pytest.mark.parametrize("residents", [0, 1])
def test_setmaxnreg_that_ptxas_drops_moves_nothing(residents):
    """A kernel without a directive that fixes the registers is launched with far too few."""
    target = torch.zeros(256, dtype=torch.int32)
    compiled = compile_sm100(grow, from_dlpack(target), residents)
    report = sm100_sim.launch(compiled, from_dlpack(target))
    (config,) = launches(compiled, from_dlpack(target))
    assert "setmaxnreg.inc" in config.ptx and report.warps("setmaxnreg") == 8
    assert config.moves_registers == bool(moving_registers(config.cubin)) == (residents == 1)
    assert (config.registers < 128) == (residents == 0)
    assert torch.equal(target, torch.arange(256, dtype=torch.int32))


def test_addresses_below_4_gib_may_be_memory():
    """Heaps of a Python that is not position-independent lie there; the first pages nowhere."""
    table = np.array([5, 0x4B48_7800, LOWEST_ADDRESS - 1], np.int64)
    found = possible_addresses((LOWEST_ADDRESS, table, 0x7F12_3456_7000), {"count": 3})
    assert found.tolist() == [LOWEST_ADDRESS, 0x4B48_7800, 0x7F12_3456_7000]
