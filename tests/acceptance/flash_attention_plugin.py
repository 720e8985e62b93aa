"""A pytest plugin that lets flash-attention's tests import this operator, at head_dim 256.

`flash_attention.py` starts pytest with it. It installs modules under the names that the tests
import, edits the tests in memory (`flash_attention_edits`), samples their cases, and writes a line
of JSON for each.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import flash_attention_edits as edits
import pytest
import torch
from _pytest.mark.structures import ParameterSet

from fa4_hd256.call.tile_mask import PARTIAL, WHOLE
from fa4_hd256.compat import flash_attn_3, flash_attn_4
from fa4_hd256.kernels.mask.block_mask import MASK_TILE
from fa4_hd256.masks import kinds_of_blocks

SETTINGS = json.loads(Path(os.environ["FA4_HD256_ACCEPTANCE"]).read_text())
CHECKOUT = Path(SETTINGS["checkout"])
HEAD_DIM = 256
#: Cases of a test that are run however small the fraction is.
FEWEST = 3
NOT_APPLICABLE = "not applicable: "


class _Cache(dict):
    """A stand-in for caches of compiled kernels, which tests clear."""

    cache: dict = {}


def _skipping(function: Any) -> Any:
    """Wrap a function so that a call that is not offered here skips its test."""

    def called(*args: Any, **options: Any) -> Any:
        for tensor in args[:3]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1] != HEAD_DIM:
                pytest.skip(f"{NOT_APPLICABLE}head_dim {tensor.shape[-1]} is written in the test")
        try:
            return function(*args, **options)
        except NotImplementedError as error:
            pytest.skip(f"{NOT_APPLICABLE}{error}")

    called.compile_cache = _Cache()
    return called


def _forward(q: Any, k: Any, v: Any, **given: Any) -> tuple:
    """Compute what flash-attn-4's private forward does, by its public functions."""
    out, lse = given.pop("out", None), given.pop("lse", None)
    given["window_size"] = (
        given.pop("window_size_left", None), given.pop("window_size_right", None)
    )  # fmt: skip
    given["return_lse"] = True
    with torch.no_grad():
        found = _public(given)(q, k, v, **given)
    if out is not None:
        out.copy_(found[0])
    if lse is not None:
        lse.copy_(found[1])
    return found[0] if out is None else out, found[1] if lse is None else lse, None, None


def _backward(
    q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *others: Any, **given: Any
) -> tuple:
    """Compute what flash-attn-4's private backward does, by gradients of its public functions."""
    given |= zip(("softmax_scale", "causal", "softcap"), others, strict=False)
    given["window_size"] = (
        given.pop("window_size_left", None), given.pop("window_size_right", None)
    )  # fmt: skip
    results = [given.pop(name, None) for name in ("dq", "dk", "dv")]
    dlse = given.pop("dlse", None)
    blocks = given.get("block_sparse_tensors")
    if blocks is not None:
        given["block_sparse_tensors"] = _of_queries(blocks, (q.shape[1], k.shape[1]))
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    given["return_lse"] = True
    with torch.enable_grad():
        found = _public(given)(*leaves, **given)
    wanted = (found, (dout, dlse)) if dlse is not None else (found[:1], (dout,))
    gradients = torch.autograd.grad(wanted[0], leaves, wanted[1])
    for place, gradient in zip(results, gradients, strict=True):
        if place is not None:
            place.copy_(gradient)
    return tuple(
        gradient if place is None else place
        for place, gradient in zip(results, gradients, strict=True)
    )


def _public(given: dict[str, Any]) -> Any:
    """Return the public function for arguments of a private one; drop those that it has not."""
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table")
    is_ragged = any(given.get(name) is not None for name in lengths)
    names = ("flash_attn_func", "flash_attn_varlen_func")
    function = getattr(flash_attn_4, names[is_ragged])
    accepted = inspect.signature(function).parameters
    for name in [name for name in given if name not in accepted]:
        if name.endswith("_descale") and given[name] is not None:
            pytest.skip(f"{NOT_APPLICABLE}{name} of a private function")
        del given[name]
    return function


def _of_queries(blocks: Any, lengths: tuple[int, int]) -> Any:
    """Return lists of keys' blocks for each block of queries, of lists the other way round."""
    size = tuple(blocks.block_size or (MASK_TILE, MASK_TILE))
    if any(side % MASK_TILE for side in size):
        pytest.skip(f"{NOT_APPLICABLE}block_size {size}")
    full = blocks.full_block_cnt, blocks.full_block_idx
    kinds = kinds_of_blocks(
        (blocks.mask_block_cnt, blocks.mask_block_idx), None if full[0] is None else full,
        size[::-1], lengths[::-1],
    ).transpose(2, 3)  # fmt: skip

    def listed(kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = kinds == kind
        return found.sum(-1).int(), (~found).int().argsort(dim=-1, stable=True).int()

    return type(blocks)(*listed(PARTIAL), *listed(WHOLE), block_size=(MASK_TILE, MASK_TILE))


def _no_metadata(*args: Any, **options: Any) -> None:
    """Return no plan: calls here need none."""


def _interface() -> types.ModuleType:
    found = types.ModuleType("flash_attn.cute.interface")
    for name in flash_attn_4.__all__:
        setattr(found, name, _skipping(getattr(flash_attn_4, name)))
    found._flash_attn_fwd, found._flash_attn_bwd = _skipping(_forward), _skipping(_backward)
    found.get_scheduler_metadata = _no_metadata

    def private(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: pytest.skip(f"{NOT_APPLICABLE}{name} is of their kernels")

    found.__getattr__ = private
    return found


def _namespace(name: str, *folders: Path) -> types.ModuleType:
    """Make a package of the checkout's modules, without what its own __init__ imports."""
    found = types.ModuleType(name)
    found.__path__ = list(map(str, folders))
    found.__spec__ = importlib.util.spec_from_loader(name, None, is_package=True)
    sys.modules[name] = found
    return found


def _install() -> None:
    package = _namespace("flash_attn", CHECKOUT / "flash_attn")
    package.cute = _namespace("flash_attn.cute", CHECKOUT / "flash_attn" / "cute")
    interface = _interface()
    sys.modules["flash_attn.cute.interface"] = package.cute.interface = interface
    for name in flash_attn_4.__all__:
        setattr(package.cute, name, getattr(interface, name))
    hopper = types.ModuleType("flash_attn_interface")
    for name in flash_attn_3.__all__:
        setattr(hopper, name, _skipping(getattr(flash_attn_3, name)))
    hopper.flash_attn_combine = flash_attn_3.flash_attn_combine
    hopper.get_scheduler_metadata = flash_attn_3.get_scheduler_metadata
    sys.modules["flash_attn_interface"] = hopper
    sys.meta_path.insert(0, edits.Finder(CHECKOUT, SETTINGS["tests"]))


_install()


def pytest_generate_tests(metafunc: Any) -> None:
    """Replace a test's parametrizations by a sample of their product, at head_dim 256."""
    own = metafunc.definition.own_markers
    marks = [mark for mark in own if mark.name == "parametrize"]
    if not marks:
        return
    own[:] = [mark for mark in own if mark.name != "parametrize"]
    names, axes = [], []
    for mark in reversed(marks):
        argument_names, values = mark.args[:2]
        if isinstance(argument_names, str):
            argument_names = [name.strip() for name in argument_names.split(",")]
        if argument_names[0] in edits.HEAD_DIM_NAMES and len(argument_names) == 1:
            values = [HEAD_DIM]
        if (chosen := SETTINGS["values"].get(argument_names[0])) is not None:
            values = [value for value in values if value in chosen]
        names += argument_names
        axes.append([_values(value, len(argument_names)) for value in values])
    cases = {}
    for chosen in itertools.product(*axes):
        values = tuple(itertools.chain(*chosen))
        cases["-".join(map(_shown, values))] = values
    ids = _sample(metafunc.function.__name__, list(cases))
    metafunc.parametrize(names, [cases[case] for case in ids], ids=ids)


def _values(value: Any, count: int) -> tuple:
    if isinstance(value, ParameterSet):
        return value.values
    return tuple(value) if count > 1 else (value,)


def _shown(value: Any) -> str:
    """Return a value as ids have it; of a tuple of functions their names."""
    if isinstance(value, (tuple, list)):
        return "_".join(map(_shown, value))
    name = getattr(value, "__name__", None)
    return str(name or value).removeprefix("torch.")


def _sample(test: str, ids: list[str]) -> list[str]:
    """Return a sample, the same one in every process, in the order of the tests."""
    if SETTINGS["only"] is not None:
        asked = set(SETTINGS["only"])
        return [case for case in ids if f"{test}[{case}]" in asked]
    count = max(math.ceil(SETTINGS["fraction"] * len(ids)), min(FEWEST, len(ids)))
    by_hash = sorted(ids, key=lambda case: hashlib.sha1(f"{test}[{case}]".encode()).digest())
    chosen = set(by_hash[:count])
    return [case for case in ids if case in chosen]


def pytest_collection_modifyitems(config: Any, items: list) -> None:
    if SETTINGS["only"] is not None:
        items[:] = [item for item in items if item.name in set(SETTINGS["only"])]
    if not hasattr(config, "workerinput"):
        _write(what="selected", id="", count=len(items))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list) -> None:
    _write(what="selected", id="", count=len(ids))


def pytest_runtest_teardown() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Controller:
    """Hooks of the process that hears of every case; it stops the session when time is over."""

    def __init__(self, session: Any) -> None:
        self._session, self._started = session, time.monotonic()

    def pytest_runtest_logreport(self, report: Any) -> None:
        _report(report)
        seconds = SETTINGS["seconds"]
        if seconds and time.monotonic() - self._started > seconds:
            self._session.shouldstop = "the time is over"
            workers = self._session.config.pluginmanager.getplugin("dsession")
            if workers is not None:
                workers.shouldstop = "the time is over"


def pytest_sessionstart(session: Any) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Controller(session))


def _report(report: Any) -> None:
    name = report.nodeid.split("::")[-1]
    if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
        _write(what="passed", id=name)
    elif hasattr(report, "wasxfail"):
        _write(what="not applicable", id=name, reason=f"their xfail: {report.wasxfail}")
    elif report.skipped:
        _, line, text = report.longrepr
        text = text.removeprefix("Skipped: ").removeprefix("Skipped").removeprefix(NOT_APPLICABLE)
        reason = text or f"the test's own skip, line {line}"
        _write(what="not applicable", id=name, reason=reason)
    elif report.failed:
        text = str(report.longrepr)
        lines = [line for line in text.splitlines() if line.startswith("E ")] or [text[-200:]]
        memory = "OutOfMemoryError" in text or "out of memory" in text
        _write(what="failed", id=name, reason=lines[0][:300], out_of_memory=memory)


def _write(**line: Any) -> None:
    with open(SETTINGS["results"], "a") as results:
        results.write(json.dumps(line) + "\n")
