"""One scale of type and one of space, as the style sheet's first line says."""

from __future__ import annotations

import re

from tests.web import palette

SPACE = {0, 4, 8, 12, 16, 24, 40}
# Onto or beside a border, which is so wide.
BORDER = 1


def sheet() -> str:
    return (palette.PAGE / "style.css").read_text(encoding="utf-8")


def test_the_sheet_says_its_scales() -> None:
    first = sheet().partition("*/")[0]
    scales = [
        {int(each) for each in found.split(", ")} for found in re.findall(r"\((.*?)\)", first)
    ]
    assert scales == [palette.TYPE_SCALE, SPACE - {0}]


def test_each_size_of_type_is_of_the_scale() -> None:
    sizes = re.findall(r"font(?:-size)?: ([\d.]+)(\w+|%)", sheet())
    assert {unit for _, unit in sizes} == {"px"}
    assert {float(size) for size, _ in sizes} == palette.TYPE_SCALE
    drawn = []
    for path in palette.PAGE.glob("**/*.js"):
        if "vendor" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        drawn += re.findall(r'font = "(\d+)px ', text)
        # Of a canvas that is scaled by hand, by the name of a constant.
        for name in re.findall(r"font = `\$\{(\w+) \* devicePixelRatio\}px ", text):
            drawn += re.findall(rf"const {name} = (\d+);", text)
        assert not re.search("fontSize|font-size", text), path
    assert len(drawn) == 5
    assert {int(size) for size in drawn} <= palette.TYPE_SCALE


def test_each_space_is_of_the_scale() -> None:
    rules = re.findall(r"(?:padding|margin|gap)[\w-]*: ([^;]*);", sheet())
    sizes = {float(size) for rule in rules for size in re.findall(r"([\d.]+)px", rule)}
    assert sizes <= SPACE | {BORDER}
