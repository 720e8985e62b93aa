"""The sanitizer: races, lifetime and synchronisation errors of a launch (docs/sanitizer.md)."""

from .findings import Finding
from .machine import READINGS, SanitizedMachine
from .native_machine import machine_for

__all__ = ["READINGS", "Finding", "SanitizedMachine", "machine_for"]
