"""The sanitizer: races, lifetime and synchronisation errors of a launch (docs/sanitizer.md)."""

from .findings import Finding
from .machine import READINGS, SanitizedMachine

__all__ = ["READINGS", "Finding", "SanitizedMachine"]
