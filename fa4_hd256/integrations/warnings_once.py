"""Warnings that a process logs once."""

from __future__ import annotations

import logging

import torch

_log = logging.getLogger("fa4_hd256")
#: Lines that have been logged.
_logged: set[str] = set()


@torch.compiler.assume_constant_result
def warn_once(line: str) -> bool:
    """Log a warning unless it has been logged. torch.compile calls it while tracing."""
    if line not in _logged:
        _logged.add(line)
        _log.warning(line)
    return True
