"""Leaving out synchronisation of compiled kernels: what the sanitizer makes of it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kernels import run_kernel_text
from sanitizer_kernels import COPIES, RING, TENSOR, changed

from sm100_sim.launcher import Options
from sm100_sim.mutation import captured, mutants

pytestmark = pytest.mark.simulator


def score(text: str, arrays=(), only=None, strict=False, **launch):
    """The mutants of a kernel given as PTX text."""
    found = []
    options = Options(sanitize="strict" if strict else True)
    with captured(lambda one: found.extend(mutants(one, options, 2, only))):
        import sm100_sim.launcher as launcher

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kernels.run_kernel", launcher.run_kernel)
            run_kernel_text(text, list(arrays), **launch)
    return found


def test_every_mutant_of_the_small_kernels_is_settled():
    results = score(RING, block=(64, 1, 1))
    # Of a ring of one slot nothing can be left out.
    assert len(results) == 5
    assert {mutant.outcome for mutant in results} == {"caught"}


def test_strict_reading_needs_the_fences_of_tensor_memory():
    def fences(instructions):
        return [i for i in instructions if i.name.startswith("tcgen05.fence")]

    plain = score(TENSOR, only=fences, block=(128, 1, 1))
    assert {mutant.outcome for mutant in plain} == {"redundant"}
    strict = score(TENSOR, only=fences, block=(128, 1, 1), strict=True)
    assert {mutant.outcome for mutant in strict} == {"caught"}
    assert len(plain) == len(strict) == 4


def test_redundant_mutants_name_the_edge():
    doubled = changed(COPIES, "proxy", "fence.proxy.async.shared::cta;\n" * 2)
    array = np.zeros(32, np.uint32)
    results = score(doubled, [array], lambda found: [i for i in found if "proxy" in i.name])
    assert [m.outcome for m in results] == ["redundant"] * 2
    assert "fence.proxy.async" in results[0].why


def test_memory_is_restored_and_the_launch_still_runs():
    array = np.arange(32, dtype=np.uint32)
    score(COPIES, [array], lambda found: found[:2])
    assert (array == np.arange(32) + 2).all()


def test_a_kernel_with_findings_is_refused():
    with pytest.raises(ValueError, match="not clean"):
        score(changed(RING, "full", ""), block=(64, 1, 1))


#: Of the forward kernel, by opcode and position among its like: one of each family.
SAMPLE = (
    ("fence.mbarrier_init", 0), ("barrier.cluster.arrive", 0), ("barrier.cluster.wait", 2),
    ("mbarrier.try_wait", 3), ("mbarrier.try_wait", 12), ("mbarrier.try_wait", 20),
    ("mbarrier.arrive", 2), ("mbarrier.arrive.relaxed", 0), ("tcgen05.commit", 1),
    ("tcgen05.wait::st", 0), ("fence.proxy.async", 0), ("tcgen05.fence::before", 0),
)  # fmt: skip


def sample(instructions):
    chosen = []
    for prefix, position in SAMPLE:
        like = [i for i in instructions if i.name.startswith(prefix)]
        chosen.append(like[position])
    return chosen


def test_sample_of_the_forward_kernel(monkeypatch):
    """12 mutants of the forward kernel; one CTA pair does 4 tiles, so that all is reached."""
    import torch

    from fa4_hd256 import backends, flash_attn_func

    monkeypatch.setattr(backends, "SIMULATED_CLUSTERS", 1)
    q = torch.randn(1, 512, 2, 256, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 512, 1, 256, dtype=torch.bfloat16) for _ in range(2))
    found = []

    def take(launch):
        found.extend(mutants(launch, Options(sanitize="strict"), 2, sample))

    with captured(take):
        flash_attn_func(q, k, v)
    assert len(found) == len(SAMPLE) == 12
    assert {m.outcome for m in found} <= {"caught", "redundant"}, [str(m) for m in found]
    assert [m.outcome for m in found].count("caught") >= 10


def test_command(tmp_path):
    script = tmp_path / "ring.py"
    tests = Path(__file__).parent
    script.write_text(
        f"import sys; sys.path.insert(0, {str(tests)!r})\n"
        "import kernels, sm100_sim.launcher as launcher\n"
        "from sanitizer_kernels import RING\n"
        "kernels.run_kernel = launcher.run_kernel\n"
        "kernels.run_kernel_text(RING, block=(64, 1, 1))\n"
    )
    command = [sys.executable, "-m", "sm100_sim", "mutate", "--seeds", "1", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "caught 5, redundant 0, survived 0" in result.stdout
