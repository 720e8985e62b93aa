"""Options that choose one shape of attention."""

from __future__ import annotations

import argparse

from bench.suite import Case


def add_shape_options(parser: argparse.ArgumentParser, seqlen: int | None = None) -> None:
    """Add the options that `chosen_case` reads. seqlen: the default one."""
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=seqlen, help="of queries, and of keys")
    parser.add_argument("--seqlen-k", type=int, help="of keys, where it is another")
    parser.add_argument("--heads", default="16/2", metavar="Q/KV", help="query and KV heads")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=int, metavar="LEFT", help="keys seen left of the diagonal")


def chosen_case(arguments: argparse.Namespace) -> Case:
    """The case of the options. Raises ValueError for sizes that make none."""
    try:
        heads, heads_kv = map(int, arguments.heads.split("/"))
    except ValueError:
        raise ValueError(f"--heads {arguments.heads}; accepted is a pair such as 16/2") from None
    seqlen, seqlen_k = arguments.seqlen, arguments.seqlen_k or arguments.seqlen
    if min(arguments.batch, seqlen, seqlen_k, heads, heads_kv) < 1:
        raise ValueError("batch, lengths and heads must be at least 1")
    lengths = ((seqlen, seqlen_k),) * arguments.batch
    window = (arguments.window, None)
    return Case("chosen", lengths, heads, heads_kv, arguments.causal, window)
