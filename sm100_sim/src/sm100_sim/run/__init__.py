"""Machines that run a launch: clusters, CTAs, warps and their turns."""
