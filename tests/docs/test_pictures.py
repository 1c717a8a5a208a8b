"""Pictures of the web page: those that are kept are those that the documentation shows."""

from __future__ import annotations

import re

from tests.docs.test_references import PAGES
from tests.web.screenshots import BUILT, DOCS, ROOT, SHOWN


def test_pictures_of_the_page_are_those_that_pages_show() -> None:
    shown = {
        name for page in PAGES for name in re.findall(r"/(page-[\w-]+\.png)\)", page.read_text())
    }
    assert shown == {path.name for path in DOCS.glob("page-*.png")} == set(SHOWN)


def test_the_other_pictures_are_ignored_by_git() -> None:
    ignored = (ROOT / ".gitignore").read_text().split()
    assert f"{BUILT.relative_to(ROOT).parts[0]}/" in ignored
