"""Maps of shared and tensor memory, drawn from a kernel's plans."""

from __future__ import annotations

from collections.abc import Iterator

from fa4_hd256.kernels.plan.budgets import (
    SMEM_CAPACITY,
    TMEM_COLUMNS,
    SmemPlan,
    SmemRegion,
    TmemPlan,
    TmemRegion,
)
from lab.pictures.svg import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    RULE,
    SKY,
    Drawing,
    text_width,
    tint,
)

_WIDTH, _LEFT, _INNER = 960, 24, 912
_BAR, _TMEM_HEIGHT, _ROW = 74, 128, 21
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
#: Regions smaller than this have no room for a name of their own in the bar.
_SMALL = 4096


def memory_map(title: str, smem: SmemPlan, tmem: TmemPlan) -> Drawing:
    """Both memories of one CTA: to scale, with a line of words for each region. title: of the
    kernel. What is named like a buffer's bytes is exact; buffers of under 4 KiB are drawn together
    at the end of the bar."""
    large = [region for region in smem.regions if region.num_bytes >= _SMALL]
    small = [region for region in smem.regions if region.num_bytes < _SMALL]
    height = 196 + _BAR + _TMEM_HEIGHT + _ROW * (len(large) + 1 + len(tmem.regions)) + 40
    drawing = Drawing(
        _WIDTH,
        height,
        f"{title}: shared and tensor memory of one CTA",
        "Two bars to scale, one for shared memory in bytes and one for tensor memory in columns, "
        "each divided into the buffers of the kernel, with a legend.",
    )
    drawing.heading(f"{title}: memory of one CTA", "to scale, from the kernel's plans")
    colours = {region.name: _COLOURS[i % len(_COLOURS)] for i, region in enumerate(large)}
    _smem(drawing, smem, colours)
    top = 112 + _BAR + 28
    for region in large:
        stages = f"{region.stages} x " if region.stages > 1 else ""
        _key(
            drawing,
            top,
            colours[region.name],
            region.name,
            f"{stages}{region.stage_bytes // 1024} KiB: {region.note}",
        )
        top += _ROW
    words = ", ".join(f"{region.name} {region.num_bytes} B" for region in small)
    _key(drawing, top, GREY, "the rest", words)
    _tmem(drawing, tmem, top + 48)
    return drawing


def _smem(drawing: Drawing, plan: SmemPlan, colours: dict[str, str]) -> None:
    scale = _INNER / SMEM_CAPACITY
    used = f"shared memory: {plan.num_bytes:,} of {SMEM_CAPACITY:,} bytes"
    drawing.text((_LEFT, 96), used, 14, style="bold")
    top, offsets = 108, plan.offsets()
    drawing.rect(_LEFT, top, _INNER, _BAR, "#ffffff", RULE)
    for region, stage, begin in _stages(plan, offsets):
        left, width = _LEFT + begin * scale, region.stage_bytes * scale
        colour = colours.get(region.name)
        if colour is None:
            continue
        drawing.rect(left, top, width, _BAR, tint(colour, 0.3), colour, 0, 1.5)
        number = f"[{stage}]" if region.stages > 1 else ""
        name = region.name + number
        size = 13 if text_width(name, 13, bold=True) < width - 6 else 10
        drawing.text((left + width / 2, top + 34), name, size, "middle", style="bold")
        drawing.text(
            (left + width / 2, top + 52), f"{region.stage_bytes // 1024} KiB", 11, "middle", GREY
        )
    first = min(offsets[r.name] for r in plan.regions if r.name not in colours)
    left = _LEFT + first * scale
    drawing.rect(left, top, max((plan.num_bytes - first) * scale, 2), _BAR, GREY)


def _stages(plan: SmemPlan, offsets: dict[str, int]) -> Iterator[tuple[SmemRegion, int, int]]:
    """Yield (region, stage, offset) of every buffer."""
    for region in plan.regions:
        for stage in range(region.stages):
            yield region, stage, offsets[region.name] + stage * region.stage_bytes


def _tmem(drawing: Drawing, plan: TmemPlan, top: float) -> None:
    used = f"tensor memory: {plan.allocated_columns} of {TMEM_COLUMNS} columns of 128 lanes"
    drawing.text((_LEFT, top), used, 14, style="bold")
    top += 12
    scale = _INNER / TMEM_COLUMNS
    drawing.rect(_LEFT, top, _INNER, _TMEM_HEIGHT, "#ffffff", RULE)
    own = [region for region in plan.regions if region.alias_of is None]
    colours = {region.name: _COLOURS[i % len(_COLOURS)] for i, region in enumerate(own)}
    for region in own:
        left, width = _LEFT + region.start * scale, region.columns * scale
        colour = colours[region.name]
        drawing.rect(left, top, width, _TMEM_HEIGHT, tint(colour, 0.3), colour, 0, 1.5)
        drawing.text((left + width / 2, top + 34), region.name, 14, "middle", style="bold")
    for region in plan.regions:
        if region.alias_of is not None:
            left, width = _LEFT + region.start * scale, region.columns * scale
            colour = colours[region.alias_of]
            drawing.rect(
                left + 3, top + 62, width - 6, _TMEM_HEIGHT - 66, tint(colour, 0.62), colour, 3, 1.5
            )
            drawing.text((left + width / 2, top + 92), region.name, 14, "middle", style="bold")
            drawing.text((left + width / 2, top + 110), f"over {region.alias_of}", 11, "middle")
    ends = sorted({r.start for r in plan.regions} | {r.start + r.columns for r in plan.regions})
    for column in ends:
        anchor = "start" if column == 0 else "end" if column == TMEM_COLUMNS else "middle"
        drawing.text(
            (_LEFT + column * scale, top + _TMEM_HEIGHT + 16), str(column), 11, anchor, GREY
        )
    top += _TMEM_HEIGHT + 42
    for region in plan.regions:
        colour = colours[region.alias_of or region.name]
        _key(drawing, top, colour, region.name, _words(region))
        top += _ROW


def _words(region: TmemRegion) -> str:
    last = region.start + region.columns - 1
    return f"columns {region.start} to {last}: {region.note}"


def _key(drawing: Drawing, top: float, colour: str, name: str, words: str) -> None:
    drawing.rect(_LEFT, top - 11, 13, 13, tint(colour, 0.45), colour)
    drawing.text((_LEFT + 22, top), name, 12.5, colour=INK, style="bold")
    drawing.text((_LEFT + 112, top), words, 12.5, colour=GREY)
