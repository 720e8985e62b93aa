"""Replays of a program, clock by clock, and what is read off them."""
