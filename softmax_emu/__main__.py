"""`python -m fa4_hd256.softmax_emu fit --degree 3`: fit the polynomial and report its errors."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys

from .fit import DEGREES, Fit, error_curve, fit


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fa4_hd256.softmax_emu")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True)
    fitting = commands.add_parser("fit", help="fit a minimax polynomial for 2^f on [0, 1]")
    fitting.add_argument("--degree", type=int, choices=DEGREES, default=3)
    fitting.add_argument("--json", action="store_true", help="print one JSON object")
    fitting.add_argument("--plot", metavar="FILE", help="draw the error curve, a PNG or SVG say")
    options = parser.parse_args(arguments)
    try:
        result = fit(options.degree)
    except ModuleNotFoundError as error:
        parser.error(str(error))
    print(json.dumps(result.as_dict()) if options.json else _text(result))
    return _plot(result, options.plot) if options.plot else 0


def _version() -> str:
    try:
        return f"fa4-hd256 {importlib.metadata.version('fa4-hd256')}"
    except importlib.metadata.PackageNotFoundError:
        return "fa4-hd256, not installed"


def _half_ulp(precision: int) -> float:
    """Largest relative error of rounding to nearest with `precision` significand bits."""
    return 2.0**-precision / (1 + 2.0**-precision)


def _text(result: Fit) -> str:
    lines = [f"2^f on [0, 1], degree {result.degree}, float32 fma Horner, p(0) = 1"]
    for power, coefficient in enumerate(result.coefficients):
        lines.append(f"  c{power} = {coefficient:.10g}  ({coefficient.hex()})")
    lines += [
        f"largest relative error               {result.max_relative_error:.4e}",
        f"largest error in float32 ulps        {result.max_ulp_error:.2f}",
        f"relative error after rounding to bf16 {result.max_relative_error_bfloat16:.4e}"
        f"  (of exact 2^f: {_half_ulp(8):.4e})",
        f"relative error after rounding to fp16 {result.max_relative_error_float16:.4e}"
        f"  (of exact 2^f: {_half_ulp(11):.4e})",
    ]
    return "\n".join(lines)


def _plot(result: Fit, path: str) -> int:
    """Draw the error curve and say where; the exit status."""
    try:
        import matplotlib
    except ImportError:
        print(
            "no error curve: it needs matplotlib, which is not installed; pip install matplotlib",
            file=sys.stderr,
        )
        return 1
    matplotlib.use("Agg")
    from matplotlib import pyplot

    points, error = error_curve(result.coefficients)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(points, error, linewidth=0.8)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set_xlabel("f")
    axes.set_ylabel("p(f) / 2^f - 1")
    axes.set_title(
        f"degree {result.degree}: largest relative error {result.max_relative_error:.3e}"
    )
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        print(f"no error curve: {error}", file=sys.stderr)
        return 2
    print(f"error curve: {path}", file=sys.stderr)
    return 0


def run() -> int:
    try:
        return main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
