"""Cases that only a Blackwell GPU can record: the simulator against numpy, and the cases against
their own mistakes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from sm100_sim.tools.golden.instructions import gather, pairs, tcgen05
from sm100_sim.tools.golden.replay import replay

pytestmark = pytest.mark.simulator

PROBES = [*tcgen05.probes(), *pairs.probes(), *gather.probes()]


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.case.name)
def test_the_simulator_agrees_with_numpy(probe):
    assert probe.wrong(replay(probe.case)) == ""


@pytest.mark.parametrize(
    "name",
    [
        "tcgen05/mma bf16 256x128 group 2 A k B k",
        "tcgen05/cp 4x256b",
        "pairs/load cluster 2",
        "gather/four rows of a pair swizzle 128",
        "tcgen05/ld 16x64b x4",
    ],
)
def test_one_wrong_word_is_seen(name):
    (probe,) = (probe for probe in PROBES if probe.case.name == name)
    found = [array.copy() for array in probe.expected]
    assert probe.wrong(found) == ""
    found[0].reshape(-1)[-1] ^= 1
    assert "1 of" in probe.wrong(found)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda c, w, s: c.__setitem__(7, 2), "not worked on exactly once"),
        (lambda c, w, s: s.__setitem__(slice(None), 1), "more tiles were handed out"),
        (lambda c, w, s: w.__setitem__((3, 2), 0), "bit 0 of word 2 is not is_canceled"),
        (lambda c, w, s: w.__setitem__((3, 1), 5), "are not x and y"),
    ],
)
def test_wrong_responses_of_launch_control_are_seen(change, what):
    """Responses as a kernel that reads x from word 0 and the valid bit from word 2 expects them."""
    count = 16
    counts, said = np.ones(count, np.uint32), np.arange(1, count + 1, dtype=np.uint32)
    said[-1] = 0
    words = np.zeros((count, 4), np.uint32)
    words[:, 0], words[:, 2] = said - 1, said > 0
    assert pairs._judge_clc(1, [counts, words, said]) == ""
    change(counts, words, said)
    assert what in pairs._judge_clc(1, [counts, words, said])


def test_products_cover_the_kernels_shapes():
    """One case at least for each kind of product that docs/kernels.md names."""
    shapes = {(p.group, p.m, p.n, p.a == "tmem", p.b_mn) for p in tcgen05.PRODUCTS}
    # QK and dP; PV with P in tensor memory; dK/dV's products of M = 128 pairs; dQ.
    assert {(2, 256, 128, False, False), (2, 256, 256, True, True), (2, 128, 256, False, True),
            (2, 128, 128, False, False)} <= shapes  # fmt: skip


def test_the_assembler_takes_every_case(tmp_path):
    """ptxas for sm_100a, as a B200's driver would; one module, each kernel under its number."""
    found = importlib.util.find_spec("triton")
    home = Path(found.submodule_search_locations[0]) if found else Path("triton")
    tool = home / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
    if not tool.exists():
        pytest.skip("ptxas comes with triton, which is not installed")
    sources = []
    for number, probe in enumerate(PROBES):
        ptx = probe.case.ptx.split(".address_size 64\n", 1)[1]
        sources.append(re.sub(r"\bgolden\b", f"golden{number}", ptx))
    path = tmp_path / "all.ptx"
    path.write_text(tcgen05.HEADER + "\n".join(sources))
    command = [str(tool), "-arch=sm_100a", "-O1", str(path), "-o", str(tmp_path / "all.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
