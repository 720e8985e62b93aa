"""Plugin of pytest: `@pytest.mark.sm100_sim(sanitize=True, seeds=8)` runs a test's kernels here.

A marked test runs inside `attached()` if PyTorch is loaded, once under the plain schedule and once
for each seed, each a case of its own; launches by `launch_ptx`, `launch_cuda` and `launch_triton`
take the same options. What is found fails the case. `--junitxml` has it then, too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

MARKER = (
    "sm100_sim(sanitize=False, seeds=0, device=None, clusters=None): run the test's kernels in the "
    "simulator, under the plain schedule and so many seeds; findings of the sanitizer fail it"
)
_SEED = "_sm100_sim_seed"
_OPTIONS = frozenset({"sanitize", "seeds", "device", "clusters"})


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


def _options(marker: pytest.Mark) -> dict[str, Any]:
    """The marker's arguments. Raises UsageError for others."""
    if marker.args or not _OPTIONS.issuperset(marker.kwargs):
        given = ", ".join([*map(repr, marker.args), *marker.kwargs])
        raise pytest.UsageError(f"mark sm100_sim got {given}; accepted: {', '.join(_OPTIONS)}")
    return dict(marker.kwargs)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("sm100_sim")
    if marker is not None:
        seeds = range(_options(marker).get("seeds", 0))
        metafunc.fixturenames.append(_SEED)
        metafunc.parametrize(_SEED, [None, *seeds], ids=["plain", *(f"seed{n}" for n in seeds)])


@pytest.fixture(autouse=True)
def _sm100_sim(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a marked test, and the fixtures of its own, run in the simulator."""
    marker = request.node.get_closest_marker("sm100_sim")
    if marker is None:
        yield
        return
    from .command.flags import applied
    from .report import collected

    options = _options(marker)
    seed = request.getfixturevalue(_SEED)
    sanitize = options.get("sanitize", False)
    choice = {
        "sanitize": {False: "0", True: "1"}.get(sanitize, sanitize),
        "device": options.get("device"),
        "seed": None if seed is None else str(seed),
        "clusters": None if "clusters" not in options else str(options["clusters"]),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(applied(choice))
        request.node.sm100_sim_reports = stack.enter_context(collected())
        if "torch" in sys.modules:
            from .attach import attached
            from .errors import MissingExtra

            with contextlib.suppress(MissingExtra):
                stack.enter_context(attached())
        yield


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[Any]:
    result = yield
    reports = getattr(pyfuncitem, "sm100_sim_reports", None)
    if reports:
        from .command.summary import found_text

        found = found_text(reports)
        if found:
            pytest.fail(found, pytrace=False)
    return result
