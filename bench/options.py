"""Options of the commands: a function for each, of the command's name with _ for -.

Help and mistyped options are answered from here alone, within a second: nothing that this module
imports loads PyTorch, CuTe DSL or the simulator. Names that it lists and that belong to such a
module are compared with that module's by `tests/bench/test_options.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path

from bench import suite
from bench.measure.target_names import TARGETS
from bench.measure.timer import COLD, L2_STATES, Sampling
from bench.measure.training_shape import Shape
from bench.processes import add_jobs_option
from bench.suite import DIRECTIONS, FORWARD
from bench.tables.comparison import BOUND, FUNCTION, OURS, SOFTCAP, YARDSTICK
from bench.tables.documents import DOCUMENTS
from bench.tables.documents import FOLDER as TABLES
from bench.tables.results import add_output_options
from bench.tables.shape_options import add_shape_options
from fa4_hd256.kernels.blackwell import tuning
from fa4_hd256.softmax_emu.coefficients import COEFFICIENTS

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
#: Choices of `defaults`: what a call decides for itself.
CHOICES = (
    "order, forward", "order, backward", "scheduler, forward", "scheduler, backward",
    "claims, forward", "claims, backward", "splits", "parts of a group", "memory for dS",
    "exp2 mix", "stages, forward", "stages, backward",
)  # fmt: skip
#: Mix of `ladder`: freq and res of the emulated exp2.
LADDER_MIX = 4, 3
#: Limit of `masks`: seconds of all runs of a row, since SDPA takes tens of times as long as ours.
MASK_SECONDS = 3.0
#: Sampling of `profile`: 2^(5 + n) clocks between two samples of a warp scheduler, 0 to 31 are
#: accepted; bytes for the samples.
INTERVAL, BUFFER_BYTES = 3, 512 << 20
#: Ways of `ranks`.
WAYS = (
    "one GPU", "ring", "ring, kernels alone", "ring, transfers alone", "ring, waits for transfers",
    "ring, static scheduler", "gathered keys", "heads over ranks", "PyTorch over ours",
    "PyTorch over cuDNN", "PyTorch over FlashAttention-2",
)  # fmt: skip
#: Providers of `steps`, of `throughput` and of `masks`.
STEP_PROVIDERS = (OURS, "flash-attn-4", "FROST")
PROVIDERS = (
    OURS, "flash-attn-4", "flash-attn-4, five products", "flash-attn-4, num_splits=0", "FROST",
    "cuDNN", "FlashAttention-2", YARDSTICK,
)  # fmt: skip
MASK_PROVIDERS = (
    OURS, FUNCTION, SOFTCAP, BOUND, "SDPA, dense mask", "FlexAttention", "flash-attn-4",
)  # fmt: skip
#: Machines of the timing model that have a name.
MACHINES = ("b200", "b300", "gb200", "gb300", "h100", "h200")
#: Attentions of `training`: the reference, and all.
REFERENCE = "SDPA float32"
ATTENTIONS = (REFERENCE, "ours", "flash-attn-4", "SDPA bf16", "float32, rounded as kernels do")
#: Kernels of `fences`.
FENCED = (
    "dV and dS, full", "dV and dS, causal, CLC", "dK and dQ from dS, full",
    "dK and dQ from dS, causal, CLC", "forward, full", "forward, causal, CLC",
)  # fmt: skip
#: Names of `pictures`.
PICTURE_NAMES = (
    "throughput-forward", "throughput-one-sequence", "throughput-h200", "model-accuracy",
    "training-losses", "timeline-forward", "pair-operands", "swizzle", "operand-majors",
    "tensor-memory-lanes", "memory-forward", "barriers-forward", "memory-dv", "barriers-dv",
    "memory-products", "barriers-products", "memory-dkdv", "barriers-dkdv", "memory-dq",
    "barriers-dq", "backward-flow", "exp2-error", "simulator-tower", "instruction-life", "race",
)  # fmt: skip
#: Types of `throughput`.
DTYPES = ("bf16", "fp16")


def machine(text: str) -> str:
    """Return the name of a machine, or of a file. Raises ArgumentTypeError for another one."""
    if text not in MACHINES and not text.endswith(".json"):
        raise argparse.ArgumentTypeError(
            f"machine {text!r} is not known; there are {', '.join(MACHINES)}, and files whose name "
            "ends in .json, such as the report of `python -m fa4_hd256 bringup`"
        )
    return text


def _one_of(kind: str, names: Collection[str]) -> Callable[[str], str]:
    """Return a type for argparse: one of the names, in an error all of them."""

    def name(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"no {kind} {text!r}; there are: {'; '.join(names)}")
        return text

    return name


def _part_of(kind: str, names: Collection[str]) -> Callable[[str], str]:
    """Return a type for argparse: a part of one of the names, in an error all of them."""

    def part(text: str) -> str:
        if not any(text in name for name in names):
            raise argparse.ArgumentTypeError(
                f"no {kind} has {text!r} in its name; there are: {'; '.join(names)}"
            )
        return text

    return part


def add_model_options(parser: argparse.ArgumentParser, draws: int = 4) -> None:
    """Add the options of the model: used where there is a GPU or not, settings. draws: default."""
    parser.add_argument("--modelled", action="store_true", help="model, even with a GPU")
    parser.add_argument(
        "--machine",
        type=machine,
        default="b200",
        help="of the model: b200, b300, h200, h100, or a file such as the report of a bringup",
    )
    parser.add_argument("--draws", type=int, default=draws, help="draws of its uncertain constants")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The fields of `Sampling`."""
    parser.add_argument("--warmup", type=int, default=Sampling.warmup, help="runs before, of each")
    parser.add_argument("--runs", type=int, default=Sampling.runs, help="timed runs of each")


def add_time_limit(parser: argparse.ArgumentParser) -> None:
    """`--within`, the seconds of a `TimeLimit`."""
    parser.add_argument(
        "--within",
        type=float,
        metavar="SECONDS",
        help="begin no row but the first later than this; those left out are named",
    )


def accuracy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--direction", choices=DIRECTIONS, default=FORWARD)
    add_jobs_option(parser)
    add_output_options(parser)


def calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sets", type=int, default=64, help="to keep at most")
    parser.add_argument("--lot", type=int, default=48, help="sets replayed in a round")
    parser.add_argument("--rounds", type=int, default=4, help="after the first lot")
    parser.add_argument("--limit", type=float, default=1.25, help="of an accepted set's error")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="keep the sets for all predictions")
    parser.add_argument("--show", action="store_true", help="print what is kept, replay nothing")
    add_jobs_option(parser)
    add_output_options(parser)


def contention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--direction", choices=DIRECTIONS, help="both without it")
    add_model_options(parser, draws=0)
    suite.add_selection(parser)
    add_output_options(parser)


def defaults(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "choice",
        nargs="*",
        type=_one_of("choice", CHOICES),
        help=f"of {'; '.join(CHOICES)}; all without one",
    )
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="of each choice's cases one in N"
    )
    add_model_options(parser, draws=64)
    add_jobs_option(parser)
    add_output_options(parser)


def ex2_sweep(parser: argparse.ArgumentParser) -> None:
    axes = parser.add_argument_group("grid", "all combinations, and hardware only")
    axes.add_argument("--freq", type=int, nargs="+", default=[4, 8, 16], help="ex2_emu_freq")
    axes.add_argument("--res", type=int, nargs="+", default=[2, 4], help="ex2_emu_res")
    axes.add_argument("--start", type=int, nargs="+", default=[0, 2], help="ex2_emu_start_frg")
    axes.add_argument(
        "--degree", type=int, nargs="+", default=[3], help=f"of {', '.join(map(str, COEFFICIENTS))}"
    )
    axes.add_argument(
        "--all-fragments", action="store_true", help="emulate in a row's last fragment, too"
    )
    parser.add_argument("--mask", choices=("full", "causal"), help="both unless chosen")
    add_model_options(parser, draws=2)
    add_jobs_option(parser)
    add_sampling_options(parser)
    parser.add_argument(
        "--write",
        nargs="?",
        const=str(tuning.TABLE),
        metavar="FILE",
        help="write the best as tuning table, by default the one that the operator reads",
    )
    add_output_options(parser)


def fences(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument(
        "--kernel",
        type=_part_of("kernel", FENCED),
        default="",
        help="only those with this in their names",
    )
    parser.add_argument("--machine", type=machine, default="b200", help="b200, b300 or a file")
    add_output_options(parser)


def fp8(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", type=machine, default="b200", help="b200, b300 or a file")
    add_output_options(parser)


def hopper(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--build", metavar="DIR", help="write the cubins to measure, do no more")
    parser.add_argument(
        "--missing", action="store_true", help="with --build, those without a measurement only"
    )
    parser.add_argument("--add", metavar="FILE", help="add what hopper_measure.py has printed")
    parser.add_argument("--kernel", default="", help="only those with this in their names")
    add_output_options(parser)


def host(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="TEXT", help="calls whose name has TEXT")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    add_output_options(parser)


def intensity(parser: argparse.ArgumentParser) -> None:
    add_shape_options(parser)
    parser.add_argument("--direction", choices=DIRECTIONS, help="both, if not given")
    parser.add_argument("--machine", type=machine, default="b200", help="b200, b300 or a file")
    add_output_options(parser)


def kv_types(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_sampling_options(parser)
    add_time_limit(parser)
    suite.add_selection(parser)
    add_output_options(parser)


def ladder(parser: argparse.ArgumentParser) -> None:
    add_shape_options(parser, seqlen=8192)
    parser.add_argument("--freq", type=int, default=LADDER_MIX[0], help="of the emulation")
    parser.add_argument("--res", type=int, default=LADDER_MIX[1], help="of the emulation")
    add_model_options(parser)
    add_jobs_option(parser)
    add_sampling_options(parser)
    parser.add_argument("--markdown", metavar="FILE", help="the table as Markdown to FILE")
    add_output_options(parser)


def masks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--direction", choices=DIRECTIONS, help="both unless chosen")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose line has TEXT")
    parser.add_argument(
        "--provider",
        action="append",
        choices=MASK_PROVIDERS,
        metavar="NAME",
        help=f"of {'; '.join(MASK_PROVIDERS)}; repeatable, all unless chosen",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=MASK_SECONDS,
        help="of all runs of a row: where they take longer there are fewer",
    )
    add_model_options(parser)
    add_sampling_options(parser)
    add_time_limit(parser)
    add_output_options(parser)


def mutation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="*",
        type=_one_of("target", TARGETS),
        help="which kernels (default: all); an unknown name lists them",
    )
    parser.add_argument("--seeds", type=int, default=20, help="most seeds a mutant")
    parser.add_argument(
        "--confirm",
        type=int,
        default=4,
        help="seeds after which a mutant that a named edge implies counts as redundant",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    add_output_options(parser)


def new_rows(parser: argparse.ArgumentParser) -> None:
    add_sampling_options(parser)
    add_time_limit(parser)
    add_output_options(parser)


def pages(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_sampling_options(parser)
    add_time_limit(parser)
    suite.add_selection(parser)
    add_output_options(parser)


def parallel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="GPUs; all that there are unless chosen")
    parser.add_argument("--warmup", type=int, default=4, help="steps before, of each")
    parser.add_argument("--runs", type=int, default=16, help="timed steps of each")
    add_time_limit(parser)
    add_output_options(parser)


def peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="to prepare")
    parser.add_argument(
        "--source",
        type=Path,
        metavar="DIR",
        help="checkout of github.com/Dao-AILab/flash-attention at that commit",
    )
    add_output_options(parser)


def pictures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        type=_one_of("picture", PICTURE_NAMES),
        metavar="NAME",
        help="of pictures; all unless chosen",
    )
    parser.add_argument(
        "--write", type=Path, metavar="DIR", default=PICTURES, help="default: docs/pictures"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit status 1 if a file there is not current",
    )
    parser.add_argument(
        "--replay",
        action="store_true",
        help="first make the data of the replays again: some minutes",
    )
    parser.add_argument(
        "--losses",
        type=Path,
        metavar="FILE",
        help="first keep the losses of `bench training --json FILE`, of two seeds",
    )
    add_output_options(parser)


def predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--row", default="", help="only rows with this in their names")
    parser.add_argument(
        "--measure", metavar="FILE", type=Path, help="predict nothing: measure them on this GPU"
    )
    add_output_options(parser)


def profile(parser: argparse.ArgumentParser) -> None:
    add_shape_options(parser, seqlen=8192)
    parser.add_argument("--direction", choices=DIRECTIONS, help="both unless chosen")
    parser.add_argument("--run", action="store_true", help="run the commands, and summarise")
    parser.add_argument("--read", metavar="FILE", help="summarise a raw page written by ncu --csv")
    parser.add_argument("--report", default="fa4_hd256", help="begin of the reports' file names")
    parser.add_argument("--interval", type=int, default=INTERVAL, help="2^(5 + n) clocks a sample")
    parser.add_argument("--buffer", type=int, default=BUFFER_BYTES, help="bytes for the samples")
    parser.add_argument("--iket", action="store_true", help="timelines of the kernels' own ranges")
    parser.add_argument("--workload", action="store_true", help=argparse.SUPPRESS)
    add_output_options(parser)


def ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="GPUs; all that there are unless chosen")
    parser.add_argument("--direction", choices=DIRECTIONS, help="both unless chosen")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="sequences whose line has TEXT; repeatable, all unless chosen",
    )
    parser.add_argument(
        "--way", action="append", choices=WAYS, help="repeatable; all unless chosen"
    )
    parser.add_argument("--warmup", type=int, default=3, help="runs before, of each")
    parser.add_argument("--runs", type=int, default=12, help="timed runs of each")
    add_time_limit(parser)
    add_output_options(parser)


def report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, help="with results of other commands (--json FILE)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: DIR/report.html")
    add_output_options(parser)


def roofline(parser: argparse.ArgumentParser) -> None:
    add_shape_options(parser, seqlen=8192)
    parser.add_argument("--freq", type=int, help="ex2_emu_freq; with --res, default: as configured")
    parser.add_argument("--res", type=int, help="ex2_emu_res")
    parser.add_argument("--machine", type=machine, default="b200", help="b200, b300 or a file")
    parser.add_argument("--direction", choices=DIRECTIONS, help="both, if not given")
    add_output_options(parser)


def schedulers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--direction", choices=DIRECTIONS, default=FORWARD)
    add_model_options(parser)
    add_sampling_options(parser)
    add_time_limit(parser)
    suite.add_selection(parser)
    add_output_options(parser)


def simulator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seqlen",
        type=int,
        help="this one; by default 2048, 8192 (heads 2/1) and 32768 (1/1), and translation",
    )
    parser.add_argument("--heads", type=int, default=2, help="with --seqlen (default: 2)")
    parser.add_argument("--heads-kv", type=int, default=1, help="with --seqlen (default: 1)")
    parser.add_argument("--runs", type=int, help="warm runs of each; the fastest counts")
    add_output_options(parser)


def splits(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add_sampling_options(parser)
    add_time_limit(parser)
    suite.add_selection(parser)
    add_output_options(parser)


def static(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--direction", choices=("forward", "backward", "both"), default="both", help="which kernels"
    )
    add_output_options(parser)


def steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine", type=machine, default="b200", help="b200, gb200, gb300, or a file"
    )
    parser.add_argument("--draws", type=int, default=32, help="sets of its constants")
    parser.add_argument(
        "--provider",
        action="append",
        choices=STEP_PROVIDERS,
        help="repeatable; all unless chosen",
    )
    add_output_options(parser)


def tables(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        type=_one_of("table", DOCUMENTS),
        metavar="NAME",
        help="of tables; all unless chosen",
    )
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=TABLES,
        metavar="DIR",
        help="run their commands and write the files, by default into docs/tables",
    )
    parser.add_argument(
        "--results",
        type=Path,
        nargs="+",
        default=[],
        metavar="JSON",
        help="of the one table's command, run elsewhere, in place of a run here",
    )
    parser.add_argument(
        "--age", action="store_true",
        help="also the commit that printed each, and files that mean something else since",
    )  # fmt: skip
    add_output_options(parser)


def throughput(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--direction", choices=DIRECTIONS, help="both unless chosen")
    add_model_options(parser, draws=32)
    add_jobs_option(parser)
    add_sampling_options(parser)
    add_time_limit(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of a measurement")
    parser.add_argument(
        "--l2", choices=L2_STATES, default=COLD, help="before each run of a measurement"
    )
    parser.add_argument(
        "--provider",
        action="append",
        choices=PROVIDERS,
        metavar="NAME",
        help=f"of {'; '.join(PROVIDERS)}; repeatable, all unless chosen, measured without the last",
    )
    suite.add_selection(parser)
    add_output_options(parser)


def timing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--machine", type=machine, default="b200", help="b200, b300 or a file")
    parser.add_argument(
        "--freq", type=int, nargs="+", default=(), help="of exp2 emulated by flash-attn-4, 0: none"
    )
    add_output_options(parser)


def training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--seed", type=int, action="append", help="of the first weights; repeatable, 0 unless given"
    )
    parser.add_argument(
        "--attention",
        action="append",
        choices=ATTENTIONS,
        help=f"beside {REFERENCE} and ours; repeatable, all unless chosen",
    )
    for field in fields(Shape):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=int, default=field.default)
    add_time_limit(parser)
    add_output_options(parser)


def validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine",
        type=machine,
        default="b200",
        help="of the replays beside rates: b200, b300, a file",
    )
    parser.add_argument("--no-hopper", action="store_true", help="leave `bench hopper` out")
    add_output_options(parser)


def whole_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine", type=machine, default="h200", help="h200, or a file such as a bringup's report"
    )
    add_output_options(parser)
