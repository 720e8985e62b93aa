"""`python -m lab static`: classes of instructions, then real kernels."""

import csv
import io
import json
from fractions import Fraction

import pytest

from bench.peers import flash_attn_4
from fa4_hd256.softmax_emu.pattern import HARDWARE_ONLY, Ex2Pattern
from lab.__main__ import main
from lab.commands import static
from lab.compiled import compiled_forward
from lab.compiled.instruction_classes import CLASS_NAMES, class_counts, instruction_class
from sm100_sim.timing import SassInstruction
from sm100_sim.timing.machine_code.sass import Control

pytest.importorskip("cutlass")


@pytest.mark.parametrize(
    ("opcode", "operands", "expected"),
    [
        ("FFMA2", "R4, R4.F32x2.HI_LO, R6.F32, R8.F32", "FFMA2"),
        ("FMNMX3", "R1, R2, R3, R4, !PT", "FMNMX"),
        ("F2FP.BF16.F32.PACK_AB", "R4, R5, R6", "F2F, F2FP"),
        ("IMAD.MOV.U32", "R1, RZ, RZ, R2", "MOV"),
        ("IMAD.U32", "R7, RZ, RZ, UR8", "MOV"),
        ("HFMA2", "R5, -RZ, RZ, 0, 5.9604644775390625e-08", "MOV"),
        ("IMAD.U32", "R5, R0, 0x10000, RZ", "integer"),
        ("UIADD3", "UR6, UPT, UPT, UR6, 0x1, URZ", "uniform"),
        ("UTCHMMA.2CTA", "gdesc[UR4], gdesc[UR6], tmem[UR8]", "UTCMMA"),
        ("SYNCS.ARRIVE.TRANS64.RED.ART0", "RZ, [R4+URZ], R1", "SYNCS"),
        ("BRA.U", "!UP1, `(.L_x_3)", "branch"),
        ("HADD2", "R1, R2, R3", "other"),
    ],
)
def test_classes(opcode, operands, expected):
    instruction = SassInstruction(0, "", opcode, operands, Control.decode(0))
    assert instruction_class(instruction) == expected
    assert class_counts([instruction]) == {name: int(name == expected) for name in CLASS_NAMES}


def test_mixes_have_equal_shares():
    assert [mix.share for mix in compiled_forward.MIXES] == [0, Fraction(3, 16), Fraction(3, 8)]
    with pytest.raises(ValueError, match="not the same true share"):
        compiled_forward.Mix(HARDWARE_ONLY, Ex2Pattern(4, 3))


def check_report(report: compiled_forward.KernelReport, share: Fraction) -> None:
    """Check what must hold for a kernel of either project."""
    assert report.share == report.softmax.share == share
    assert (report.stack, report.local, report.spills) == (0, 0, 0)
    # Opt-in limit of SM100, and more than half of it: K, V and Q tiles.
    assert 116_224 < report.smem_bytes <= 232_448
    classes = report.softmax.classes
    # A pair of columns: one FFMA2 to scale; emulated ones three more (degree 3) and three FADD2.
    pairs = int(share * 64)
    assert classes["FFMA2"] == 64 + 3 * pairs
    assert classes["MUFU"] == 128 - 2 * pairs + 1
    assert classes["F2F, F2FP"] == 64
    assert report.softmax.total == sum(classes.values())
    assert report.mma.classes["UTCMMA"] >= compiled_forward.STEP_MMAS
    assert report.mma.total == sum(report.mma.classes.values())


@pytest.fixture(scope="module")
def reports():
    """Both projects, full attention, at the share of one mix."""
    return list(compiled_forward.reports(masks=[False], mixes=[compiled_forward.MIXES[-1]]))


def test_kernels(reports):
    if flash_attn_4.unavailable():
        assert [report.project for report in reports] == [compiled_forward.OURS]
    else:
        expected = [compiled_forward.OURS, flash_attn_4.PACKAGE]
        assert [report.project for report in reports] == expected
        ours, theirs = reports
        assert ours.softmax.total <= theirs.softmax.total and ours.mma.total <= theirs.mma.total
    for report in reports:
        check_report(report, Fraction(3, 8))


def test_flash_attn_4_compiles_to_the_pattern_of_its_tuning():
    reason = flash_attn_4.unavailable()
    if reason:
        pytest.skip(reason)
    for causal in (False, True):
        assert flash_attn_4.tuned_pattern(causal) == compiled_forward.MIXES[1].theirs
    with pytest.raises(ValueError, match="its res is 4"):
        flash_attn_4.compile_forward(False, Ex2Pattern(4, 3))


def test_forms(reports, monkeypatch, capsys):
    monkeypatch.setattr(compiled_forward, "reports", lambda: iter(reports))
    command = ["static", "--direction", "forward"]
    assert main([*command, "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    kernels = table["rows"]
    assert main([*command, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(kernels) == len(rows) == len(reports)
    for kernel, row, report in zip(kernels, rows, reports):
        assert kernel["softmax_step"]["total"] == report.softmax.total
        assert float(row["softmax_step.total"]) == report.softmax.total
        assert row["registers"] == str(report.registers)
        assert row["basis"] == "computed" and row["machine"].startswith("sm_100f")
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "| FFMA2 " in text and "37.50%" in text
    assert "MMA loop, full attention" in text


def test_a_missing_flash_attn_4_is_said(reports, monkeypatch):
    def missing(name):
        raise flash_attn_4.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(flash_attn_4, "_forward_module", lambda: pytest.fail("imported"))
    monkeypatch.setattr(flash_attn_4.importlib.metadata, "version", missing)
    assert "pip install flash-attn-4==4.0.0b36" in flash_attn_4.unavailable()
    with pytest.raises(RuntimeError, match="is not installed"):
        flash_attn_4.compile_forward(False, HARDWARE_ONLY)
    monkeypatch.undo()
    monkeypatch.setattr(flash_attn_4, "unavailable", lambda: "flash-attn-4 is not installed")
    text = static.forward_table(reports[:1]).as_markdown()
    assert "compare with: flash-attn-4 is not installed" in text
