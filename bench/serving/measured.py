"""Measurements of an engine's backends: rates, kernels of a step, how far answers are apart.

Each backend has an engine in a process of its own. Those of a row live at once, and their runs are
interleaved: a round asks every engine for the first tokens of all prompts, then for all tokens.
What each backend answers is compared with the others', and with its own answers to the same
requests again: how far two of the engine's own backends are apart says what rounding alone does.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.measure.time_limit import TimeLimit
from bench.processes import Child
from bench.serving import models
from bench.serving.agreement import Agreement, Generated, Scored, agreement
from bench.tables.ready import results
from bench.tables.results import emit
from bench.tables.table import BASIS, MACHINE, Column, Table
from fa4_hd256 import progress

RATES = (
    Column("model"), Column("mode"), Column("backend"), Column("status"),
    Column("prompts", "tokens/s", ".0f"), Column("decoding", "tokens/s", ".0f"),
    Column("step", "ms", ".2f", "a step of decoding"),
    Column("low", "ms", ".2f", "20 %"), Column("high", "ms", ".2f", "80 %"),
    Column("gpu", "ms", ".2f", "all kernels of a step"),
    Column("start", "s", ".0f"), Column("first", title="kernels of ours made ready at the start"),
    Column("later", title="after the warm-up"),
)  # fmt: skip
AGREEMENTS = (
    Column("model"), Column("mode"), Column("one"), Column("other"),
    Column("equal", title="requests with equal tokens"), Column("requests", title="of"),
    Column("first", format=".1f", title="tokens before the first difference"),
    Column("decoded", format=".5f", title="decoded: mean difference of log p"),
    Column("decoded_max", format=".4f", title="largest"),
    Column("scored", format=".5f", title="as a prompt: mean difference of log p"),
    Column("scored_max", format=".4f", title="largest there"),
    Column("best", format=".2%", title="the likeliest token is the same"),
)  # fmt: skip
#: Suffix of a backend's name, for its second answers.
AGAIN = ", again"


class Failed(RuntimeError):
    """An engine ended instead of answering; the text has its last words."""


class Served:
    """A process that answers `orders`. log: the file that gets what it writes; program: its
    command."""

    def __init__(self, log: Path, program: Sequence[str]) -> None:
        self._child = Child(program, log)
        self.tell, self.end = self._child.tell, self._child.kill

    def hear(self) -> dict[str, Any]:
        """Wait for an answer. Raises Failed if the process ends first, with the last line of its
        log that names an error, and the name of the log."""
        if (answer := self._child.hear()) is not None:
            return answer
        lines = self._child.last_words(600).splitlines()
        last = ([line for line in lines if "Error" in line] or lines or ["nothing"])[-1].strip()
        raise Failed(f"ended with {self._child.status}: {last} ({self._child.log})")

    def ask(self, **order: Any) -> dict[str, Any]:
        self.tell(**order)
        return self.hear()


@dataclass(frozen=True)
class Load:
    """Requests of a measurement. prompt: tokens of one on average, from half to one and a half of
    it; tokens: generated for each."""

    requests: int
    prompt: int
    tokens: int
    rounds: int

    @property
    def longest(self) -> int:
        """Tokens of the longest request, and of a text that is scored."""
        return 3 * self.prompt // 2 + self.tokens + 1

    @property
    def compared(self) -> Load:
        """Requests whose answers are compared: fewer, since engines return log-probabilities one
        Python object each."""
        return replace(self, requests=min(self.requests, 32), prompt=min(self.prompt, 1024))

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return prompts of random tokens, in every process the same. The last token of the
        vocabulary is left out: SGLang 0.5.23 names it 0 where it returns log-probabilities of a
        prompt."""
        draw = random.Random(0)
        lengths = [
            draw.randint(self.prompt // 2, 3 * self.prompt // 2) for _ in range(self.requests)
        ]
        return [[draw.randrange(3, vocabulary - 1) for _ in range(length)] for length in lengths]


class Cache(NamedTuple):
    """Size of a cache: tokens of all requests, and bytes that are enough for them."""

    tokens: int
    nbytes: int


@dataclass(frozen=True)
class Engine:
    """An engine. package: what is imported and what the command is called; program: a command line
    that answers `orders`; arguments: its options for a model's folder, a backend, a mode, a load,
    and so many tokens of its cache in so many bytes."""

    name: str
    package: str
    version: str
    program: Sequence[str]
    backends: Sequence[str]
    modes: Sequence[str]
    arguments: Callable[[Path, str, str, Load, Cache], dict[str, Any]]


@dataclass(frozen=True)
class Bench:
    """Measurements of one run of a command."""

    engine: Engine
    size: models.Size
    load: Load
    backends: Sequence[str]
    folder: Path
    #: Arguments that replace the engine's.
    replaced: dict[str, Any] | None = None

    def rows(self, kind: str, mode: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rows of each table of a model served in a mode."""
        model = self.folder / kind.replace(" ", "-")
        if not model.is_dir():
            place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            models.save(kind, self.size, model, place)
        found = {name: {"model": kind, "mode": mode, "backend": name} for name in self.backends}
        with self._children(kind, mode, model, found) as children:
            answers = self._measured(children, found)
        pairs = [
            {"model": kind, "mode": mode, "one": one, "other": other, **apart._asdict()}
            for one, other, apart in _agreements(answers)
        ]
        total = sum(map(len, self.load.prompts(self.size.vocabulary)))
        return [_row(row, self.load, total) for row in found.values()], pairs

    @contextmanager
    def _children(
        self, kind: str, mode: str, model: Path, found: dict[str, dict[str, Any]]
    ) -> Iterator[dict[str, Served]]:
        """Start an engine for each backend, all at once, and end them. Those that do not start have
        the reason in `found`."""
        tokens = self.load.requests * self.load.longest
        cache = Cache(tokens, models.cache_bytes(kind, self.size, tokens) + (1 << 30))
        started = {}
        with ExitStack() as ends:
            for name in self.backends:
                log = self.folder / f"{model.name}-{mode}-{name}.log"
                child = Served(log, self.engine.program)
                ends.callback(child.end)
                order = self.engine.arguments(model, name, mode, self.load, cache)
                child.tell(**order | (self.replaced or {}))
                started[name] = child

            def ready(name: str, child: Served) -> None:
                answer = child.hear()
                if answer["backends"] != [name]:
                    raise Failed(f"layers have the backends {answer['backends']}")
                found[name] |= {"start": answer["seconds"], "first": answer["readied"]}

            _every(started, found, ready)
            yield started

    def _measured(
        self, children: dict[str, Served], found: dict[str, dict[str, Any]]
    ) -> dict[str, tuple[Generated, Scored]]:
        """Add times to the rows, and return each backend's answers, the second ones too."""
        load, answers = self.load, dict[str, tuple[Generated, Scored]]()
        prompts = load.prompts(self.size.vocabulary)
        compared, texts = load.compared.prompts(self.size.vocabulary), list[list[int]]()
        every = partial(_every, children, found)

        def warm(name: str, child: Served) -> None:
            said = [child.ask(do="time", texts=prompts, tokens=n) for n in (1, load.tokens)]
            said.append(child.ask(do="decode", texts=compared, tokens=load.tokens))
            found[name]["first"] += sum(one["readied"] for one in said)
            # The first backend's texts, or where it fails the next one's.
            answered = zip(compared, said[2]["tokens"], strict=True)
            texts.extend([] if texts else [text + tokens for text, tokens in answered])
            child.ask(do="score", texts=texts)
            found[name] |= {"later": 0, "seconds": [], "steps": []}

        def profile(name: str, child: Served) -> None:
            kernels = child.ask(do="profile", texts=prompts, tokens=load.tokens)["kernels"]
            found[name] |= {"kernels": kernels, "gpu": sum(kernels.values()) / 1e3 or None}

        def answer(suffix: str, name: str, child: Served) -> None:
            generated = child.ask(do="decode", texts=compared, tokens=load.tokens)
            scored = child.ask(do="score", texts=texts)
            found[name]["later"] += generated["readied"] + scored["readied"]
            answers[name + suffix] = (
                Generated(generated["tokens"], generated["logprobs"]),
                Scored(scored["logprobs"], scored["best"]),
            )

        every(warm)
        for number in range(load.rounds):
            every(lambda name, child: self._round(child, found[name], prompts), first=number)
        every(profile)
        for suffix in ("", AGAIN):
            every(partial(answer, suffix))
        return answers

    def _round(self, child: Served, found: dict[str, Any], prompts: list[list[int]]) -> None:
        """Add the times of a round: of the first tokens of all prompts, then of steps of
        decoding."""
        first = child.ask(do="time", texts=prompts, tokens=1)
        every = child.ask(do="time", texts=prompts, tokens=self.load.tokens)
        found["seconds"].append(first["seconds"])
        found["steps"] += every["steps"]
        found["later"] += first["readied"] + every["readied"]


def _every(
    children: dict[str, Served], found: dict[str, dict[str, Any]],
    act: Callable[[str, Served], None], first: int = 0,
) -> None:  # fmt: skip
    """Act on every engine, beginning with that number. The row of one that fails gets its reason,
    and all goes on without it."""
    names = [*children]
    first %= max(1, len(names))
    for name in names[first:] + names[:first]:
        try:
            act(name, children[name])
        except Failed as error:
            found[name]["status"] = str(error)
            children.pop(name)


def _agreements(
    answers: dict[str, tuple[Generated, Scored]],
) -> Iterator[tuple[str, str, Agreement]]:
    """Yield every pair of backends, and each backend with itself."""
    names = [name for name in answers if not name.endswith(AGAIN)]
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            yield one, other, agreement(answers[one], answers[other])
    for name in names:
        if name + AGAIN in answers:
            yield name, name + AGAIN, agreement(answers[name], answers[name + AGAIN])


def _row(found: dict[str, Any], load: Load, total: int) -> dict[str, Any]:
    """Return a row of rates. total: tokens of all prompts. A step of decoding is one in which all
    requests decode."""
    row = dict.fromkeys(column.name for column in RATES) | {"status": "ok"} | found
    seconds, steps = row.pop("seconds", None), row.pop("steps", None)
    if row["status"] != "ok" or seconds is None:
        return row
    row |= {"prompts": total / median(seconds), "seconds": seconds}
    if not steps:
        return row | {"status": "no step in which all requests decode; accepted: more tokens"}
    low, middle, high = (float(at) for at in np.percentile(steps, (20, 50, 80)))
    return row | {
        "decoding": load.requests / middle,
        "step": middle * 1e3, "low": low * 1e3, "high": high * 1e3,
    }  # fmt: skip


def tables(
    bench: Bench, jobs: Sequence[tuple[str, str]], limit: TimeLimit, origin: dict[str, str]
) -> list[Table]:
    """Return the tables of rates and of agreement. jobs: models and modes."""

    def found(job: tuple[str, str]) -> tuple[list[dict[str, Any]], ...]:
        with progress.step(f"serving {job[0]}, {job[1]}"):
            return bench.rows(*job)

    of_jobs = [
        *results(map(found, limit.begun(jobs)), len(jobs), RATES, lambda rows: rows[0], "serving")
    ]
    load, size = bench.load, bench.size
    text = (
        f"{size.layers} layers, {size.heads} query heads, hidden size {size.hidden}, vocabulary "
        f"{size.vocabulary}, random weights; {load.requests} prompts of {load.prompt} tokens on "
        f"average, {load.tokens} generated for each; {load.rounds} rounds, interleaved. "
        "Medians, of steps in which all requests decode. Kernels of a step: by PyTorch's profiler."
    )
    compared = load.compared
    judged = (
        f"{compared.requests} requests of {compared.prompt} tokens on average. The first backend's "
        "texts are scored by all. Differences of log p are absolute, over "
        "generated tokens before the first difference of a request, and over all tokens of the "
        "scored texts."
    )
    rates, pairs = ([row | origin for rows in of_jobs for row in rows[part]] for part in range(2))
    engine = bench.engine
    return [
        limit.noted(
            Table(engine.package, f"Models served by {engine.name}", RATES, rates, (text,))
        ),
        Table(
            engine.package, f"Agreement of {engine.name}'s backends", AGREEMENTS, pairs, (judged,)
        ),
    ]


def run(engine: Engine, arguments: argparse.Namespace) -> int:
    """Run a command. Exit status 1 if a backend was not measured. Raises ValueError without a GPU,
    or without the engine."""
    if not torch.cuda.is_available():
        raise ValueError(
            f"bench {engine.package} without a CUDA device; accepted: a machine that has one"
        )
    if find_spec(engine.package) is None:
        raise ValueError(
            f"{engine.name} is not installed; pip install {engine.package}=={engine.version} "
            "beside this package"
        )
    limit = TimeLimit(arguments.within)
    load = Load(**_given(Load, arguments))
    size = models.Size(**_given(models.Size, arguments), positions=load.longest + 64)
    jobs = [
        (kind, mode)
        for kind in arguments.model or models.MODELS
        for mode in arguments.mode or engine.modes
    ]
    origin = {BASIS: "measured", MACHINE: torch.cuda.get_device_name()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(engine, size, load, arguments.backend or engine.backends, folder)
        found = tables(bench, jobs, limit, origin)
    emit(found, arguments)
    return int(any(row["status"] != "ok" for row in found[0].rows))


def _given(kind: type[models.Size] | type[Load], arguments: argparse.Namespace) -> dict[str, Any]:
    names = (field.name for field in fields(kind))
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
