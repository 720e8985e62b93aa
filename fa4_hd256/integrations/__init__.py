"""Adapters to other libraries: `transformers` and PyTorch's own SDPA (`sdpa`), whose `register`
installs them; the functions that the backends of the engines `vllm` and `sglang` call.

Nothing is registered by importing. docs/features.md has the arguments.
"""
