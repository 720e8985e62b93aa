"""One process per GPU: ranks of a group of torch.distributed, which all do the same jobs."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from bench.measure.providers import attempt
from fa4_hd256.interrupt import starting_workers

#: Times of runs in milliseconds, each the slowest rank's.
Times = tuple[float, ...]

#: Way that several GPUs are compared with.
ONE_GPU = "one GPU"

Job = TypeVar("Job")
Found = TypeVar("Found")

#: Seconds that a job may take, compiling included: a rank that fails alone leaves others waiting.
LONGEST = 240.0


def rank_count(asked: int | None, command: str) -> int:
    """Return the number of ranks, by default of GPUs. Raises ValueError for fewer than 2, or more
    than GPUs."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = there if asked is None else asked
    if not 2 <= count <= there:
        raise ValueError(
            f"{count} ranks on {there} CUDA devices; accepted: 2 or more, no more than there are; "
            f"`{command}` has no modelled figures"
        )
    return count


def figures(times: Times | str, one: Times | str | None = None) -> dict[str, Any]:
    """Columns of a row: status, ms, low and high of its times, or why it has none; speedup over
    those of one GPU, where these are given and known."""
    if isinstance(times, str):
        return {"status": times}
    low, ms, high = (float(np.quantile(times, share)) for share in (0.2, 0.5, 0.8))
    found: dict[str, Any] = {"status": "ok", "ms": ms, "low": low, "high": high}
    if one is not None and not isinstance(one, str):
        found["speedup"] = float(np.median(one)) / ms
    return found


def each_job(
    function: Callable[[Job], Found], jobs: Iterable[Job], ranks: int
) -> Iterator[tuple[Job, Found | str]]:
    """Call function(job) on the first `ranks` GPUs, job by job, NCCL being initialised. Yields each
    job with what rank 0's function returned, or why a rank's raised. A process that ends, or says
    nothing for `LONGEST` seconds, is the reason of its job, and the last one."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fa4_hd256_") as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            place = str(Path(folder, "store")), rank, ranks
            process = context.Process(target=_serve, args=(function, place, there), daemon=True)
            with starting_workers():
                process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            for job in jobs:
                for pipe in pipes:
                    pipe.send(job)
                answers = [_answer(pipe, rank) for rank, pipe in enumerate(pipes)]
                failed = [answer for answer in answers if isinstance(answer, str)]
                yield job, failed[0] if failed else answers[0]
        except _RankLost as error:
            yield job, str(error)
        finally:
            for process in processes:
                process.kill()
                process.join()


class _RankLost(RuntimeError):
    """A rank's process answers no more; says which."""


def _answer(pipe: Any, rank: int) -> Any:
    if not pipe.poll(LONGEST):
        raise _RankLost(f"nothing in {LONGEST:.0f} s from rank {rank}")
    try:
        return pipe.recv()
    except EOFError:
        raise _RankLost(f"the process of rank {rank} has ended") from None


def _serve(function: Callable[[Any], Any], place: tuple[str, int, int], pipe: Any) -> None:
    """A rank's process, until it is killed."""
    store, rank, count = place
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=count, device_id=device
    )
    while True:
        found, reason = attempt(partial(function, pipe.recv()))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        pipe.send(reason or found)
