"""The picture of measured rates shows what the tables of docs/tables hold."""

from __future__ import annotations

import pytest

from lab.pictures import measured, measured_bars

ROW = "| {} | 16/16 | {} | {} | {} | {} |"
HEADER = "| shape | heads | mask | ours (TFLOPS) | flash-attn-4 (TFLOPS) | cuDNN (TFLOPS) |"
ROWS = [ROW.format(f"32x{n}", m, 700, 600, 500) for n in (512, 1024) for m in ("full", "causal")]
TABLE = "\n".join(
    ["Measured: NVIDIA H200, driver 1. commit 0123456789, time now.", "", HEADER, "|" + "-|" * 6]
    + ROWS
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A docs/tables of this test's own."""
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    for name in ("throughput_h200", "throughput_h200_backward"):
        (tmp_path / f"{name}.md").write_text(TABLE)
    return tmp_path


def test_gpu_and_commit_are_those_of_the_table(folder):
    found = measured.read_table("throughput_h200")
    assert found.origin == "NVIDIA H200, commit 0123456" and len(found.rows) == 4
    assert found.rows[0]["ours (TFLOPS)"] == "700"


def test_a_faster_row_moves_its_point(folder):
    before = measured.throughput_h200().svg()
    faster = TABLE.replace("| 700 |", "| 710 |", 1)
    (folder / "throughput_h200.md").write_text(faster)
    assert measured.throughput_h200().svg() != before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Modelled: B200.", "holds no measured table"),
        (TABLE.replace("16/16", "16/2"), "no rows of"),
    ],
)
def test_a_table_without_the_rows_is_refused(folder, text, message):
    (folder / "throughput_h200.md").write_text(text)
    with pytest.raises(ValueError, match=message):
        measured.throughput_h200()


def test_bars_have_the_figures_of_their_tables(monkeypatch):
    """Each bar is a row of a table; a row that is missing, or there twice, is refused."""
    texts = [box.text for box in measured_bars.bars_h200().texts]
    for panel in measured_bars._PANELS:
        rows = {
            (row["direction"], row["shape"], row["mask"], row["heads"]): row
            for row in measured.read_table(panel.table).rows
        }
        for group in panel.groups:
            row = rows[group[:4]]
            known = row["ours (TFLOPS)"]
            if panel.unit == "TB/s":
                known = f"{float(row['K and V once, ours (TB/s)']):.1f}"
            assert known in texts
    # cuDNN at 49 TFLOPS with 16 heads per KV head: a byte has 16 FLOP.
    assert (
        "3.1" in texts
        and rows["forward", "128x(1, 131072)", "full", "32/2"]["cuDNN (TFLOPS)"] == "49"
    )
    read = measured.read_table

    def twice(name):
        table = read(name)
        return measured.Measurements([*table.rows, *table.rows], table.origin)

    monkeypatch.setattr(measured_bars, "read_table", twice)
    with pytest.raises(ValueError, match="has 2 rows of backward"):
        measured_bars.bars_h200()
