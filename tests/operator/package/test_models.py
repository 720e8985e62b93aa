"""The table of models in docs/features.md is that of `fa4_hd256.models`."""

from __future__ import annotations

from checkout import ROOT

from fa4_hd256.models import MODELS, Mask

PAGE = ROOT / "docs" / "features.md"


def shown(mask: Mask) -> str:
    left, right = mask.window_size
    if left is None:
        return "causal" if mask.causal else "full"
    return f"window ({left}, {0 if mask.causal else right})"


def rows() -> list[str]:
    """Return the table's lines but for its heading."""
    return [
        f"| `{name}` | {model.name} | {model.heads_q}/{model.heads_kv} | "
        f"{', '.join(map(shown, model.masks))} | {f'{model.softcap:g}' if model.softcap else '-'} |"
        for name, model in MODELS.items()
    ]


def test_the_page_lists_the_models():
    table = PAGE.read_text("utf-8").split("| name | model |")[1].split("\n\n")[0]
    assert table.splitlines()[2:] == rows() and len(rows()) > 10
