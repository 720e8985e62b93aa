"""Adapters to other libraries. Importing one registers nothing. docs/features.md has the
arguments."""
