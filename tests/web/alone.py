"""The page in a browser without a controller: its own files, and answers that a test makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from controller.web.pages import FOLDER
from tests.web.browser import Visit

HOST = "http://page.test"
_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_ALWAYS = {
    "about": {"version": "0", "term": 1, "read_only": ""},
    "whoami": {"name": "", "role": "admin", "asked": False},
}
# In the place of the browser's: `streams` are those that are open, and `say` has each whose URL
# ends so hear an event, or lose its connection.
_STREAMS = """window.streams = new Set();
window.EventSource = class extends EventTarget {
  constructor(url) {
    super();
    this.path = url.split("?")[0];
    this.url = url;
    streams.add(this);
    queueMicrotask(() => this.dispatchEvent(new Event("open")));
  }
  close() { streams.delete(this); }
};
window.say = (path, name, value) => {
  for (const each of [...streams].filter((stream) => stream.path.endsWith(path))) {
    each.dispatchEvent(new MessageEvent(name, { data: JSON.stringify(value ?? null) }));
  }
};"""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is none."""

    status: int
    message: str = "it is a test"
    headers: Mapping[str, str] = field(default_factory=dict)


Answers = Mapping[str, Any | Callable[[], Any]]


def serve(page: Any, answers: Answers) -> None:
    """Answer what a page asks for: its files, and by its path below `/api/v1/` a value, what a
    function gives, or a refusal."""
    known = {**_ALWAYS, **answers}

    def answer(route: Any) -> None:
        path = route.request.url.removeprefix(HOST).partition("?")[0]
        file = FOLDER / path.removeprefix("/page/")
        if path.startswith("/page/"):
            route.fulfill(body=file.read_bytes(), content_type=_KINDS[file.suffix])
        elif path.startswith("/api/"):
            found = known.get(path.removeprefix("/api/v1/"), Refusal(404))
            found = found() if callable(found) else found
            status, headers = 200, {}
            if isinstance(found, Refusal):
                status, headers = found.status, dict(found.headers)
                found = {"error": {"message": found.message, "reason": "", "fields": []}}
            headers["Content-Type"] = "application/json"
            route.fulfill(status=status, headers=headers, body=json.dumps(found))
        else:
            html = (FOLDER / "index.html").read_bytes()
            route.fulfill(body=html, content_type="text/html")

    page.route(f"{HOST}/**", answer)


def called(page: Any, module: str, function: str, *arguments: Any) -> Any:
    """What a function that a script of the page exports gives."""
    script = f"""async (given) => {{
      const {{ {function} }} = await import("/page/{module}.js");
      return {function}(...given);
    }}"""
    return page.evaluate(script, list(arguments))


def visit_alone(chromium: Any, answers: Answers, **options: Any) -> Visit:
    """A page that hears on its streams what a test has it hear (`say`)."""
    visit = Visit(chromium, HOST, **options)
    visit.page.add_init_script(_STREAMS)
    serve(visit.page, answers)
    return visit


def say(visit: Visit, path: str, name: str, value: Any = None) -> None:
    """Have the streams of a path hear an event; `error` is the loss of their connection."""
    visit.page.evaluate("given => say(...given)", [path, name, value])
