"""A timeline: the predicted time of a kernel, and what each warp, TMA and the L2 transfers do when.

    python examples/timeline.py timeline.json [--release]

The kernel is the ring of `single_warp_tma.py`. The file is a Chrome trace: open it in Perfetto
(ui.perfetto.dev) or chrome://tracing; a clock of the GPU is drawn as a nanosecond. Everything in it
is modelled (docs/timing.md). Needs numba and nvidia-cuda-nvdisasm (the simulator's extra `timing`).
"""

from __future__ import annotations

import argparse

from single_warp_tma import run

from sm100_sim import timing


def main() -> None:
    """Predict the launch, say what took the time, and write the timeline."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="where the Chrome trace goes")
    parser.add_argument("--release", action="store_true", help="with the barrier")
    arguments = parser.parse_args()
    with timing.attached("b200", draws=2) as found:
        run(arguments.release)
    (prediction,) = found.predictions
    print(prediction.as_text())
    timing.write_trace(arguments.file, prediction)


if __name__ == "__main__":
    main()
