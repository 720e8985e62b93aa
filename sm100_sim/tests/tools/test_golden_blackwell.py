"""Cases that only a Blackwell GPU can record: the simulator against numpy, and the cases against
their own mistakes."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from sm100_sim.tools.golden.instructions import gather, mma, pairs, tcgen05
from sm100_sim.tools.golden.replay import replay

pytestmark = pytest.mark.simulator

MMAS = list(mma.probes())
OTHERS = [*tcgen05.probes(), *pairs.probes(), *gather.probes()]
PROBES = [*MMAS, *OTHERS]


@pytest.mark.parametrize("probe", OTHERS, ids=lambda probe: probe.case.name)
def test_the_simulator_agrees_with_numpy(probe):
    assert probe.wrong(replay(probe.case)) == ""


# The swizzled forms of 16-bit types are those that every kernel of the project runs.
@pytest.mark.parametrize("probe", MMAS, ids=lambda probe: probe.case.name)
@pytest.mark.sampled("*plain*", "*e4m3*", "*order*", "*negated", "*256x256 group 2 A tmem B mn")
def test_the_simulator_multiplies_as_numpy_does(probe):
    assert probe.wrong(replay(probe.case)) == ""


@pytest.mark.parametrize(
    "name",
    [
        "tcgen05/mma bf16 256x128 group 2 A k B k",
        "tcgen05/mma e4m3 128x32 group 1 A mn B mn plain",
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
    shapes = {(p.group, p.m, p.n, p.a == "tmem", p.b_mn) for p in mma.PRODUCTS}
    # QK and dP; PV with P in tensor memory; dK/dV's products of M = 128 pairs; dQ.
    assert {(2, 256, 128, False, False), (2, 256, 256, True, True), (2, 128, 256, False, True),
            (2, 128, 128, False, False)} <= shapes  # fmt: skip
    forms = {(p.dtype, p.n, p.a, p.plain, p.negate) for p in mma.PRODUCTS}
    # Decode of 16 rows, and of 32 with keys in e4m3; dS by queries and by keys; a negative scale.
    assert {("bf16", 16, "mn", "b", False), ("e4m3", 32, "mn", "b", False),
            ("bf16", 256, "k", "a", False), ("bf16", 256, "mn", "a", False),
            ("bf16", 128, "k", "", True)} <= forms  # fmt: skip


def test_mmas_out_of_order_are_seen():
    """The chain that overwrites A is issued before the one that reads it."""
    (probe,) = (p for p in MMAS if p.case.name == "tcgen05/mma order of S over P")
    head, *chains, rest = re.split(r"(?=mov\.u32 %r1, b;\nshr)", probe.case.ptx)
    last, tail = rest.split("mov.b16 %mask", 1)
    reads, writes = "".join(chains[:2]), chains[2] + last
    turned = dataclasses.replace(probe.case, ptx=f"{head}{writes}{reads}mov.b16 %mask{tail}")
    assert "words differ" in probe.wrong(replay(turned))


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
