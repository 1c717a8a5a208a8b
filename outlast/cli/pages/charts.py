"""Pictures of a job's time as inline SVG: plain functions from numbers to text.

Colours come from the style sheet of the page, by class name; parts are named as in
`controller.core.accounting`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from outlast.cli.pages.plot import Frame, Point, polyline, ticks

_BAR_HEIGHT = 22.0
_LABEL_WIDTH = 210.0


def ettr_curve(cumulative: Sequence[Point], hour: Sequence[Point], *, unit: str) -> str:
    """ETTR since the beginning and over the last hour; points are (time, ratio)."""
    lows = [y for _, y in cumulative[len(cumulative) // 20 :]]
    frame = Frame(
        x_min=0.0,
        x_max=max((x for x, _ in cumulative), default=1.0),
        # What the last hour fell to may be nothing; the cumulative one decides the scale.
        y_min=max(0.0, min(lows, default=0.9) - 0.05),
        y_max=1.0,
    )
    inside = [(x, max(frame.y_min, y)) for x, y in hour]
    parts = [
        *_grid(frame, unit),
        f'<polyline class="hour" points="{polyline(inside, frame)}"/>',
        f'<polyline class="ettr" points="{polyline(cumulative, frame)}"/>',
    ]
    return _svg(frame.width, frame.height, "ETTR over time", parts)


def parts_bar(seconds: Mapping[str, float]) -> str:
    """One bar: what the time went into, in proportion. Parts of no length are left out."""
    whole_s = sum(seconds.values()) or 1.0
    width, height, x = 860.0, 40.0, 0.0
    parts: list[str] = []
    for part, part_s in seconds.items():
        part_width = part_s / whole_s * width
        if part_width > 0:
            parts.append(
                f'<rect class="part part-{escape(part)}" x="{x:.2f}" y="0" '
                f'width="{part_width:.2f}" height="{height:g}">'
                f"<title>{escape(part)}: {100 * part_s / whole_s:.2f} %</title></rect>"
            )
        x += part_width
    return _svg(width, height, "what the time went into", parts)


def parts_key(seconds: Mapping[str, float]) -> str:
    """What the colours of a bar mean."""
    entries = (
        f'<span><i class="part-{escape(part)}"></i>{escape(part)}</span>' for part in seconds
    )
    return f'<p class="key soft">{"".join(entries)}</p>'


def change_bars(changes: Sequence[tuple[str, float]]) -> str:
    """Changes of ETTR, as (what, difference), to the left where it falls and the right else."""
    largest = max((abs(change) for _, change in changes), default=0.0) or 1.0
    width, middle = 860.0, _LABEL_WIDTH + 325.0
    parts: list[str] = []
    for row, (name, change) in enumerate(changes):
        y = row * (_BAR_HEIGHT + 6.0) + 4.0
        length = abs(change) / largest * 250.0
        x = middle - length if change < 0 else middle
        kind = "less" if change < 0 else "more"
        text_x = x - 8 if change < 0 else x + length + 8
        anchor = "end" if change < 0 else "start"
        parts.append(
            f'<text x="0" y="{y + 15:.1f}">{escape(name)}</text>'
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(length, 0.5):.1f}" '
            f'height="{_BAR_HEIGHT:g}"/>'
            f'<text class="tick" text-anchor="{anchor}" x="{text_x:.1f}" y="{y + 15:.1f}">'
            f"{100 * change:+.2f} points</text>"
        )
    height = len(changes) * (_BAR_HEIGHT + 6.0) + 8.0
    return _svg(width, height, "changes of ETTR", parts)


def _grid(frame: Frame, unit: str) -> list[str]:
    parts = []
    for value in ticks(frame.y_min, frame.y_max):
        y = frame.y(value)
        parts.append(
            f'<line class="grid" x1="{frame.left}" x2="{frame.width - frame.right}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/><text class="tick" text-anchor="end" '
            f'x="{frame.left - 8}" y="{y + 4:.1f}">{100 * value:g} %</text>'
        )
    for value in ticks(frame.x_min, frame.x_max, 8):
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{frame.x(value):.1f}" '
            f'y="{frame.height - frame.bottom + 18}">{value:g} {escape(unit)}</text>'
        )
    return parts


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">\n'
        f"{body}\n</svg>"
    )
