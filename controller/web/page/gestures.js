// Pointers on a picture: one drags it, two pinch it around their middle, and one that hardly moves taps.

import { useEffect, useRef } from "/page/vendor/preact-htm.js";

// How far a pointer moves that still taps: a finger is never quite still, nor as thin as a mouse's arrow.
const SLACK_PX = { mouse: 4, pen: 6, touch: 12 };
export const slackOf = (event) => SLACK_PX[event.pointerType] ?? SLACK_PX.mouse;

/** The middle of the first two pointers and how far they are apart; of one its place, and 1. */
function gripOf(pointers) {
  const [one, other = one] = pointers.values();
  return {
    x: (one.x + other.x) / 2,
    y: (one.y + other.y) / 2,
    apart: Math.max(1, Math.hypot(one.x - other.x, one.y - other.y)),
  };
}

/**
 * Listeners for a canvas.
 *
 * A browser that scrolls the page instead, as the canvas' `touch-action` allows, cancels the pointer.
 *
 * @param canvas a ref to it
 * @param seen what is shown now; it is given back as it was when fingers came or went
 * @param moved called with that, the grip then and the grip now: `x` and `y` in pixels of the window, and `apart`
 * @param tapped called with the event
 */
export function useGestures({ canvas, seen, moved, tapped }) {
  const state = useRef({ pointers: new Map(), base: null, hasMoved: false }).current;
  const placed = ({ clientX, clientY }) => ({ x: clientX, y: clientY });
  const gripped = () => {
    state.base = state.pointers.size > 0 ? { seen, grip: gripOf(state.pointers) } : null;
  };
  const left = (event) => {
    const wasHeld = state.pointers.delete(event.pointerId);
    if (wasHeld) gripped();
    return wasHeld;
  };
  useEffect(() => {
    // Two fingers are the picture's even where one finger scrolls the page.
    const touched = (event) => {
      if (event.targetTouches.length > 1 && event.cancelable) event.preventDefault();
    };
    const element = canvas.current;
    element.addEventListener("touchmove", touched, { passive: false });
    return () => element.removeEventListener("touchmove", touched);
  }, []);
  return {
    onPointerDown: (event) => {
      if (event.button !== 0) return;
      canvas.current.setPointerCapture(event.pointerId);
      state.pointers.set(event.pointerId, placed(event));
      state.hasMoved = state.pointers.size > 1;
      gripped();
    },
    onPointerMove: (event) => {
      if (!state.pointers.has(event.pointerId)) return;
      state.pointers.set(event.pointerId, placed(event));
      const grip = gripOf(state.pointers);
      const by = Math.hypot(grip.x - state.base.grip.x, grip.y - state.base.grip.y);
      state.hasMoved ||= by > slackOf(event);
      if (state.hasMoved) moved(state.base.seen, state.base.grip, grip);
    },
    onPointerUp: (event) => {
      if (left(event) && !state.hasMoved && state.pointers.size === 0) tapped(event);
    },
    onPointerCancel: left,
  };
}
