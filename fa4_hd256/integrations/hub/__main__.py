"""`python -m fa4_hd256.integrations.hub OUT`: write the Hugging Face kernel into a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from .layout import write


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fa4_hd256.integrations.hub",
        description="Write this package as a Hugging Face kernel (build.toml, build/torch-cuda).",
    )
    parser.add_argument("out", type=Path, help="folder, a new one or one written before")
    try:
        variant = write(parser.parse_args().out)
    except FileExistsError as error:
        parser.error(str(error))
    print(f"{variant}: set LOCAL_KERNELS=ORGANISATION/fa4-hd256={variant} to load it from here")


if __name__ == "__main__":
    main()
