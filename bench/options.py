"""Options of the commands: a function for each, of the command's name with _ for -.

Help and mistyped options are answered from here alone, within a second: nothing that this module
imports loads PyTorch, CuTe DSL or the simulator. Names that it lists and that belong to such a
module are compared with that module's by `tests/bench/test_options.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from pathlib import Path

from bench import suite
from bench.bringup.stages import STAGES
from bench.measure.settings import COLD, L2_STATES, WARM, Sampling, Shape
from bench.processes import add_jobs_option
from bench.suite import DIRECTIONS, FORWARD
from bench.tables.comparison import BOUND, FUNCTION, OURS, OURS_BF16, SOFTCAP, YARDSTICK
from bench.tables.results import add_output_options
from fa4_hd256.kernels.blackwell import tuning
from fa4_hd256.softmax_emu.pattern import COEFFICIENTS

#: Limit of `masks`: seconds of all runs of a row, since SDPA takes tens of times as long as ours.
MASK_SECONDS = 3.0
#: Providers of `throughput` and of `masks`.
PROVIDERS = (
    OURS, "flash-attn-4", "flash-attn-4, five products", "flash-attn-4, num_splits=0", "FROST",
    "cuDNN", "FlashAttention-2", YARDSTICK,
)  # fmt: skip
MASK_PROVIDERS = (
    OURS, FUNCTION, SOFTCAP, BOUND, "SDPA, dense mask", "FlexAttention", "flash-attn-4",
)  # fmt: skip
#: Tables of `decode`, and the providers of its rates.
DECODE_PARTS = ("rates", "kv-types", "pages", "small-pages", "new-rows")
DECODE_PROVIDERS = (
    OURS, "flash-attn-4", "flash-attn-4, num_splits=0", "cuDNN", "FlashAttention-2",
)  # fmt: skip
#: Models, backends and modes of `vllm` and of `sglang`. The first backend is ours, and its texts
#: are scored by all.
SERVED_MODELS = ("Qwen3", "Gemma 3", "Qwen3.5")
VLLM_BACKENDS = ("CUSTOM", "FLASH_ATTN", "TRITON_ATTN")
SGLANG_BACKENDS = ("fa4_hd256", "triton", "fa3")
EAGER, GRAPHS = "eager", "graphs"
#: Machines of the timing model that have a name.
MACHINES = ("b200", "b300", "gb200", "gb300", "h100", "h200")
#: Attentions of `training`: the reference, and all.
REFERENCE = "SDPA float32"
ATTENTIONS = (REFERENCE, "ours", "flash-attn-4", "SDPA bf16", "float32, rounded as kernels do")
#: Types of `throughput`.
DTYPES = ("bf16", "fp16", "e4m3")


def machine(text: str) -> str:
    """Return the name of a machine, or of a file. Raises ArgumentTypeError for another one."""
    if text not in MACHINES and not text.endswith(".json"):
        raise argparse.ArgumentTypeError(
            f"machine {text!r} is not known; there are {', '.join(MACHINES)}, and files whose name "
            "ends in .json, such as the report of `python -m bench bringup`"
        )
    return text


def one_of(kind: str, names: Collection[str]) -> Callable[[str], str]:
    """Return a type for argparse: one of the names, in an error all of them."""

    def name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"no {kind} {text!r}; there are: {'; '.join(names)}")
        return text

    return name


def add_direction(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    meaning = "%(default)s unless chosen" if default else "both unless chosen"
    parser.add_argument("--direction", choices=DIRECTIONS, default=default, help=meaning)


def add_model_options(parser: argparse.ArgumentParser, draws: int = 4) -> None:
    """Add the options of the model: used where there is a GPU or not, settings. draws: default."""
    parser.add_argument("--modelled", action="store_true", help="model, even with a GPU")
    files = "of the model: b200, b300, gb200, gb300, or a file such as the report of a bringup"
    parser.add_argument("--machine", type=machine, default="b200", help=files)
    parser.add_argument("--draws", type=int, default=draws, help="draws of its uncertain constants")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The fields of `Sampling`."""
    parser.add_argument("--warmup", type=int, default=Sampling.warmup, help="runs before, of each")
    parser.add_argument("--runs", type=int, default=Sampling.runs, help="timed runs of each")


def add_time_limit(parser: argparse.ArgumentParser) -> None:
    """`--within`, the seconds of a `TimeLimit`."""
    meaning = "begin no row but the first later than this; those left out are named"
    parser.add_argument("--within", type=float, metavar="SECONDS", help=meaning)


def _add_measured(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that times calls on a GPU, and of its output."""
    add_sampling_options(parser)
    add_time_limit(parser)
    add_output_options(parser)


def accuracy(parser: argparse.ArgumentParser) -> None:
    add_direction(parser, FORWARD)
    add_jobs_option(parser)
    add_output_options(parser)


def bringup(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "The first hour on a GPU: one command, one report; without a GPU it runs in the simulator. "
        "Every step runs in a process of its own with a time limit; a step that hangs is killed, "
        "named, and the next one goes on. Started again with the same --out, it goes on where it "
        "ended. docs/bringup.md says what each stage settles."
    )
    add, names = parser.add_argument, [stage.name for stage in STAGES]
    out = "directory of results and report (default: %(default)s); what is there is not run again"
    add("--out", type=Path, default=Path("bringup_report"), help=out)
    add("--again", action="append", default=[], metavar="STAGE", choices=names,
        help="drop this stage's results first")  # fmt: skip
    add("--stages", nargs="+", choices=names, default=names, help="run these only (default: all)")
    add("--only", action="append", default=[], metavar="PATTERN",
        help="steps STAGE/STEP that match, as in 'golden/tma*'")  # fmt: skip
    add("--simulate", action="store_true", help="in the simulator, as where there is no GPU")
    add("--report", action="store_true", help="only write the report again")
    add("--decide", type=Path, metavar="REPORT",
        help="only print what follows from a report.json, on any machine")  # fmt: skip
    add("--plant", action="store_true", help="first plant failures that the run must recognise")


def decode(parser: argparse.ArgumentParser) -> None:
    parts = f"of {', '.join(DECODE_PARTS)}; all unless chosen"
    part = one_of("part", DECODE_PARTS)
    parser.add_argument("parts", nargs="*", type=part, metavar="PART", help=parts)
    parser.add_argument("--only", metavar="TEXT", help="cases whose description contains TEXT")
    state = f"before each run of a measurement; by default {WARM} of new-rows and {COLD} else"
    parser.add_argument("--l2", choices=L2_STATES, help=state)
    add_model_options(parser)
    add_jobs_option(parser)
    _add_measured(parser)


def ex2_sweep(parser: argparse.ArgumentParser) -> None:
    axes = parser.add_argument_group("grid", "all combinations, and hardware only")
    for name, default, meaning in (
        ("freq", [4, 8, 16], "ex2_emu_freq; with --e4m3 16 at most"),
        ("res", [2, 4], "ex2_emu_res"),
        ("start", [0, 2], "ex2_emu_start_frg"),
        ("degree", [3], f"of {', '.join(map(str, COEFFICIENTS))}"),
    ):
        axes.add_argument(f"--{name}", type=int, nargs="+", default=default, help=meaning)
    every = "emulate in a row's last fragment, too"
    axes.add_argument("--all-fragments", action="store_true", help=every)
    parser.add_argument("--mask", choices=("full", "causal"), help="both unless chosen")
    of_e4m3 = "of the kernel for q, k and v in e4m3; modelled alone"
    parser.add_argument("--e4m3", action="store_true", help=of_e4m3)
    add_model_options(parser, draws=2)
    add_jobs_option(parser)
    add_sampling_options(parser)
    written = "write the best as tuning table, by default the one that the operator reads"
    table = str(tuning.TABLE)
    parser.add_argument("--write", nargs="?", const=table, metavar="FILE", help=written)
    add_output_options(parser)


def gate(parser: argparse.ArgumentParser) -> None:
    _add_measured(parser)


def host(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="TEXT", help="calls whose name has TEXT")
    add_output_options(parser)


def masks(parser: argparse.ArgumentParser) -> None:
    add_direction(parser)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose line has TEXT")
    names = f"of {'; '.join(MASK_PROVIDERS)}; repeatable, all unless chosen"
    parser.add_argument(
        "--provider", action="append", choices=MASK_PROVIDERS, metavar="NAME", help=names
    )
    seconds = "of all runs of a row: where they take longer there are fewer"
    parser.add_argument("--seconds", type=float, default=MASK_SECONDS, help=seconds)
    _add_measured(parser)


def profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=8192, help="of queries, and of keys")
    parser.add_argument("--seqlen-k", type=int, help="of keys, where it is another")
    parser.add_argument("--heads", default="16/2", metavar="Q/KV", help="query and KV heads")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=int, metavar="LEFT", help="keys seen left of the diagonal")
    add_direction(parser)
    parser.add_argument("--run", action="store_true", help="run the commands")
    parser.add_argument("--report", default="fa4_hd256", help="begin of the reports' file names")
    parser.add_argument("--iket", action="store_true", help="timelines of the kernels' own ranges")
    parser.add_argument("--workload", action="store_true", help=argparse.SUPPRESS)
    add_output_options(parser)


def report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="with results of other commands (--json FILE)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: DIR/report.html")


def schedulers(parser: argparse.ArgumentParser) -> None:
    add_direction(parser, FORWARD)
    add_model_options(parser)
    suite.add_selection(parser)
    _add_measured(parser)


def throughput(parser: argparse.ArgumentParser) -> None:
    add_direction(parser)
    add_model_options(parser, draws=32)
    add_jobs_option(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of a measurement")
    state = "before each run of a measurement"
    parser.add_argument("--l2", choices=L2_STATES, default=COLD, help=state)
    names = (
        f"of {'; '.join(PROVIDERS)}; repeatable, all unless chosen, measured without the last; "
        f"with --dtype e4m3 of {OURS}; {OURS_BF16}"
    )
    choices = (*PROVIDERS, OURS_BF16)
    parser.add_argument("--provider", action="append", choices=choices, metavar="NAME", help=names)
    suite.add_selection(parser)
    _add_measured(parser)


def training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=500)
    seeds = "of the first weights; repeatable, 0 unless given"
    parser.add_argument("--seed", type=int, action="append", help=seeds)
    names = f"beside {REFERENCE} and ours; repeatable, all unless chosen"
    parser.add_argument("--attention", action="append", choices=ATTENTIONS, help=names)
    for field in fields(Shape):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=int, default=field.default)
    add_time_limit(parser)
    add_output_options(parser)


def vllm(parser: argparse.ArgumentParser) -> None:
    _serving(parser, VLLM_BACKENDS)


def sglang(parser: argparse.ArgumentParser) -> None:
    _serving(parser, SGLANG_BACKENDS)


def _serving(parser: argparse.ArgumentParser, backends: Sequence[str]) -> None:
    for name, choices, meaning in (
        ("model", SERVED_MODELS, "in whose form a model is made"),
        ("backend", backends, f"ours is {backends[0]}"),
        ("mode", (EAGER, GRAPHS), "of the engine: without CUDA graphs, or with those of decoding"),
    ):
        several = f"{meaning}; repeatable, all unless chosen"
        parser.add_argument(f"--{name}", action="append", choices=choices, help=several)
    for name, default, meaning in (
        ("layers", 12, "of the models"),
        ("hidden", 2048, "their hidden size"),
        ("heads", 16, "query heads"),
        ("requests", 32, "served at once"),
        ("prompt", 1024, "tokens of a prompt on average"),
        ("tokens", 128, "generated for each request"),
        ("rounds", 5, "of each engine"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=meaning)
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep models and logs there")
    add_time_limit(parser)
    add_output_options(parser)
