"""What the browser tests take for a request of the page's own, without a browser."""

from __future__ import annotations

import pytest

from tests.web.browser import is_allowed


@pytest.mark.parametrize(
    ("verb", "target"),
    [
        ("GET", "/page/app.js"),
        ("GET", "/api/v1/jobs"),
        ("GET", "/api/v1/jobs/gpt-abcde/curve"),
        ("GET", "/api/v1/jobs/a/heat-map?measure=work&order=rank&rows=1024&steps=1000"),
        ("GET", "/api/v1/nodes/a.b%2Fc"),
        ("POST", "/api/v1/nodes/n0/cordon"),
    ],
)
def test_files_of_the_page_and_what_is_documented_may_be_asked_for(verb: str, target: str) -> None:
    assert is_allowed(verb, target, False)


@pytest.mark.parametrize(
    ("verb", "target"),
    [
        ("GET", "/metrics"),
        ("GET", "/sd/agents"),
        ("GET", "/favicon.ico"),
        ("GET", "/jobs/gpt-abcde"),
        ("POST", "/page/app.js"),
        # Of another verb, another path, or with a parameter that the document lacks.
        ("DELETE", "/api/v1/jobs/gpt-abcde"),
        ("GET", "/api/v1/nodes/n0/cordon"),
        ("GET", "/api/v1/jobs/gpt-abcde/secrets"),
        ("GET", "/api/v1/jobs/a/heat-map?all=1"),
    ],
)
def test_nothing_else_may_be(verb: str, target: str) -> None:
    assert not is_allowed(verb, target, False)


def test_every_path_of_the_page_is_the_page() -> None:
    assert is_allowed("GET", "/", True)
    assert is_allowed("GET", "/jobs/gpt-abcde/timeline/7", True)
    assert not is_allowed("GET", "/metrics", True)
    assert not is_allowed("GET", "/api/v1/jobs", True)
