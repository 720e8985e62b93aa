"""The figures behind pictures that take minutes of replays, kept as small files beside this module.

Each file says which command made it and from which constants of the timing model;
`python -m lab pictures --replay` makes them again.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from lab.model.origin import modelled_machine
from sm100_sim.timing import load

DATA = Path(__file__).resolve().parent / "data"
MACHINE = "b200"
#: Pictures that show figures of the timing model.
MODELLED = ("throughput-forward", "throughput-one-sequence", "model-accuracy", "timeline-forward")
#: Commands that make the rates, of bench, and the model's accuracy, of the lab.
RATES = {
    "dense": ("throughput", "--modelled", "--group", "dense", "--heads", "8/8"),
    "few KV heads": ("throughput", "--modelled", "--group", "few KV heads"),
}
ACCURACY = ("validate",)
#: Call of the timeline: full attention, two query heads that share their tiles, one CTA pair.
SEQLEN = 1024
#: Clocks that the timeline shows before and after the end of a tile.
BEFORE, AFTER = 5200, 6400


def constants() -> str:
    """Machine and digest of the constants, as every modelled row has them."""
    return modelled_machine(load(MACHINE))


def basis() -> str:
    """Return the basis in words for a picture."""
    machine, digest = constants().split(" modelled, constants ")
    return f"modelled, {machine}, constants {digest}; not measured"


def read(name: str) -> dict[str, Any]:
    """Read a file: "rates", "accuracy" or "timeline". Raises ValueError for one that was made from
    other constants than those of today."""
    found = json.loads((DATA / f"{name}.json").read_text("utf-8"))
    made = found["constants"]
    if made != constants():
        raise ValueError(
            f"{name}.json was made from {made}, and the constants are {constants()} now; make it "
            "again by `python -m lab pictures --replay`"
        )
    return found


def replay() -> None:
    """Make the files again: some minutes, more where no replay is kept."""
    from bench import __main__ as bench
    from lab import __main__ as lab

    tables = {name: _run(bench, command) for name, command in RATES.items()}
    _write("rates", {"rows": rates(tables)})
    _write("accuracy", {"rows": accuracy(_run(lab, ACCURACY))})
    _write("timeline", timeline())


def _run(program: ModuleType, command: tuple[str, ...]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "result.json"
        if program.main([*command, "--json", str(target)]):
            raise RuntimeError(f"python -m {program.PROGRAM.package} {' '.join(command)} failed")
        return json.loads(target.read_text("utf-8"))["tables"]


def rates(tables: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the parts of those tables that the pictures need: TFLOPS to a whole number."""
    rows = []
    for group in ("dense", "few KV heads"):
        for row in tables[group][0]["rows"]:
            for name, found in row["details"].items():
                # Published rates, which have no range, are drawn from where they are kept.
                if "tflops_low" in found:
                    batch, seqlen = map(int, row["shape"].split("x"))
                    rows.append({
                        "group": group, "provider": name, "direction": row["direction"],
                        "mask": row["mask"], "heads": row["heads"], "batch": batch,
                        "seqlen": seqlen, **{
                            key: round(found[key]) for key in ("tflops", "tflops_low",
                                                               "tflops_high")
                        },
                    })  # fmt: skip
    return rows


def accuracy(tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every published row that counts: TFLOPS to a whole number; fitted: as modelled at the clock
    of its lab's GPU."""
    return [
        {
            "kind": f"{row['direction']}, {row['gpu']}", "kernel": row["kernel"],
            "case": row["case"], "published": round(row["published"]),
            "modelled": round(row["modelled"]),
            "fitted": round(row["published"] * (1 + row["error_fitted"])),
        }
        for table in tables
        for row in table["rows"]
        if "error_fitted" in row and row["counts"]
    ]  # fmt: skip


def timeline() -> dict[str, Any]:
    """Return the spans of every role around the end of the third tile of a replay of the
    forward."""
    from fa4_hd256.kernels.blackwell.forward.config import ForwardConfig
    from lab.model import ours
    from lab.model.calls import Kind
    from lab.pictures.spans import forward_spans
    from sm100_sim import timing

    config = ForwardConfig()
    steps, tile = SEQLEN // config.block_kv, 2
    machine = load(MACHINE)
    compiled, arguments = ours.call_on(machine, ours.Variant(Kind(False)), (SEQLEN, 2))
    prediction = timing.predict(compiled, *arguments, machine=machine)[-1]
    spans = forward_spans(prediction, config, steps)
    end = next(s.end for s in spans if (s.what, s.tile, s.step) == ("PV", tile, steps - 1))
    shown = [
        [span.lane, span.what, span.tile - tile, span.step, span.begin - end, span.end - end]
        for span in spans
        if span.end > end - BEFORE and span.begin < end + AFTER
    ]
    return {
        "problem": f"full attention, batch 1, heads 2/1, {SEQLEN} tokens, one CTA pair",
        "steps": steps,
        "columns": ["lane", "what", "tile", "step", "begin", "end"],
        "spans": shown,
    }


def _write(name: str, content: dict[str, Any]) -> None:
    head = {"command": "python -m lab pictures --replay", "constants": constants()}
    (key, rows) = next((k, v) for k, v in content.items() if k in ("rows", "spans"))
    others = {**head, **{k: v for k, v in content.items() if k != key}}
    lines = [f" {json.dumps(k)}: {json.dumps(v)}," for k, v in others.items()]
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    text = "\n".join(["{", *lines, f' "{key}": [', body, " ]", "}"]) + "\n"
    (DATA / f"{name}.json").write_text(text, "utf-8")
