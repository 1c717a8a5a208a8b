// A job's curve as columns: what was read at first, and each step that has come since.

export const NAMES = [
  "step", "attempt", "loss", "grad_norm", "learning_rate", "tokens_per_s", "duration_s", "at_s",
  "eval_loss",
];
// More points than this on a chart cost time and show nothing.
const MOST = 6000;

export function emptyCurve() {
  return Object.fromEntries(NAMES.map((name) => [name, []]));
}

/** A new curve with reports added; a step that is done again takes the place of its first time. */
export function withReports(curve, reports) {
  if (reports.length === 0) return curve;
  const columns = Object.fromEntries(NAMES.map((name) => [name, [...curve[name]]]));
  for (const report of reports) {
    const row = { ...report, tokens_per_s: report.duration_s > 0 ? report.tokens / report.duration_s : null };
    // A batch that was left out has no loss.
    if (report.tokens === 0) row.loss = row.grad_norm = row.tokens_per_s = null;
    let at = columns.step.length;
    while (at > 0 && columns.step[at - 1] >= row.step) at -= 1;
    const isAgain = columns.step[at] === row.step;
    for (const name of NAMES) columns[name].splice(at, isAgain ? 1 : 0, row[name] ?? null);
  }
  return thinned(columns);
}

/** Every other row of the older half, while there are too many. */
function thinned(columns) {
  const length = columns.step.length;
  if (length <= MOST) return columns;
  const isKept = (_, index) => index % 2 === 0 || index > length / 2 || columns.eval_loss[index] !== null;
  return Object.fromEntries(NAMES.map((name) => [name, columns[name].filter(isKept)]));
}

/** Steps at which a new attempt began. */
export function attemptMarks(curve) {
  const marks = [];
  for (let index = 1; index < curve.step.length; index += 1) {
    if (curve.attempt[index] !== curve.attempt[index - 1]) {
      marks.push({ step: curve.step[index], text: `attempt ${curve.attempt[index]}`, isFault: false });
    }
  }
  return marks;
}

/** Values of another curve at the steps of this one and its own, as data of two series. */
export function joined(first, second, name) {
  const steps = [...new Set([...first.step, ...second.step])].sort((a, b) => a - b);
  const column = (curve) => {
    const values = new Map(curve.step.map((step, index) => [step, curve[name][index]]));
    return steps.map((step) => values.get(step) ?? null);
  };
  return [steps, column(first), column(second)];
}
