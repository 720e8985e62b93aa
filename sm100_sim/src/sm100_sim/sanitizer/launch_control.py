"""Cluster launch control: a request after one that is known to have failed.

PTX ISA, "clusterlaunchcontrol.try_cancel": undefined once the executing CTA has observed that an
earlier request failed. `query_cancel` notices that itself; a program that reads the words of the
response does not execute it, so here the failure counts as observed as soon as its arrival is known
to the warp that makes the next request.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sm100_sim.isa.clc import RESPONSE_BYTES, failed

from .findings import Finding, describe, parties, sites
from .memory.shadow import Access
from .rules import Rules
from .state import WarpState


class Responses:
    """Responses on their way to the CTAs, or there."""

    def __init__(self, sanitizer: Rules) -> None:
        self._sanitizer = sanitizer
        self._sent: dict[Any, dict[int, Access]] = {}

    def request(self, state: WarpState, cta: Any, offset: int, access: Access) -> None:
        """A warp requests a response at a shared offset of a CTA; `access` writes it."""
        if cta is state.warp.cta:
            for place, earlier in self._sent.get(cta, {}).items():
                words = cta.smem[place : place + RESPONSE_BYTES].view(np.uint32)
                if (
                    failed(words)
                    and earlier.clock is not None
                    and (state.frontier[earlier.agent] >= earlier.clock)
                ):
                    text = (
                        f"{describe(access)}: an earlier request of this CTA is known to have "
                        "failed, and another one is undefined then"
                    )
                    finding = Finding(
                        "cancel-after-failure", text, sites(access), "", parties(access),
                        text.rpartition(": ")[2],
                    )  # fmt: skip
                    self._sanitizer.report(finding, (access.instruction.index,))
        self._sent.setdefault(cta, {})[offset] = access

    def leave(self, cta: Any) -> None:
        """A CTA has exited."""
        self._sent.pop(cta, None)
