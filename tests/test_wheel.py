"""Wheel of fa4_hd256: one top-level package, which works beside a user's own `schedulers`,
`softmax_emu` and `bench`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from checkout import ROOT

#: In an interpreter that finds the wheel first, and packages of a user's with these names.
ALONE = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import fa4_hd256
from fa4_hd256.__main__ import main
assert fa4_hd256.__file__.startswith(sys.argv[1]), fa4_hd256.__file__
assert main(["plan"]) == 0
from fa4_hd256.run import keys
from fa4_hd256.architectures import ARCHITECTURES
users = map(__import__, ("schedulers", "softmax_emu", "bench"))
assert all(module.whose == "the user's" for module in users)
print(*(name for name, _ in keys.compiled_sources("forward", ARCHITECTURES[0])))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The wheel, unpacked; built from a copy of the files that git knows."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for name in listed:
        kept = name.startswith(
            ("fa4_hd256/", "schedulers/", "softmax_emu/", "bench/", "sm100_sim/")
        )
        if (kept or "/" not in name) and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", str(source)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *command, "--wheel-dir", str(place)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(place / "site")
    return place / "site"


def test_it_installs_one_package(site):
    tops = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    assert tops == {"fa4_hd256"}
    files = {p.relative_to(site).as_posix() for p in site.rglob("*")}
    assert {"fa4_hd256/schedulers/clc.py", "fa4_hd256/softmax_emu/online.py",
            "fa4_hd256/py.typed", "fa4_hd256/kernels/blackwell/tuning.json"} <= files  # fmt: skip


def test_the_simulators_license_is_the_projects():
    assert (ROOT / "sm100_sim/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("name", ["interrupt.py", "run/native_cache.py", "waiting.py", "words.py"])
def test_it_holds_what_it_shares_with_the_simulator(site, name):
    """A link of the checkout is a file of the wheel, which needs no simulator."""
    place = site / "fa4_hd256" / name
    assert (ROOT / "fa4_hd256" / name).is_symlink() and not place.is_symlink()
    assert place.read_bytes() == (ROOT / "fa4_hd256" / name).read_bytes()


@pytest.mark.sampled
def test_it_works_beside_packages_of_these_names(site, tmp_path):
    """A user's own modules of these names are found, and the package finds its own."""
    for name in ("schedulers", "softmax_emu", "bench"):
        (tmp_path / f"{name}.py").write_text('whose = "the user\'s"\n')
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(site), str(tmp_path)], cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "schedulers/clc.py" in done.stdout.splitlines()[-1]
