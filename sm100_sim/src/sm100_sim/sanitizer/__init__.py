"""The sanitizer: races, lifetime and synchronisation errors of a launch (docs/sanitizer.md)."""

from .findings import Finding
from .watch import READINGS, Reading, Watch

__all__ = ["READINGS", "Finding", "Reading", "Watch"]
