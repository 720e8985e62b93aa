"""The environment variables of the package: the one place that reads and documents them."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .architectures import ARCHITECTURES, Architecture, named

#: Said where the simulator is needed and missing. Calls on a GPU do not need it.
NO_SIMULATOR = (
    "sm100_sim is not installed; pip install ./sm100_sim in a checkout of fa4-hd256 installs it"
)


@dataclass(frozen=True)
class Variable:
    """One environment variable and what it is for."""

    name: str
    default: str
    meaning: str


CACHE_DIR = Variable(
    "FA4_HD256_CACHE_DIR",
    "$XDG_CACHE_HOME/fa4_hd256 or ~/.cache/fa4_hd256",
    "directory of the compiled kernels; safe to delete; not used where others may write it",
)
PROGRESS = Variable(
    "FA4_HD256_PROGRESS",
    "on where stderr is a terminal",
    "1 or 0: what is being compiled, simulated or replayed, with its time, on stderr; 0 also hides "
    "the rows that commands of bench print there as each is ready",
)
RESERVED_SMS = Variable(
    "FA4_HD256_RESERVED_SMS",
    "0",
    "SMs that grids of the static tile scheduler, and on Hopper of the dynamic one, leave to other "
    "kernels (NCCL's, say); FA_CLC=0 makes all static; same bits",
)
CHECK = Variable(
    "FA4_HD256_CHECK",
    "0",
    "1: contents of tensors on a GPU are checked like those of CPU tensors: offsets, lengths, "
    "max_seqlen_q and max_seqlen_k, page numbers, row addresses of new rows, scheduler and "
    "backward metadata. Every such call then waits for the GPU",
)
CHECK_PAGES = Variable(
    "FA4_HD256_CHECK_PAGES",
    "0",
    "1: as FA4_HD256_CHECK, but only page numbers and row addresses of new rows in a cache",
)
DS_BYTES = Variable(
    "FA4_HD256_DS_BYTES",
    "the configuration's: 8 GiB, on Hopper 9",
    "bytes that dS of a backward may take at a time, for calls without backward_config; 0: none is "
    "stored, and dQ recomputes it",
)

PREBUILT = Variable(
    "FA4_HD256_PREBUILT",
    "unset",
    "directory of kernels built ahead of time by python -m fa4_hd256 build; read, never written",
)
JIT = Variable(
    "FA4_HD256_JIT",
    "1",
    "0: nothing is compiled; a kernel that is in no cache is an error that says how to build it",
)

ARCHITECTURE = Variable(
    "FA4_HD256_ARCH",
    ARCHITECTURES[0].name,
    "architecture whose kernels CPU tensors run in the simulator: "
    f"{' or '.join(a.name for a in ARCHITECTURES)}; for CUDA tensors their GPU decides",
)

VLLM_FLASH_ATTN = Variable(
    "FA4_HD256_VLLM_FLASH_ATTN",
    "0",
    "1: vLLM's backend FLASH_ATTN takes head size 256 here, and other head sizes as before "
    "(docs/engines.md)",
)

#: Processes that compile at once unless it is chosen: each takes up to 1 GB.
MOST_JOBS = 8
JOBS = Variable(
    "FA4_HD256_JOBS",
    "the cores of the process, at most 8",
    "processes that compile at once in warm_up and at the start of an engine, this one among "
    "them; ranks of torch.distributed share them; 1: it compiles alone",
)

#: Every variable that this project reads, for docs/api.md and `python -m fa4_hd256 env`.
VARIABLES = (
    ARCHITECTURE,
    CACHE_DIR,
    CHECK,
    CHECK_PAGES,
    DS_BYTES,
    JIT,
    JOBS,
    PREBUILT,
    PROGRESS,
    RESERVED_SMS,
    VLLM_FLASH_ATTN,
    Variable(
        "FA_CLC",
        "by mask and lengths",
        "1 selects the dynamic tile scheduler (cluster launch control, or a counter in "
        "memory), 0 the static one; unset: the dynamic one in a backward, and a rule of mask and "
        "lengths in a forward (docs/kernels.md)",
    ),
    Variable(
        "SM100_SIM_REPORT",
        "unset",
        "file to which the simulator appends one JSON object per launch",
    ),
    Variable(
        "SM100_SIM_DEVICE",
        " or ".join(f"{a.simulated} for {a.name}" for a in ARCHITECTURES),
        "GPU that the simulator passes for: b200, gb200, b300, gb300, rubin or h200, also with a "
        "number of SMs, as b200:19",
    ),
    Variable(
        "SM100_SIM_CLUSTERS",
        "as many as the device holds, within 1 GiB of state",
        "number of clusters resident at once",
    ),
    Variable("SM100_SIM_SEED", "unset", "seed of an adversarial schedule"),
    Variable(
        "SM100_SIM_SANITIZE",
        "0",
        "1 looks for races and lifetime errors; wait-ld for tcgen05.ld without wait::ld alone; "
        "strict reads the ISA to the letter",
    ),
    Variable(
        "SM100_SIM_THREADS",
        "the cores of the process",
        "number of clusters that run at the same time",
    ),
    Variable(
        "SM100_SIM_PADDED",
        "0",
        "1: loads may read behind a tensor, up to the multiple of 512 bytes to which PyTorch "
        "rounds it on a GPU",
    ),
    Variable(
        "SM100_SIM_CACHE_DIR",
        "$XDG_CACHE_HOME/sm100_sim or ~/.cache/sm100_sim",
        "directory of the simulator's translated kernels; off keeps none; not used where others "
        "may write it",
    ),
    Variable(
        "CUTE_DSL_ARCH",
        "the first of an architecture, for this package's kernels",
        "target of CuTe DSL; accepted here, where the GPUs decide (docs/architecture.md): "
        f"{', '.join(target for a in ARCHITECTURES for target in a.targets)}",
    ),
)

#: CuTe DSL's variables that say where files go or what is printed, not what is compiled.
_DSL_OUTPUT_ONLY = ("CACHE_DIR", "DUMP_DIR", "KEEP", "LOG", "PRINT", "ARCH", "LIBS")


def cache_directory() -> Path:
    given = os.environ.get(CACHE_DIR.name)
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "fa4_hd256"
    try:
        return Path.home() / ".cache" / "fa4_hd256"
    except RuntimeError:  # a user id without an account, as containers run with
        return Path(tempfile.gettempdir(), f"fa4_hd256-{os.geteuid()}")


def prebuilt_directory() -> str | None:
    return os.environ.get(PREBUILT.name) or None


def jit_allowed() -> bool:
    return _switch(JIT, True)


def _switch(variable: Variable, default: bool) -> bool:
    """Return the value of a variable. Raises ValueError for other values than 0 and 1."""
    given = os.environ.get(variable.name)
    if given is None:
        return default
    if given not in ("0", "1"):
        raise ValueError(f"{variable.name} is {given!r}; accepted: 0 or 1")
    return given == "1"


def replaces_flash_attn() -> bool:
    return _switch(VLLM_FLASH_ATTN, False)


def progress_wanted() -> bool:
    return _switch(PROGRESS, sys.stderr.isatty())


def rows_wanted() -> bool:
    """Return True unless commands are not to print rows on stderr as each is ready. Files get them,
    too: a row that took long must not be lost to what comes after it."""
    return _switch(PROGRESS, True)


def reserved_sms() -> int:
    return _whole_number(RESERVED_SMS, "SMs") or 0


def jobs() -> int:
    given = _whole_number(JOBS, "processes")
    return min(MOST_JOBS, len(os.sched_getaffinity(0))) if given is None else given


def ds_bytes() -> int | None:
    return _whole_number(DS_BYTES, "bytes")


def _whole_number(variable: Variable, unit: str) -> int | None:
    given = os.environ.get(variable.name)
    if not given:
        return None
    if not given.isdecimal():
        raise ValueError(
            f"{variable.name} is {given!r}; accepted: a whole number of {unit} from 0 on"
        )
    return int(given)


def checks_contents() -> bool:
    return _checks(CHECK)


def checks_pages() -> bool:
    return _checks(CHECK_PAGES) or _checks(CHECK)


def _checks(variable: Variable) -> bool:
    return bool(os.environ.get(variable.name)) and _switch(variable, False)


def architecture() -> Architecture:
    """Return the architecture of calls on the CPU. Raises ValueError for an unknown name."""
    given = os.environ.get(ARCHITECTURE.name) or ARCHITECTURE.default
    try:
        return named(given)
    except ValueError:
        accepted = " or ".join(a.name for a in ARCHITECTURES)
        raise ValueError(f"{ARCHITECTURE.name} is {given!r}; accepted: {accepted}") from None


def requested_architecture() -> str | None:
    return os.environ.get("CUTE_DSL_ARCH") or None


def compiler_settings() -> dict[str, str]:
    """CuTe DSL's variables that can change what is compiled: part of the key of a cached kernel."""
    prefix = "CUTE_DSL_"
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(prefix) and not name.removeprefix(prefix).startswith(_DSL_OUTPUT_ONLY)
    }


class _Seen:
    """The environment as it was last looked at, and what of it matters to a call."""

    #: (variables, values of `switches`) in one attribute: another thread may look at any time.
    both: tuple[dict[Any, Any] | None, tuple[str, ...]] = None, ()


_seen = _Seen()
#: `os.environ` without encoding: compared in less than a microsecond.
_variables: dict[Any, Any] | None = getattr(os.environ, "_data", None)


def switches() -> tuple[str, ...]:
    """Return the present values of all variables that a call depends on. The very tuple of the call
    before means that no variable of the environment has changed since, so guards compare by `is`.

    Read at every call: anything cached for similar calls has it in its key.
    """
    present = _variables if _variables is not None else dict(os.environ)
    variables, found = _seen.both
    if present != variables:
        kept = dict(present)
        named = [
            f"{variable}={os.environ.get(variable)}"
            for variable in (
                "FA_CLC",
                ARCHITECTURE.name,
                RESERVED_SMS.name,
                CHECK.name,
                CHECK_PAGES.name,
                DS_BYTES.name,
            )
        ]
        named += [f"{name}={value}" for name, value in compiler_settings().items()]
        found = tuple(named)
        _seen.both = kept, found
    return found


def describe() -> str:
    """A table of all variables with their present values."""
    rows = [("variable", "value", "default", "meaning")]
    for variable in VARIABLES:
        value = os.environ.get(variable.name, "(not set)")
        rows.append((variable.name, value, variable.default, variable.meaning))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)) + f"  {row[3]}"
        for row in rows
    )
