"""Options of `python -m fa4_hd256 build`, without what compiles.

Help and mistyped options are answered from here, within a second: nothing that this module imports
loads PyTorch or CuTe DSL.
"""

from __future__ import annotations

import argparse

from ...models import MODELS
from .targets import TARGETS

#: Names of `needs.USES` and `FORMS`, and of `warm`'s dtypes; a test compares them.
USES = ("decode", "prefill", "training")
FORMS = (
    "block-mask",
    "cache",
    "dense",
    "packed",
    "packed-cache",
    "packed-paged",
    "padded",
    "paged",
)
OF_Q = "that-of-q"
DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
KV_DTYPES = ("float8_e4m3fn", OF_Q, "uint8")
#: Options without a value, and which calls' kernels each adds.
_ALSO = {
    "--batch-invariant": "of calls that ask for that",
    "--scheduler-metadata": "of calls that are given one",
    "--tree-mask": "of calls that are given one",
    "--alibi": "of calls with ALiBi",
    "--rotary": "that write rotated rows to a cache",
    "--max-logits": "of calls with return_max_logits",
    "--cache-batch-idx": "of calls over a cache with that",
    "--cache-leftpad": "of calls over a cache with that",
    "--out-gate": "of calls with a gate of the result",
    "--mxfp8": "of calls with q, k and v in mxfp8, of Blackwell",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is built; at least one")
    what.add_argument("--model", action="append", default=[], choices=sorted(MODELS))
    what.add_argument("--heads", metavar="Q/KV", help="attention of another model")
    what.add_argument(
        "--kernel",
        action="append",
        default=[],
        metavar="TEXT",
        help="one kernel, as an error that misses it names it",
    )
    own = parser.add_argument_group("of --heads")
    own.add_argument("--full", action="store_true", help="no causal mask")
    own.add_argument(
        "--window",
        action="append",
        default=[],
        type=int,
        metavar="KEYS",
        help="layers whose queries see so many keys, beside those that see all",
    )
    own.add_argument("--softcap", type=float)
    own.add_argument("--sink", action="store_true")
    parser.add_argument("--arch", action="append", required=True, choices=sorted(TARGETS))
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--use", action="append", choices=USES, help="default: prefill and decode")
    parser.add_argument(
        "--form", action="append", choices=FORMS, help="default: dense, packed and cache"
    )
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: bfloat16")
    parser.add_argument(
        "--kv-dtype",
        action="append",
        choices=KV_DTYPES,
        help="of k and v, uint8: NVFP4; default: that of q",
    )
    parser.add_argument("--scheduler", choices=("static", "dynamic", "both"), default="both")
    parser.add_argument(
        "--page-size",
        action="append",
        default=[],
        type=int,
        metavar="ROWS",
        help="of the paged forms",
    )
    for name, calls in _ALSO.items():
        parser.add_argument(name, action="store_true", help=f"also kernels {calls}")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="RANKS")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
