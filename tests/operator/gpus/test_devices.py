"""Facts that the operator takes from the GPU: pairs that fit, L2, HBM, rows of the tuning table."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from gpus import gpu

from fa4_hd256 import flash_attn_func
from fa4_hd256.call.backward_problem import KeyWork, choose_head_parts
from fa4_hd256.call.division import splits_for
from fa4_hd256.call.forward_problem import Problem
from fa4_hd256.call.options import Options
from fa4_hd256.gpus import devices, driver
from fa4_hd256.kernels.blackwell import tuning
from fa4_hd256.kernels.blackwell.architecture import KERNELS, RECOMPUTED
from fa4_hd256.kernels.blackwell.forward.config import TILES
from fa4_hd256.run import launch as launching
from fa4_hd256.run.arguments import call_scalars
from fa4_hd256.run.catalogue import forward_spec
from fa4_hd256.softmax_emu.pattern import HARDWARE_ONLY, Ex2Pattern

pytestmark = pytest.mark.architecture("sm_100a")

MIB = 1 << 20
CPU = torch.device("cpu")


def properties(sms, capability=(10, 0), l2=126 * MIB):
    major, minor = capability
    return SimpleNamespace(
        multi_processor_count=sms, major=major, minor=minor, L2_cache_size=l2, name="Some GPU"
    )


@pytest.fixture
def machine(monkeypatch):
    """Two GPUs: a B200 as cuda:0, which is current, and a slice of a B300 as cuda:1."""
    gpus = [properties(148), properties(19, (10, 3), 16 * MIB)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    monkeypatch.setattr(driver, "resident_pairs", lambda index: (74, 8)[index])
    monkeypatch.setattr(driver, "hbm_bytes_per_second", lambda index: (8e12, 1e12)[index])
    devices._cuda_gpu.cache_clear()
    yield gpus
    devices._cuda_gpu.cache_clear()


def test_the_device_of_the_tensors_decides(machine):
    """Neither the current device decides, nor an earlier query."""
    first, second = (devices.gpu_of(torch.device("cuda", index)) for index in (0, 1))
    assert (first.sms, first.pairs, first.l2_bytes_for_tiles) == (148, 74, 64 * MIB)
    # An SM without a peer, and one more that lies alone in its group.
    assert (second.sms, second.pairs, second.l2_bytes_for_tiles) == (19, 8, 8 * MIB)
    assert (first.tuning_name, second.tuning_name) == ("B200", "B300")
    assert devices.gpu_of(torch.device("cuda")) is first
    assert devices.gpu_of(torch.device("cuda", 1)) is second


def test_each_gpu_is_asked_once(machine, monkeypatch):
    found = devices.gpu_of(torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    assert devices.gpu_of(torch.device("cuda", 1)) is found


def test_calls_on_two_gpus_of_a_process(machine, tmp_path):
    """Parts of the keys, mix of exp2 and grid follow each one's own GPU."""
    table = tmp_path / "tuning.json"
    mixes = {"B200": Ex2Pattern(16, 4), "B300": Ex2Pattern(8, 2)}
    rows = [
        tuning.TunedPattern(name, True, "medium", mix, "modelled", "none")
        for name, mix in mixes.items()
    ]
    tuning.write(rows, table)
    q, k = torch.zeros(1, 16, 16, 256).bfloat16(), torch.zeros(1, 8192, 2, 256).bfloat16()
    problem = Problem.describe((q, k, k), Options.check(None, True, (None, None), 0.0))
    found = {}
    for index in (0, 1):
        one = devices.gpu_of(torch.device("cuda", index))
        scalars = call_scalars(problem.problem_class, problem, one)
        mix = tuning.pattern_for(True, 8192, one.tuning_name, table)
        numbers = scalars.clusters.value, scalars.l2_bytes.value
        found[index] = (splits_for(problem, one), mix, *numbers)
    assert found[0] == (32, mixes["B200"], 74, 64 * MIB)
    assert found[1] == (4, mixes["B300"], 8, 8 * MIB)


def test_without_an_answer_of_the_driver(machine, monkeypatch):
    def fails(index):
        raise driver.DriverError("cuModuleLoadData: CUDA_ERROR_JIT_COMPILER_NOT_FOUND")

    monkeypatch.setattr(driver, "resident_pairs", fails)
    with pytest.warns(RuntimeWarning, match="cuda:1 holds .*JIT_COMPILER.*half of its 19 SMs"):
        assert devices.gpu_of(torch.device("cuda", 1)).pairs == 9


def test_without_the_clock_of_the_memory(machine, monkeypatch):
    """The rate of the family counts then, as much per SM."""
    monkeypatch.setattr(driver, "hbm_bytes_per_second", lambda index: 0.0)
    rates = [devices.gpu_of(torch.device("cuda", i)).hbm_bytes_per_second for i in (0, 1)]
    assert 7.5e12 < rates[0] < 8.5e12 and rates[1] == pytest.approx(rates[0] * 19 / 148)


def test_a_device_without_a_pair(monkeypatch):
    monkeypatch.setenv("SM100_SIM_DEVICE", "b200:1")
    with pytest.raises(ValueError, match="holds no CTA pair: it has 1 SMs.*accepted"):
        flash_attn_func(*(torch.zeros(1, 4, 1, 256).bfloat16() for _ in range(3)))


def test_the_driver_says_why_it_fails():
    """A machine without a driver gives an error that names the call."""
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(driver.DriverError, match="cuInit"):
        driver.resident_pairs(0)


@pytest.mark.parametrize(
    ("name", "sms", "pairs"), [("b200", 148, 74), ("gb200", 152, 76), ("gb300", 152, 76)]
)
def test_tensors_on_the_cpu_have_the_simulators_gpu(monkeypatch, name, sms, pairs):
    monkeypatch.setenv("SM100_SIM_DEVICE", name)
    found = devices.gpu_of(CPU)
    assert (found.sms, found.pairs, found.l2_bytes_for_tiles) == (sms, pairs, 64 * MIB)
    assert found.hbm_bytes_per_second == 8e12
    assert found.tuning_name == ("B300" if name == "gb300" else "B200")


def test_the_default_mix_is_that_of_the_gpu(monkeypatch):
    """The row of the GPU's compute capability, and hardware alone where the table has none."""
    listed = json.loads(tuning.TABLE.read_text())["exp2"]
    assert all(entry["gpu"] in ("B200", "B300") for entry in listed)
    asked = []

    def pattern_for(causal, seqlen_k, name, **_):
        asked.append(name)
        return HARDWARE_ONLY

    monkeypatch.setattr(tuning, "pattern_for", pattern_for)
    options = SimpleNamespace(window=(None, 0))
    problem = SimpleNamespace(
        options=options,
        max_seqlen_k=4,
        problem_class=SimpleNamespace(gathers=False),
        kernels=KERNELS,
        tiles=TILES,
        page_size=None,
        architecture=KERNELS.architecture,
    )
    for name in ("b200", "gb200", "b300", "gb300"):
        forward_spec(problem, gpu(name=name), None)
    assert asked == ["B200", "B200", "B300", "B300"]
    monkeypatch.undo()
    if "B300" not in {entry["gpu"] for entry in listed}:
        assert KERNELS.tuned(TILES, True, 4096, "B300", False).ex2_pattern == HARDWARE_ONLY


# Pairs of a static grid: all, all but one, odd numbers, never none.
@pytest.mark.parametrize(
    ("reserved", "pairs"), [("0", 74), ("", 74), ("1", 73), ("16", 66), ("33", 57), ("147", 1)]
)
def test_sms_left_to_other_kernels(monkeypatch, reserved, pairs):
    monkeypatch.setenv("FA4_HD256_RESERVED_SMS", reserved)
    assert gpu().grid_clusters(2) == pairs
    # A call's splits stay, so that the bits do.
    assert gpu().pairs == 74


@pytest.mark.parametrize(
    ("reserved", "message"), [("148", "accepted here: 0 to 147"), ("-1", "a whole number"),
                              ("half", "a whole number")],
)  # fmt: skip
def test_sms_that_cannot_be_left(monkeypatch, reserved, message):
    monkeypatch.setenv("FA4_HD256_RESERVED_SMS", reserved)
    with pytest.raises(ValueError, match=f"FA4_HD256_RESERVED_SMS is .*{message}"):
        _ = gpu().grid_clusters(2)


def test_parts_cost_more_where_memory_is_slow():
    """A slice with a seventh of everything splits as the whole does for a seventh of the tiles."""
    from dataclasses import replace

    whole = gpu(70)
    part = replace(whole, pairs=10, hbm_bytes_per_second=whole.hbm_bytes_per_second / 7)
    for tiles in (7, 49, 140, 700):
        whole_work, part_work = (KeyWork(count, 2, 0.5) for count in (tiles, tiles // 7))
        parts = choose_head_parts(part_work, 16, part, RECOMPUTED)
        assert choose_head_parts(whole_work, 16, whole, RECOMPUTED) == parts
    slow = replace(part, hbm_bytes_per_second=1e9)
    assert choose_head_parts(KeyWork(1, 2, 0.5), 16, slow, RECOMPUTED) == 1


class Failing:
    """A compiled kernel whose loading fails, as CuTe DSL reports it."""

    @staticmethod
    def load():
        raise OSError("cudaErrorNoKernelImageForDevice")


def two_gpus(monkeypatch, other: tuple[int, int]) -> None:
    """A process with a B200 and a GPU of another compute capability."""
    import contextlib

    def capability(device: torch.device | int) -> tuple[int, int]:
        index = device.index if isinstance(device, torch.device) else device
        return ((10, 0), other)[index]

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(launching, "cuda_gpu", lambda device: gpu())


@pytest.mark.parametrize("other", [(10, 3), (8, 6), (9, 0)])
def test_a_gpu_that_cannot_take_the_kernel(monkeypatch, other):
    """Named where a GPU of the process is of another architecture; else the error is the error."""
    two_gpus(monkeypatch, other)
    kind, message = OSError, "^cudaErrorNoKernelImageForDevice$"
    if other != (10, 3):
        a, b = other
        message = rf"NoKernelImage.*\n.*cuda:1 \({a}.{b}\).*CUDA_VISIBLE_DEVICES"
        kind = RuntimeError
    with pytest.raises(kind, match=message):
        launching.host_function(Failing(), torch.device("cuda", 0))


def test_a_gpu_that_cannot_be_used_does_not_end_the_report(monkeypatch):
    """`env` is for bug reports: each GPU has its line, whatever is wrong with one."""
    two_gpus(monkeypatch, (10, 3))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: ("B200", "B300")[i])

    def described(device):
        if device.index == 1:
            raise RuntimeError("it holds no CTA pair")
        return gpu()

    monkeypatch.setattr(launching, "cuda_gpu", described)
    lines = launching.describe_gpus().splitlines()
    first, second = (line for line in lines if line.startswith("cuda:"))
    assert "cuda:0: B200, 10.0: " in first and "cannot" not in first
    assert second == "cuda:1: B300, 10.3: cannot be used: it holds no CTA pair"
