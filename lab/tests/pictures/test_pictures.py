"""The pictures of docs/pictures are current, legible, and right about layouts."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from checkout import ROOT
from import_graph import SIMULATOR

from fa4_hd256.kernels.blackwell.instructions import MmaShape, k_major_operand, mn_major_operand
from lab.__main__ import main
from lab.options import PICTURES as FOLDER
from lab.pictures import inputs
from lab.pictures.catalogue import PICTURES
from lab.pictures.layouts import accumulator_parts, place_of_chunk
from lab.pictures.race import KERNEL, planted_race, run_text
from lab.pictures.simulator import FLOORS, OBSERVERS
from lab.pictures.svg import Drawing, text_width
from lab.published.flash_attention import FORWARD_256
from lab.published.nvidia import TRAINING
from sm100_sim.isa.tensor.descriptors import MatrixDescriptor, chunk_addresses, decode_instruction
from sm100_sim.isa.tensor.tensor_core import destinations


@pytest.fixture(scope="module")
def drawn():
    return {name: draw() for name, draw in PICTURES.items()}


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_current(name, drawn):
    """Pictures that differ are drawn again by `python -m lab pictures`; look at them then."""
    assert (FOLDER / f"{name}.svg").read_text("utf-8") == drawn[name].svg()


def test_no_picture_is_left_over():
    assert {path.stem for path in FOLDER.iterdir()} == set(PICTURES)
    assert set(inputs.MODELLED) < set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_legible(name, drawn):
    """No line of text covers another or leaves the picture; words for those who cannot see it."""
    picture = drawn[name]
    assert not complaints(picture)
    tree = ElementTree.fromstring(picture.svg())
    assert tree.find("{*}title").text and tree.find("{*}desc").text


@pytest.mark.parametrize("name", inputs.MODELLED)
def test_a_picture_with_modelled_figures_says_so(name, drawn):
    assert any("modelled" in text.text for text in drawn[name].texts)


def complaints(picture: Drawing) -> list[str]:
    found = [
        f"{one.text!r} covers {other.text!r}"
        for one, other in itertools.combinations(picture.texts, 2)
        if one.overlaps(other)
    ]
    for box in picture.texts:
        if min(box.left, box.top) < 0 or box.right > picture.width or box.bottom > picture.height:
            found.append(f"{box.text!r} leaves the picture")
    return found


def test_what_is_not_legible_is_told():
    picture = Drawing(200, 100, "title", "description")
    picture.text((10, 50), "first")
    picture.text((30, 55), "second")
    picture.text((10, 99), "gone below")
    assert len(complaints(picture)) == 2


def test_check_tells_what_is_stale(tmp_path, capsys):
    assert main(["pictures", "swizzle", "exp2-error", "--write", str(tmp_path)]) == 0
    assert main(["pictures", "swizzle", "exp2-error", "--write", str(tmp_path), "--check"]) == 0
    path = tmp_path / "swizzle.svg"
    path.write_text(path.read_text("utf-8").replace("xor", "or"), "utf-8")
    assert main(["pictures", "swizzle", "exp2-error", "--write", str(tmp_path), "--check"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("not current") == 2 and "drawn again by" in printed


@pytest.mark.parametrize("name", ["rates", "timeline"])
def test_data_of_other_constants_are_refused(name, tmp_path, monkeypatch):
    content = json.loads((inputs.DATA / f"{name}.json").read_text("utf-8"))
    content["constants"] = "B200 modelled, constants 00000000"
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.setattr(inputs, "DATA", tmp_path)
    with pytest.raises(ValueError, match="lab pictures --replay"):
        inputs.read(name)


def test_published_rates_name_their_sources():
    shown = (*FORWARD_256, *TRAINING)
    assert shown and all(row.source.startswith("github.com/") for row in shown)


def test_swizzle_is_that_of_the_tensor_core():
    """Chunks of an atom, and of both operands' slices, where the tensor core reads them."""
    keys = k_major_operand(64)
    for number in range(4):
        descriptor = MatrixDescriptor(
            keys.step_bytes[number], keys.leading_bytes, keys.stride_bytes, 128
        )
        addresses = chunk_addresses(descriptor, False, 8, 2)
        for row, half in itertools.product(range(8), range(2)):
            line, place = place_of_chunk(row, 2 * number + half)
            assert addresses[row, half] == line * 128 + place * 16
    values = mn_major_operand(128)
    descriptor = MatrixDescriptor(0, values.leading_bytes, values.stride_bytes, 128)
    addresses = chunk_addresses(descriptor, True, 128, 2)
    for k, chunk in itertools.product(range(16), range(16)):
        block, inside = divmod(chunk, 8)
        line, place = place_of_chunk(k % 8, inside)
        start = block * values.leading_bytes + k // 8 * 1024
        assert addresses[k, chunk] == start + line * 128 + place * 16


@pytest.mark.parametrize(("m", "n"), [(256, 128), (128, 256)])
def test_lanes_are_those_of_the_tensor_core(m, n):
    descriptor = decode_instruction(MmaShape(m, n, True).instruction_descriptor, "f16", 2)
    mma = SimpleNamespace(ctas=(None, None), descriptor=descriptor, d=0)
    found = [(range(128)[lanes], range(n)[columns]) for columns, _, lanes in destinations(mma)]
    parts = accumulator_parts(m, n)
    assert found == [(lanes, columns) for lanes, _, columns in parts]
    assert all(len(lanes) == len(rows) for lanes, rows, _ in parts)


def test_race_is_gone_when_the_read_comes_first():
    """The words beside the picture: without the bug nothing is found."""
    assert planted_race().kind == "race"
    arrive, read = (
        next(line for line in KERNEL.split("\n") if line.endswith(comment))
        for comment in ("arrive empty", "read the slot")
    )
    fixed = KERNEL.replace(f"{arrive}\n{read}", f"{read}\n{arrive}")
    assert fixed != KERNEL
    for schedule in ({}, {"schedule": "lazy"}, {"seed": 1}, {"seed": 2}):
        assert {finding.kind for finding in run_text(KERNEL, **schedule).findings} == {"race"}
        assert not run_text(fixed, **schedule).findings


def test_the_tower_stands_in_the_order_of_imports():
    """Floors follow the order that the simulator's tests hold the code to."""
    row = {package: number for number, packages in enumerate(SIMULATOR) for package in packages}
    floors = [[row[package] for package in packages] for packages, _ in FLOORS]
    assert all(max(lower) < min(upper) for lower, upper in itertools.pairwise(floors))
    assert all(row[package] > max(floors[-1]) for package, *_ in OBSERVERS)
    named = [package for packages, _ in FLOORS for package in packages]
    named += [package for package, *_ in OBSERVERS]
    assert all((ROOT / "sm100_sim/src/sm100_sim" / package).is_dir() for package in named)


@pytest.mark.parametrize("style", ["", "bold", "mono"])
def test_no_text_is_wider_than_the_table_says(style):
    """DejaVu Sans, among the widest fonts that a reader falls back to, sets the widths."""
    fonts = pytest.importorskip("matplotlib.font_manager")
    from matplotlib.ft2font import FT2Font, LoadFlags

    family = "DejaVu Sans Mono" if style == "mono" else "DejaVu Sans"
    weight = "bold" if style == "bold" else "normal"
    font = FT2Font(fonts.findfont(fonts.FontProperties(family=family, weight=weight)))
    font.set_size(100, 72)
    for text in ("fill the slot", "full", "tcgen05.mma", "SMEM: 230,736 B", "S = Q Kᵀ"):
        glyphs = (font.load_char(ord(c), flags=LoadFlags.NO_HINTING) for c in text)
        width = sum(glyph.linearHoriAdvance for glyph in glyphs) / 65536
        found = text_width(text, 100, style == "mono", style == "bold")
        assert 0.99 * width <= found <= 1.3 * width
