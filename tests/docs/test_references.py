"""What documentation names exists: files, links, commands with their options, make targets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path

import pytest
import typer.main

from outlast.cli.main import app
from outlast.cli.usage import ListingGroup
from outlast.spec import JobSpec
from tests.test_project import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Folders of the repository: what begins with one of them is a path.
TOPS = ("bench", "checkpoint", "controller", "demo", "deploy", "diagnostics", "docs")
TOPS += ("examples", "outlast", "proto", "tests", "trainer")
# What a run makes, and places in the folders of users and stores.
MADE = ("*NAME*", "outlast/owner.json", "tests/*/results/*", "bench/results/*-part.json")

CODE = re.compile(r"```[a-z]*\n(.*?)```", re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(rf"(?:{'|'.join(TOPS)})/[\w./*{{}},-]*[\w}}]")


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path) -> Iterator[str]:
    """Everything that the page says one may type."""
    text = page.read_text(encoding="utf-8")
    for block in CODE.findall(text):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            yield line.strip().removeprefix("$ ")
    yield from INLINE.findall(CODE.sub("", text))


def expanded(pattern: str) -> Iterator[str]:
    """`a/{b,c}` is two paths."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        yield pattern
        return
    for each in found[1].split(","):
        yield from expanded(pattern[: found.start()] + each + pattern[found.end() :])


def is_there(path: str) -> bool:
    if any(fnmatch(path, made) for made in MADE):
        return True
    # A module or a name in it may be given without its ending.
    return any(
        any(ROOT.glob(path + ending)) for ending in ("", ".py", ".md", ".yaml") if "//" not in path
    )


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_paths_of_the_repository_exist(page: Path) -> None:
    named = {
        path
        for text in commands(page)
        for word in text.split()
        for found in PATH.findall(word.strip("'\"(),:;"))
        if word.strip("'\"(),:;").startswith(found)
        for path in expanded(found)
    }
    assert sorted(path for path in named if not is_there(path)) == []


@lru_cache
def headings(page: Path) -> frozenset[str]:
    """Anchors of a page, as GitHub makes them of its headings."""
    lines = CODE.sub("", page.read_text(encoding="utf-8")).splitlines()
    titles = (line.lstrip("#").strip() for line in lines if line.startswith("#"))
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for link in LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_page = target.suffix == ".md" and target.is_file()
        if not target.exists() or (anchor and is_page and anchor not in headings(target)):
            broken.append(link)
    assert broken == []


def wrong_words(line: str) -> list[str]:
    """What of `outlast ...` is no command or option."""
    try:
        words = shlex.split(line.replace("…", "..."), comments=True)
    except ValueError:
        return []
    group = typer.main.get_command(app)
    names = []
    words = words[1:]
    while (members := getattr(group, "commands", None)) and words and words[0][0] != "-":
        names.append(words.pop(0))
        known = members.get(names[-1])
        if known is None and isinstance(group, ListingGroup):
            known = members["list"]
        if known is None:
            is_word = re.fullmatch(r"[a-z][a-z-]*", names[-1]) is not None
            return [f"no command: {' '.join(names)}"] if is_word else []
        group = known
    if names == ["run"]:
        words = _before_script(words)
    options = {
        option
        for parameter in group.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    } | {"--help", "--version", "--install-completion", "--show-completion"}
    given = [word.partition("=")[0] for word in _own(words) if re.match(r"--?[a-z]", word)]
    return [f"{' '.join(names)}: no option {each}" for each in given if each not in options]


def _before_script(words: list[str]) -> list[str]:
    """What a script or a module is given is its own."""
    for number, word in enumerate(words):
        if word.endswith(".py") or (number and words[number - 1] == "-m"):
            return words[:number]
    return words


def _own(words: list[str]) -> Iterator[str]:
    """Up to what belongs to another program."""
    for word in words:
        if word in ("|", "&&", ";", ">", "&", "#", "||", "2>&1"):
            return
        yield word


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_and_their_options_exist(page: Path) -> None:
    wrong = [
        found
        for text in commands(page)
        if re.match(r"(?:\.venv/bin/)?outlast [a-z-]", text)
        for found in wrong_words(text)
    ]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+)(?=:)", makefile, re.MULTILINE))
    benches = {path.stem for path in (ROOT / "bench").glob("*.py")}
    benches |= {path.parent.name for path in (ROOT / "bench").glob("*/__main__.py")}
    targets |= {f"bench-{name}" for name in benches}
    named = {
        found
        for text in commands(page)
        for found in re.findall(r"\bmake ((?:[a-z]+-)*[a-z]+)\b(?!-)", text)
    }
    assert sorted(named - targets) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("outlast submit job.yaml --watch", []),
        ("outlast submt job.yaml", ["no command: submt"]),
        ("outlast ckpt ls JOB --fast", ["ckpt ls: no option --fast"]),
        ("outlast status JOB | head --lines 3", []),
        ("outlast run --nproc-per-node 2 train.py --lr 1", []),
        ("outlast run -m my.package --lr 1", []),
        ("outlast run --lr 1 train.py", ["run: no option --lr"]),
    ],
)
def test_what_does_not_exist_is_found(line: str, says: list[str]) -> None:
    assert wrong_words(line) == says


# Files of users that sources speak of.
USERS_FILES = ("demo.py", "trainer.py")
MODULE = re.compile(
    r"`((?:bench|checkpoint|controller|demo|diagnostics|outlast|trainer)(?:\.\w+)+)`"
)
BESIDE = re.compile(r"\(`([\w/]+\.py)`")


def has_module(name: str) -> bool:
    """Whether a module of ours, or a name in one, is called so."""
    folder, *rest = name.split(".")
    path = ROOT / folder
    while rest and (path / rest[0]).is_dir():
        path /= rest.pop(0)
    if not rest:
        return True
    module = path / f"{rest[0]}.py"
    if module.is_file():
        rest.pop(0)
    else:
        module = path / "__init__.py"
    return not rest or re.search(rf"\b{rest[0]}\b", module.read_text(encoding="utf-8")) is not None


def sources() -> Iterator[tuple[Path, str]]:
    for top in ("bench", *PACKAGES):
        for path in (ROOT / top).rglob("*.py"):
            if path.parent != ROOT / "outlast" / "v1":
                yield path, path.read_text(encoding="utf-8")


def test_modules_that_docstrings_and_comments_name_exist() -> None:
    spec_fields = {
        f"{section}.{field}"
        for section, of_job in JobSpec.model_fields.items()
        for field in getattr(of_job.annotation, "model_fields", {})
    }
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in sources()
        for name in MODULE.findall(text)
        if name not in spec_fields
        and not name.startswith("outlast.v1.")
        and name not in USERS_FILES
        and not has_module(name)
    ]
    assert wrong == []


def test_files_that_docstrings_and_comments_name_exist() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in sources()
        for name in BESIDE.findall(text)
        if not any((folder / name).is_file() for folder in path.parents)
    ]
    assert wrong == []
