"""This attention inside other libraries: `transformers` and PyTorch's own SDPA (`sdpa`).

Nothing is registered by importing; each module's `register` does it.
"""
