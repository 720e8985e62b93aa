"""A Hugging Face kernel: this package in the layout that the `kernels` library loads.

`python -m fa4_hd256.integrations.hub OUT` writes it (`layout`), and `functions` holds what
transformers calls of it.
"""
