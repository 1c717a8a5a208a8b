// How the times of ranks compare, and the colours that say so.

// Against the median of its peers, from which a colour says no more.
export const [LEAST, MOST] = [0.5, 2];
const [COLD, HOT] = [[70, 140, 200], [220, 90, 20]];

export function colorOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Red, green and blue, from blue over grey to orange: told apart by the colour-blind. */
export function heatParts(heat) {
  return COLD.map((value, index) => Math.round(value + (HOT[index] - value) * heat));
}

export function heatColor(heat) {
  return heat === null ? colorOf("--line") : `rgb(${heatParts(heat).join()})`;
}

/** The lower one of two: of two peers the slow one is to be told from the other. */
export function median(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted.length ? sorted[(sorted.length - 1) >> 1] : null;
}

/** From 0 to 1 for a value against the median of its peers. */
export function heatOf(value, middle) {
  if (value === null || !middle) return value === null ? null : 0;
  return Math.min(1, Math.max(0, (value / middle - LEAST) / (MOST - LEAST)));
}
