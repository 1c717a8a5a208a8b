// Calls of the controller's JSON API, which is all that the page knows of it.

const ROOT = "/api/v1";

/** What the controller answers instead of what was asked for. */
export class ApiError extends Error {
  constructor(status, error, retryAfterS = 0) {
    super(error.message);
    this.status = status;
    this.reason = error.reason;
    this.fields = error.fields ?? [];
    this.retryAfterS = retryAfterS;
  }
}

// The controller is busy, is starting, or did not answer what stands before it in time.
const PASSING = [429, 502, 503, 504];

/** After how long to ask again what has failed; null where another answer is not to be expected. */
export function retryMs(failure) {
  if (!(failure instanceof ApiError)) return RETRY_MS;
  if (!PASSING.includes(failure.status)) return null;
  // A timer with more than 2 ** 31 ms rings at once.
  return Math.min(MOST_RETRY_MS, Math.max(RETRY_MS, 1000 * failure.retryAfterS));
}

async function answered(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // No JSON: an error of something between here and the controller.
  }
  if (response.status === 401) dispatchEvent(new Event("outlast-asked-for-token"));
  if (!response.ok || body === null) {
    const message = `${response.status} ${response.statusText}`;
    const retryAfterS = Number.parseFloat(response.headers.get("Retry-After")) || 0;
    throw new ApiError(response.status, body?.error ?? { message }, retryAfterS);
  }
  return body;
}

function url(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  const text = new URLSearchParams(given).toString();
  return `${ROOT}/${path.map(encodeURIComponent).join("/")}${text && `?${text}`}`;
}

/** @param {string[]} path its parts, not escaped */
export async function get(path, query) {
  return answered(await fetch(url(path, query)));
}

export async function post(path, body = {}) {
  const headers = { "Content-Type": "application/json" };
  return answered(await fetch(url(path), { method: "POST", headers, body: JSON.stringify(body) }));
}

// A controller that is away comes back.
export const RETRY_MS = 2000;
const MOST_RETRY_MS = 60_000;

/**
 * Follow a stream of events, each heard by the handler of its name, until the stream says that it
 * ends. `query` is asked each time that the stream is opened; `reopened` is called once it is open, when
 * that is not the first time: what happens from then on is in the stream. A page that nobody looks at has no stream: a browser keeps only six connections
 * to a server, for all its tabs. Returns a function that ends it.
 */
export function follow(path, query, handlers, { connected = () => {}, reopened = () => {} } = {}) {
  let source = null;
  let timer = 0;
  let times = 0;
  let isOver = false;
  const close = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
  };
  const open = () => {
    close();
    if (isOver || document.hidden) return;
    const isAgain = times > 0;
    times += 1;
    source = new EventSource(url(path, query()));
    for (const [name, handler] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => handler(JSON.parse(event.data)));
    }
    source.addEventListener("end", end);
    source.addEventListener("open", () => {
      connected(true);
      if (isAgain) reopened();
    });
    source.addEventListener("error", () => {
      close();
      connected(false);
      timer = setTimeout(open, RETRY_MS);
    });
  };
  const end = () => {
    isOver = true;
    close();
    document.removeEventListener("visibilitychange", open);
  };
  document.addEventListener("visibilitychange", open);
  open();
  return end;
}
