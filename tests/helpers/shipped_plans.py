"""The plans of all default configurations; run it to write their fingerprints.

`python tests/helpers/shipped_plans.py` proves every plan and writes
`fa4_hd256/kernels/plan/proved_plans.json`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from fa4_hd256.architectures import ARCHITECTURES
from fa4_hd256.kernels.blackwell import pair_plan
from fa4_hd256.kernels.hopper import checked_plan
from fa4_hd256.kernels.kernel_set import KernelSet, kernels_of
from fa4_hd256.kernels.plan import drain
from fa4_hd256.kernels.plan.edges import EdgeTable
from fa4_hd256.kernels.plan.steps import StepTable

Plan = tuple[str, EdgeTable, StepTable]

#: Lengths of keys; at least one takes each default of a forward.
LENGTHS = (64, 80, 4096, 32768)


def default_configs(kernels: KernelSet) -> Iterator[object]:
    """Every configuration that calls get by default, and all plans of the backward."""
    yield from (config() for config in kernels.configs("forward"))
    for tiles, causal, length, paged in itertools.product(
        kernels.forwards, (False, True), LENGTHS, (False, True)
    ):
        yield kernels.config_of(tiles).tuned(causal, length, "", tiles, paged)
    backward = kernels.config("backward")()
    for kernel in (*kernels.backward_set().stored, *kernels.backward_set().recomputed):
        yield backward.of_kernel(kernel.kind).plan


def shipped_plans() -> dict[str, Plan]:
    """Fingerprint -> (architecture and kernel, edges, steps) of every default plan."""
    found: dict[str, Plan] = {}
    for architecture in ARCHITECTURES:

        def note(name: str, edges: EdgeTable, steps: StepTable, of: str = architecture.name):
            found[drain.fingerprint(edges, steps)] = (f"{of}: {name}", edges, steps)

        with (
            mock.patch.object(pair_plan, "check_drains", note),
            mock.patch.object(checked_plan, "check_drains", note),
        ):
            for config in default_configs(kernels_of(architecture)):
                replace(config)  # checks itself again
                for capped in (False, True):
                    getattr(config, "steps_of", lambda _: None)(capped)
    return found


def text(plans: dict[str, Plan]) -> str:
    """The file of fingerprints."""
    names = {key: name for key, (name, _, _) in plans.items()}
    return json.dumps(dict(sorted(names.items(), key=lambda item: item[::-1])), indent=1) + "\n"


if __name__ == "__main__":
    plans = shipped_plans()
    for plan in plans.values():
        drain.prove_drains(*plan)
    drain.PROVED.write_text(text(plans), "utf-8")
    print(f"{len(plans)} plans proved; their fingerprints are in {drain.PROVED}")
