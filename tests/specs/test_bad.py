"""Wrong specs through `plan` and `submit`: all that is wrong at once, and no job is made.

Each file in `bad/` names the words to expect in comments at its top. Files that hold no
comments are made here.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.cli.errors import ExitCode
from tests.cli.running import TIMEOUT_S, outlast, outlast_json
from tests.cli.test_commands import start_controller

BAD = sorted((Path(__file__).parent / "bad").glob("*.yaml"))
# What only someone who knows our libraries could make sense of.
FORBIDDEN = re.compile(
    r"Traceback|pydantic|Input should|NoneType|valid_|_type\b|_parsing|<class|Errno|yaml\.|"
    r"literal\[|StatusCode|INVALID_ARGUMENT"
)
NUM_BAD = 40


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A controller without nodes: what reaches it would be listed as a job."""
    folder = tmp_path_factory.mktemp("state")
    process = start_controller(folder)
    try:
        yield folder
        assert outlast_json("jobs", "--state-dir", str(folder)) == {"jobs": []}
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == ExitCode.OK
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user, with what specs in it name."""
    (tmp_path / "text.txt").write_bytes(b"to be or not " * 769 + b"end")
    (tmp_path / "empty").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "cat.png").write_bytes(b"\x89PNG")
    commits = tmp_path / "jobs" / "gpt-tiny" / "commits"
    commits.mkdir(parents=True)
    for step in (10, 20):
        (commits / f"{step:08d}.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(path: Path | str, state_dir: Path, stdin: str = "") -> str:
    """What both commands say, which must be the same."""
    said = []
    for command in ("plan", "submit"):
        done = outlast(command, str(path), "--state-dir", str(state_dir), stdin=stdin)
        assert done.returncode == ExitCode.BAD_INPUT, done.stdout
        assert done.stdout == ""
        assert FORBIDDEN.search(done.stderr) is None, done.stderr
        said.append(done.stderr)
    assert said[0] == said[1]
    return said[0]


def test_there_are_enough_of_them() -> None:
    assert len(BAD) >= NUM_BAD


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_everything_wrong_with_a_spec_is_said_at_once(
    path: Path, here: Path, state_dir: Path
) -> None:
    said = refused(path, state_dir)
    expected = re.findall(r"^# expect: (.*)$", path.read_text(), re.MULTILINE)
    assert expected
    for words in expected:
        assert words in said
    # Every problem that is told is one that the file expects.
    fields = re.findall(r"^  ([\w.\[\]()]+): ", said, re.MULTILINE)
    for field in fields if "problem" in said else ():
        assert any(words.startswith(f"{field}: ") for words in expected), said


FILES: list[tuple[str, bytes, str]] = [
    (
        "train.py",
        b"import torch\n",
        "train.py is a script, not a job spec; `outlast run train.py` runs",
    ),
    ("run", b"#!/bin/sh\n", "run is a script, not a job spec"),
    ("model.pt", b"PK\x03\x04" + bytes(99), "model.pt is a ZIP archive (a torch.save file is one)"),
    ("job", b"\x7fELF\x02\x01" + bytes(99), "job is a program, not a job spec"),
    ("job.bin", b"name\0\1\2", "job.bin is a binary file, not a job spec"),
    ("latin.yaml", b"name: a\n# caf\xe9\n", "is not UTF-8 text: byte 0xe9 in line 2; save it as"),
    ("utf16.yaml", "name: a".encode("utf-16"), "is not UTF-8 text"),
    ("empty.yaml", b"", "must be a mapping of fields, such as 'name: my-job', and this is empty"),
    ("bell.yaml", b"name: a\x07\n", "a character that text does not have (#x0007)"),
    ("comma.json", b'{"name": "a",\n "steps": 5,}', "comma.json, line 2, column 13: not JSON"),
    ("twice.json", b'{"name": "a", "name": "b"}', "name: is given 2 times in one section"),
    ("deep.yaml", b"name: " + b"[" * 5000, "nests too deeply"),
    ("deep.json", b'{"name": ' + b"[" * 90_000, "nests too deeply"),
    ("digits.yaml", b"name: a\nsteps: " + b"9" * 5000, "line 2, column 8: not YAML: '99"),
    ("digits.json", b'{"steps": ' + b"9" * 5000 + b"}", "a number has more digits than any field"),
]


@pytest.mark.parametrize(("name", "content", "words"), FILES, ids=[each[0] for each in FILES])
def test_what_is_no_spec_is_called_by_its_name(
    name: str, content: bytes, words: str, here: Path, state_dir: Path
) -> None:
    (here / name).write_bytes(content)
    assert words in refused(name, state_dir)


def test_a_file_of_100_mb_is_not_read(here: Path, state_dir: Path) -> None:
    with (here / "huge.yaml").open("wb") as file:
        file.truncate(100 << 20)
    assert "huge.yaml is larger than 256 KiB: not a job spec" in refused("huge.yaml", state_dir)


def test_a_folder_and_a_missing_file_say_what_is_there(here: Path, state_dir: Path) -> None:
    (here / "gpt.yaml").write_text("name: a")
    assert f"is a folder; give the path of a job spec, such as {here}/gpt.yaml" in refused(
        here, state_dir
    )
    empty = f"outlast: {here}/empty is a folder; give the path of a job spec, a YAML or JSON file"
    assert refused(here / "empty", state_dir).strip() == empty
    assert "no such file (did you mean gpt.yaml?)" in refused("gtp.yaml", state_dir)


def test_standard_input_is_called_so(here: Path, state_dir: Path) -> None:
    assert "standard input has a problem:\n  steps: is 0" in refused(
        "-", state_dir, stdin="name: a\nsteps: 0"
    )


@pytest.mark.parametrize(
    ("field", "url", "package"),
    [
        ("checkpoint.url", "s3://bucket/jobs", "s3fs"),
        ("checkpoint.load", "gs://bucket/jobs/a", "gcsfs"),
        ("checkpoint.url", "hdfs://name:8020/jobs", "hdfs-native"),
    ],
)
def test_a_store_whose_package_is_not_installed_comes_with_the_remedy(
    field: str,
    url: str,
    package: str,
    here: Path,
    state_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As an import finds it where it is not installed.
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    section, name = field.split(".")
    (here / "job.yaml").write_text(f"name: a\n{section}: {{{name}: '{url}'}}\n")
    words = f"  {field}: is {url!r}; {url.partition(':')[0]}:// URLs need the package {package}, "
    remedy = f"which is not installed; remedy: pip install {package}\n"
    assert refused("job.yaml", state_dir).endswith(f"has a problem:\n{words}{remedy}")
    # Nodes elsewhere may have it.
    done = outlast("plan", "job.yaml", "--state-dir", str(here / "none"))
    assert done.returncode == ExitCode.OK, done.stderr
    assert f"warning: {field} is {url!r}; " in done.stdout


def test_where_nodes_are_other_machines_their_files_are_warnings(here: Path) -> None:
    spec = here / "job.yaml"
    spec.write_text(
        "name: a\ndata: {source: /data/text}\ncheckpoint: {url: /proc/x, load: /data/job}\n"
    )
    # No controller is known at all.
    done = outlast("plan", "job.yaml", "--state-dir", str(here / "none"))
    assert done.returncode == ExitCode.OK, done.stderr
    for field in ("data.source", "checkpoint.url", "checkpoint.load"):
        assert f"warning: {field} is '/" in done.stdout
    assert "what counts is what the nodes have" in done.stdout.replace("\n", " ")
    # What the submitter wrote as a path of their own must be there.
    spec.write_text("name: a\ndata: {source: ~/no/such/text}\n")
    done = outlast("plan", "job.yaml", "--state-dir", str(here / "none"))
    assert f"is '~/no/such/text', taken as '{os.path.expanduser('~')}" in done.stderr
    assert done.returncode == ExitCode.BAD_INPUT
    # What is certain, and what may be wrong, at once.
    spec.write_text("name: a\nsteps: 0\ndata: {source: /data/text}\n")
    done = outlast("plan", "job.yaml", "--state-dir", str(here / "none"))
    assert "  steps: is 0; allowed: " in done.stderr
    assert "  warning: data.source is '/data/text', which is neither" in done.stderr
