"""Parts of `python -m bench vllm`: models, engines in processes of their own, how answers agree."""
