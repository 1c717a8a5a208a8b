"""The page in a real browser, and what must hold whatever is shown."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from controller.web.openapi import document
from tests.web.palette import TYPE_SCALE

WHY_NOT = "no Chromium or no playwright; `make test-web` installs them"
# Of a page that shows something live, which is then checked.
DEADLINE_MS = 60_000
# Whatever a page waits for comes within a tenth of a second.
HURRIED = """const later = window.setTimeout.bind(window);
window.setTimeout = (work, ms, ...rest) => later(work, Math.min(ms ?? 0, 100), ...rest);"""
_DOCUMENT = document()
# Of all that has text of its own.
_TYPE_SIZES = """() => [...document.querySelectorAll("body *")]
  .filter((each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
  .map((each) => parseFloat(getComputedStyle(each).fontSize))"""


@contextmanager
def browser(inside: Sequence[str] = ()) -> Iterator[Any]:
    """Chromium of the distribution; skips without one. `inside` is what its command begins with, as
    one that runs it in another network namespace."""
    path = shutil.which("chromium")
    driver = pytest.importorskip("playwright.sync_api", reason=WHY_NOT)
    if path is None:
        pytest.skip(WHY_NOT)
    with ExitStack() as stack:
        if inside:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="outlast-browser-"))
            )
            path = str(_script(folder / "chromium", [*inside, path]))
        playwright = stack.enter_context(driver.sync_playwright())
        # Root, as which tests run in containers, has no sandbox.
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        stack.callback(launched.close)
        yield launched


def _script(path: Path, command: Sequence[str]) -> Path:
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o700)
    return path


class Visit:
    """A page with what it has complained of, and where it has been."""

    def __init__(self, browser: Any, base: str, **options: Any) -> None:
        self.base = base
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(DEADLINE_MS)
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._said)
        self.page.on("request", self._asked)

    def open(self, path: str) -> None:
        self.page.goto(self.base + path)
        self.page.wait_for_selector("h1")

    def shows(self, text: str) -> None:
        """Wait until the text is on the page."""
        self.page.get_by_text(text).first.wait_for()

    def is_fit_for_all(self) -> None:
        """Axe finds nothing serious, the browser no error, and type is of one scale."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=WHY_NOT)
        result = axe.Axe().run(self.page).response
        assert result["passes"], "it looked at something"
        found = result["violations"]
        grave = [
            (each["id"], [node["html"] for node in each["nodes"]])
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        assert grave == [], grave
        assert set(self.page.evaluate(_TYPE_SIZES)) <= TYPE_SCALE
        assert (self.complaints, self.foreign) == ([], [])

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _asked(self, request: Any) -> None:
        if request.url.startswith(("data:", "blob:")):
            return
        is_ours = request.url.startswith(f"{self.base}/")
        target = request.url.removeprefix(self.base)
        if not is_ours or not is_allowed(request.method, target, request.is_navigation_request()):
            self.foreign.append(f"{request.method} {request.url}")


def is_allowed(verb: str, target: str, is_navigation: bool) -> bool:
    """Whether the page may ask for a path and query: for itself, its files, or what the OpenAPI
    document has, with no parameters but those."""
    asked = urlsplit(target)
    if is_navigation:
        # Whatever the path says, it is the page that answers.
        return not asked.path.startswith(("/api/", "/metrics", "/sd/"))
    if asked.path.startswith("/page/"):
        return verb == "GET"
    for path, operations in _DOCUMENT["paths"].items():
        pattern = re.sub(r"\{\w+\}", "[^/]+", path)
        if verb.lower() in operations and re.fullmatch(pattern, asked.path):
            parameters = operations[verb.lower()]["parameters"]
            known = {each["name"] for each in parameters if each["in"] == "query"}
            return set(parse_qs(asked.query, keep_blank_values=True)) <= known
    return False


class Answers:
    """The controller's first answer to each question, again and again."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def first(self, route: Any) -> None:
        """Answer a request of the page."""
        url = route.request.url
        if url not in self._known:
            self._known[url] = route.fetch()
        route.fulfill(response=self._known[url])
