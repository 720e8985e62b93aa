"""Shadows of memories and registers: who wrote and read each part last."""
