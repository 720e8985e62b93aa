"""Files of the package that a call goes through, counted by tracing it.

A call that finds its plan: every file of which a function runs. A first call: the files that hand
it on, whose functions call those of other files. Left out are files that only answer: those that
call no other one (`call/tree_mask`, say), whose name in the caller is enough to read on, and
`_FACTS`. Compiling is no part of a first call here: its kernels are in memory. Nothing is launched.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from paged_cases import int32

import fa4_hd256
from bench.measure import host
from fa4_hd256 import flash_attn_func, flash_attn_with_kvcache, plans

pytestmark = pytest.mark.simulator

ROOT = Path(fa4_hd256.__file__).parent
#: Answers about the process and its GPU, or the one that the simulator passes for.
_FACTS = ("architectures.py", "environment.py", "gpus/")


class Trace:
    """Calls of the package's functions while another one runs, in any thread.

    calls: file -> files whose functions its own call. functions: how often each runs.
    """

    def __init__(self, call) -> None:
        self.calls: dict[str, set[str]] = defaultdict(set)
        self.functions: Counter[str] = Counter()
        sys.setprofile(self._note)
        threading.setprofile(self._note)
        try:
            call()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame, event, argument):
        file = _file_of(frame)
        if event != "call" or file is None:
            return
        self.functions[f"{file}:{frame.f_code.co_name}"] += 1
        self.calls[file]  # those that call nothing have an entry, too
        caller = frame.f_back
        while caller is not None and _file_of(caller) is None:
            caller = caller.f_back
        before = file if caller is None else _file_of(caller)
        if before != file:
            self.calls[before].add(file)

    @property
    def handed_on(self) -> set[str]:
        """Files that hand a call on, as the module's docstring says."""
        asked = {file for file in self.calls if not file.startswith(_FACTS)}
        return {file for file in asked if self.calls[file] & asked}


def _file_of(frame):
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(ROOT)) if ROOT in path.parents else None


def normal(*shape, grad=False):
    return torch.randn(shape).bfloat16().requires_grad_(grad)


def forward():
    q, k, v = (normal(1, 4, 2, 256) for _ in "qkv")
    return lambda: flash_attn_func(q, k, v, causal=True)


def backward():
    q, k, v = (normal(1, 4, 2, 256, grad=True) for _ in "qkv")
    out = flash_attn_func(q, k, v, causal=True)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def new_rows():
    caches = [normal(4, 16, 1, 256) for _ in "kv"]
    given = [normal(1, 1, heads, 256) for heads in (2, 1, 1)]
    options = {"cache_seqlens": int32([3]), "page_table": int32([[0, 1]]), "causal": True}
    return lambda: flash_attn_with_kvcache(given[0], *caches, *given[1:], **options)


CALLS = pytest.mark.parametrize("make", [forward, backward, new_rows])
#: Files of a first call that hand it on, and of a repeated one. Only ever lower them.
MOST = {forward: (10, 5), backward: (13, 6), new_rows: (12, 7)}


#: Files that call `plans`, and get no call back from it.
ABOVE = {"interface.py", "kv_cache.py", "ops/autograd.py", "ops/operators.py"}


@CALLS
def test_a_first_call(make):
    with host.stand_in():
        call = make()
        call()
        plans.forget_plans()
        found = Trace(call)
    assert {"plans.py", "run/plan.py", "run/execute.py"} <= found.handed_on
    assert len(found.handed_on) <= MOST[make][0], sorted(found.handed_on)
    assert not found.calls["plans.py"] & ABOVE, "a turn back"
    assert found.functions["call/forward_problem.py:check_forward_tensors"] == 1, "described twice"


@CALLS
def test_a_call_that_finds_its_plan(make):
    with host.stand_in():
        call = make()
        for _ in range(3):
            call()
        found = Trace(call)
    assert {"plans.py", "run/execute.py"} <= set(found.calls)
    assert len(found.calls) <= MOST[make][1], sorted(found.calls)


# ------------------------------------------------------------------------- imports of a kernel


def imported(module: Path) -> set[Path]:
    """Modules of the package that a module's import statements name, those in functions, too."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            place = module.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            names = [place / alias.name for alias in node.names]
            found |= {path.with_suffix(".py") for path in (place, *names)}
    return {path for path in found if path.is_file()}


def closure(module: Path) -> set[Path]:
    """A module and all that it imports, whatever imports it."""
    found, left = set(), {module}
    while left:
        found |= left
        left = set().union(*map(imported, left)) - found
    return found


#: Kernel -> modules, and their lines, that a reader of it meets. Only ever lower them.
CLOSURES = {"kernels/blackwell/forward/kernel.py": (33, 6123)}


@pytest.mark.parametrize("kernel", CLOSURES)
def test_what_a_kernel_imports(kernel):
    """The proof of its plan, the schedulers' implementations and host code are not among it."""
    found = closure(ROOT / kernel)
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in found)
    assert (len(found), lines) <= CLOSURES[kernel] and lines <= CLOSURES[kernel][1], sorted(found)
    assert not any("proof" in path.parts or path.name == "kernel_set.py" for path in found)
