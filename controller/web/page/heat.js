// How the times of ranks compare, and the colours that say so.

// Against the median of its peers, from which a colour says no more.
export const [LEAST, MOST] = [0.5, 2];

export function colorOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const partsOf = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));

/** Of light; a number from which it is told how well text is read on it. */
function luminance(parts) {
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const [red, green, blue] = parts.map((part) => linear(part / 255));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

/**
 * The colours of the theme that is chosen now, from blue over grey to orange: the lighter, the hotter.
 *
 * `parts` gives the red, green and blue of a heat, `color` what it is filled with, and `ink` what is written on it.
 */
export function heatScale() {
  const [cold, hot] = ["--cold", "--hot"].map((name) => partsOf(colorOf(name)));
  const [none, quiet] = [colorOf("--line"), colorOf("--quiet")];
  const parts = (heat) => cold.map((value, index) => Math.round(value + (hot[index] - value) * heat));
  return {
    parts,
    color: (heat) => (heat === null ? none : `rgb(${parts(heat).join()})`),
    // Where white and black have the same contrast, 4.6.
    ink: (heat) => (heat === null ? quiet : luminance(parts(heat)) > 0.179 ? "#000" : "#fff"),
  };
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
