// A picture on a canvas that is zoomed, panned and chosen from: by mouse, by fingers, and by keys.

import { slackOf, useGestures } from "/page/gestures.js";
import { colorOf } from "/page/heat.js";
import { html, useEffect, useRef, useState } from "/page/vendor/preact-htm.js";

// No less than so much of the whole is shown.
const LEAST = 4;
const [IN, OUT] = [0.8, 1.25];
// Of what is seen, by an arrow key.
const PAN = 1 / 8;
const ARROWS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export const within = (value, least, most) => Math.min(Math.max(value, least), Math.max(least, most));

/** Where a part of an axis begins, and its size, so that the unit `at` is at this share of it. */
function placedAxis(at, share, size, whole, least) {
  const now = within(size, Math.min(least, whole), whole);
  return [within(at - share * now, 0, whole - now), now];
}

/** How far to move to see `length` units from `at` on; of more than there is room for some are enough. */
function beyond(from, size, at, length) {
  if (length <= size) return Math.min(0, at - from) + Math.max(0, at + length - (from + size));
  if (at + length <= from || at >= from + size) return at - from;
  return 0;
}

/** The width of a canvas in pixels, 0 at first; it is another one when the theme changes, too. */
export function useWidth(canvas) {
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const resized = new ResizeObserver(() => setWidth(canvas.current.clientWidth));
    resized.observe(canvas.current);
    const themed = () => setWidth((before) => before + 1e-9);
    addEventListener("outlast-themed", themed);
    return () => {
      resized.disconnect();
      removeEventListener("outlast-themed", themed);
    };
  }, []);
  return width;
}

/**
 * The part of a whole that is seen, painted whenever its view is rendered.
 *
 * @param whole its width `w` and height `h`, in units of its own; when `of` is another one, its units mean
 *   something else, and all of it is seen
 * @param frame pixels at the left and at the bottom that are not part of it, and its height in all
 * @param axes which ones zoom: "xy" or "x"; `least` is the smallest part of an axis that is shown
 * @param paint called with the canvas' context, the part that is seen, and pixels that it is wide and high
 */
function usePlane({ whole, frame, axes, least, paint }) {
  const canvas = useRef(null);
  const width = useWidth(canvas);
  const [view, setView] = useState(null);
  const all = { x: 0, y: 0, ...whole };
  const isOfIt = view && view.of === whole.of && view.x + view.w <= whole.w && view.y + view.h <= whole.h;
  const seen = isOfIt ? view : all;
  useEffect(() => {
    if (width === 0) return;
    const shown = canvas.current;
    const [across, down] = [shown.clientWidth, frame.height].map((px) => Math.round(px * devicePixelRatio));
    const ctx = shown.getContext("2d");
    // A canvas whose size is set is made anew, which a picture that moves has no time for.
    if (shown.width !== across || shown.height !== down) [shown.width, shown.height] = [across, down];
    ctx.reset();
    ctx.scale(devicePixelRatio, devicePixelRatio);
    paint(ctx, seen, { across: shown.clientWidth - frame.left, down: frame.height - frame.bottom });
  });
  /** Which share of what is seen lies left of and above a place of the window. */
  const shareOf = ({ x, y }) => {
    const box = canvas.current.getBoundingClientRect();
    return {
      x: (x - box.left - frame.left) / (box.width - frame.left),
      y: (y - box.top) / (frame.height - frame.bottom),
    };
  };
  const unitAt = (share, of = seen) => ({ x: of.x + share.x * of.w, y: of.y + share.y * of.h });
  /** Shows so many times as much, with a unit at a share of it. */
  const show = (at, share, factor, from = seen) => {
    const [x, w] = placedAxis(at.x, share.x, from.w * factor, whole.w, least);
    const [y, h] = placedAxis(at.y, share.y, from.h * (axes === "xy" ? factor : 1), whole.h, least);
    setView({ x, y, w, h, of: whole.of });
  };
  /** Moves by so many units, as far as there is something; gives whether there was. */
  const move = (right, down) => {
    const [x, y] = [within(seen.x + right, 0, whole.w - seen.w), within(seen.y + down, 0, whole.h - seen.h)];
    if (x === seen.x && y === seen.y) return false;
    setView({ ...seen, x, y });
    return true;
  };
  const reveal = ({ x, y, w, h }) => move(beyond(seen.x, seen.w, x, w), beyond(seen.y, seen.h, y, h));
  return { canvas, seen, shareOf, unitAt, show, move, reveal, showAll: () => setView(null) };
}

/** A dashed frame around what keys have come to. */
function paintCursor(ctx, box, seen, frame, { across, down }) {
  const at = [frame.left + ((box.x - seen.x) / seen.w) * across, ((box.y - seen.y) / seen.h) * down];
  const size = [Math.max(4, (box.w / seen.w) * across), Math.max(4, (box.h / seen.h) * down)];
  ctx.save();
  ctx.beginPath();
  ctx.rect(frame.left, 0, across, down);
  ctx.clip();
  ctx.lineWidth = 3;
  for (const [color, dash] of [["--card", []], ["--focus", [6, 3]]]) {
    ctx.strokeStyle = colorOf(color);
    ctx.setLineDash(dash);
    ctx.strokeRect(...at, ...size);
  }
  ctx.restore();
}

/**
 * The picture with its buttons, and a line that says how it is used.
 *
 * Keys come to an item, which has a frame and is said; Enter chooses it, as a tap does.
 *
 * @param label gives the picture's name, of the part that is seen
 * @param items what can be chosen: its `name`; `at` gives the one at a place or within a reach beside it,
 *   `next` the one to which an arrow key leads from another one or from none, `boxOf` its place and size in units,
 *   and `nameOf` a few words
 * @param cursor the item that keys have come to, or null; `point` is called with another one
 * @param chosen the item that is chosen, or null; `choose` is called with another one
 * @param keys further keys, each with what it does; `help` says so
 * @param children further buttons
 */
export function Plane({
  whole, frame, axes = "xy", least = LEAST, paint, label, items, cursor, point, chosen, choose, keys = {}, help = "", children,
}) {
  const { canvas, seen, shareOf, unitAt, show, move, reveal, showAll } = usePlane({
    whole, frame, axes, least,
    paint: (ctx, part, size) => {
      paint(ctx, part, size);
      if (cursor) paintCursor(ctx, items.boxOf(cursor), part, frame, size);
    },
  });
  const handlers = useGestures({
    canvas,
    seen,
    moved: (before, from, to) => show(unitAt(shareOf(from), before), shareOf(to), from.apart / to.apart, before),
    tapped: (event) => {
      const share = shareOf({ x: event.clientX, y: event.clientY });
      const isInside = share.x >= 0 && share.x < 1 && share.y >= 0 && share.y < 1;
      const reach = (slackOf(event) * seen.w) / (canvas.current.clientWidth - frame.left);
      if (isInside) choose(items.at(unitAt(share), reach));
    },
  });
  const rolled = (event) => {
    event.preventDefault();
    const share = shareOf({ x: event.clientX, y: event.clientY });
    show(unitAt(share), share, event.deltaY > 0 ? OUT : IN);
  };
  useEffect(() => {
    // Only a listener that says so may keep the page from scrolling.
    const element = canvas.current;
    element.addEventListener("wheel", rolled, { passive: false });
    return () => element.removeEventListener("wheel", rolled);
  });
  const current = cursor ?? chosen;
  const box = current && items.boxOf(current);
  // Wherever it was chosen, it is shown.
  // Not again where it has only moved: new steps come, and the reader may have gone elsewhere.
  useEffect(() => { if (box) reveal(box); }, [current && items.nameOf(current)]);
  /** Around what keys are at, where that is seen. */
  const zoom = (factor) => {
    const middle = box ? { x: (box.x + box.w / 2 - seen.x) / seen.w, y: (box.y + box.h / 2 - seen.y) / seen.h } : null;
    const isSeen = middle && Math.min(middle.x, middle.y) >= 0 && Math.max(middle.x, middle.y) <= 1;
    const share = isSeen ? middle : { x: 0.5, y: 0.5 };
    show(unitAt(share), share, factor);
  };
  const pressed = {
    "+": () => zoom(IN), "=": () => zoom(IN), "-": () => zoom(OUT), 0: showAll, Home: showAll,
    Enter: () => choose(current ?? items.next(null, "ArrowRight", seen)), ...keys,
  };
  const keyed = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in ARROWS) {
      const [right, down] = ARROWS[event.key];
      if (event.shiftKey) point(items.next(current, event.key, seen));
      // Where there is no more of the picture, the page scrolls.
      else if (!move(right * seen.w * PAN, down * seen.h * PAN)) return;
    } else if (event.key in pressed) pressed[event.key]();
    else return;
    event.preventDefault();
  };
  // Up and down are the page's while all of the picture's height is seen.
  const style = { height: `${frame.height}px`, touchAction: seen.h < whole.h ? "none" : "pan-y" };
  return html`<canvas ref=${canvas} class="heat" style=${style} tabindex="0" role="application"
      aria-label=${label(seen)} aria-describedby="picture-help" ...${handlers} onDblClick=${showAll} onKeyDown=${keyed}></canvas>
    <p id="picture-help" class="quiet">Drag to pan, pinch or wheel to zoom, tap to choose, double click to see all. Keys: arrows pan, + and − zoom,
      Home or 0 shows all, Shift with arrows goes to the next ${items.name}, Enter chooses it${help}.</p>
    <div class="actions">
      <button onClick=${() => zoom(IN)}>Zoom in</button>
      <button onClick=${() => zoom(OUT)}>Zoom out</button>
      <button onClick=${showAll}>Show all</button>
      ${children}
      <span class="quiet" aria-live="polite">${cursor && `At ${items.nameOf(cursor)}`}</span>
    </div>`;
}
