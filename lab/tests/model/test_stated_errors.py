"""The error that a ratio counts with is the one that validation finds in its class."""

import math
import re
from collections import defaultdict

import pytest

from bench.suite import BACKWARD, FORWARD, Case
from lab.model.predictor import predictor_of
from lab.model.stated_errors import CLASSES, LONGER, class_of, ratio_error
from lab.tables.documents import path_of

#: (queries, keys) of a call in each class of lengths.
LENGTHS = {
    "1k-2k": (2048, 2048), "4k-32k": (8192, 8192), "64k-128k": (65536, 65536),
    "chunks": (512, 65536),
}  # fmt: skip


def case_of(mask, lengths, batch=1):
    return Case("dense", (LENGTHS[lengths],) * batch, 8, 8, mask == "causal")


def pooled(text):
    """Class -> (error, rows), of the table of errors by class of row."""
    found = defaultdict(list)
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 13 and cells[1] in (FORWARD, BACKWARD):
            _, direction, mask, lengths, kind, rows = cells[:6]
            if kind in ("burst", "sustained"):
                case = case_of(mask, lengths)
                name = class_of(case, direction, sustained=kind == "sustained")
                found[name].append((int(rows), float(cells[9].removesuffix("%"))))
    return {
        name: (math.sqrt(sum(n * e * e for n, e in parts) / sum(n for n, _ in parts)) / 100,
               sum(n for n, _ in parts))
        for name, parts in found.items()
    }  # fmt: skip


def check(text):
    found = pooled(text)
    assert found.keys() == CLASSES.keys()
    for name, (error, rows) in found.items():
        assert CLASSES[name] == pytest.approx(error, abs=6e-4), name
        assert rows >= 15, name


def test_classes_are_those_of_the_table():
    check(path_of("validate_aims").read_text("utf-8"))


def test_other_errors_are_seen():
    text = path_of("validate_aims").read_text("utf-8")
    row = re.search(r".*\| B200 +\| forward +\| full +\| 4k-32k +\| burst.*", text)[0]
    cells = row.split("|")
    cells[10] = "4.0%"
    with pytest.raises(AssertionError):
        check(text.replace(row, "|".join(cells)))


@pytest.mark.parametrize(
    ("case", "direction", "sustained", "name"),
    [
        (case_of("full", "4k-32k"), FORWARD, False, "forward, full, to 32k"),
        (case_of("causal", "4k-32k"), FORWARD, False, "forward, causal, to 32k"),
        (case_of("causal", "4k-32k"), FORWARD, True, "forward, longer or under load"),
        (case_of("full", LONGER), FORWARD, False, "forward, longer or under load"),
        (case_of("full", "1k-2k", batch=16), FORWARD, False, "forward, up to 2k"),
        (case_of("causal", "chunks"), FORWARD, False, "forward, fewer queries than keys"),
        (case_of("causal", "chunks"), BACKWARD, False, "backward"),
        # The longest sequence of a ragged batch says.
        (Case("varlen", ((34, 34), (5000, 5000)), 16, 2, True, packed=True), FORWARD, False,
         "forward, causal, to 32k"),
    ],
)  # fmt: skip
def test_which_class(case, direction, sustained, name):
    assert class_of(case, direction, sustained=sustained) == name
    assert ratio_error(case, direction, sustained=sustained) == CLASSES[name]


def test_what_is_printed_counts_them():
    case = case_of("full", "4k-32k")
    assert predictor_of("b200", 0).ratio_error(case, FORWARD) == 0.020
