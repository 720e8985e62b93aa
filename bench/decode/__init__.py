"""Parts of `python -m bench decode`, a table each."""
