"""`python -m bench bringup`: the first hour on a GPU."""

from bench.bringup.command import main

__all__ = ["main"]
