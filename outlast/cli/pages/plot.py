"""A plot's frame and scales: from values to pixels of inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A plot's size in pixels, its margins, and the values at its edges."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float
    width: float = 860
    height: float = 320
    left: float = 56
    right: float = 16
    top: float = 28
    bottom: float = 40

    def x(self, value: float) -> float:
        """Pixels from the left for a value on the horizontal axis."""
        span = self.x_max - self.x_min or 1.0
        return self.left + (value - self.x_min) / span * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Pixels from the top for a value on the vertical axis."""
        span = self.y_max - self.y_min or 1.0
        return (
            self.height
            - self.bottom
            - (value - self.y_min) / span * (self.height - self.top - self.bottom)
        )


def polyline(points: Sequence[Point], frame: Frame) -> str:
    """The `points` attribute of a line; values that are not finite leave no mark."""
    return " ".join(
        f"{frame.x(x):.1f},{frame.y(y):.1f}"
        for x, y in points
        if math.isfinite(x) and math.isfinite(y)
    )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values between `low` and `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]
