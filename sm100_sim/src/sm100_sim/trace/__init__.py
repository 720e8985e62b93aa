"""Trace of a launch, in order."""
