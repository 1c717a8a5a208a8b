// Numbers, times and names as people read them. Null and NaN are shown as a dash.

const DASH = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function number(value, digits = 4) {
  if (!known(value)) return DASH;
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) {
    return value.toExponential(Math.max(digits - 2, 1));
  }
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

export function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en") : DASH;
}

/** 12,345 as 12.3 k */
export function short(value) {
  if (!known(value)) return DASH;
  for (const [limit, unit] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= limit) return `${(value / limit).toPrecision(3)} ${unit}`;
  }
  return value.toPrecision(3);
}

export function percent(value, digits = 1) {
  return known(value) ? `${(100 * value).toFixed(digits)} %` : DASH;
}

export function bytes(value) {
  if (!known(value) || value <= 0) return DASH;
  for (const [limit, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"]]) {
    if (value >= limit) return `${(value / limit).toFixed(1)} ${unit}`;
  }
  return `${Math.ceil(value / 1024)} KiB`;
}

export function duration(seconds) {
  if (!known(seconds)) return DASH;
  if (seconds < 0.001) return seconds === 0 ? "0 s" : `${(1e6 * seconds).toFixed(0)} µs`;
  if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const [days, hours, minutes] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60];
  if (seconds >= 86400) return `${Math.floor(days)} d ${Math.floor(hours)} h`;
  if (seconds >= 3600) return `${Math.floor(hours)} h ${Math.floor(minutes)} min`;
  return `${Math.floor(minutes)} min ${Math.floor(seconds % 60)} s`;
}

export function ago(atS, nowS = Date.now() / 1000) {
  return known(atS) && atS > 0 ? `${duration(Math.max(0, nowS - atS))} ago` : DASH;
}

export function moment(atS) {
  if (!known(atS) || atS <= 0) return DASH;
  return new Date(1000 * atS).toLocaleString("sv");
}

/** worker_killed as "worker killed" */
export function words(name) {
  return name ? name.replaceAll("_", " ") : DASH;
}

export const mfu = (job) =>
  job.peak_flops_per_s > 0 ? job.model_flops_per_s / job.peak_flops_per_s : null;

export const hfu = (job) =>
  job.peak_flops_per_s > 0 ? job.hardware_flops_per_s / job.peak_flops_per_s : null;

const MOVES = {
  good: ["RUNNING", "SUCCEEDED", "ASSIGNED", "READY", "STANDBY", "CLOSED"],
  busy: ["QUEUED", "PROVISIONING", "PREFLIGHT", "STARTING", "RESTARTING", "VALIDATING", "VERIFYING"],
  warn: ["SUSPENDING", "DIAGNOSING", "SUSPECT", "DRAINING", "OPEN", "EVIDENCE", "VERDICT", "ACTING"],
  bad: ["FAILED", "QUARANTINED"],
};

/** What a state means to whoever looks: good, busy, warn, bad or idle. */
export function toneOf(state, kind) {
  if (state === "REPAIRING") return kind === "node" ? "bad" : "warn";
  return Object.keys(MOVES).find((tone) => MOVES[tone].includes(state)) ?? "idle";
}

export const ENDED = ["SUCCEEDED", "FAILED", "CANCELLED"];
