// Curves over steps, drawn by uPlot: one cursor and one zoom for all charts of a view.

import { colorOf } from "/page/heat.js";
import { html, useEffect, useRef } from "/page/ui.js";

const COLORS = ["--blue", "--orange", "--green", "--purple", "--red", "--sky", "--yellow", "--indigo"];
// Once each colour is used; with how a legend shows them.
const DASHES = [[[], "solid"], [[8, 4], "dashed"], [[2, 3], "dotted"], [[8, 3, 2, 3], "double"]];
const HEIGHT_PX = 190;
const LETTER_PX = 12;
// A form and a letter besides the colour, for those who do not see it.
export const MARKS = {
  attempt: { color: "--quiet", dash: [4, 4], letter: "A", name: "a new attempt" },
  fault: { color: "--warn", dash: [4, 4], letter: "F", name: "a fault" },
  skipped: { color: "--bad", dash: [], letter: "S", name: "batches left out" },
  rollback: { color: "--purple", dash: [8, 4], letter: "R", name: "gone back to an older state" },
};

/** A line at each mark's step, with what happened there. */
function marked(marks) {
  return (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.font = `${LETTER_PX * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textBaseline = "top";
    const [left, right] = [bbox.left, bbox.left + bbox.width];
    const sizePx = LETTER_PX * devicePixelRatio;
    let lettered = { x: -Infinity, y: bbox.top };
    for (const mark of marks.current) {
      const x = plot.valToPos(mark.step, "x", true);
      const until = mark.last > mark.step ? plot.valToPos(mark.last, "x", true) : x;
      if (until < left || x > right) continue;
      const { color, dash, letter } = MARKS[mark.kind];
      ctx.strokeStyle = ctx.fillStyle = colorOf(color);
      if (until > x) {
        ctx.globalAlpha = 0.2;
        ctx.fillRect(Math.max(x, left), bbox.top, Math.min(until, right) - Math.max(x, left), bbox.height);
        ctx.globalAlpha = 1;
      }
      if (x < left) continue;
      ctx.setLineDash(dash);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      // Marks are in order: one right behind another has its letter below.
      const isClose = x - lettered.x < sizePx && lettered.y + 2 * sizePx < bbox.top + bbox.height;
      lettered = { x, y: isClose ? lettered.y + sizePx : bbox.top };
      ctx.fillText(letter, x + 2 * devicePixelRatio, lettered.y);
    }
    ctx.restore();
  };
}

/**
 * A colour and a dash for each series that no other one of the chart has, for up to 32.
 *
 * @param {{color?: string, dash?: number[], isDots?: boolean}[]} series
 */
export function looksOf(series) {
  return series.map(({ color, dash, isDots }, index) => {
    const [pattern, border] = DASHES[Math.floor(index / COLORS.length) % DASHES.length];
    if (color) return { color, dash: dash ?? [], border: dash ? "dashed" : "solid", width: 1.5 };
    // Dots have no dash of their own: a line through them has.
    return { color: COLORS[index % COLORS.length], dash: pattern, border, width: isDots && pattern.length === 0 ? 0 : 1.5 };
  });
}

function seriesOf(series, looks, format) {
  return series.map((each, index) => ({
    label: each.label,
    stroke: colorOf(looks[index].color),
    width: looks[index].width,
    dash: looks[index].dash,
    points: { show: Boolean(each.isDots), size: 6, fill: colorOf(looks[index].color) },
    // Of two curves each has steps that the other lacks, and dots are far from each other.
    spanGaps: Boolean(each.spansGaps || each.isDots),
    // Where no cursor is, the last one.
    value: (plot, value, at) => {
      const shown = value ?? plot.data[at].findLast((each) => each !== null);
      return shown === undefined || shown === null ? "–" : format(shown);
    },
  }));
}

/** `zoomed` is called with the steps that a mouse has chosen, or null for all. */
function options({ series, sync, format, marks, width, isLog, zoomed }) {
  const looks = looksOf(series);
  const axis = { stroke: colorOf("--quiet"), grid: { stroke: colorOf("--line"), width: 1 } };
  const font = "12px system-ui, sans-serif";
  return {
    width,
    height: HEIGHT_PX,
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
    cursor: {
      sync: { key: sync, setSeries: false },
      // What is shown is chosen by the view, for all of its charts.
      drag: { x: true, y: false, setScale: false },
      bind: { dblclick: () => () => zoomed(null) },
    },
    legend: { live: true, markers: { dash: (_, at) => looks[at - 1]?.border ?? "solid" } },
    axes: [
      { ...axis, font, size: 34 },
      { ...axis, font, size: 64, values: (_, values) => values.map((value) => (value === null ? "" : format(value))) },
    ],
    series: [
      { label: "step", value: (plot, value) => value ?? plot.data[0].at(-1) ?? "–" },
      ...seriesOf(series, looks, format),
    ],
    hooks: { draw: [marked(marks)], setSelect: [(plot) => zoomed(selected(plot))] },
  };
}

/** Whole steps around what a mouse has gone over, which is then no longer shown as chosen. */
function selected(plot) {
  const { left, width } = plot.select;
  const [first, last] = [left, left + width].map((px) => plot.posToVal(px, "x"));
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  return [Math.floor(first), Math.ceil(last)];
}

/** Gives a plot its data, and shows a range of steps of it, or all. */
function show(plot, data, range) {
  plot.setData(data, range === null);
  if (range !== null) plot.setScale("x", { min: range[0], max: range[1] });
}

/**
 * @param {{label: string, isDots?: boolean, color?: string, dash?: number[], spansGaps?: boolean}[]} series
 * @param {(number|null)[][]} data steps, then the values of each series
 * @param {[number, number]|null} range steps that are shown; null for all
 * @param zoomed called with another range, which a mouse has chosen
 */
export function Chart({ title, series, data, sync, format, range, zoomed, marks = [], isLog = false }) {
  const box = useRef(null);
  const plot = useRef(null);
  const shownMarks = useRef(marks);
  shownMarks.current = marks;
  const latest = useRef(null);
  latest.current = { data, range, zoomed };
  const names = series.map((each) => each.label).join();
  useEffect(() => {
    const make = () => {
      plot.current?.destroy();
      const made = options({
        series, sync, format, marks: shownMarks, width: box.current.clientWidth, isLog,
        zoomed: (chosen) => latest.current.zoomed(chosen),
      });
      plot.current = new uPlot(made, latest.current.data, box.current);
      if (latest.current.range) show(plot.current, latest.current.data, latest.current.range);
    };
    make();
    const resized = new ResizeObserver(() => {
      plot.current.setSize({ width: box.current.clientWidth, height: HEIGHT_PX });
    });
    resized.observe(box.current);
    addEventListener("outlast-themed", make);
    return () => {
      resized.disconnect();
      removeEventListener("outlast-themed", make);
      plot.current.destroy();
      plot.current = null;
    };
  }, [names, sync, isLog]);
  useEffect(() => show(plot.current, data, range), [data, marks, range]);
  const last = data.slice(1).map((values) => values.findLast((value) => value !== null));
  const spoken = series.map((each, index) => `${each.label} ${last[index] === undefined ? "none" : format(last[index])}`);
  return html`<figure class="chart">
    <figcaption>${title}</figcaption>
    <div ref=${box} role="img" aria-label="${title} over steps${range ? ` ${range.join(" to ")}` : ""}; now: ${spoken.join(", ")}"></div>
  </figure>`;
}
