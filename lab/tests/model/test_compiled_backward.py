"""The backward kernels of `python -m lab static`: both projects, and how the table is made."""

import csv
import io
import json

import pytest

from bench.peers import flash_attn_4
from lab.__main__ import main
from lab.compiled import compiled_backward

pytestmark = pytest.mark.simulator

pytest.importorskip("cutlass")

SEQLEN = 256
UNITS = 2


@pytest.fixture(scope="module")
def ours():
    return list(compiled_backward.our_reports(SEQLEN))


def test_our_kernels(ours):
    ours = {report.kernel: report for report in ours}
    assert sorted(ours) == sorted(compiled_backward.KERNELS)
    for report in ours.values():
        assert (report.stack, report.local, report.spills) == (0, 0, 0)
        assert report.executed > 0 and report.instructions > 0
    preprocess, dq, dkdv, dv, products = (ours[name] for name in compiled_backward.KERNELS)
    assert (preprocess.tmem_columns, preprocess.mmas) == (0, 0)
    assert {report.tmem_columns for report in (dq, dkdv, dv, products)} == {512}
    # S, dP over 256 columns of the head; dQ over 128 keys, dV and dK over 256 queries; K = 16.
    assert dq.mmas == dv.mmas == 16 + 16 + 8
    assert dkdv.mmas == 4 * 16 and products.mmas == 2 * 8
    # Bytes of a CTA and unit: K twice and V, once 64 KiB each; Q and dO in both halves. Of a tile:
    # rest.
    assert dq.load_bytes == 2 * (3 * 32 << 10) + 2 * (128 << 10) / UNITS
    assert dkdv.load_bytes >= 2 * (256 << 10) + 2 * (64 << 10)
    assert dv.load_bytes >= dq.load_bytes
    assert products.load_bytes == 2 * (2 * 256 * 128 + 2 * 128 * 256)
    assert not any(report.store_bytes for report in ours.values())


@pytest.mark.third_party
@pytest.mark.sampled
def test_their_kernels(ours):
    reason = flash_attn_4.unavailable()
    if reason:
        pytest.skip(reason)
    theirs = {report.kernel: report for report in compiled_backward.their_reports(SEQLEN)}
    assert sorted(theirs) == sorted(compiled_backward.THEIRS)
    ours = {report.kernel: report for report in ours}
    dq, dkdv = ours["dQ"], ours["dK/dV"]
    # The kernels differ, so must what is read of each, although one cubin holds two of them.
    assert theirs["dQ"].instructions != theirs["dK/dV"].instructions
    assert theirs["dQ"].mmas == dq.mmas and theirs["dK/dV"].mmas > dkdv.mmas
    assert theirs["dQ"].executed > dq.executed and theirs["dK/dV"].executed > dkdv.executed


def test_columns_of_tensor_memory():
    alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], "
    assert compiled_backward.tmem_columns("mov.b32 \t%r2, 256;\n" + alloc + "%r2;") == 256
    assert compiled_backward.tmem_columns(alloc + "64;") == 64
    assert compiled_backward.tmem_columns("ret;") == 0
    with pytest.raises(ValueError, match="no constant"):
        compiled_backward.tmem_columns("add.u32 %r2, %r3, 4;\n" + alloc + "%r2;")


def test_forms(ours, monkeypatch, capsys):
    monkeypatch.setattr(compiled_backward, "measure", lambda: ours)
    command = ["static", "--direction", "backward"]
    assert main([*command, "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert main([*command, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["kernel"] for row in table["rows"]] == [row["kernel"] for row in rows]
    mmas = {report.kernel: report.mmas for report in ours}
    assert [row["mmas"] for row in table["rows"]] == [mmas[k] for k in compiled_backward.KERNELS]
    assert main(command) == 0
    assert f" {ours[1].instructions} |" in capsys.readouterr().out
