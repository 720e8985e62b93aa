"""`python -m sm100_sim run FILE.cu --kernel NAME`: a kernel in CUDA C++ or PTX, its arguments given
on the command line.

An argument is a scalar, "i32=5", or an array, "f32[1024]=random";
"map:f16[256,64]=random,box=64x64, swizzle=128" is the TMA descriptor of an array. Arrays are filled
with 0 unless a value is given: a number, `arange`, `random` (normally distributed) or @FILE.npy.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from sm100_sim.cuda_launcher import compile_cuda
from sm100_sim.errors import CompileError, LaunchError, MissingExtra, SimulationError
from sm100_sim.launcher import Options, options_from, parsed_kernel
from sm100_sim.ptx.parser import PtxSyntaxError
from sm100_sim.ptx_launcher import launch_ptx, tensor_map
from sm100_sim.report import Report
from sm100_sim.settings import read_settings
from sm100_sim.terminal import short_name, wants_colour

from . import flags
from .files import write_files
from .outcome import Outcome
from .summary import summary

_TYPES = {
    "f16": "f2", "f32": "f4", "f64": "f8", "bf16": "u2", "e4m3": "u1", "e5m2": "u1",
    **{f"{kind}{bits}": f"{kind}{bits // 8}" for kind in "iu" for bits in (8, 16, 32, 64)},
}  # fmt: skip
_ARGUMENT = re.compile(
    r"(?P<map>map:)?(?P<type>\w+)(?:\[(?P<shape>[\d,x ]+)\])?(?:=(?P<value>[^,]+))?"
    r"(?:,box=(?P<box>[\dx]+))?(?:,swizzle=(?P<swizzle>\d+))?$"
)


def run_file(arguments: list[str]) -> int:
    """Run the command; returns the exit status: 1 for findings or an error of the launch, 2 for a
    call that cannot be run."""
    choice = flags.parsed(_parser(), arguments)
    if choice.file.endswith(".py"):
        print("sm100_sim: scripts run without `run`: sm100-sim SCRIPT.py", file=sys.stderr)
        return 2
    if not Path(choice.file).is_file():
        print(f"sm100_sim: {choice.file!r} is not a file", file=sys.stderr)
        return 2
    with flags.applied(vars(choice)):
        try:
            return _run(choice)
        except (CompileError, LaunchError, MissingExtra, PtxSyntaxError, ValueError) as error:
            print(f"sm100_sim: {error}", file=sys.stderr)
            return 2


def _parser() -> argparse.ArgumentParser:
    made = flags.parser("run", __doc__ or "", "FILE.cu|FILE.ptx")
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    add_launch(made)
    made.add_argument(
        "--seeds", type=int, default=0, help="run again under so many adversarial schedules"
    )
    made.add_argument("--save", metavar="DIR", help="write every array as it is afterwards, as NPY")
    return made


def add_launch(made: argparse.ArgumentParser) -> None:
    """Add what says which kernel is launched, and how."""
    add = made.add_argument
    add("--kernel", required=True, help='its name, as "scale" or "gemm<128, 2>"')
    add("--grid", default="1", help="CTAs, as 8 or 8x2")
    add("--block", default="128", help="threads of a CTA (default 128)")
    add("--cluster", default="1", help="CTAs of a cluster")
    add("--smem", type=int, default=0, help="bytes of dynamic shared memory")
    add("--arg", action="append", default=[], metavar="ARG", help="an argument, once for each")
    add("--flag", action="append", default=[], help="an option of NVRTC, as --flag=-DTILE=64")


def launched(
    choice: argparse.Namespace, ptx: str, name: str, arrays: list[np.ndarray], options: Options
) -> Report:
    """Launch the kernel with the arguments of the command line; their arrays go to `arrays`.

    Raises LaunchError for arguments that are not understood, or not as many as parameters.
    """
    parameters = parsed_kernel(ptx, name).params
    if len(choice.arg) != len(parameters):
        sizes = ", ".join(f"{p.name} ({p.size} bytes)" for p in parameters) or "none"
        raise LaunchError(
            f"{short_name(name)} has {len(parameters)} parameters: {sizes}; {len(choice.arg)} "
            'given by --arg, as --arg "f32[1024]=random" --arg i32=1024'
        )
    return launch_ptx(
        ptx, name, [argument(text, arrays) for text in choice.arg], grid=_extent(choice.grid),
        block=_extent(choice.block), cluster=_extent(choice.cluster), dynamic_smem=choice.smem,
        options=options,
    )  # fmt: skip


def _run(choice: argparse.Namespace) -> int:
    ptx, name = module_of(choice)
    outcome = Outcome(modules={name: ptx})
    plain = options_from(read_settings(), trace=bool(choice.html))
    seeds: list[int | None] = [plain.seed, *range(choice.seeds)]
    arrays: list[np.ndarray] = []
    for seed in seeds:
        arrays = []
        try:
            outcome.reports.append(launched(choice, ptx, name, arrays, _seeded(plain, seed)))
        except LaunchError:
            raise
        except SimulationError as error:
            outcome.failures.append(error)
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            break
    _tell(arrays, choice.save)
    print(summary(outcome.reports, outcome.failures, wants_colour(sys.stdout)))
    write_files(choice, outcome)
    return 1 if outcome.failures or any(report.findings for report in outcome.reports) else 0


def _seeded(options: Options, seed: int | None) -> Options:
    return Options(**{**vars(options), "seed": seed})


def module_of(choice: argparse.Namespace) -> tuple[str, str]:
    """PTX and the name of the kernel in it."""
    if choice.file.endswith(".ptx"):
        return Path(choice.file).read_text(encoding="utf-8"), choice.kernel
    compiled = compile_cuda(Path(choice.file), [choice.kernel], flags=choice.flag)
    return compiled.ptx, compiled.names[choice.kernel]


def argument(text: str, arrays: list[np.ndarray]) -> Any:
    """The argument that a text names; its array is added to `arrays`. Raises LaunchError for a text
    that is none."""
    match = _ARGUMENT.match(text.strip())
    if match is None or match["type"] not in _TYPES or bool(match["map"]) != bool(match["box"]):
        raise LaunchError(
            f'argument {text!r} is not understood; accepted: "i32=5", "f32[64,128]=random", '
            f'"map:f16[256,64],box=64x64,swizzle=128"; types: {", ".join(_TYPES)}'
        )
    kind = np.dtype(_TYPES[match["type"]])
    if match["shape"] is None:
        return kind.type(float(match["value"] or 0)) if kind.kind == "f" else kind.type(
            int(match["value"] or "0", 0))  # fmt: skip
    shape = tuple(map(int, re.split("[,x]", match["shape"].replace(" ", ""))))
    array = _filled(match["type"], kind, shape, match["value"] or "0", len(arrays))
    arrays.append(array)
    if not match["map"]:
        return array
    box = tuple(map(int, match["box"].split("x")))
    named = match["type"] if match["type"] == "bf16" else None
    return tensor_map(array, box, swizzle=int(match["swizzle"] or 0), dtype=named)


def _filled(name: str, kind: np.dtype, shape: tuple[int, ...], how: str, seed: int) -> np.ndarray:
    """An array on a boundary of 256 bytes, as cudaMalloc gives."""
    count = int(np.prod(shape))
    raw = np.zeros(count * kind.itemsize + 256, np.uint8)
    start = -raw.ctypes.data % 256
    array = raw[start : start + count * kind.itemsize].view(kind).reshape(shape)
    if how.startswith("@"):
        array[...] = np.load(how[1:])
    elif how == "arange":
        array[...] = np.arange(count).reshape(shape)
    elif how == "random":
        drawn = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        if name == "bf16":
            array[...] = (drawn.view(np.uint32) >> 16).astype(np.uint16)
        elif kind.kind == "f":
            array[...] = drawn
        else:
            array[...] = np.random.default_rng(seed).integers(0, 100, shape)
    else:
        array[...] = float(how) if kind.kind == "f" else int(how, 0)
    return array


def _extent(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.split("[x,]", text))


def _tell(arrays: list[np.ndarray], directory: str | None) -> None:
    for number, array in enumerate(arrays):
        values = array.reshape(-1)[:6].tolist()
        print(f"array {number} {array.dtype}{list(array.shape)}: {values}"
              f"{' ...' if array.size > 6 else ''}")  # fmt: skip
        if directory:
            Path(directory).mkdir(parents=True, exist_ok=True)
            np.save(Path(directory) / f"array{number}.npy", array)
