"""Options of the lab's commands: a function for each, of the command's name with _ for -.

As `bench/options.py`, whose rules hold here: nothing that this module imports loads PyTorch, CuTe
DSL or the simulator.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.options import add_time_limit, machine, one_of
from bench.processes import add_jobs_option
from bench.suite import DIRECTIONS
from bench.tables.comparison import OURS
from bench.tables.results import add_output_options
from lab.measure.target_names import TARGETS
from lab.tables.documents import DOCUMENTS

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
#: Ways of `ranks`.
WAYS = (
    "one GPU", "ring", "ring, kernels alone", "ring, transfers alone", "ring, waits for transfers",
    "ring, static scheduler", "gathered keys", "heads over ranks", "PyTorch over ours",
    "PyTorch over cuDNN", "PyTorch over FlashAttention-2",
)  # fmt: skip
#: Providers of `steps`.
STEP_PROVIDERS = (OURS, "flash-attn-4", "FROST")
#: Names of `pictures`.
PICTURE_NAMES = (
    "bars-h200", "throughput-forward", "throughput-one-sequence", "throughput-h200",
    "model-accuracy", "training-losses", "timeline-forward", "pair-operands", "swizzle",
    "operand-majors", "tensor-memory-lanes", "memory-forward", "barriers-forward",
    "memory-dv", "barriers-dv",
    "memory-products", "barriers-products", "memory-dkdv", "barriers-dkdv", "memory-dq",
    "barriers-dq", "backward-flow", "exp2-error", "simulator-tower", "instruction-life", "race",
)  # fmt: skip


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


def foreign(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--predict", action="store_true", help="simulate and replay, and keep it")
    parser.add_argument("--measure", action="store_true", help="on the GPU that is there")
    parser.add_argument("--kernels", default="", help="parts of names, with ; between")
    parser.add_argument(
        "--seconds", type=float, default=85.0, help="with --measure: begin no kernel after these"
    )
    add_output_options(parser)


def mutation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="*",
        type=one_of("target", TARGETS),
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
        type=one_of("picture", PICTURE_NAMES),
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


def steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine", type=machine, default="b200", help="b200, gb200, gb300, or a file"
    )
    parser.add_argument("--draws", type=int, default=32, help="sets of its constants")
    parser.add_argument(
        "--provider", action="append", choices=STEP_PROVIDERS, help="repeatable; all unless chosen"
    )
    add_output_options(parser)


def tables(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        type=one_of("table", DOCUMENTS),
        metavar="NAME",
        help="of tables; all unless chosen",
    )
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=True,
        metavar="DIR",
        help="run their commands and write the files, by default where they lie",
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


def validate(parser: argparse.ArgumentParser) -> None:
    add_output_options(parser)
