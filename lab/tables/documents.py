"""The tables of docs/tables: one file each, headed by the command that prints it.

`python -m lab tables NAME --write` runs the command and writes its file, but for those that are
kept from before. A file says what it is
of (measured, modelled with the digest of the constants, or computed) and which page explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.__main__ import COMMANDS as BENCH
from bench.tables.table import BASIS, MACHINE, Table

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "tables"


@dataclass(frozen=True)
class Document:
    """A file of docs/tables.

    command: after `python -m bench`, or `lab`, without output options. page: from docs, which
    explains it. tables: which of the command's tables it has, by number; None for all. of_before:
    it was printed by an earlier state of the model, to be compared with; the command prints others
    today.
    """

    title: str
    command: tuple[str, ...]
    page: str
    tables: tuple[int, ...] | None = None
    of_before: bool = False

    @property
    def program(self) -> str:
        """Return the package whose command it is."""
        return "bench" if self.command[0] in BENCH else "lab"

    def header(self, name: str) -> str:
        """Return the start of every file."""
        origin = "Kept as an earlier state of the model printed it; nothing makes it again."
        if not self.of_before:
            command = f"python -m lab tables {name} --write"
            origin = f"Generated, not to be edited: `{command}` makes it again."
        return (
            f"# {self.title}\n\n    python -m {self.program} {' '.join(self.command)}\n\n"
            f"Explained in [{Path(self.page).name}](../{self.page}). {origin}\n\n"
        )

    def text(self, name: str, tables: Sequence[Table]) -> str:
        """The whole file of the command's tables."""
        chosen = [tables[n] for n in self.tables] if self.tables is not None else tables
        return (
            self.header(name)
            + f"{origin(chosen)}\n\n"
            + "\n\n".join(table.as_markdown() for table in chosen)
            + "\n"
        )


def origin(tables: Sequence[Table]) -> str:
    """Describe the tables' rows, and when and with which versions they were made."""
    of_rows = dict.fromkeys((row[BASIS], row[MACHINE]) for table in tables for row in table.rows)
    kinds = "; ".join(f"{basis}: {machine}" for basis, machine in of_rows)
    versions = ", ".join(f"{key} {value}" for key, value in tables[0].environment.items())
    return f"{kinds[:1].upper()}{kinds[1:]}. {versions}."


_VALIDATE = ("validate", "--no-hopper")
_DENSE = ("throughput", "--modelled", "--group", "dense", "--heads", "8/8")


_DECIDED = tuple(
    f"'{what}, {direction}'"
    for direction in ("forward", "backward")
    for what in ("order", "scheduler", "claims", "stages")
)


def _beside(*providers: str) -> tuple[str, ...]:
    return tuple(word for name in providers for word in ("--provider", name))


DOCUMENTS = {
    "throughput": Document(
        "Throughput by length, B200", _DENSE, "throughput.md", (0,)
    ),
    "throughput_one_sequence": Document(
        "Throughput of one causal sequence, B200",
        ("throughput", "--modelled", "--group", "'few KV heads'"), "throughput.md", (0,),
    ),
    **{
        f"throughput_prompts{suffix}": Document(
            f"Throughput of a prompt and of its chunks, {gpu}",
            ("throughput", "--modelled", *machine, "--direction", "forward", "--group", "prompts"),
            "throughput.md", (0,),
        )
        for gpu, suffix, machine in (
            ("B200", "", ()), ("GB200", "_gb200", ("--machine", "gb200")),
            ("GB300", "_gb300", ("--machine", "gb300")),
        )
    },
    "throughput_summary": Document("Throughput, by group", _DENSE, "throughput.md", (1,)),
    **{
        f"throughput_{machine}": Document(
            f"Throughput of one causal sequence, {machine.upper()}",
            ("throughput", "--modelled", "--machine", machine, "--group", "'few KV heads'"),
            "throughput.md", (0,),
        )
        for machine in ("gb200", "gb300")
    },
    **{
        f"throughput_{machine}_dense": Document(
            f"Throughput by length, {machine.upper()}",
            ("throughput", "--modelled", "--machine", machine, *_DENSE[2:]), "throughput.md", (0,),
        )
        for machine in ("gb200", "gb300")
    },
    **{
        f"throughput_{name}": Document(
            f"Throughput of {title}, B200", ("throughput", "--modelled", "--group", group),
            "throughput.md", (0,),
        )
        for name, title, group in (
            ("windows", "windows", "window"), ("unequal", "unequal lengths", "unequal"),
            ("varlen", "packed sequences", "varlen"),
        )
    },
    **{
        f"throughput_h200{name}": Document(
            f"{title} on an H200 beside its peers",
            ("throughput", *options, *_beside("ours", "flash-attn-4", *more)),
            "benchmarks.md", (0,),
        )
        for name, title, options, *more in (
            ("", "The forward",
             ("--direction", "forward", "--group", "'h200 dense'", "--heads", "16/16"), "cuDNN"),
            ("_backward", "The backward",
             ("--direction", "backward", "--group", "'h200 dense'"), "cuDNN"),
            ("_windows", "Windows", ("--group", "'h200 window'"), "cuDNN"),
            # cuDNN takes no packed sequences.
            ("_varlen", "Packed sequences", ("--group", "'h200 varlen'")),
            ("_prefill", "Chunked prefill",
             ("--direction", "forward", "--group", "'chunked prefill'"), "cuDNN"),
        )
    },
    **{
        f"decode_{gpu.lower()}": Document(
            f"Decoding on an {gpu} beside its peers",
            ("throughput", "--direction", "forward", "--group", "decode",
             *_beside("ours", "flash-attn-4", "cuDNN", "'flash-attn-4, num_splits=0'",
                      "FlashAttention-2")),
            "benchmarks.md", (0,),
        )
        for gpu in ("H200", "H100")
    },
    **{
        f"{name}_{gpu.lower()}": Document(f"{title} on an {gpu}", ("decode", part), "serving.md")
        for gpu in ("H200", "H100")
        for name, title, part in (
            ("pages", "Keys and values in pages", "pages"),
            ("kv_types", "Keys and values in e4m3", "kv-types"),
        )
    },
    "new_rows_h200": Document(
        "New rows of a cache on an H200", ("decode", "new-rows"), "serving.md"
    ),
    "masks_h200": Document("Attention under masks on an H200", ("masks",), "masks.md"),
    "masks": Document("Attention under masks on a B200", ("masks", "--modelled"), "masks.md"),
    **{
        f"{name}_h100{suffix}": Document(
            f"{title} over {gpus} H100s", (name,), "training.md"
        )
        for gpus, suffix in (("two", ""), ("four", "x4"))
        for name, title in (("ranks", "One sequence"), ("parallel", "Training steps of a block"))
    },
    "training": Document(
        "A training with each attention",
        ("training", "--seed", "0", "--seed", "1"), "benchmarks.md",
    ),
    "training_rounding": Document(
        "What rounding does to a small training",
        ("training", "--layers", "3", "--hidden", "128", "--heads", "2", "--heads-kv", "1",
         "--vocabulary", "64", "--window", "31", "--full-every", "3", "--batch", "4",
         "--seqlen", "128", *(w for seed in "012" for w in ("--seed", seed))),
        "benchmarks.md",
    ),
    "schedulers": Document(
        "Tile schedulers, forward", ("schedulers", "--modelled"), "benchmarks.md"
    ),
    "schedulers_backward": Document(
        "Tile schedulers, backward", ("schedulers", "--modelled", "--direction", "backward"),
        "benchmarks.md",
    ),
    "calibrate": Document(
        "What published rates say of each constant", ("calibrate", "--show"), "timing.md"
    ),
    "contention": Document(
        "Tile schedulers while another kernel holds SMs", ("contention",), "benchmarks.md"
    ),
    "pages": Document(
        "Keys and values in pages", ("decode", "pages", "--modelled"), "serving.md"
    ),
    "kv_types": Document(
        "Keys and values in e4m3 beside bf16", ("decode", "kv-types", "--modelled"), "serving.md"
    ),
    "pages_gb200": Document(
        "Keys and values in pages, on a GB200",
        ("decode", "pages", "--modelled", "--machine", "gb200"), "serving.md",
    ),
    "defaults": Document(
        "What calls decide for themselves",
        ("defaults", *_DECIDED, "--draws", "32"), "benchmarks.md",
    ),
    "splits": Document(
        "Keys divided among CTA pairs", ("splits", "--modelled", "--draws", "32"), "benchmarks.md"
    ),
    "splits_gb200": Document(
        "Keys divided among a GB200's CTA pairs",
        ("splits", "--modelled", "--machine", "gb200", "--draws", "32"), "benchmarks.md",
    ),
    "ex2_sweep": Document("Mixes of exp2", ("ex2-sweep", "--modelled"), "benchmarks.md"),
    "accuracy": Document("Error by degree and emulated share", ("accuracy",), "kernels.md"),
    "accuracy_gradients": Document(
        "Errors of gradients by kind of call", ("accuracy", "--direction", "backward"),
        "kernels.md",
    ),
    "fp8": Document("Keys and values in e4m3, by method", ("fp8",), "serving.md"),
    "validate_aims": Document(
        "Aims, fitted clocks and errors by class of row", _VALIDATE, "timing.md", (0, 4, 5)
    ),
    "validate_ratios": Document(
        "Ratios of kernels and of GPUs", _VALIDATE, "timing.md", (1, 2)
    ),
    "validate_steps": Document("A step by difference of two chunks", _VALIDATE, "timing.md", (3,)),
    "validate_forward": Document("Forward, every row", _VALIDATE, "timing.md", (6,)),
    "validate_backward": Document("Backward, every row", _VALIDATE, "timing.md", (7,)),
    "validate_published": Document("Rates as published", _VALIDATE, "timing.md", (8,)),
    "validate_windows": Document("Windowed kernels outside the fit", _VALIDATE, "timing.md", (10,)),
    "steps": Document("Clocks of steps, units and tiles, B200", ("steps",), "benchmarks.md"),
    "steps_gb300": Document(
        "Clocks of steps, units and tiles, GB300", ("steps", "--machine", "gb300"), "benchmarks.md"
    ),
    "hopper": Document("The model against an H200", ("hopper",), "timing.md"),
    "hopper_fences": Document(
        "Fences and arrivals, the model against an H200", ("hopper", "--kernel", "'; '"),
        "timing.md",
    ),
    "whole_gpu": Document("A whole H200, measured and modelled", ("whole-gpu",), "timing.md", (0,)),
    "whole_gpu_loads": Document(
        "Clock and power of an H200 under load", ("whole-gpu",), "timing.md", (1,)
    ),
    "predict_h200_first": Document(
        "Attention on an H200, as first predicted", ("predict",), "timing.md", of_before=True
    ),
    "predict_hopper": Document("Attention on Hopper GPUs, predicted", ("predict",), "timing.md"),
    "ladder": Document("The optimisation ladder", ("ladder", "--modelled"), "timing.md"),
    "mutation": Document(
        "Mutation score of the kernels", ("mutation",), "../lab/mutation.md"
    ),
}  # fmt: skip
