"""Write the reference page of the JSON API from its OpenAPI document, so that it cannot drift.

`python docs/make_http_api_reference.py` rewrites docs/reference/http-api.md; a test compares it
with what the code says now.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from controller.web.openapi import document
from controller.web.routes import ROOT

PAGE = Path(__file__).parent / "reference" / "http-api.md"

_HEAD = f"""# HTTP API

Generated from the routes in `controller/web` by `python docs/make_http_api_reference.py`. The
controller serves the same as OpenAPI 3.1, with the schema of every answer, at
`{ROOT}/openapi.json`.

The [web page](../how-to/use-the-web-page.md) uses this API and nothing else. Requests become calls
of the controller's gRPC services, so that both are checked, done and refused alike.

- Fields have the names of the messages in `proto/outlast/v1`, and all are there: absent ones, NaN
  and Inf are null, integers are numbers.
- A POST takes a JSON object, with `Content-Type: application/json`, of at most 1 MiB.
- An unknown parameter or field is refused, by its name, with those that there are.
- Errors are `{{"error": {{"message", "reason", "fields": [{{"field", "description"}}]}}}}`: 400 for
  a request that makes no sense, 401 and 403 for who may not ask, 404 for what is not there, 409 for
  what cannot be done as things are, 413 and 415 for a body that is too large or no JSON, 429 for
  too much at once, 503 and 504 for a controller that cannot answer now.
- Answers of 1 KiB and more are compressed (gzip) where the request has `Accept-Encoding` with it;
  streams are not.
- Streams are server-sent events; a comment each 15 s keeps them open.
- With `--tokens-file` each request shows a token, as `Authorization: Bearer TOKEN` or in the cookie
  that `/api/v1/login` sets; without one the answer is 401, and 403 where its role does not suffice.
- Otherwise page and API answer the controller's own machine only, unless it was started with
  `--open-http`; `/metrics`, `/healthz`, `/readyz` and `/sd/agents` answer everybody.
- `/healthz` says whether the process does its work, also while it waits for another controller
  (`--wait`); `/readyz` answers 200 for the one that leads, and 503 with the reason for one that
  waits, starts or stops. All else is 503 while it waits.

| | path | parameters | |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = [
        _row(verb, path, operation)
        for path, operations in sorted(document()["paths"].items())
        for verb, operation in operations.items()
    ]
    return _HEAD + "\n".join(rows) + "\n"


def _row(verb: str, path: str, operation: dict[str, Any]) -> str:
    names = [f"`{each['name']}`" for each in operation["parameters"] if each["in"] == "query"]
    body = operation.get("requestBody")
    if body is not None:
        fields = body["content"]["application/json"]["schema"]["properties"]
        names += [f"`{name}` in the body" for name in fields]
    return f"| {verb.upper()} | `{path}` | {', '.join(names)} | {operation['summary']} |"


if __name__ == "__main__":
    PAGE.write_text(page())
