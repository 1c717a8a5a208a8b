// Curves over steps, drawn by uPlot: one cursor and one zoom for all charts of a view.

import { colorOf } from "/page/heat.js";
import { html, useEffect, useRef } from "/page/ui.js";

const COLORS = ["--blue", "--orange", "--green", "--purple"];
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

function options(title, series, sync, format, marks, width, isLog) {
  const colors = COLORS.map(colorOf);
  const axis = { stroke: colorOf("--quiet"), grid: { stroke: colorOf("--line"), width: 1 } };
  const font = "12px system-ui, sans-serif";
  return {
    width,
    height: HEIGHT_PX,
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
    cursor: { sync: { key: sync, setSeries: false }, drag: { x: true, y: false } },
    legend: { live: true },
    axes: [
      { ...axis, font, size: 34 },
      { ...axis, font, size: 64, values: (_, values) => values.map((value) => (value === null ? "" : format(value))) },
    ],
    series: [
      { label: "step", value: (plot, value) => value ?? plot.data[0].at(-1) ?? "–" },
      ...series.map((each, index) => ({
        label: each.label,
        stroke: each.color ? colorOf(each.color) : colors[index % colors.length],
        width: each.isDots ? 0 : 1.5,
        dash: each.dash,
        points: { show: Boolean(each.isDots), size: 6, fill: colors[index % colors.length] },
        // Of two curves each has steps that the other lacks.
        spanGaps: Boolean(each.spansGaps),
        // Where no cursor is, the last one.
        value: (plot, value, at) => {
          const shown = value ?? plot.data[at].findLast((each) => each !== null);
          return shown === undefined || shown === null ? "–" : format(shown);
        },
      })),
    ],
    hooks: { draw: [marked(marks)] },
  };
}

/**
 * @param {{label: string, isDots?: boolean, color?: string, dash?: number[], spansGaps?: boolean}[]} series
 * @param {(number|null)[][]} data steps, then the values of each series
 * @param {[number, number]|null} range steps that are shown; null for what a mouse has chosen, or all
 */
export function Chart({ title, series, data, sync, format, marks = [], isLog = false, range = null }) {
  const box = useRef(null);
  const plot = useRef(null);
  const shownMarks = useRef(marks);
  shownMarks.current = marks;
  const latest = useRef(data);
  latest.current = data;
  const names = series.map((each) => each.label).join();
  useEffect(() => {
    const make = () => {
      plot.current?.destroy();
      const width = box.current.clientWidth;
      const made = options(title, series, sync, format, shownMarks, width, isLog);
      plot.current = new uPlot(made, latest.current, box.current);
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
  const wasZoomed = useRef(false);
  useEffect(() => {
    if (range) plot.current.setScale("x", { min: range[0], max: range[1] });
    else if (wasZoomed.current) plot.current.setData(latest.current);
    wasZoomed.current = range !== null;
  }, [range, names, sync, isLog]);
  useEffect(() => {
    const now = plot.current;
    const steps = data[0];
    const before = now.data[0];
    const { min, max } = now.scales.x;
    // Who has zoomed in stays there.
    const isWhole = !before.length || min === null || (min <= before[0] && max >= before.at(-1));
    now.setData(data, isWhole);
    if (!isWhole && steps.length) now.redraw();
  }, [data, marks]);
  const last = data.slice(1).map((values) => values.findLast((value) => value !== null));
  const spoken = series.map((each, index) => `${each.label} ${last[index] === undefined ? "none" : format(last[index])}`);
  return html`<figure class="chart">
    <figcaption>${title}</figcaption>
    <div ref=${box} role="img" aria-label="${title} over steps${range ? ` ${range.join(" to ")}` : ""}; now: ${spoken.join(", ")}"></div>
  </figure>`;
}
