"""This attention inside other libraries: `transformers` and PyTorch's own SDPA (`sdpa`), whose
`register` does it; what the backends of the engines `vllm` and `sglang` call.

Nothing is registered by importing. docs/integrations.md has the arguments.
"""
