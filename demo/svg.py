"""Inline SVG for the report: a loss curve with its faults, and the phases of an incident.

Plain functions from numbers to text. Colours and fonts come from the style
sheet of the page, by class name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from demo.analysis import Phase
from outlast.cli.pages.plot import Frame, Point, polyline, ticks

# Names of phases are written into bars at least this wide, in pixels.
_MIN_LABELLED_WIDTH = 64


def loss_curve(
    losses: Sequence[Point],
    fault_free: Sequence[Point],
    evaluations: Sequence[Point],
    marks: Sequence[tuple[float, str]],
) -> str:
    """Loss over steps: both runs, held-out losses as dots, faults as labelled lines."""
    finite = [y for _, y in (*losses, *fault_free, *evaluations) if math.isfinite(y)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    padding = 0.05 * (high - low or 1.0)
    frame = Frame(
        x_min=1,
        x_max=max((x for x, _ in (*losses, *fault_free)), default=1),
        y_min=low - padding,
        y_max=high + padding,
    )
    parts = [
        *_axes(frame),
        f'<polyline class="fault-free" points="{polyline(fault_free, frame)}"/>',
        f'<polyline class="loss" points="{polyline(losses, frame)}"/>',
        *(
            f'<circle class="evaluation" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4">'
            f"<title>held-out loss after step {x:g}: {y:.4f}</title></circle>"
            for x, y in evaluations
            if math.isfinite(y)
        ),
        *(_mark(frame, x, label) for x, label in marks),
    ]
    return _svg(frame.width, frame.height, "loss over steps", parts)


def timeline(phases: Sequence[Phase], *, end_s: float | None = None) -> str:
    """The phases of an incident side by side, as wide as they were long.

    `end_s` cuts off what comes after it: once training goes on, the rest is only waiting.
    """
    # What took no time is in the table; here it would only be a line.
    lasting = [phase for phase in phases if phase.duration_s > 0]
    shown = [phase for phase in lasting if end_s is None or phase.start_s < end_s]
    stop_s = end_s or max((phase.start_s + phase.duration_s for phase in shown), default=0.0)
    frame = Frame(
        x_min=0.0, x_max=max(stop_s, 1e-3), y_min=0, y_max=1, height=92, left=8, top=8, bottom=28
    )
    parts: list[str] = []
    for index, phase in enumerate(shown):
        start_s = max(0.0, phase.start_s)
        finish_s = min(phase.start_s + phase.duration_s, stop_s)
        x, width = frame.x(start_s), max(1.0, frame.x(finish_s) - frame.x(start_s))
        words = f"{phase.name}: {finish_s - phase.start_s:.3f} s"
        detail = f"\n{phase.detail}" if phase.detail else ""
        parts.append(
            f'<rect class="phase phase-{index % 6}" x="{x:.1f}" y="{frame.top}" '
            f'width="{width:.1f}" height="{frame.height - frame.top - frame.bottom}">'
            f"<title>{escape(words + detail)}</title></rect>"
        )
        if width >= _MIN_LABELLED_WIDTH:
            parts.append(
                f'<text class="phase-name" x="{x + 6:.1f}" y="{frame.top + 24}">'
                f"{escape(phase.name[: int(width // 8)])}</text>"
                f'<text class="phase-time" x="{x + 6:.1f}" y="{frame.top + 42}">'
                f"{finish_s - phase.start_s:.2f} s</text>"
            )
    for value in ticks(0.0, frame.x_max, 6):
        parts.append(
            f'<text class="tick" x="{frame.x(value):.1f}" y="{frame.height - 8}">{value:g} s</text>'
        )
    return _svg(frame.width, frame.height, "phases of the incident", parts)


def _axes(frame: Frame) -> list[str]:
    bottom = frame.height - frame.bottom
    parts = []
    for value in ticks(frame.y_min, frame.y_max):
        y = frame.y(value)
        parts.append(
            f'<line class="grid" x1="{frame.left}" x2="{frame.width - frame.right}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" text-anchor="end" x="{frame.left - 8}" '
            f'y="{y + 4:.1f}">{value:g}</text>'
        )
    for value in ticks(frame.x_min, frame.x_max, 8):
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{frame.x(value):.1f}" '
            f'y="{bottom + 18}">{value:g}</text>'
        )
    parts.append(
        f'<text class="tick" text-anchor="end" x="{frame.width - frame.right}" '
        f'y="{frame.height - 6}">step</text>'
    )
    return parts


def _mark(frame: Frame, x: float, label: str) -> str:
    at = frame.x(x)
    anchor = "end" if at > frame.width * 0.7 else "start"
    shift = -6 if anchor == "end" else 6
    return (
        f'<line class="fault" x1="{at:.1f}" x2="{at:.1f}" y1="{frame.top}" '
        f'y2="{frame.height - frame.bottom}"/>'
        f'<text class="fault-name" text-anchor="{anchor}" x="{at + shift:.1f}" '
        f'y="{frame.top + 12}">{escape(label)}</text>'
    )


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">\n'
        f"{body}\n</svg>"
    )
