// A picture on a canvas that one zooms with the wheel, moves by dragging, and picks places of.

import { useEffect, useRef, useState } from "/page/vendor/preact-htm.js";

// No less than so much of the whole is shown.
const LEAST = 4;

export const within = (value, least, most) => Math.min(Math.max(value, least), Math.max(least, most));

function zoomedAxis(from, size, whole, least, factor, at) {
  const now = within(size * factor, Math.min(least, whole), whole);
  return [within(at - ((at - from) * now) / size, 0, whole - now), now];
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
 * @param whole its width `w` and height `h`, in units of its own
 * @param frame pixels at the left and at the bottom that are not part of it, and its height in all
 * @param axes which ones zoom: "xy" or "x"; `least` is the smallest part of an axis that is shown
 * @param paint called with the canvas, its context, and the part that is seen
 * @param picked called with the place of a click
 */
export function usePlane({ whole, frame, axes = "xy", least = LEAST, paint, picked }) {
  const canvas = useRef(null);
  const drag = useRef(null);
  const width = useWidth(canvas);
  const [view, setView] = useState(null);
  const all = { x: 0, y: 0, w: whole.w, h: whole.h };
  const seen = view && view.x + view.w <= whole.w && view.y + view.h <= whole.h ? view : all;
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
  const placeOf = (event, of = seen) => {
    const box = canvas.current.getBoundingClientRect();
    return {
      x: of.x + ((event.clientX - box.left - frame.left) / (box.width - frame.left)) * of.w,
      y: of.y + ((event.clientY - box.top) / (frame.height - frame.bottom)) * of.h,
    };
  };
  const zoom = (factor, { x, y }) => {
    const [left, w] = zoomedAxis(seen.x, seen.w, whole.w, least, factor, x);
    const [top, h] = axes === "xy" ? zoomedAxis(seen.y, seen.h, whole.h, least, factor, y) : [seen.y, seen.h];
    setView({ x: left, w, y: top, h });
  };
  /** Moves by so many units, as far as there is something. */
  const move = (right, down, from = seen) => setView({
    ...from,
    x: within(from.x + right, 0, whole.w - from.w),
    y: within(from.y + down, 0, whole.h - from.h),
  });
  /** Moves no further than it takes to see a unit. */
  const reveal = ({ x, y }) => {
    const beyond = (from, size, at) => Math.min(0, at - from) + Math.max(0, at + 1 - (from + size));
    move(beyond(seen.x, seen.w, x), beyond(seen.y, seen.h, y));
  };
  const rolled = (event) => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, placeOf(event));
  };
  useEffect(() => {
    // Only a listener that says so may keep the page from scrolling.
    const element = canvas.current;
    element.addEventListener("wheel", rolled, { passive: false });
    return () => element.removeEventListener("wheel", rolled);
  });
  const showAll = () => setView(null);
  const onPointerDown = (event) => {
    drag.current = { from: [event.clientX, event.clientY], at: placeOf(event), view: seen, hasMoved: false };
    canvas.current.setPointerCapture(event.pointerId);
  };
  const onPointerMove = (event) => {
    if (!drag.current) return;
    const { from, at, view: before } = drag.current;
    if (Math.abs(event.clientX - from[0]) + Math.abs(event.clientY - from[1]) > 4) drag.current.hasMoved = true;
    if (!drag.current.hasMoved) return;
    const { x, y } = placeOf(event, before);
    move(at.x - x, at.y - y, before);
  };
  const onPointerUp = (event) => {
    const { x, y } = placeOf(event);
    const isInside = x >= 0 && x < whole.w && y >= 0 && y < whole.h;
    if (drag.current && !drag.current.hasMoved && isInside) picked({ x, y });
    drag.current = null;
  };
  const handlers = { onPointerDown, onPointerMove, onPointerUp, onDblClick: showAll };
  return { canvas, seen, zoom, move, reveal, showAll, handlers };
}
