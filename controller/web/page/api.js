// Calls of the controller's JSON API, which is all that the page knows of it.

const ROOT = "/api/v1";

/** What the controller answers instead of what was asked for. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.reason = error.reason;
    this.fields = error.fields ?? [];
  }
}

async function answered(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // No JSON: an error of something between here and the controller.
  }
  if (!response.ok || body === null) {
    const message = `${response.status} ${response.statusText}`;
    throw new ApiError(response.status, body?.error ?? { message });
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

/**
 * Follow a stream of events, each heard by the handler of its name; the browser connects again
 * by itself. Returns a function that ends it.
 */
export function follow(path, query, handlers, onConnection = () => {}) {
  const source = new EventSource(url(path, query));
  for (const [name, handler] of Object.entries(handlers)) {
    source.addEventListener(name, (event) => handler(event.data ? JSON.parse(event.data) : null));
  }
  source.addEventListener("end", () => source.close());
  source.addEventListener("open", () => onConnection(true));
  source.addEventListener("error", () => onConnection(source.readyState === EventSource.OPEN));
  return () => source.close();
}
