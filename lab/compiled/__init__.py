"""Figures of compiled kernels: loops of their SASS, and closed forms of their demand."""
