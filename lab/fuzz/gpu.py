"""Runs programs on a GPU of compute capability 9.0, through the CUDA driver API.

Programs are compiled and run in batches, each batch in a process of its own. Those that may hang
are launched on streams of their own, all at once; what has not ended after a while hangs, and the
process is ended. After any error the programs of a batch are run one by one.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from sm100_sim.interrupt import starting_workers
from sm100_sim.tools.golden.cases import HEADER, KERNEL, Case
from sm100_sim.tools.golden.record import Gpu

from .outcome import ENDED, HANG, REFUSED, Outcome, Variant, digest

#: Programs of a module; of those that may hang, as many as have a hardware queue each.
BATCH = 32
HANG_BATCH = 24
#: Seconds after which a program hangs, and most of them without a result of a batch.
PATIENCE = 1.0
LIMIT = 30.0
_STUCK = f"no result within {LIMIT:.0f} s"
#: Optimisation that the driver's compiler does by itself.
LEVEL = 4
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def module_text(cases: list[Case]) -> str:
    """One PTX module of many cases; the kernel of case i is `golden_i`."""
    bodies = (
        case.ptx.removeprefix(HEADER).replace(f"{KERNEL}(", f"{KERNEL}_{i}(", 1)
        for i, case in enumerate(cases)
    )
    return HEADER + "".join(bodies)


class _Batch:
    """Cases that are loaded, with buffers on the device, ready to be launched."""

    def __init__(self, gpu: Gpu, cases: list[Case], level: int) -> None:
        self.gpu, self.cases = gpu, cases
        option = gpu.driver.CUjit_option.CU_JIT_OPTIMIZATION_LEVEL
        module = gpu.call(
            "cuModuleLoadDataEx", module_text(cases).encode() + b"\0", 1, [option], [level]
        )
        self.functions = [
            gpu.call("cuModuleGetFunction", module, f"{KERNEL}_{i}".encode())
            for i in range(len(cases))
        ]
        self.addresses = [self._place(case) for case in cases]

    def _place(self, case: Case) -> list[int]:
        addresses = []
        for array in (*case.inputs, *case.outputs):
            host = np.ascontiguousarray(array)
            # Tensor maps may reach to the end of the 128 bytes that a buffer's words end in.
            buffer = self.gpu.call("cuMemAlloc", host.nbytes + 128)
            self.gpu.call("cuMemcpyHtoD", buffer, host.ctypes.data, host.nbytes)
            addresses.append(int(buffer))
        return addresses

    def registers(self, number: int) -> int:
        """Registers that each thread of a case is launched with."""
        attribute = self.gpu.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        return self.gpu.call("cuFuncGetAttribute", attribute, self.functions[number])

    def run(self, number: int) -> list[np.ndarray]:
        case, addresses = self.cases[number], self.addresses[number]
        self.gpu.launch(self.functions[number], case, addresses)
        self.gpu.call("cuCtxSynchronize")
        results = []
        for address, array in zip(addresses[len(case.inputs) :], case.outputs, strict=True):
            results.append(np.empty_like(array))
            self.gpu.call("cuMemcpyDtoH", results[-1].ctypes.data, address, array.nbytes)
        return results

    def run_together(self) -> list[list[np.ndarray] | None]:
        """Launch all cases at once; None for one that has not ended within PATIENCE."""
        gpu, flags = self.gpu, self.gpu.driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        streams, results = [], []
        for case in self.cases:
            streams.append(gpu.call("cuStreamCreate", flags))
            results.append([self._pinned(array) for array in case.outputs])
        for number, case in enumerate(self.cases):
            addresses = self.addresses[number]
            gpu.launch(self.functions[number], case, addresses, streams[number])
            for address, array in zip(addresses[len(case.inputs) :], results[number], strict=True):
                gpu.call(
                    "cuMemcpyDtoHAsync", array.ctypes.data, address, array.nbytes, streams[number]
                )
        waiting, end = set(range(len(self.cases))), time.monotonic() + PATIENCE
        while waiting and time.monotonic() < end:
            waiting = {i for i in waiting if not self._is_done(streams[i])}
            time.sleep(0.005)
        return [None if i in waiting else outputs for i, outputs in enumerate(results)]

    def _pinned(self, array: np.ndarray) -> np.ndarray:
        pointer = self.gpu.call("cuMemHostAlloc", array.nbytes, 0)
        raw: Any = (ctypes.c_uint8 * array.nbytes).from_address(int(pointer))
        return np.frombuffer(raw, array.dtype).reshape(array.shape)

    def _is_done(self, stream: Any) -> bool:
        status = self.gpu.driver.cuStreamQuery(stream)[0]
        if status == self.gpu.driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if status != self.gpu.driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuStreamQuery: {status.name}")
        return True


def _work(connection: Any, variants: list[Variant], hanging: bool, level: int) -> None:
    """A process: run a batch and send (position, outcome, outputs), then None."""
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    if hanging:
        os.environ[_CONNECTIONS] = "32"
    cases = [variant.case() for variant in variants]
    try:
        batch = _Batch(Gpu(), cases, level)
        together = batch.run_together() if hanging else None
        for number, case in enumerate(cases):
            outputs = together[number] if together else batch.run(number)
            state = HANG if outputs is None else ENDED
            outcome = Outcome(
                state,
                case.digest(),
                digest(outputs) if outputs else "",
                registers=batch.registers(number),
            )
            connection.send((number, outcome, outputs))
        connection.send(None)
    except Exception as error:  # of the driver: reported under the program's name
        connection.send((-1, f"{type(error).__name__}: {error}", None))
    connection.close()
    # A context with a kernel that hangs cannot be torn down; the process just ends.
    os._exit(0)


Found = dict[Variant, tuple[Outcome, list[np.ndarray] | None]]


def run_batch(
    variants: list[Variant], hanging: bool, level: int = LEVEL, work: Callable = _work
) -> Found:
    """Outcomes and outputs of a batch. After an error what is left runs in smaller batches, until
    one has a single program; after LIMIT seconds without a result, as programs that may hang."""
    found, trouble = _run_once(variants, hanging, level, work)
    left = [variant for variant in variants if variant not in found]
    if not left:
        return found
    if trouble == _STUCK and not hanging:
        parts, hanging = _cut(left, HANG_BATCH), True
    elif len(variants) == 1:
        return {left[0]: (Outcome(REFUSED, left[0].case().digest(), text=trouble), None)}
    else:
        parts = _cut(left, (len(left) + 1) // 2 if len(left) == len(variants) else len(left))
    for part in parts:
        found |= run_batch(part, hanging, level, work)
    return found


def _cut(variants: list[Variant], size: int) -> list[list[Variant]]:
    return [variants[start : start + size] for start in range(0, len(variants), size)]


def _run_once(
    variants: list[Variant], hanging: bool, level: int, work: Callable
) -> tuple[Found, str]:
    """Return (results of a process that runs a batch, what went wrong in it)."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(False)
    process = context.Process(target=work, args=(sender, variants, hanging, level), daemon=True)
    with starting_workers():
        process.start()
    sender.close()
    found: Found = {}
    trouble = _STUCK
    try:
        while receiver.poll(LIMIT):
            message = receiver.recv()
            if message is None:
                trouble = ""
                break
            number, outcome, outputs = message
            if number < 0:
                trouble = outcome
                break
            found[variants[number]] = outcome, outputs
    except (EOFError, OSError):
        trouble = "its process ended"
    process.kill()
    process.join()
    return found, trouble


def run(
    variants: Iterable[Variant], processes: int = 16, level: int = LEVEL
) -> Iterator[tuple[Variant, Outcome, list[np.ndarray] | None]]:
    """Run variants on the GPU: what each one gave, and its outputs if it ended. level: how far the
    driver's compiler optimises, 0 to 4."""
    variants = list(variants)
    plain = [variant for variant in variants if not variant.may_hang]
    hanging = [variant for variant in variants if variant.may_hang]
    for some, size, workers, flag in (
        (plain, BATCH, processes, False),
        (hanging, HANG_BATCH, max(1, processes // 2), True),
    ):
        batches = _cut(some, size)
        with ThreadPoolExecutor(workers) as threads:
            for found in threads.map(
                lambda batch, flag=flag: run_batch(batch, flag, level), batches
            ):
                for variant, (outcome, outputs) in found.items():
                    yield variant, outcome, outputs
