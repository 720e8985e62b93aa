"""The tables of docs/tables and lab/docs/tables: one file each, headed by its command.

`python -m lab tables NAME --write` runs the command and writes its file. A file says what it is of
(measured, modelled with the digest of the constants, or computed) and which page explains it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.__main__ import COMMANDS as BENCH
from bench.tables.table import BASIS, MACHINE, Table

_ROOT = Path(__file__).resolve().parents[2]
#: The folder of tables that pages of the operator explain, and that of those which the lab's do.
FOLDER, LAB_FOLDER = _ROOT / "docs" / "tables", _ROOT / "lab" / "docs" / "tables"


@dataclass(frozen=True)
class Document:
    """A file of docs/tables, or of lab/docs/tables. command: after `python -m bench`, or `lab`,
    without output options. page: which explains it. tables: which of the command's tables it has,
    by number; None for all."""

    title: str
    command: tuple[str, ...]
    page: str
    tables: tuple[int, ...] | None = None

    @property
    def program(self) -> str:
        """Return the package whose command it is."""
        return "bench" if self.command[0] in BENCH else "lab"

    @property
    def folder(self) -> Path:
        """Return the folder of the file: the lab's own where a page of the lab explains it."""
        return LAB_FOLDER if self.page.startswith("lab/") else FOLDER

    def header(self, name: str) -> str:
        command = f"python -m lab tables {name} --write"
        origin = f"Generated, not to be edited: `{command}` makes it again."
        link = os.path.relpath(_ROOT / self.page, self.folder)
        return (
            f"# {self.title}\n\n    python -m {self.program} {' '.join(self.command)}\n\n"
            f"Explained in [{Path(self.page).name}]({link}). {origin}\n\n"
        )

    def text(self, name: str, tables: Sequence[Table]) -> str:
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


def read_markdown(text: str) -> list[dict[str, str]]:
    """Return the rows of a table in Markdown, column -> text; none where there is no table."""
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines() if line.startswith("|")
    ]  # fmt: skip
    return [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]


#: Sampling of the tables of an H200: seconds a row.
_FEW_RUNS = ("--warmup", "8", "--runs", "48")
#: Pages that explain several tables.
_TIMING = "lab/docs/timing.md"
_THROUGHPUT = "lab/docs/throughput.md"
_BENCHMARKS = "docs/benchmarks.md"
_SERVING = "docs/serving.md"
_DENSE = ("throughput", "--modelled", "--group", "dense", "--heads", "8/8")


def _beside(*providers: str) -> tuple[str, ...]:
    return tuple(word for name in providers for word in ("--provider", name))


DOCUMENTS = {
    "throughput": Document(
        "Throughput by length, B200", _DENSE, _THROUGHPUT, (0,)
    ),
    "throughput_one_sequence": Document(
        "Throughput of one causal sequence, B200",
        ("throughput", "--modelled", "--group", "'few KV heads'"), _THROUGHPUT, (0,),
    ),
    "throughput_prompts": Document(
        "Throughput of a prompt and of its chunks, B200",
        ("throughput", "--modelled", "--direction", "forward", "--group", "prompts"),
        _THROUGHPUT, (0,),
    ),
    "throughput_summary": Document("Throughput, by group", _DENSE, _THROUGHPUT, (1,)),
    **{
        f"throughput_{machine}": Document(
            f"Throughput of one causal sequence, {machine.upper()}",
            ("throughput", "--modelled", "--machine", machine, "--group", "'few KV heads'"),
            _THROUGHPUT, (0,),
        )
        for machine in ("gb200", "gb300")
    },
    **{
        f"throughput_{name}": Document(
            f"Throughput of {title}, B200", ("throughput", "--modelled", "--group", group),
            _THROUGHPUT, (0,),
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
            _BENCHMARKS, (0,),
        )
        for name, title, options, *more in (
            ("", "The forward",
             ("--direction", "forward", "--group", "'h200 dense'", "--heads", "16/16", *_FEW_RUNS),
             "cuDNN"),
            ("_backward", "The backward",
             ("--direction", "backward", "--group", "'h200 dense'", *_FEW_RUNS), "cuDNN"),
            ("_windows", "Windows", ("--group", "'h200 window'", *_FEW_RUNS), "cuDNN"),
            # cuDNN takes no packed sequences.
            ("_varlen", "Packed sequences", ("--group", "'h200 varlen'", *_FEW_RUNS)),
            ("_prefill", "Chunked prefill",
             ("--direction", "forward", "--group", "'chunked prefill'", *_FEW_RUNS), "cuDNN"),
            ("_mha", "The forward of MHA",
             ("--direction", "forward", "--group", "mha", *_FEW_RUNS), "cuDNN"),
            ("_mha_backward", "The backward of MHA",
             ("--direction", "backward", "--group", "mha", "--warmup", "4", "--runs", "24"),
             "cuDNN"),
        )
    },
    **{
        f"decode_{gpu.lower()}": Document(
            f"Decoding on an {gpu} beside its peers",
            ("throughput", "--direction", "forward", "--group", "decode",
             *_beside("ours", "flash-attn-4", "cuDNN", "'flash-attn-4, num_splits=0'",
                      "FlashAttention-2")),
            _BENCHMARKS, (0,),
        )
        for gpu in ("H200", "H100")
    },
    **{
        f"{name}_{gpu.lower()}": Document(f"{title} on an {gpu}", ("decode", part), _SERVING)
        for gpu in ("H200", "H100")
        for name, title, part in (
            ("pages", "Keys and values in pages", "pages"),
            ("kv_types", "Keys and values in e4m3", "kv-types"),
        )
    },
    "new_rows_h200": Document(
        "New rows of a cache on an H200", ("decode", "new-rows"), _SERVING
    ),
    "small_pages_h200": Document(
        "Keys and values in pages of few rows on an H200",
        ("decode", "small-pages", "--runs", "32", "--warmup", "8"), _SERVING,
    ),
    "packed_masks_h200": Document(
        "Packed sequences with chosen keys on an H200",
        ("masks", "--only", "'packed masks'", "--direction", "forward", "--runs", "24",
         "--warmup", "4", "--seconds", "2"),
        "docs/masks.md",
    ),
    "masks_h200": Document("Attention under masks on an H200", ("masks",), "docs/masks.md"),
    **{
        f"{name}_h100{suffix}": Document(
            f"{title} over {gpus} H100s", (name,), "docs/training.md"
        )
        for gpus, suffix in (("two", ""), ("four", "x4"))
        for name, title in (("ranks", "One sequence"), ("parallel", "Training steps of a block"))
    },
    "training": Document(
        "A training with each attention",
        ("training", "--seed", "0", "--seed", "1"), _BENCHMARKS,
    ),
    "training_rounding": Document(
        "What rounding does to a small training",
        ("training", "--layers", "3", "--hidden", "128", "--heads", "2", "--heads-kv", "1",
         "--vocabulary", "64", "--window", "31", "--full-every", "3", "--batch", "4",
         "--seqlen", "128", *(w for seed in "012" for w in ("--seed", seed))),
        _BENCHMARKS,
    ),
    "schedulers": Document(
        "Tile schedulers, forward", ("schedulers", "--modelled"), _BENCHMARKS
    ),
    "schedulers_backward": Document(
        "Tile schedulers, backward", ("schedulers", "--modelled", "--direction", "backward"),
        _BENCHMARKS,
    ),
    "calibrate": Document(
        "What published rates say of each constant", ("calibrate", "--show"), _TIMING
    ),
    "pages": Document(
        "Keys and values in pages", ("decode", "pages", "--modelled"), _SERVING
    ),
    "kv_types": Document(
        "Keys and values in e4m3 beside bf16", ("decode", "kv-types", "--modelled"), _SERVING
    ),
    "pages_gb200": Document(
        "Keys and values in pages, on a GB200",
        ("decode", "pages", "--modelled", "--machine", "gb200"), _SERVING,
    ),
    "ex2_sweep": Document("Mixes of exp2", ("ex2-sweep", "--modelled"), _BENCHMARKS),
    "accuracy": Document("Error by degree and emulated share", ("accuracy",), "docs/kernels.md"),
    "accuracy_gradients": Document(
        "Errors of gradients by kind of call", ("accuracy", "--direction", "backward"),
        "docs/kernels.md",
    ),
    "validate_aims": Document(
        "Aims, fitted clocks and errors by class of row", ("validate",), _TIMING, (0, 4, 5)
    ),
    "steps": Document("Clocks of steps, units and tiles, B200", ("steps",), _BENCHMARKS),
    "steps_gb300": Document(
        "Clocks of steps, units and tiles, GB300", ("steps", "--machine", "gb300"), _BENCHMARKS
    ),
    "predict_hopper": Document("Attention on Hopper GPUs, predicted", ("predict",), _TIMING),
    "mutation": Document(
        "Mutation score of the kernels", ("mutation",), "lab/mutation.md"
    ),
}  # fmt: skip


def path_of(name: str) -> Path:
    return DOCUMENTS[name].folder / f"{name}.md"
