"""A job's folder goes to the controller once, and not before all that the job runs is in it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from outlast.code.sending import with_code
from outlast.problems import SpecError
from outlast.v1 import code_pb2
from outlast.v1.code_pb2_grpc import CodeStub


class Store:
    """A controller's archives."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    def FindCode(
        self, request: code_pb2.FindCodeRequest, timeout: float
    ) -> code_pb2.FindCodeResponse:
        return code_pb2.FindCodeResponse(is_here=request.digest in self.digests, max_bytes=64 << 20)

    def PutCode(self, requests: Iterable[code_pb2.PutCodeRequest], timeout: float) -> None:
        first, *rest = requests
        assert first.size_bytes == sum(len(each.data) for each in rest)
        self.digests.append(first.digest)


def sent(store: Store, folder: Path, **workload: Any) -> dict[str, Any]:
    given = {"command": ["python", "train.py"], "code": {"path": str(folder)}, **workload}
    return with_code({"name": "job", "workload": given}, cast(CodeStub, store))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src" / "pkg").mkdir(parents=True)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "src" / "pkg" / "run.py").write_text("")
    (tmp_path / "link").symlink_to("src/pkg")
    return tmp_path


def test_the_same_folder_is_sent_once_and_the_spec_has_its_digest(folder: Path) -> None:
    store = Store()
    first = sent(store, folder)
    assert sent(store, folder) == first
    assert store.digests == [first["workload"]["code"]["digest"]]
    assert with_code(first, cast(CodeStub, None)) == first, "nobody is asked again"


@pytest.mark.parametrize(
    "workload",
    [
        {"command": ["python", "src/pkg/run.py"], "working_dir": "src", "python_path": ["src"]},
        {"command": ["python", "link/run.py"], "working_dir": "link"},
        {"command": ["python", "-m", "pkg.run"], "python_path": ["./src/"]},
        {"command": ["python", "/opt/train.py"], "working_dir": "/opt"},
    ],
)
def test_what_is_in_the_folder_or_on_the_nodes_is_taken(
    folder: Path, workload: dict[str, Any]
) -> None:
    store = Store()
    sent(store, folder, **workload)
    assert len(store.digests) == 1


@pytest.mark.parametrize(
    ("field", "workload"),
    [
        ("command", {"command": ["python", "trian.py"]}),
        ("command", {"command": ["python", "src"]}),
        ("working_dir", {"working_dir": "runs"}),
        ("python_path", {"python_path": ["lib"]}),
        ("command", {"code": {"path": ".", "exclude": ["train.py"]}}),
    ],
)
def test_what_would_be_missing_on_nodes_is_named_and_nothing_is_sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, field: str, workload: dict[str, Any]
) -> None:
    monkeypatch.chdir(folder)
    store = Store()
    with pytest.raises(SpecError, match="is not among what is sent of") as caught:
        sent(store, folder, **workload)
    assert [problem.field for problem in caught.value.problems] == [f"workload.{field}"]
    assert not store.digests


def test_a_spec_with_problems_is_refused_before_its_folder_is_sent(folder: Path) -> None:
    store = Store()
    with pytest.raises(SpecError, match="stop_grace_s"):
        sent(store, folder, stop_grace_s=-1)
    assert not store.digests
