"""`python -m bench hopper`: the timing model with Hopper's constants against a Hopper GPU.

Hopper shares with Blackwell what the model has beside the tensor core: issue slots, pipes, shared
memory, barriers, bulk copies. `--build DIR` writes the cubins of `hopper_kernels` and
`hopper_pipeline`; `python bench/measure/hopper_measure.py DIR` times them on the GPU and prints
what `bench/measure/hopper_measured.json` holds; without `--build` the command replays the same
cubins and prints both. `--missing` and `--add FILE` do the same for kernels that were not measured
before.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import hopper_fences, hopper_kernels, hopper_pipeline
from bench.measure.hopper_kernels import Kernel
from bench.tables.origin import modelled_machine
from bench.tables.results import add_output_options, emit
from bench.tables.table import BASIS, MACHINE, Column, Plot, Table
from sm100_sim.host.host_code import LaunchConfig
from sm100_sim.launcher import Options, parameter_buffer, run_kernel, translated_kernel
from sm100_sim.timing.machine_constants import load
from sm100_sim.timing.program import Compiled, build
from sm100_sim.timing.replay import Replay, clocks_measured, replay
from sm100_sim.timing.sass import disassemble

GPU = "h200"
#: What was measured, on which GPU; written by `hopper_measure`.
MEASUREMENTS = Path(__file__).parents[1] / "measure" / "hopper_measured.json"
THREADS = 32


@functools.cache
def kernels() -> tuple[Kernel, ...]:
    """All kernels, those in PTX and the one in CuTe DSL."""
    warps = hopper_pipeline.CONSUMERS // THREADS + 1
    ptx = hopper_pipeline.ptx(hopper_kernels.ROUNDS, hopper_kernels.ENTRY)
    name = "CuTe DSL: online softmax over a ring of bulk copies"
    pipeline = Kernel(name, warps, ptx, 1, "tile")
    return *hopper_kernels.KERNELS, pipeline, *hopper_fences.KERNELS


def assemblers() -> list[Path]:
    """The versions of ptxas that triton brings, the older one, with which the measured kernels were
    compiled, first; RuntimeError if triton is not installed."""
    found = importlib.util.find_spec("triton")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("ptxas comes with triton, which is not installed: pip install triton")
    directory = Path(found.submodule_search_locations[0], "backends", "nvidia", "bin")
    return [directory / "ptxas", directory / "ptxas-blackwell"]


def compile_ptx(ptx: str) -> bytes:
    """The cubin of a PTX module for sm_90a, by the first ptxas that knows its PTX version. Raises
    RuntimeError with what the last one says."""
    with tempfile.TemporaryDirectory(prefix="fa4_hd256_") as directory:
        source, target = Path(directory, "kernel.ptx"), Path(directory, "kernel.cubin")
        source.write_text(ptx)
        for tool in assemblers():
            command = [str(tool), "-arch=sm_90a", "-O3", str(source), "-o", str(target)]
            result = subprocess.run(command, capture_output=True, text=True)
            if "Unsupported .version" not in result.stderr:
                break
        if result.returncode:
            raise RuntimeError(f"ptxas refused the kernel: {result.stderr.strip()}")
        return target.read_bytes()


def write_cubins(directory: Path, known: Collection[str] = ()) -> None:
    """A cubin of each kernel but the known ones and kernels.json, which `hopper_measure` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    listed = []
    for number, kernel in enumerate(kernels()):
        if kernel.name in known:
            continue
        file = f"{number}.cubin"
        (directory / file).write_bytes(compile_ptx(kernel.ptx))
        listed.append(
            {"name": kernel.name, "warps": kernel.warps, "ctas": kernel.ctas, "file": file}
        )
    content = {
        "entry": hopper_kernels.ENTRY,
        "rounds": hopper_kernels.ROUNDS,
        "buffer_bytes": hopper_kernels.BUFFER,
        "dynamic_shared": hopper_kernels.DYNAMIC_SHARED,
        "kernels": listed,
    }
    (directory / "kernels.json").write_text(json.dumps(content, indent=1))


def program_of(kernel: Kernel) -> Compiled:
    """The kernel run in the simulator and its warps' paths through the cubin."""
    results, buffer = np.zeros(64, np.uint64), np.zeros(hopper_kernels.BUFFER, np.uint8)
    entry, shared = hopper_kernels.ENTRY, hopper_kernels.DYNAMIC_SHARED
    block, grid = (THREADS * kernel.warps, 1, 1), (kernel.ctas, 1, 1)
    config = LaunchConfig(entry, grid, block, grid, shared, (), ptx=kernel.ptx)
    translated = translated_kernel(kernel.ptx, entry, True)
    arrays = {"results": results, "buffer": buffer}
    values = [array.ctypes.data.to_bytes(8, "little") for array in arrays.values()]
    ranges = sorted(
        (array.ctypes.data, array.ctypes.data + array.nbytes, name)
        for name, array in arrays.items()
    )
    parameters = parameter_buffer(translated.kernel, values)
    report = run_kernel(config, parameters, ranges, Options(trace=True))
    function = disassemble(compile_ptx(kernel.ptx))[entry]
    return build(function, translated, report.trace, grid, report.shared_accesses)


def round_clocks(compiled: Compiled, run: Replay) -> float:
    """Clocks that a kernel measures, over its rounds."""
    return clocks_measured(compiled, run) / hopper_kernels.ROUNDS


COLUMNS = (
    Column("kernel"),
    Column("operations", title="in a round"),
    Column("measured", "clocks", ".1f"),
    Column("modelled", "clocks", ".1f"),
    Column("spread", "clocks", ".1f", "+-"),
    Column("error", "", "+.0%"),
    Column("sets", title="sets the constant"),
)


def measurements() -> dict[str, Any]:
    """What is known of the GPU; no rounds if nothing is."""
    if not MEASUREMENTS.exists():
        return {"rounds": {}, "quartiles": {}, "device": "no GPU"}
    return json.loads(MEASUREMENTS.read_text())


def add_measurements(file: Path) -> None:
    """Put what `hopper_measure` has printed into the file of measurements, newer over older.

    Raises ValueError if it was measured on another GPU than what is there.
    """
    known, new = measurements(), json.loads(file.read_text())
    if known["rounds"] and known["device"] != new["device"]:
        raise ValueError(f"measured on {new['device']}, {MEASUREMENTS.name} on {known['device']}")
    merged = {**new, **{key: {**known[key], **new[key]} for key in ("rounds", "quartiles")}}
    MEASUREMENTS.write_text(json.dumps(merged, indent=1) + "\n")


def compare(draws: int = 4, chosen: str = "") -> Table:
    """Clocks of a round of every kernel with `chosen` in its name, modelled beside measured."""
    machine, measured = load(GPU), measurements()
    # One CTA has L2 to itself.
    values = [drawn._replace(sms=1.0) for drawn in machine.sampled(draws)]
    rows = []
    for kernel in kernels():
        if chosen not in kernel.name:
            continue
        compiled = program_of(kernel)
        clocks = [round_clocks(compiled, replay(compiled, drawn)) for drawn in values]
        found = measured["rounds"].get(kernel.name)
        rows.append({
            "kernel": kernel.name,
            "operations": f"{kernel.operations} {kernel.unit}",
            "measured": found,
            "modelled": clocks[0],
            "spread": float(np.std(clocks)),
            "error": None if found is None else clocks[0] / found - 1,
            "sets": kernel.sets or None,
            "unmatched": compiled.unmatched,
            BASIS: "modelled",
            MACHINE: modelled_machine(machine),
        })  # fmt: skip
    errors = np.abs([r["error"] for r in rows if r["error"] is not None and not r["sets"]])
    notes = [f"Measured on {measured['device']}, one CTA; modelled: central constants, spread."]
    if len(errors):
        notes.append(
            f"Rows that set no constant: median error {np.median(errors):.0%}, within 10 % "
            f"{np.mean(errors <= 0.1):.0%} of {len(errors)}, largest {errors.max():.0%}."
        )
    title = "Clocks of a round on a Hopper GPU, measured and modelled"
    plot = Plot("kernel", ("measured", "modelled"))
    return Table("hopper", title, COLUMNS, rows, tuple(notes), plot)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--build", metavar="DIR", help="write the cubins to measure, do no more")
    parser.add_argument(
        "--missing", action="store_true", help="with --build, those without a measurement only"
    )
    parser.add_argument("--add", metavar="FILE", help="add what hopper_measure.py has printed")
    parser.add_argument("--kernel", default="", help="only those with this in their names")
    add_output_options(parser)


def main(arguments: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    if arguments.build:
        known = measurements()["rounds"] if arguments.missing else ()
        write_cubins(Path(arguments.build), known)
        return 0
    if arguments.add:
        add_measurements(Path(arguments.add))
    emit(compare(chosen=arguments.kernel), arguments)
    return 0
