"""The simulator against vectors recorded on a Hopper GPU (`python -m sm100_sim record`).

Integer, layout and correctly rounded results agree bit for bit; approximate functions stay within
the bound that the PTX ISA states for each, in the simulator and in the recording.
"""

from __future__ import annotations

import numpy as np
import pytest
from cuda.bindings import driver
from project import DOCS

from sm100_sim.__main__ import main
from sm100_sim.errors import SimulationError
from sm100_sim.host import host_code
from sm100_sim.state import tensormap
from sm100_sim.tools import golden
from sm100_sim.tools.golden import Case, record
from sm100_sim.tools.golden.bounds import Measure, bound_of, values
from sm100_sim.tools.golden.comparing import comparable, difference
from sm100_sim.tools.golden.instructions.tensormaps import requests
from sm100_sim.tools.golden.replay import replay

pytestmark = pytest.mark.simulator

VECTORS = golden.Vectors()
CASES = golden.all_cases()
EXACT = [
    case for case in CASES if not (case.approximate or case.faults or case.rule or case.hashed)
]
#: Sums of the tensor core have a test of their own (test_golden_wgmma.py).
APPROXIMATE = [case for case in CASES if case.approximate and not case.hopper]


def chunks() -> list:
    """Return about 20 cases of one group each, so that no test takes long: every so many-th one, so
    that each test has cases of all the group."""
    found = []
    for group, cases in golden.groups(EXACT).items():
        count = -(-len(cases) // 20)
        found += [pytest.param(cases[i::count], id=f"{group}-{i}") for i in range(count)]
    return found


def check(cases: list[Case], **options) -> None:
    wrong = [
        difference(case, replay(case, **options), VECTORS.outputs(case), late_flush=True)
        for case in cases
    ]
    assert not any(wrong), "\n".join(filter(None, wrong))


def test_the_page_counts_the_cases():
    page = (DOCS / "golden.md").read_text("utf-8")
    rules = sum(1 for case in CASES if case.rule)
    assert f"{len(CASES)} cases, {rules} of them" in page and f"`rules` ({rules} cases" in page


def test_every_case_is_recorded():
    """Each vector belongs to the PTX and the inputs that are there now; none is left over."""
    assert VECTORS.manifest["cases"] == {case.name: case.digest() for case in CASES}
    assert VECTORS.manifest["failed"] == {}
    assert VECTORS.manifest["capability"] == "9.0"


# Groups of single instructions that no other test has are whole by default, but for conversions.
@pytest.mark.parametrize("cases", chunks())
@pytest.mark.sampled(
    "*-0", "integer-*", "bits-*", "compare-*", "float32-*", "half-*", "minmax-*", "convert-[1-4]"
)
def test_bit_for_bit(cases):
    check(cases)


@pytest.mark.parametrize("group", ["tma", "cluster", "async"])
@pytest.mark.sampled("cluster", "async")
def test_bit_for_bit_when_asynchronous_work_is_late(group):
    check([case for case in EXACT if case.group == group], schedule="lazy")


@pytest.mark.parametrize("case", APPROXIMATE, ids=lambda case: case.name.split("/")[1])
def test_within_the_bound(case):
    """The recording is held to the bound too: that checks the reference and the bound's reading."""
    (recorded,) = VECTORS.outputs(case)
    (mine,) = replay(case)
    inputs = [values(array, case.floats) for array in case.inputs]
    bound = bound_of(case)
    figures = {}
    for who, array in (("simulator", mine), ("hardware", recorded)):
        measure: Measure = bound.measure(inputs, values(array, case.floats))
        assert not measure.wrong, f"{case.name}, {who}: {measure.wrong}"
        figures[who] = measure.worst
    same = np.mean(comparable(mine, case.floats) == comparable(recorded, case.floats))
    print(
        f"{case.name}: bound {bound.text}; largest error "
        + ", ".join(f"{who} {worst}" for who, worst in figures.items())
        + f"; {same:.1%} of the results equal"
    )


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_trigonometry_beyond_its_bound(name):
    """Large arguments lose accuracy as they do on hardware."""
    case = next(case for case in CASES if case.name == f"approximate/{name}.approx.f32")
    mine, recorded = (values(arrays[0], "f32") for arrays in (replay(case), VECTORS.outputs(case)))
    number = ~np.isnan(recorded)
    assert np.abs(mine - recorded)[number].max() < 2.0**-21


@pytest.mark.parametrize("case", [case for case in CASES if case.faults], ids=lambda c: c.name)
def test_what_the_hardware_refuses(case):
    assert "CUDA_ERROR" in VECTORS.manifest["faults"][case.name]
    with pytest.raises(SimulationError, match="coordinate|multiple of 128|setmaxnreg"):
        replay(case)


def test_tensor_maps():
    """The driver's descriptors decode to what was requested; it refuses what `validate` does."""
    recorded = VECTORS.file(golden.TENSOR_MAPS)
    wanted = requests()
    assert len(recorded["accepted"]) == len(wanted)
    assert 200 < recorded["accepted"].sum() < len(wanted)
    for tensor_map, raw, accepted in zip(wanted, recorded["descriptors"], recorded["accepted"]):
        if accepted:
            assert tensormap.decode(raw.tobytes()) == tensor_map
            assert tensormap.encode(tensor_map)[:64] == raw.tobytes()[:64]
        else:
            with pytest.raises(tensormap.TensorMapError):
                tensormap.validate(tensor_map)


def test_host_code_that_asks_the_driver_for_tensor_maps():
    """The call that host code makes gives the driver's bytes: arguments as the recorder gave it."""
    recorded = VECTORS.file(golden.TENSOR_MAPS)
    encode_tiled = host_code.CALLBACKS["_cuTensorMapEncodeTiled"][0]
    for t, raw, accepted in zip(requests(), recorded["descriptors"], recorded["accepted"]):
        arrays = [
            np.array(values, kind)
            for values, kind in (
                (t.sizes, np.uint64),
                (t.strides, np.uint64),
                (t.box, np.uint32),
                (t.element_strides, np.uint32),
            )
        ]
        kind = f"T{record._TYPES[t.dtype]}" if t.tf32 else record._TYPES[t.dtype]
        numbers = [
            getattr(
                driver.CUtensorMapInterleave,
                f"CU_TENSOR_MAP_INTERLEAVE_{f'{t.interleave}B' if t.interleave else 'NONE'}",
            ),
            getattr(
                driver.CUtensorMapSwizzle,
                f"CU_TENSOR_MAP_SWIZZLE_{f'{t.swizzle}B' if t.swizzle else 'NONE'}",
            ),
            (0, 64, 128, 256).index(t.l2_promotion),
            t.nan_fill,
        ]
        found = np.zeros(128, np.uint8)
        types = driver.CUtensorMapDataType
        arguments = (
            found.ctypes.data,
            int(getattr(types, f"CU_TENSOR_MAP_DATA_TYPE_{kind}")),
            t.rank,
            t.address,
            *(array.ctypes.data for array in arrays),
            *map(int, numbers),
        )
        if accepted:
            encode_tiled(*arguments)
            assert found[:64].tobytes() == raw.tobytes()[:64]
        else:
            with pytest.raises(tensormap.TensorMapError):
                encode_tiled(*arguments)
            assert not found.any()


def test_some_groups_can_be_recorded_again(tmp_path, capsys):
    """Unselected groups keep what they have, faults and failures included."""
    before = VECTORS.manifest
    (tmp_path / "manifest.json").write_text((golden.DIRECTORY / "manifest.json").read_text())
    found = [case for case in CASES if case.group == "found"]
    results = {case.name: [] if case.faults else VECTORS.outputs(case) for case in found}
    failed = results.popitem()[0]
    golden.save(tmp_path, results, {"failed": {failed: "why"}, "faults": {}}, ("found",))
    assert [path.name for path in tmp_path.glob("*.npz")] == ["found.npz"]
    again = golden.Vectors(tmp_path)
    assert again.manifest["failed"] == {failed: "why"}
    assert again.manifest["cases"] == {k: v for k, v in before["cases"].items() if k != failed}
    assert again.manifest["faults"] == {
        k: v for k, v in before["faults"].items() if not k.startswith("found/")
    }
    with pytest.raises(SystemExit):
        main(["record", "--groups", "nonsense", "--out", str(tmp_path)])
    assert "accepted are approximate" in capsys.readouterr().err


def test_groups_of_another_gpu_are_not_put_beside_these():
    """The manifest names one GPU and one driver for all vectors."""
    here = VECTORS.manifest
    record.same_origin({"device": here["device"], "driver_cuda": here["driver_cuda"]}, here)
    with pytest.raises(ValueError, match="device 'NVIDIA H200', and here it is 'NVIDIA H100'"):
        record.same_origin({**here, "device": "NVIDIA H100"}, here)


def test_a_changed_case_is_noticed(tmp_path):
    case = CASES[0]
    other = Case(case.name, case.group, case.ptx + "\n", case.inputs, case.outputs)
    with pytest.raises(ValueError, match="record again"):
        VECTORS.outputs(other)
    with pytest.raises(KeyError, match="newer"):
        VECTORS.outputs(Case("no such case", "", "", (), ()))
    with pytest.raises(FileNotFoundError, match="python -m sm100_sim record"):
        golden.Vectors(tmp_path)


def test_hashes_are_stored_and_compared(tmp_path):
    """A hashed case writes no array, and any other output is noticed."""
    (tmp_path / "manifest.json").write_text((golden.DIRECTORY / "manifest.json").read_text())
    group = [case for case in CASES if case.group == "wgmma"]
    results = {case.name: [np.zeros_like(array) for array in case.outputs] for case in group}
    golden.save(tmp_path, results, {}, ("wgmma",))
    again = golden.Vectors(tmp_path)
    hashed = next(case for case in group if case.hashed)
    assert again.agrees(hashed, results[hashed.name])
    results[hashed.name][0].reshape(-1)[-1] = 1
    assert not again.agrees(hashed, results[hashed.name])
    assert set(again.file("wgmma.npz")) == {case.name for case in group if not case.hashed}
