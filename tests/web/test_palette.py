"""Colours that the page shows together differ for all kinds of colour vision; text is legible."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from outlast.blackbox.records import Group, Phase
from tests.web import palette

# Five times what is just noticed between two patches side by side: bars and lines are small, and
# their legend is elsewhere.
LEAST = 12.0
# Of grounds under a word or sign that says the same.
LEAST_SOFT = 8.0
# WCAG 2.2: text (1.4.3), and what of a picture carries meaning (1.4.11).
TEXT, PICTURE = 4.5, 3.0

TONES = ("good", "busy", "warn", "bad", "idle")
# What is in one picture, by where it is shown.
TOGETHER = {
    "timeline": palette.named("views/timeline.js", "COLORS"),
    "curves": palette.named("charts.js", "COLORS"),
    "marks on curves": palette.named("charts.js", "MARKS"),
    "parts of a step": palette.named("views/curves.js", "STEP_PARTS"),
    "parts of two steps": palette.named("views/curves.js", "GROUP_COLORS"),
    "time of a job": palette.named("views/job.js", "SECONDS"),
    "time of an incident": palette.named("views/incidents.js", "COLORS"),
    "groups of a rank": palette.named("cube.js", "AXES"),
    "states": list(TONES),
}
STEPS = 50


@pytest.fixture(params=["light", "dark"])
def theme(request: pytest.FixtureRequest) -> dict[str, str]:
    return palette.themes()[request.param]


@pytest.mark.parametrize("place", TOGETHER)
def test_colours_of_one_picture_are_told_apart_by_all(place: str, theme: dict[str, str]) -> None:
    names = TOGETHER[place]
    assert len(names) == len(set(names)) >= 3, "each has its own"
    assert palette.too_alike({name: theme[name] for name in names}, LEAST) == []


def test_grounds_of_states_are_told_apart_by_all(theme: dict[str, str]) -> None:
    soft = {tone: theme[f"{tone}-soft"] for tone in TONES}
    assert palette.too_alike(soft, LEAST_SOFT) == []


def test_colours_that_were_mixed_up_are_found() -> None:
    """Of an earlier palette: two curves to whom lacks the red cones, two to whom lacks the blue."""
    earlier = {"first": "#0b6aa8", "third": "#007a5a", "fourth": "#8a4f9e"}
    found = [each.rpartition(" ")[0] for each in palette.too_alike(earlier, LEAST)]
    assert found == ["first/third tritan", "first/fourth protan"]


def test_the_simulation_leaves_grey_as_it_is() -> None:
    for view in palette.VIEWS:
        assert palette.difference("#808080", "#808080", view) == 0
        assert palette.seen("#ffffff", view) == pytest.approx((100, 0, 0), abs=0.05)
        assert palette.seen("#777777", view) == pytest.approx((50.03, 0, 0), abs=0.05)


def test_every_kind_of_operation_has_a_colour_of_its_own() -> None:
    """Groups by their names, phases of a step in words, forward and backward passes."""
    text = (palette.PAGE / "views/timeline.js").read_text(encoding="utf-8")
    table = re.search(r"const COLORS = \{(.*?)\};", text, re.DOTALL)
    assert table
    keys = {key.strip('"[]') for key in re.findall(r'("[\w ]+"|\[?\w+\]?): "--', table[1])}
    groups = {group.name.lower() for group in Group}
    # Before the first step and after the last one; and two in which a rank's own work is.
    others = {Phase.STARTING, Phase.GROUPS, Phase.RESTORE, Phase.FINISHED}
    others |= {Phase.STEP, Phase.FORWARD_BACKWARD}
    phases = {phase.name.lower().replace("_", " ") for phase in set(Phase) - others}
    assert keys == groups | phases | {"WORK", "forward", "backward"}
    assert len(TOGETHER["timeline"]) == len(keys)


def test_the_heat_map_is_the_lighter_the_hotter(theme: dict[str, str]) -> None:
    cold, hot = theme["cold"], theme["hot"]
    colors = [palette.between(cold, hot, step / STEPS) for step in range(STEPS + 1)]
    for view in palette.VIEWS:
        lightness = [palette.seen(color, view)[0] for color in colors]
        assert all(one < other for one, other in pairwise(lightness)), view
        assert lightness[-1] - lightness[0] > 2 * LEAST
        # What is not known is no heat.
        assert all(palette.difference(theme["line"], each, view) > LEAST for each in colors)
    # A half, as long, twice: the shades that the legend names.
    named = {ratio: palette.between(cold, hot, (ratio - 0.5) / 1.5) for ratio in (0.5, 1, 1.5, 2)}
    assert palette.too_alike({str(ratio): color for ratio, color in named.items()}, LEAST) == []


def test_what_carries_meaning_stands_out_from_its_ground(theme: dict[str, str]) -> None:
    parts = {name for place, names in TOGETHER.items() if place != "states" for name in names}
    low = {
        name: round(palette.contrast(theme[name], theme["card"]), 2)
        for name in sorted(parts | {"cold", "hot", "focus"})
        if palette.contrast(theme[name], theme["card"]) < PICTURE
    }
    assert low == {}


def test_text_is_read_on_its_ground(theme: dict[str, str]) -> None:
    pairs = [
        *((tone, ground) for tone in TONES for ground in ("card", "page", f"{tone}-soft")),
        *((text, ground) for text in ("ink", "quiet", "link") for ground in ("card", "page")),
        *(("ink", f"{tone}-soft") for tone in TONES),
    ]
    low = [pair for pair in pairs if palette.contrast(*(theme[name] for name in pair)) < TEXT]
    assert low == []
