"""The sanitizer: races, lifetime and synchronisation errors of a launch (docs/sanitizer.md)."""

from .findings import Finding
from .machine import SanitizedMachine, StrictMachine

__all__ = ["Finding", "SanitizedMachine", "StrictMachine"]
