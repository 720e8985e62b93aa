"""Masks: which keys a query sees."""
