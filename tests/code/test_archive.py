"""A folder of code becomes one archive, the same wherever and whenever it is packed."""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.code.archive import pack
from outlast.code.errors import CodeError
from outlast.code.listing import entries_of
from outlast.code.names import leads_out
from outlast.code.unpack import check_digest, unpack


def folder_of(root: Path, **files: str) -> Path:
    """A folder with these files; `__` in a name is a slash and `_dot_` a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def names(root: Path, *exclude: str) -> list[str]:
    return [entry.name for entry in entries_of(root, exclude)]


def digest(root: Path, *exclude: str) -> str:
    with pack(root, exclude) as archive:
        return archive.digest


def git(root: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(root), *identity, *arguments]
    subprocess.run(command, check=True, capture_output=True)


def test_the_digest_is_of_names_contents_and_what_is_executable(tmp_path: Path) -> None:
    one = folder_of(tmp_path / "one", train_dot_py="a", pkg__x_dot_py="b")
    other = folder_of(tmp_path / "other", pkg__x_dot_py="b", train_dot_py="a")
    os.utime(other / "train.py", (1, 1))
    (other / "pkg" / "x.py").chmod(0o600)
    assert digest(one) == digest(other)
    (other / "train.py").chmod(0o755)
    assert digest(one) != digest(other)
    (other / "train.py").chmod(0o644)
    (other / "train.py").write_text("c")
    assert digest(one) != digest(other)


@pytest.mark.parametrize("is_git", [True, False])
def test_what_gitignore_or_the_spec_leaves_out_does_not_travel(
    tmp_path: Path, is_git: bool
) -> None:
    folder_of(
        tmp_path,
        _dot_gitignore="*.bin\n/data/\n!keep.bin\n",
        train_dot_py="",
        big_dot_bin="",
        keep_dot_bin="",
        data__x="",
        sub__data__y="",
        sub___dot_gitignore="*.txt\n!*.bin\n",
        sub__note_dot_txt="",
        sub__own_dot_bin="",
        notes__a_dot_md="",
    )
    (tmp_path / "pkg/__pycache__").mkdir(parents=True)
    (tmp_path / "pkg/__pycache__/x.pyc").write_text("")
    if is_git:
        git(tmp_path, "init", "-q")
    expected = [".gitignore", "keep.bin", "sub/.gitignore", "sub/data/y", "sub/own.bin", "train.py"]
    assert names(tmp_path, "notes/") == expected


def test_a_file_that_git_tracks_travels_though_it_is_ignored(tmp_path: Path) -> None:
    folder_of(tmp_path, _dot_gitignore="*.bin\n", a_dot_bin="", gone_dot_py="")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-f", ".")
    (tmp_path / "gone.py").unlink()
    assert names(tmp_path) == [".gitignore", "a.bin"]


def test_a_work_tree_within_another_travels_too(tmp_path: Path) -> None:
    folder_of(tmp_path, a="", inner__b="", inner___dot_gitignore="c\n", inner__c="")
    git(tmp_path, "init", "-q")
    git(tmp_path / "inner", "init", "-q")
    assert names(tmp_path) == ["a", "inner/.gitignore", "inner/b"]


def test_a_part_of_a_work_tree_travels_alone_by_the_rules_of_all_of_it(tmp_path: Path) -> None:
    folder_of(tmp_path, _dot_gitignore="build\n.env\n", a="", part__b="", build__c="")
    folder_of(tmp_path / "part", _dot_env="secret")
    git(tmp_path, "init", "-q")
    assert names(tmp_path / "part") == ["b"]
    with pytest.raises(CodeError, match=r"build holds no file that is not ignored by git in the"):
        names(tmp_path / "build")


def test_a_work_tree_that_git_does_not_list_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it would be, with what it ignores."""
    root = folder_of(tmp_path / "root", a="", part__b="", _dot_env="secret")
    git(root, "init", "-q")
    (root / ".git/info/exclude").write_text(".env\n")
    assert names(root) == ["a", "part/b"]
    (root / ".git/config").write_text("[core\n")
    for folder in (root, root / "part"):
        with pytest.raises(CodeError, match=rf"in the git work tree {root}, .*git fails: fatal: "):
            names(folder)
    monkeypatch.setenv("PATH", str(tmp_path))
    for folder in (root, root / "part"):
        with pytest.raises(CodeError, match=r"git is not installed here; .* give a copy"):
            names(folder)
    shutil.rmtree(root / ".git")
    assert names(root) == [".env", "a", "part/b"]
    (root / ".git").mkdir()
    assert names(root) == [".env", "a", "part/b"], "git itself takes it for no repository"


def test_a_submodule_that_is_not_checked_out_is_refused_by_name(tmp_path: Path) -> None:
    origin = folder_of(tmp_path / "origin", x="")
    root = folder_of(tmp_path / "root", a="")
    for each in (origin, root):
        git(each, "init", "-q")
        git(each, "add", ".")
        git(each, "commit", "-qm", "x")
    allowed = ("-c", "protocol.file.allow=always")
    git(root, *allowed, "submodule", "add", "-q", str(origin), "libs/sub")
    assert names(root) == [".gitmodules", "a", "libs/sub/x"]
    git(root, "submodule", "deinit", "-f", "libs/sub")
    with pytest.raises(CodeError, match=r"^libs/sub is a submodule .* `git submodule update --ini"):
        names(root)
    assert names(root, "libs/") == names(root, "sub") == [".gitmodules", "a"]


def test_what_stands_where_git_has_a_file_or_a_folder_travels(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "root", folder__x="", file="", _dot_gitignore="linked\n")
    folder_of(root, linked__x="", inner__x="")
    git(root, "init", "-q")
    git(root, "add", "-f", ".")
    outside = folder_of(tmp_path / "outside", x="of somebody else")
    for name in ("folder", "linked", "inner"):
        shutil.rmtree(root / name)
    (root / "file").unlink()
    folder_of(root, folder="a file now", file__y="in a folder now")
    (root / "linked").symlink_to(outside)
    (root / "inner").symlink_to("file")
    assert names(root) == [".gitignore", "file/y", "folder", "inner"]
    there_and_back(root, tmp_path)


def test_links_within_the_folder_are_kept(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "a", pkg__x_dot_py="text", sub__y="")
    (root / "sub" / "link").symlink_to("../pkg/x.py")
    (root / "all").symlink_to("pkg")
    unpacked = there_and_back(root, tmp_path)
    assert (unpacked / "sub" / "link").read_text() == "text"
    assert os.readlink(unpacked / "all") == "pkg"


def there_and_back(root: Path, tmp_path: Path) -> Path:
    with pack(root) as archive:
        check_digest(archive.file, archive.digest)
        unpack(archive.file, tmp_path / "unpacked")
    return tmp_path / "unpacked"


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "../a/x", "pkg/../../secret"])
def test_a_link_that_leads_out_is_refused_by_its_name(tmp_path: Path, target: str) -> None:
    root = folder_of(tmp_path / "a", x="", pkg__y="")
    (tmp_path / "secret").write_text("")
    (root / "bad").symlink_to(target)
    with pytest.raises(CodeError, match=r"^bad is a link to .* leads out of"):
        pack(root)
    assert names(root, "bad") == ["pkg/y", "x"]


def test_a_socket_is_refused_by_its_name(tmp_path: Path) -> None:
    folder_of(tmp_path, x="")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "s"))
        with pytest.raises(CodeError, match=r"^s is a pipe, socket or device"):
            pack(tmp_path)


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff")).write_text("")
    with pytest.raises(CodeError, match="not UTF-8"):
        pack(tmp_path)


def test_too_much_is_refused_with_its_size_and_the_largest_files(tmp_path: Path) -> None:
    folder_of(tmp_path, small="x" * 1000, large="x" * (3 << 20), larger="x" * (5 << 20))
    with pytest.raises(CodeError) as caught:
        pack(tmp_path, max_bytes=4 << 20)
    said = str(caught.value)
    assert "has 8.0 MiB in 3 files; allowed: at most 4.0 MiB" in said
    assert "the largest: larger (5.0 MiB), large (3.0 MiB), small (0.0 MiB)" in said
    assert "workload.code.exclude" in said
    pack(tmp_path, ("large*",), 4 << 20).file.close()


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CodeError, match="holds no file"):
        pack(tmp_path)
    with pytest.raises(CodeError, match="does not exist"):
        pack(tmp_path / "none")
    folder_of(tmp_path, x="")
    with pytest.raises(CodeError, match="is not a folder"):
        pack(tmp_path / "x")


_PART = st.text(st.sampled_from("aZ0 é日😀-_.~'\"\\"), min_size=1, max_size=30)


@settings(max_examples=15, deadline=None)
@given(
    files=st.dictionaries(
        st.lists(_PART.map(lambda part: f"d{part}"), min_size=0, max_size=3).map(tuple),
        st.tuples(st.binary(max_size=2000), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_what_is_unpacked_is_what_was_packed(
    files: dict[tuple[str, ...], tuple[bytes, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("round")
    root = tmp_path / "root"
    for folder, (content, is_executable) in files.items():
        path = root.joinpath(*folder, "f")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if is_executable else 0o644)
    unpacked = there_and_back(root, tmp_path)
    for folder, (content, is_executable) in files.items():
        found = unpacked.joinpath(*folder, "f")
        assert found.read_bytes() == content
        assert os.access(found, os.X_OK) == is_executable
    assert unpacked.stat().st_mode & 0o777 == 0o700
    with pack(root) as one, pack(unpacked) as other:
        assert one.digest == other.digest


@given(
    depth=st.integers(0, 3),
    parts=st.lists(st.sampled_from(["..", ".", "a", ""]), min_size=1, max_size=8),
)
def test_links_lead_out_by_their_words_when_a_walk_leaves_the_root(
    depth: int, parts: list[str]
) -> None:
    name = "/".join(["d"] * depth + ["link"])
    place, is_out = depth, False
    for part in parts:
        place += {"..": -1, "a": 1}.get(part, 0)
        is_out = is_out or place < 0
    target = "/".join(parts)
    assert leads_out(name, target) == (is_out or target.startswith("/") or not target)


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "members",
    [
        [member("/abs")],
        [member("../up")],
        [member("a/../../up")],
        [member("pipe", tarfile.FIFOTYPE)],
        [member("hard", tarfile.LNKTYPE, "/etc/passwd")],
        [member("link", tarfile.SYMTYPE, "/etc")],
        [member("link", tarfile.SYMTYPE, "..")],
        [member("a"), member("a")],
        [member("a", tarfile.SYMTYPE, "b"), member("a/x")],
        [member("a", tarfile.SYMTYPE, "b/c"), member("b/c", tarfile.SYMTYPE, "."), member("b/d")],
        [member("d/up", tarfile.SYMTYPE, ".."), member("out", tarfile.SYMTYPE, "d/up/../x")],
        [
            member("d/up", tarfile.SYMTYPE, ".."),
            member("out", tarfile.SYMTYPE, "d/up/.."),
            member("out/link", tarfile.SYMTYPE, "x"),
        ],
    ],
    ids=lambda members: "-".join(each.name for each in members),
)
def test_an_archive_that_reaches_out_of_its_folder_leaves_nothing_behind(
    tmp_path: Path, members: list[tarfile.TarInfo]
) -> None:
    with tarfile.open(tmp_path / "archive", "w") as tar:
        for each in members:
            tar.addfile(each, io.BytesIO())
    folder = tmp_path / "inner" / "unpacked"
    folder.parent.mkdir()
    try:
        unpack_file(tmp_path / "archive", folder)
    except CodeError:
        assert not folder.exists()
    else:
        root = folder.resolve()
        links = [each for each in folder.rglob("*") if each.is_symlink()]
        assert all(each.resolve().is_relative_to(root) for each in links)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["archive", "inner"]
    assert {each.name for each in folder.parent.iterdir()} <= {"unpacked"}


def unpack_file(archive: Path, into: Path) -> None:
    with archive.open("rb") as file:
        unpack(file, into)


SPARSE = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 40), "GNU.sparse.numblocks": "1"}


@pytest.mark.parametrize(("size_bytes", "pax"), [(1, SPARSE), (1 << 40, {}), (-1, {})])
def test_an_archive_that_is_smaller_than_its_files_is_refused(
    tmp_path: Path, size_bytes: int, pax: dict[str, str]
) -> None:
    with tarfile.open(tmp_path / "archive", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(member("first"), io.BytesIO())
        large = member("large")
        large.size, large.pax_headers = size_bytes, pax
        tar.format = tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT
        tar.fileobj.write(large.tobuf(tar.format) + b"x" * 512)  # type: ignore[union-attr]
    with pytest.raises(CodeError, match="large"):
        unpack_file(tmp_path / "archive", tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()


def test_a_folder_that_is_deleted_while_it_is_unpacked_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder_of(tmp_path / "root", a="a", pkg__b="b")
    job, gone = tmp_path / "job", tmp_path / "gone"
    job.mkdir()
    copy = shutil.copyfileobj

    def delete_first(*arguments: Any) -> None:
        if job.exists():
            job.rename(gone)
        copy(*arguments)

    monkeypatch.setattr(shutil, "copyfileobj", delete_first)
    with pack(root) as archive, pytest.raises(FileNotFoundError):
        unpack(archive.file, job / "draft")
    assert not job.exists()


def test_an_archive_with_another_digest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(b"other")
    with (tmp_path / "archive").open("rb") as file:
        with pytest.raises(CodeError, match="expected sha256:0000"):
            check_digest(file, f"sha256:{'0' * 64}")
        with pytest.raises(CodeError, match="no archive"):
            unpack(file, tmp_path / "unpacked")
