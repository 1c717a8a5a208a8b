"""What the page's style sheet has of colours, how the colour-blind see them, and sizes of type."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import controller.web

TYPE_SCALE = {12, 14, 16, 20, 26}
"""Sizes of type, in pixels."""

PAGE = Path(controller.web.__file__).parent / "page"

Triple = tuple[float, float, float]

# Severity 1, for linear RGB.
# Source: Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color
# Vision Deficiency", IEEE TVCG 15(6), 2009, table 1 of its supplement.
_DEFICIENCIES: Mapping[str, tuple[Triple, Triple, Triple]] = {
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
_UNCHANGED = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
VIEWS = {"normal": _UNCHANGED, **_DEFICIENCIES}
# sRGB to CIE XYZ, and its white (D65).
_XYZ = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)
_WHITE = (0.95047, 1.0, 1.08883)


def themes() -> dict[str, dict[str, str]]:
    """The tokens of the light and of the dark theme, by name, as `#rrggbb`."""
    text = (PAGE / "style.css").read_text(encoding="utf-8")
    blocks = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
        for block in re.findall(r"^ *:root[^{]*\{([^}]*)\}", text, re.MULTILINE)
    ]
    light, dark, chosen = blocks
    assert dark == chosen, "the system's dark theme and the one that is chosen are one"
    assert light.keys() == dark.keys()
    return {"light": light, "dark": dark}


def named(file: str, constant: str) -> list[str]:
    """The tokens that a constant of a script names, in its order."""
    text = (PAGE / file).read_text(encoding="utf-8")
    found = re.search(rf"const {constant} = ([{{\[].*?[}}\]]);\n", text, re.DOTALL)
    assert found, f"{file} has no {constant}"
    tokens = themes()["light"]
    words = re.findall(r'"(?:--)?([a-z]+)"', found[1])
    return [word for word in words if word in tokens]


def _linear(color: str) -> Triple:
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    )
    return red, green, blue


def _times(matrix: Sequence[Triple], vector: Triple) -> Triple:
    first, second, third = (
        sum(one * other for one, other in zip(row, vector, strict=True)) for row in matrix
    )
    return first, second, third


def seen(color: str, view: str) -> Triple:
    """CIE L*, a* and b* of a colour, as one with this deficiency sees it."""
    red, green, blue = (min(1.0, max(0.0, part)) for part in _times(VIEWS[view], _linear(color)))
    x, y, z = (
        part ** (1 / 3) if part > 216 / 24389 else (24389 / 27 * part + 16) / 116
        for part in (
            value / white
            for value, white in zip(_times(_XYZ, (red, green, blue)), _WHITE, strict=True)
        )
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(one: str, other: str, view: str) -> float:
    """CIE76 difference of two colours to one with this deficiency; 2.3 is just noticed."""
    pairs = zip(seen(one, view), seen(other, view), strict=True)
    return float(sum((first - second) ** 2 for first, second in pairs) ** 0.5)


def too_alike(colors: Mapping[str, str], least: float) -> list[str]:
    """Pairs that differ by less than so much to somebody."""
    return [
        f"{one}/{other} {view} {found:.1f}"
        for one, other in combinations(colors, 2)
        for view in VIEWS
        if (found := difference(colors[one], colors[other], view)) < least
    ]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours by WCAG 2.2, from 1 to 21."""
    less, more = sorted(
        sum(share * part for share, part in zip(_XYZ[1], _linear(color), strict=True))
        for color in (one, other)
    )
    return (more + 0.05) / (less + 0.05)


def between(cold: str, hot: str, heat: float) -> str:
    """The colour of a heat from 0 to 1, as heat.js has it."""
    ends = [(int(cold[at : at + 2], 16), int(hot[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(low + (high - low) * heat):02x}" for low, high in ends)
