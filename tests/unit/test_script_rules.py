"""Rules of what a script brings along: its code, and variables that only nodes know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outlast.cli.places import Nodes, look
from outlast.problems import SpecError
from outlast.rules.workload import plain_secrets
from outlast.spec.parse import parse_spec, read_spec
from outlast.submission import resolve_places

DIGEST = f"sha256:{'0' * 64}"

IMAGE = {"image": "torch:1", "command": ["python", "/train.py"]}


def document(**workload: Any) -> dict[str, Any]:
    return {"name": "job", "workload": {"command": ["python", "train.py"], **workload}}


def problems(**workload: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_spec(document(**workload))
    return {problem.field: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("workload", "field", "message"),
    [
        ({"code": {"digest": "sha256:12"}}, "code.digest", "allowed: sha256: and 64 hexadecimal"),
        ({"code": {"path": ""}}, "code.path", "allowed: text that is not empty"),
        ({"code": {"folder": "."}}, "code.folder", "allowed here: path, exclude, digest"),
        ({"code": {"path": "."}, "working_dir": "../x"}, "working_dir", "leads out of the folder"),
        (
            {"code": {"path": "."}, "python_path": ["a/../../b"]},
            "python_path",
            "leads out of the folder",
        ),
        (
            {"code": {"digest": DIGEST}, "command": ["python", "../train.py"]},
            "command",
            "leads out of the folder",
        ),
        ({"code": {"exclude": ["a"]}}, "code.exclude", "give workload.code.path, too"),
        (
            {"code": {"path": "."}, "python": "venv/bin/python"},
            "python",
            "no part of the code that is sent; give its full path on nodes",
        ),
        (
            {"code": {"path": "."}, "command": [".venv/bin/python", "train.py"]},
            "command",
            "is '.venv/bin/python', a relative path, and no part of the code that is sent",
        ),
        ({"image": "a b", "command": ["sh"]}, "image", "is 'a b'"),
        (
            {"image": "torch:1", "command": ["python", "train.py"]},
            "command",
            "is 'train.py', a relative path; with workload.image give the full path in the image",
        ),
        ({**IMAGE, "working_dir": "work"}, "working_dir", "the full path in the image"),
        ({**IMAGE, "python_path": ["a"]}, "python_path", "or send your folder along"),
        (
            {**IMAGE, "command": ["bin/python", "/app/train.py"]},
            "command",
            "is 'bin/python', a relative path; with workload.image",
        ),
        ({**IMAGE, "python": "bin/python"}, "python", "is 'bin/python', a relative path"),
        ({"env": {"A": {}}}, "env.A", "allowed: text, {from_env: NAME}"),
        ({"env": {"A": {"from_env": "B", "from_file": "/c"}}}, "env.A", "or {from_file: PATH}"),
        ({"env": {"A": {"from_env": "B C"}}}, "env.A", "letters, digits"),
        ({"env": {"A": {"from_file": "c"}}}, "env.A", "with an absolute path on nodes"),
        ({"env": {"A": 1}}, "env", "a section of names and text, or with from_env or from_file"),
        ({"env": {"A": {"from_vault": "B"}}}, "env", "or with from_env or from_file"),
    ],
)
def test_what_is_wrong_is_said_with_its_field(
    workload: dict[str, Any], field: str, message: str
) -> None:
    found = problems(**workload)
    assert list(found) == [f"workload.{field}"]
    assert message in found[f"workload.{field}"]


def test_code_belongs_to_a_command() -> None:
    with pytest.raises(SpecError, match=r"only with workload\.command"):
        parse_spec({"name": "job", "workload": {"code": {"path": "."}}})


def test_names_of_secrets_are_known_by_whole_words() -> None:
    env: dict[str, Any] = {
        "HF_TOKEN": "x",
        "WANDB_API_KEY": "x",
        "apikey": "x",
        "DB_PASSWORD": "x",
        "AWS_SECRET_ACCESS_KEY": {"from_env": "AWS_SECRET_ACCESS_KEY"},
        "EMPTY_TOKEN": "",
        "TOKENIZERS_PARALLELISM": "false",
        "MAX_TOKENS": "9",
        "KEYBOARD": "x",
    }
    said = plain_secrets(parse_spec(document(env=env)))
    names = [line.split()[0].removeprefix("workload.env.") for line in said]
    assert names == ["HF_TOKEN", "WANDB_API_KEY", "apikey", "DB_PASSWORD"]
    assert all("{from_env: NAME}" in line for line in said)


def test_with_code_only_its_own_path_is_the_submitters() -> None:
    given = document(
        code={"path": "../proj"}, working_dir="runs", python_path=["src"], stop_grace_s=1
    )
    resolved, written = resolve_places(given, Path("/home/me/here"))
    assert resolved["workload"] == {**given["workload"], "code": {"path": "/home/me/proj"}}
    assert written == {"workload.code.path": "../proj"}


def test_a_spec_that_was_written_out_without_code_has_the_submitters_paths() -> None:
    nothing = {"path": None, "digest": None, "exclude": []}
    resolved, _ = resolve_places(document(code=nothing, working_dir="runs"), Path("/home/me"))
    assert resolved["workload"]["working_dir"] == "/home/me/runs"


def test_variables_that_cannot_be_read_get_no_warning() -> None:
    spec, _ = read_spec(document(env={"HF_TOKEN": 1}))
    assert spec is not None
    assert not look(spec, {}, Nodes.ELSEWHERE).warnings


def test_what_is_not_sent_is_a_problem_wherever_nodes_are(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("")
    (tmp_path / "data.bin").write_text("")

    def seen(command: list[str], **workload: Any) -> dict[str, str]:
        code = {"path": str(tmp_path), "exclude": ["*.bin"]}
        spec = parse_spec(document(command=command, code=code, **workload))
        found = look(spec, {}, Nodes.ELSEWHERE)
        return {problem.field: problem.message for problem in found.problems}

    right = ["python", "src/train.py"]
    assert not seen(right, working_dir="src", python_path=["src", "."])
    assert "is not among what is sent" in seen(["python", "train.py"])["workload.command"]
    assert "is not among" in seen(["python", "data.bin"])["workload.command"]
    assert list(seen(right, working_dir="runs", python_path=["lib"])) == [
        "workload.working_dir",
        "workload.python_path",
    ]
    (tmp_path / "bad").symlink_to("/etc")
    assert "bad is a link to /etc" in seen(right)["workload.code.path"]


def test_paths_with_an_image_are_its_own(tmp_path: Path) -> None:
    inside = {"image": "torch:1", "command": ["python", "train.py"], "working_dir": "/app"}
    resolved, written = resolve_places(document(**inside), tmp_path)
    assert resolved["workload"] == inside
    assert not written
    spec = parse_spec(resolved)
    # What is in it nobody here knows.
    assert not look(spec, written, Nodes.HERE).problems
    code = {**inside, "working_dir": "src", "code": {"path": "."}}
    resolved, _ = resolve_places(document(**code), tmp_path)
    assert resolved["workload"]["code"]["path"] == str(tmp_path)
    assert parse_spec(resolved).workload.working_dir == "src"


@pytest.mark.parametrize(
    ("workload", "interpreter"),
    [
        ({}, ""),
        ({"python": "/env/bin/python"}, "/env/bin/python"),
        ({"image": "torch:1", "command": ["python", "/train.py"]}, "python"),
        ({"image": "torch:1", "command": ["python3.12", "/train.py"]}, "python3.12"),
        ({**IMAGE, "python": "/conda/bin/python"}, "/conda/bin/python"),
    ],
)
def test_the_interpreter_of_an_image_is_its_own(workload: dict[str, Any], interpreter: str) -> None:
    assert parse_spec(document(**workload)).workload.interpreter == interpreter
