"""Measurements of this project; `python -m bench --help` lists them."""
