"""Run flash-attention's own tests at head_dim 256 on this operator.

    python tests/acceptance/flash_attention.py --checkout PATH [--fraction 0.05] [--suite NAME ...]
        [--workers 4] [--seconds 540] [--json FILE]

PATH is a checkout of flash-attention. Its tests run in a pytest of their own with
`flash_attention_plugin`, under which they import `fa4_hd256.compat`. Every suite ends with a table:
cases that passed, that failed (by id), that are not applicable (by reason) and that were not run.
Exit status: 0 if every executed case passed and at least one was executed, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SETTINGS = "FA4_HD256_ACCEPTANCE"
#: Seconds of a suite's time that are left for its report.
REPORTING = 15


@dataclass(frozen=True)
class Suite:
    """Tests of one file: its path in the checkout, and names of functions.

    values: by name of a parameter, those of its values alone; all of the others.
    """

    path: str
    tests: tuple[str, ...]
    values: dict[str, list[Any]] = field(default_factory=dict)


_CUTE, _HOPPER = "tests/cute/test_flash_attn.py", "hopper/test_flash_attn.py"
SUITES = {
    "output": Suite(_CUTE, ("test_flash_attn_output",)),
    "varlen": Suite(_CUTE, ("test_flash_attn_varlen_output",)),
    "sinks": Suite(_CUTE, (
        "test_flash_attn_learnable_sink_backward_dtype",
        "test_flash_attn_varlen_learnable_sink_backward_with_lse",
    )),
    "lse_grad": Suite(_CUTE, ("test_flash_attn_lse_grad", "test_flash_attn_lse_grad_unused")),
    "paged": Suite(_CUTE, (
        "test_flash_attn_paged_hd256_sm100_tma", "test_flash_attn_paged_hd256_sm100_tma_gqa",
        "test_flash_attn_paged_hd256_sm100_tma_shuffled", "test_flash_attn_kvcache",
    )),
    "layouts": Suite(_CUTE, (
        "test_flash_attn_hd256_sm100_noncontiguous_transpose",
        "test_flash_attn_bwd_preallocated_outputs",
    )),
    "mask_mod": Suite("tests/cute/test_mask_mod.py", (
        "test_mask_mod_ima_partial_block", "test_q_boundary_masking_block_sparse_bwd",
        "test_static_masks", "test_parameterized_masks", "test_cute_mask_mod_vectorized",
        "test_gqa_block_sparse_broadcast_pattern_recompilation",
        "test_gqa_expand_stride_zero_bug", "test_compact_block_sparse_indices",
    )),
    "score_mod": Suite("tests/cute/test_score_mod.py", (
        "test_cute_vs_flex_attention", "test_cute_score_mod_vectorized",
        "test_cute_vs_flex_attention_with_aux_tensors",
        "test_cute_score_mod_with_aux_tensors_vectorized", "test_score_mod_with_paged_kvcache",
        "test_score_mod_with_paged_kvcache_aux_tensors",
        "test_cute_vs_flex_attention_backward", "test_cute_vs_flex_attention_backward_with_aux",
        "test_cute_vs_flex_attention_backward_pack_gqa",
        "test_cute_score_mod_aux_scalars_matches_flex",
        "test_cute_score_mod_aux_tensors_and_scalars_match_flex",
        "test_cute_score_mod_bwd_aux_scalars_matches_flex",
    )),
    "hopper_output": Suite(_HOPPER, ("test_flash_attn_output",)),
    "hopper_varlen": Suite(_HOPPER, ("test_flash_attn_varlen_output",)),
    "hopper_kvcache": Suite(_HOPPER, ("test_flash_attn_kvcache",)),
    # Pages of so few rows that these are gathered one by one.
    "hopper_small_pages": Suite(_HOPPER, ("test_flash_attn_kvcache",), {"page_size": [1, 4]}),
    "hopper_combine": Suite(_HOPPER, ("test_flash_attn_combine",)),
}  # fmt: skip


@dataclass
class Outcome:
    """Outcome of a suite's cases. failed: id -> last line of the error."""

    selected: int = 0
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    not_applicable: Counter[str] = field(default_factory=Counter)
    out_of_memory: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def executed(self) -> int:
        return len(self.passed) + len(self.failed)

    @property
    def not_run(self) -> int:
        return max(self.selected - self.executed - self.not_applicable.total(), 0)

    @classmethod
    def read(cls, lines: list[dict[str, Any]]) -> Outcome:
        """Read the lines that the plugin wrote."""
        found = cls()
        for line in lines:
            what, name = line["what"], line["id"]
            if what == "selected":
                found.selected = max(found.selected, line["count"])
            elif what == "passed":
                found.passed.append(name)
            elif what == "not applicable":
                found.not_applicable[line["reason"]] += 1
            elif line["out_of_memory"]:
                found.out_of_memory.append(name)
            else:
                found.failed[name] = line["reason"]
        return found


def run(suite: Suite, arguments: argparse.Namespace, only: list[str] | None = None) -> Outcome:
    """Run a suite in a pytest of its own. only: ids, for those alone, one after the other."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results, settings = Path(folder) / "results.jsonl", Path(folder) / "settings.json"
        settings.write_text(json.dumps({
            "checkout": str(arguments.checkout), "tests": suite.tests, "only": only,
            "values": suite.values,
            "fraction": arguments.fraction, "results": str(results),
            "seconds": arguments.seconds and arguments.seconds - REPORTING,
        }))  # fmt: skip
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        paths = [HERE, ROOT, arguments.checkout / Path(suite.path).parent]
        environment = {
            **os.environ, SETTINGS: str(settings), "FLASH_ATTENTION_DISABLE_FP8": "TRUE",
            "PYTHONPATH": os.pathsep.join(map(str, [*paths, os.environ.get("PYTHONPATH", "")])),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "flash_attention_plugin",
            "-c", f"{folder}/pytest.ini", "--rootdir", folder, "--noconftest", "--assert=plain",
            "-p", "no:cacheprovider", "--tb=short", "--no-header", *arguments.pytest,
        ]  # fmt: skip
        if only is None and arguments.workers > 1:
            command += ["-n", str(arguments.workers)]
        command += [f"{arguments.checkout / suite.path}::{test}" for test in suite.tests]
        output, status = _output_of(command, environment, arguments.seconds)
        written = results.read_text().splitlines() if results.exists() else []
    if arguments.log:
        with arguments.log.open("a") as log:
            log.write(output)
    found = Outcome.read([json.loads(line) for line in written])
    if status not in (0, 1, 2, 5) or not found.selected:
        found.error = output[-3000:]
    print(f"    pytest took {time.monotonic() - started:.0f} s", flush=True)
    return found


def _output_of(
    command: list[str], environment: dict[str, str], seconds: float | None
) -> tuple[str, int]:
    """Return what a pytest wrote, and its exit status; it is ended when a case hangs."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            status = process.wait(seconds and seconds + REPORTING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = 2
        output.seek(0)
        return output.read(), status


def run_with_memory(suite: Suite, arguments: argparse.Namespace) -> Outcome:
    """Run a suite, and cases for which workers together had too little memory again, alone."""
    found = run(suite, arguments)
    if found.out_of_memory:
        print(f"    {len(found.out_of_memory)} cases ran out of memory: again, alone", flush=True)
        again = run(suite, arguments, found.out_of_memory)
        found.passed += again.passed
        found.failed |= again.failed
        found.failed |= dict.fromkeys(again.out_of_memory, "out of memory, alone, too")
        found.not_applicable += again.not_applicable
        found.error = found.error or again.error
    return found


def show(name: str, found: Outcome) -> None:
    """Print a suite's table."""
    print(
        f"{name}: {found.selected} selected, {found.executed} executed, {len(found.passed)} "
        f"passed, {len(found.failed)} failed, {found.not_applicable.total()} not applicable, "
        f"{found.not_run} not run"
    )
    for reason, count in found.not_applicable.most_common():
        print(f"    not applicable, {count}: {reason}")
    for case, reason in sorted(found.failed.items()):
        print(f"    FAILED {case}: {reason}")
    if found.error:
        print(f"    pytest did not end well:\n{found.error}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkout", type=Path, required=True, help="a flash-attention checkout")
    parser.add_argument("--suite", action="append", choices=SUITES, help="default: all")
    parser.add_argument("--fraction", type=float, default=0.05, help="of the cases; default: 0.05")
    parser.add_argument("--workers", type=int, default=4, help="of pytest-xdist; default: 4")
    parser.add_argument("--seconds", type=float, help="for each suite; what is left is not run")
    parser.add_argument("--json", type=Path, help="where results are written")
    parser.add_argument("--log", type=Path, help="where pytest's output is appended")
    parser.add_argument("--pytest", action="append", default=[], help="one more option of pytest")
    arguments = parser.parse_args()
    arguments.checkout = arguments.checkout.resolve()
    outcomes = {}
    for name in arguments.suite or SUITES:
        print(f"{name} ...", flush=True)
        outcomes[name] = run_with_memory(SUITES[name], arguments)
        show(name, outcomes[name])
        if arguments.json:
            arguments.json.write_text(json.dumps(
                {name: {**vars(each), "executed": each.executed, "not_run": each.not_run}
                 for name, each in outcomes.items()}, indent=1,
            ))  # fmt: skip
    found = outcomes.values()
    is_good = all(not each.failed and not each.error for each in found)
    return 0 if is_good and any(each.executed for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
