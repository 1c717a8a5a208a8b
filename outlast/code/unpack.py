"""From an archive to a folder: nothing of it gets out of the folder, whoever made the archive."""

from __future__ import annotations

import ctypes
import os
import shutil
import tarfile
from pathlib import Path
from typing import IO

from outlast.code.digest import CHUNK_BYTES, digest_of
from outlast.code.errors import CodeError
from outlast.code.names import leads_out, wrong_with_name


def check_digest(archive: IO[bytes], digest: str) -> None:
    """Refuse an archive, from its beginning, that is not the one of this digest.

    Raises:
        CodeError: it is another one, or damaged.
    """
    archive.seek(0)
    found = digest_of(archive)
    if found != digest:
        raise CodeError(f"the archive has the digest {found}; expected {digest}")


def unpack(archive: IO[bytes], into: Path) -> None:
    """Unpack an archive of `outlast.code.archive` into a new folder for its owner only.

    All of it is on disk on return: whoever finds the folder later need not look again.

    Raises:
        CodeError: it is no such archive.
        OSError: the folder cannot be written, or was deleted meanwhile; what is there of it is
            deleted again.
    """
    into.mkdir(mode=0o700)
    archive.seek(0)
    try:
        with tarfile.open(fileobj=archive, mode="r:") as tar:
            _extract(tar, into, most_bytes=os.fstat(archive.fileno()).st_size)
        _sync(into)
    except BaseException as error:
        shutil.rmtree(into, ignore_errors=True)
        if isinstance(error, tarfile.TarError | FileExistsError | NotADirectoryError):
            raise CodeError(f"this is no archive of code: {error}") from error
        raise


def _extract(tar: tarfile.TarFile, into: Path, most_bytes: int) -> None:
    """Files hold no more than `most_bytes`, whatever the archive says of itself."""
    links: list[tarfile.TarInfo] = []
    made: set[str] = set()
    for member in tar:
        wrong = wrong_with_name(member.name)
        if wrong is not None:
            raise CodeError(f"the archive has a name that {wrong}: {member.name!a}")
        if member.issym():
            links.append(member)
        elif member.isreg() and not member.issparse():
            if not 0 <= member.size <= most_bytes:
                raise CodeError(f"the archive is smaller than the files in it: {member.name}")
            most_bytes -= member.size
            _write(tar, member, _place(into, member.name, made))
        else:
            raise CodeError(f"the archive has {member.name}, which is neither file nor link")
    # Last: no file is written through one.
    for member in links:
        if leads_out(member.name, member.linkname):
            raise CodeError(f"the archive has a link that leads out of it: {member.name}")
        _place(into, member.name, made).symlink_to(member.linkname)
    # Through each other they may go further than their words say.
    root = into.resolve()
    for member in links:
        if not Path(os.path.realpath(into / member.name)).is_relative_to(root):
            raise CodeError(f"the archive has a link that leads out of it: {member.name}")


def _place(into: Path, name: str, made: set[str]) -> Path:
    """Where a member goes. Its folders are made, and remembered in `made`; never again the one
    that all are in: it is deleted under us when the job is over."""
    *folders, last = name.split("/")
    path = into
    for folder in folders:
        path = path / folder
        if str(path) in made:
            continue
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            # A link that was made before this one may lead anywhere.
            if path.is_symlink():
                raise CodeError(f"the archive has a name below a link: {name}") from None
        made.add(str(path))
    return path / last


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    content = tar.extractfile(member)
    assert content is not None, "a file has content"
    mode = 0o700 if member.mode & 0o100 else 0o600
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(handle, "wb") as file:
        shutil.copyfileobj(content, file, CHUNK_BYTES)


def _sync(folder: Path) -> None:
    """Bring the file system of a folder to disk: at once, and not file by file, which took 4 ms for
    each of a thousand."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(handle):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(handle)
