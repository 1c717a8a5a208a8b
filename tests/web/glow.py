"""What is drawn on a canvas of ranks: frames that glow, and arrows."""

from __future__ import annotations

from typing import Any

from tests.web.browser import Visit

# Of each picture since a canvas was last set to a size: strokes that glow in the colour of what is
# bad, each with its corners, and the two ends of curves, which only arrows have.
WATCH = """window.drawn = { glows: [], arrows: [] };
(() => {
  const own = CanvasRenderingContext2D.prototype;
  const size = Object.getOwnPropertyDescriptor(HTMLCanvasElement.prototype, "height");
  let path = [];
  const watched = (name, seen) => {
    const real = own[name];
    own[name] = function (...given) {
      if (this.canvas.className === "cube") seen.call(this, ...given);
      return real.apply(this, given);
    };
  };
  Object.defineProperty(HTMLCanvasElement.prototype, "height", { ...size, set(value) {
    if (this.className === "cube") window.drawn = { glows: [], arrows: [] };
    size.set.call(this, value);
  } });
  watched("beginPath", () => { path = []; });
  watched("moveTo", (x, y) => path.push([x, y]));
  watched("lineTo", (x, y) => path.push([x, y]));
  watched("quadraticCurveTo", (bendX, bendY, x, y) => drawn.arrows.push([path.at(-1), [x, y]]));
  watched("stroke", function () {
    const probe = document.createElement("canvas").getContext("2d");
    probe.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--bad").trim();
    const isBad = this.strokeStyle === probe.strokeStyle && this.shadowColor === probe.strokeStyle;
    if (isBad && this.shadowBlur > 0) drawn.glows.push(path.slice());
  });
})();"""


Point = tuple[float, float]


def glowing(visit: Visit) -> list[Point]:
    """The middle of each cell that glows now."""
    found: list[list[Point]] = visit.page.evaluate("drawn.glows")
    return [
        (sum(x for x, _ in path) / len(path), sum(y for _, y in path) / len(path)) for path in found
    ]


def arrows(visit: Visit) -> list[tuple[Point, Point]]:
    """Where each arrow begins, and where its head points to."""
    found: list[Any] = visit.page.evaluate("drawn.arrows")
    return [((begun[0], begun[1]), (ended[0], ended[1])) for begun, ended in found]
