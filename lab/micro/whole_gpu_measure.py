"""Measure a whole Hopper GPU: `python -m lab.micro.whole_gpu_measure > measured.json`.

Parts (all, or those named behind it): own bytes of tiles on all SMs at once, loads behind stores,
launches, hosts, clock and power over time under load. Needs PyTorch with CUDA, cuda-bindings with
nvrtc, nvidia-ml-py and numpy, and nothing of this project beside `whole_gpu_kernels` and `cuda_c`.
It changes no setting of the GPU.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from lab.micro import whole_gpu_kernels as kernels
from lab.micro.whole_gpu_kernels import TILES, WORK

#: SMs that move bytes at once.
ACTIVE = (1, 16, 33, 66, 99, 132)
#: Edge of the square bf16 products; (heads, sequence length, head_dim) of the attention.
PRODUCT, ATTENTION = 8192, (16, 16384, 256)
LOAD_SECONDS, REST_SECONDS = 2.2, 2.5
#: Shares of the time in which a product runs; the rest of it the GPU is awake and idle.
DUTIES = (0.2, 0.4)
#: Kernels in a row, and clocks of each.
FOLLOWERS, SPIN = 24, 200000
#: Rounds of the kernel of exp2: 32 operations of 2048 threads of an SM each.
ROUNDS = 600
#: Heads of 128 queries and one KV head, which keep part of the SMs busy.
HEADS = (16, 33, 66, 99, 132)
_GIB, COPY = 1 << 30, kernels.COPY
#: Bytes that a run of tiles reads, and writes, before it begins again.
PLACE = 256 << 20


class Device:
    """Kernels in CUDA C, those of `whole_gpu_kernels` or others, on PyTorch's context."""

    def __init__(self, source: str = kernels.SOURCE) -> None:
        from cuda.bindings import driver, nvrtc

        torch.zeros(1, device="cuda")
        self.driver = driver
        program = self._nvrtc(nvrtc.nvrtcCreateProgram(source.encode(), b"k.cu", 0, [], []))
        self._nvrtc(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90a"]))
        cubin = b" " * self._nvrtc(nvrtc.nvrtcGetCUBINSize(program))
        self._nvrtc(nvrtc.nvrtcGetCUBIN(program, cubin))
        self.module = self.call("cuModuleLoadData", cubin)
        self._functions: dict[str, Any] = {}

    @staticmethod
    def _nvrtc(answer: tuple) -> Any:
        status, *results = answer
        if int(status) != 0:
            raise RuntimeError(f"nvrtc: {status}")
        return results[0] if results else None

    def call(self, name: str, *arguments: Any) -> Any:
        """A driver call; RuntimeError with its name if it fails."""
        status, *results = getattr(self.driver, name)(*arguments)
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {status.name}")
        return results[0] if len(results) == 1 else tuple(results)

    def function(self, name: str, shared: int = 0) -> Any:
        if name not in self._functions:
            self._functions[name] = self.call("cuModuleGetFunction", self.module, name.encode())
        if shared:
            limit = self.driver.CUfunction_attribute
            which = limit.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call("cuFuncSetAttribute", self._functions[name], which, shared)
        return self._functions[name]

    def launch(
        self,
        name: str,
        grid: int,
        threads: int,
        arguments: tuple,
        shared: int = 0,
        cluster: int = 1,
        dependent: bool = False,
    ) -> None:
        """Launch on PyTorch's stream. arguments: (value, bytes) of each. dependent: as soon as the
        kernel before lets it."""
        driver, function = self.driver, self.function(name, shared)
        values = [np.array([v], np.uint64 if size == 8 else np.uint32) for v, size in arguments]
        pointers = np.array([v.ctypes.data for v in values], np.uint64)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        attributes = []
        if cluster > 1:
            one = driver.CUlaunchAttribute()
            one.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            one.value.clusterDim.x, one.value.clusterDim.y, one.value.clusterDim.z = cluster, 1, 1
            attributes.append(one)
        if dependent:
            one = driver.CUlaunchAttribute()
            kinds = driver.CUlaunchAttributeID
            one.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            one.value.programmaticStreamSerializationAllowed = 1
            attributes.append(one)
        config.attrs, config.numAttrs = attributes, len(attributes)
        self.call("cuLaunchKernelEx", config, function, pointers.ctypes.data, 0)


def _quartiles(values: Any) -> list[float]:
    return [float(v) for v in np.percentile(np.asarray(values, float), [25, 50, 75])]


# Own bytes of tiles.


@functools.cache
def _pools() -> list[torch.Tensor]:
    """Allocate the tensors that are read, and those that are written."""
    return [torch.randint(0, 127, (16 * PLACE,), dtype=torch.int8, device="cuda")
            for _ in range(2)]  # fmt: skip


def _addresses() -> Iterator[tuple[int, int]]:
    """Yield the addresses to read and to write: each run elsewhere, so that L2 has nothing of
    it."""
    for turn in itertools.count():
        source, target = (pool.data_ptr() + turn % 16 * PLACE for pool in _pools())
        yield source, target


_places = _addresses()


def tiles(
    device: Device,
    active: int,
    lockstep: bool,
    load: int = 0,
    store: int = 0,
    stagger: int = 0,
    work: int = 0,
    wait_store: bool = False,
) -> dict[str, list[float]]:
    """Clocks of a load, of a store and of a whole tile, quartiles over SMs and tiles but the first
    three: those start with cold TLBs."""
    source, target = next(_places)
    out = torch.zeros(TILES, active, kernels.TILE_WORDS, dtype=torch.int64, device="cuda")
    gate = torch.zeros(1, dtype=torch.int32, device="cuda")
    pointers = (source, 8), (target, 8), (PLACE, 8), (out.data_ptr(), 8)
    options = TILES, int(lockstep), load, store, stagger, work, int(wait_store)
    arguments = (*pointers, (gate.data_ptr(), 8), *((value, 4) for value in options))
    device.launch("tiles", active, 32, arguments, shared=1024 + 2 * kernels.BUFFER)
    torch.cuda.synchronize()
    words = out.cpu().numpy()
    found = words[3:]
    asked, there, ended, stored = (found[..., i] for i in range(kernels.TILE_WORDS))
    return {
        "load": _quartiles(there - asked), "store": _quartiles(stored - ended),
        "tile": _quartiles(np.diff(asked, axis=0)),
        "load by tile": np.median(words[..., 1] - words[..., 0], axis=1).tolist(),
    }  # fmt: skip


def own_bytes(device: Device) -> dict[str, Any]:
    """Loads, stores and both, in lockstep by a barrier, apart, and free-running."""
    full, found = kernels.BUFFER, {}
    for active in ACTIVE:
        found[f"load, {active} SMs"] = tiles(device, active, True, load=full)
        found[f"store, {active} SMs"] = tiles(device, active, True, store=full, wait_store=True)
    found["load, 132 SMs, 300 clocks apart"] = tiles(device, 132, True, load=full, stagger=300)
    found["store, 132 SMs, 300 clocks apart"] = tiles(
        device, 132, True, store=full, stagger=300, wait_store=True
    )
    for active in (16, 66, 132):
        found[f"free, load, {active} SMs"] = tiles(device, active, False, load=full, work=WORK)
        found[f"free, load and store, {active} SMs"] = tiles(
            device, active, False, load=full, store=full, work=WORK
        )
    for work in (2000, 6000):
        found[f"free, load, {work} clocks of work, 132 SMs"] = tiles(
            device, 132, False, load=full, work=work
        )
    found["lockstep, load behind a store, 132 SMs"] = tiles(
        device, 132, True, load=full, store=full, work=WORK
    )
    return found


#: name: (bytes loaded, bytes stored, bytes of a copy, by the warp, load first, from L2).
QUEUES = {
    "load 64 KiB": (65536, 0, COPY, 0, 0, 0),
    "load 64 KiB from L2": (65536, 0, COPY, 0, 0, 1),
    "load 1 KiB from L2": (1024, 0, COPY, 0, 0, 1),
    "store 64 KiB": (0, 65536, COPY, 0, 0, 0),
    "store 16 KiB, load 64 KiB from L2": (65536, 16384, COPY, 0, 0, 1),
    "store 32 KiB, load 64 KiB from L2": (65536, 32768, COPY, 0, 0, 1),
    "store 64 KiB, load 64 KiB from L2": (65536, 65536, COPY, 0, 0, 1),
    "store 64 KiB, load 1 KiB from L2": (1024, 65536, COPY, 0, 0, 1),
    "store 16 KiB, load 1 KiB from L2": (1024, 16384, COPY, 0, 0, 1),
    "store 64 KiB by 2 KiB, load 1 KiB from L2": (1024, 65536, 2048, 0, 0, 1),
    "store 64 KiB by the warp, load 64 KiB from L2": (65536, 65536, COPY, 1, 0, 1),
    "store 64 KiB by the warp, load 1 KiB from L2": (1024, 65536, COPY, 1, 0, 1),
    "load 64 KiB from L2, store 64 KiB behind": (65536, 65536, COPY, 0, 1, 1),
    "load 64 KiB from L2, store 64 KiB behind, both by 2 KiB": (65536, 65536, 2048, 0, 1, 1),
}


def queues(device: Device) -> dict[str, Any]:
    """Clocks of a load, and until a store is read and done, of one SM alone and of all."""
    found = {}
    for sms in (1, 132):
        for name, (load, store, piece, *others) in QUEUES.items():
            source, target = next(_places)
            out = torch.zeros(TILES, sms, kernels.TILE_WORDS, dtype=torch.int64, device="cuda")
            pointers = (source, 8), (target, 8), (PLACE, 8), (out.data_ptr(), 8)
            options = TILES, load, store, piece, *others
            arguments = (*pointers, *((value, 4) for value in options))
            device.launch("queue", sms, 32, arguments, shared=1024 + 2 * kernels.BUFFER)
            torch.cuda.synchronize()
            words = out.cpu().numpy()[3:]
            found[f"{name}, {sms} SMs"] = {
                key: _quartiles(words[..., n])
                for n, key in enumerate(("issue", "load", "store read", "store done"))
            }
    return found


# Launches and hosts.


def followers(device: Device, how: int, shared: int, cluster: int, graph: bool) -> dict[str, Any]:
    """Clocks on an SM from the end of a kernel to the next one's work; how: bits of `follower`."""
    threads, sms = 384, 132
    out = torch.zeros(FOLLOWERS, sms, kernels.FOLLOWER_WORDS, dtype=torch.int64, device="cuda")

    def row() -> None:
        for n in range(FOLLOWERS):
            arguments = ((out[n].data_ptr(), 8), (SPIN, 8), (how, 4))
            device.launch("follower", sms, threads, arguments, shared, cluster,
                          bool(how) and n > 0)  # fmt: skip

    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            row()
        run: Callable[[], Any] = recorded.replay
    else:
        run = row
    for _ in range(3):
        run()
        torch.cuda.synchronize()
    words = out.cpu().numpy()[4:]
    # Small CTAs may share an SM and leave another without.
    both = (words[1:, :, 1] > 0) & (words[:-1, :, 1] > 0)
    gaps = (words[1:, :, 1] - words[:-1, :, 2])[both]
    begun = (words[1:, :, 0] - words[:-1, :, 2])[both]
    return {"work": _quartiles(gaps), "entry": _quartiles(begun)}


def launches(device: Device) -> dict[str, Any]:
    """Kernels in a row, small ones and such that fill an SM, plain and as dependents."""
    found, waits, both = {}, kernels.WAITS, kernels.WAITS | kernels.TRIGGERS
    sizes = {"small": (0, 1), "200 KiB": (200 << 10, 1), "200 KiB, pairs": (200 << 10, 2)}
    for size, (shared, cluster) in sizes.items():
        for how, name in ((0, "plain"), (waits, "dependent"), (both, "dependent, let go early")):
            for graph in (False, True):
                key = f"{size}, {name}{', graph' if graph else ''}"
                found[key] = followers(device, how, shared, cluster, graph)
    return found


def _events(run: Callable[[], Any], calls: int) -> float:
    """Seconds a call of so many in a row, by events, the median of 15."""
    found = []
    for _ in range(15):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3 / calls)
    return float(np.median(found))


def hosts(device: Device) -> dict[str, Any]:
    """PyTorch's attention: the host's time of a call, the GPU's, and ten calls in a row."""
    found = {}
    for seqlen in (128, 1024, 2048, 4096):
        q, k, v = (torch.randn(1, 8, seqlen, 256, device="cuda").bfloat16() for _ in range(3))

        def run() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)  # noqa: B023

        for _ in range(20):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                run()
        alone = _events(graph.replay, 1) / 20
        times = []
        for _ in range(15):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(10):
                run()
            times.append((time.perf_counter() - begin) / 10)
        found[str(seqlen)] = {
            "device": alone,
            "host": float(np.median(times)),
            "ten": _events(run, 10),
            "one": _events(run, 1),
        }
    return found


# Load.


class Sensor(threading.Thread):
    """Power and clock about every 5 ms: rows of (seconds, watts now, watts averaged, MHz, the
    driver's reasons for the clock, joules since long)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        import pynvml

        pynvml.nvmlInit()
        self.library, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self.rows: list[tuple[float, ...]] = []
        self.stopped = False

    def read(self) -> tuple[float, ...]:
        library, handle = self.library, self.handle
        # 186: NVML_FI_DEV_POWER_INSTANT, in milliwatts.
        (instant,) = library.nvmlDeviceGetFieldValues(handle, [186])
        return (
            time.perf_counter(), instant.value.uiVal / 1e3,
            library.nvmlDeviceGetPowerUsage(handle) / 1e3,
            float(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)),
            float(library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            library.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
        )  # fmt: skip

    def run(self) -> None:
        while not self.stopped:
            self.rows.append(self.read())
            time.sleep(0.004)

    def stop(self) -> np.ndarray:
        self.stopped = True
        self.join()
        return np.array(self.rows)


def _binned(seconds: np.ndarray, *series: np.ndarray) -> list[list[float]]:
    """Rows of (milliseconds, means of the series): bins of 5 ms up to 0.2 s, then of 250."""
    edges = np.concatenate([np.arange(0, 0.2, 0.005), np.arange(0.2, 60.0, 0.25)])
    where, rows = np.digitize(seconds, edges), []
    for n in np.unique(where[seconds >= 0]):
        chosen = where == n
        rows.append([round(float(edges[n - 1] * 1e3), 1),
                     *(round(float(np.mean(s[chosen])), 2) for s in series)])  # fmt: skip
    return rows


def load(
    device: Device, operation: Callable[[], Any], duty: float = 1.0, seconds: float = LOAD_SECONDS
) -> dict[str, Any]:
    """An operation again and again from rest. duty: its share of the time, the GPU idle but awake
    in the rest.

    operations: (ms, ms of each, MHz of an SM meanwhile); sensors: (ms, watts, watts averaged, MHz,
    ...). watts: by the energy counter over the second half; first: ms, ms and MHz of the first 12.
    """
    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)
    sensor, events = Sensor(), list[list[torch.cuda.Event]]()
    marks = torch.zeros(40000, 4, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    sensor.start()
    time.sleep(0.05)
    begin, pause = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds and len(events) < len(marks) - 2:
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        operation()
        pair[1].record()
        events.append(pair)
        device.launch("probe", 1, 32, ((marks[len(events)].data_ptr(), 8),))
        if duty < 1.0 and len(events) == 8:
            torch.cuda.synchronize()
            typical = np.median([one[0].elapsed_time(one[1]) for one in events])
            pause = int(typical * 1e-3 * (1 / duty - 1) * 1.98e9)
        if pause:
            device.launch("spin", 1, 32, ((pause, 8),))
        if len(events) > 24:
            events[-24][1].synchronize()
    torch.cuda.synchronize()
    rows = sensor.stop()
    first = events[0][0]
    starts = np.array([first.elapsed_time(one[0]) for one in events]) * 1e-3
    took = np.array([one[0].elapsed_time(one[1]) for one in events])
    counts = marks.cpu().numpy()[1 : len(events) + 1].astype(float)
    clocks = np.full(len(events), np.nan)
    ticks, nanoseconds = np.diff(counts[:, 1]), np.diff(counts[:, 2])
    same = np.diff(counts[:, 0]) == 0
    clocks[1:][same] = ticks[same] / nanoseconds[same] * 1e3
    known = ~np.isnan(clocks)
    late = rows[rows[:, 0] > begin + seconds / 2]
    return {
        "operations": _binned(starts[known], took[known], clocks[known]),
        "first": [[round(float(v), 4) for v in row]
                  for row in zip(starts[:12] * 1e3, took[:12], np.nan_to_num(clocks[:12]))],
        "sensors": _binned(rows[:, 0] - begin, *rows.T[1:5]),
        "watts": float((late[-1, 5] - late[0, 5]) / (late[-1, 0] - late[0, 0])),
        "late": [float(np.median(took[len(took) // 2:])),
                 float(np.nanmedian(clocks[len(took) // 2:]))],
        "count": len(events),
    }  # fmt: skip


def product(share: float = 1.0) -> Callable[[], Any]:
    """A square product of numbers; a share is random, the others are zeros."""
    a, b = (
        (torch.randn(PRODUCT, PRODUCT, device="cuda")
         * (torch.rand(PRODUCT, PRODUCT, device="cuda") < share)).bfloat16()
        for _ in range(2)
    )  # fmt: skip
    return functools.partial(torch.mm, a, b, out=torch.empty_like(a))


def attention(
    backend: Any, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
) -> Callable[[], Any]:
    """PyTorch's by a back end. tensors: q, k, v, by default random ones of `ATTENTION`."""
    shape = 1, *ATTENTION
    q, k, v = tensors or (torch.randn(shape, device="cuda").bfloat16() for _ in range(3))

    def run() -> Any:
        with torch.nn.attention.sdpa_kernel([backend]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return run


def part_of_the_sms(device: Device) -> dict[str, Any]:
    """Attention of so many heads with 128 queries each, all on the same keys: clocks of a burst."""
    _, seqlen, dim = ATTENTION
    k, v = (torch.randn(1, 1, 2 * seqlen, dim, device="cuda").bfloat16() for _ in range(2))
    found = {}
    for heads in HEADS:
        q = torch.randn(1, heads, 128, dim, device="cuda").bfloat16()
        keys, values = (one.expand(1, heads, 2 * seqlen, dim) for one in (k, v))
        run = attention(torch.nn.attention.SDPBackend.CUDNN_ATTENTION, (q, keys, values))
        for _ in range(3):
            run()
        name = f"attention, cuDNN, {heads} heads of 128 queries"
        found[name] = load(device, run, seconds=0.3)
        print(name, found[name]["first"][8:], file=sys.stderr, flush=True)
    return found


def loads(device: Device) -> dict[str, Any]:
    """Products, attention, a copy, an SM that spins; products with pauses."""
    shares = {"random": 1.0, "half random": 0.5, "a tenth random": 0.1, "zeros": 0.0}
    operations = {f"product, {name}": product(share) for name, share in shares.items()}
    backends = torch.nn.attention.SDPBackend
    for name, backend in (("cuDNN", backends.CUDNN_ATTENTION), ("FA2", backends.FLASH_ATTENTION)):
        operations[f"attention, {name}"] = attention(backend)
    source = torch.randint(0, 127, (2 * _GIB,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    operations["copy"] = lambda: target.copy_(source)
    out = torch.zeros(64, device="cuda")
    for name, rounds in (("exp2", ROUNDS), ("fma", 8 * ROUNDS)):
        arguments = (out.data_ptr(), 8), (rounds, 4)
        operations[name] = functools.partial(device.launch, f"{name}s", 2 * 132, 1024, arguments)
    operations["awake"] = lambda: device.launch("spin", 1, 32, ((2_000_000, 8),))
    found = part_of_the_sms(device)
    for name, operation in operations.items():
        for _ in range(3):
            operation()
        found[name] = load(device, operation)
        print(name, found[name]["late"], found[name]["watts"], file=sys.stderr, flush=True)
    for name in ("product, random", "product, zeros"):
        for duty in DUTIES:
            key = f"{name}, {duty:.0%} of the time"
            found[key] = load(device, operations[name], duty, 1.6)
            print(key, found[key]["late"], found[key]["watts"], file=sys.stderr, flush=True)
    return found


PARTS: dict[str, Callable[[Device], dict[str, Any]]] = {
    "own_bytes": own_bytes, "queues": queues, "launches": launches, "hosts": hosts, "loads": loads,
}  # fmt: skip


def measure(chosen: Iterable[str] = PARTS) -> dict[str, Any]:
    """Measure those parts; add the GPU's name and the versions of PyTorch and the driver."""
    device = Device()
    properties = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "device": properties.name,
        "sms": properties.multi_processor_count,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    sensor = Sensor()
    driver = sensor.library.nvmlSystemGetDriverVersion()
    found["driver"] = driver if isinstance(driver, str) else driver.decode()
    found["power_limit"] = sensor.library.nvmlDeviceGetEnforcedPowerLimit(sensor.handle) / 1e3
    for name in chosen:
        try:
            found[name] = PARTS[name](device)
        except Exception as error:  # Earlier measurements are not lost with it.
            found[name] = {"error": repr(error)}
            print(name, repr(error), file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    json.dump(measure(sys.argv[1:] or PARTS), sys.stdout)
