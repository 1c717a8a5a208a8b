"""A copy of the controller's state in one file, and a state directory made from it.

The file is a ZIP archive: the journal's database as one transaction saw it, the archives of code
that jobs bring along, and `manifest.json`, which says what they are and has a digest of each. A
copy is made by SQLite's own backup, beside a controller that goes on writing; it is put back where
no controller runs. Both are there whole or not at all.

What is not in it: checkpoints, logs, tokens, certificates and the audit log. They are files that
are not written as one with the journal, and most are on other disks or machines.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sqlite3
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO
from urllib.parse import quote

from controller.state_dir import JOURNAL, open_state_dir
from controller.store.sqlite import BUSY_TIMEOUT_MS
from controller.store.tables import SCHEMA_VERSION
from outlast import __version__
from outlast.code.digest import CHUNK_BYTES
from outlast.errors import FatalError

MANIFEST = "manifest.json"
# Of the archive itself; what the journal's rows mean has `SCHEMA_VERSION`.
FORMAT = 1
_CODE = re.compile(r"code/[0-9a-f]{64}")
# One of a job has some hundred bytes.
_MAX_MANIFEST_BYTES = 16 * 2**20
# Beside the database, of which one without them may lack what was committed last.
_SQLITE_SUFFIXES = ("", "-wal")
# What the module raises of an archive in which bits have changed: also for a compression that it
# does not know, and for encryption.
_DAMAGED = (zipfile.BadZipFile, NotImplementedError, RuntimeError)


class BackupError(FatalError):
    """A copy cannot be made, or not be put back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a copy of the state is."""

    schema_version: int
    term: int
    """Of the controller that wrote the journal."""
    made_s: float
    outlast: str
    """The version that made the copy."""
    sha256: dict[str, str]
    """Of each file, by its name in the archive."""

    @property
    def made(self) -> str:
        """When the copy was made, in UTC."""
        return datetime.fromtimestamp(self.made_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def back_up(state_dir: Path, file: Path, *, now_s: float) -> Manifest:
    """Copy a controller's state to a file, which is replaced if it is there.

    Raises:
        BackupError: there is no journal, it is damaged, or the file cannot be written.
    """
    journal = state_dir / JOURNAL
    if not journal.is_file():
        raise BackupError(
            f"{state_dir} has no {JOURNAL}: no controller has kept its state there; "
            "say where with --state-dir; a journal in PostgreSQL is copied by pg_dump"
        )
    try:
        # In a folder of its own beside the file: whatever ends this, the file is as it was.
        with tempfile.TemporaryDirectory(prefix=".outlast-backup-", dir=file.parent) as folder:
            copy = Path(folder) / JOURNAL
            schema_version, term = _copy_journal(journal, copy)
            draft = Path(folder) / "archive"
            sources = {JOURNAL: copy, **_code_files(state_dir)}
            with _new_file(draft) as target:
                manifest = _write_archive(
                    target, sources, schema_version=schema_version, term=term, now_s=now_s
                )
            draft.replace(file)
        _sync_folder(file.parent)
    except OSError as error:
        raise BackupError(f"{file} cannot be written: {error.strerror or error}") from error
    return manifest


def restore(file: Path, state_dir: Path, *, force: bool, now_s: float) -> Manifest:
    """Put a copy of the state back.

    A journal that is there already is set aside with `force`, below `replaced-TIME`.

    Raises:
        BackupError: the copy is damaged, no copy, or of a newer version; or a journal is there.
        LockedError: a controller uses the state directory.
        StateDirError: the state directory cannot be written.
    """
    with _opened(file) as archive:
        manifest = _read_manifest(file, archive)
        lock = open_state_dir(state_dir)
        try:
            journal = state_dir / JOURNAL
            if journal.exists() and not force:
                raise BackupError(
                    f"{journal} is there already; give --force to set it aside, "
                    "or another folder with --state-dir"
                )
            _put_back(file, archive, manifest, journal, f"replaced-{_stamp(now_s)}")
        except OSError as error:
            raise BackupError(
                f"{state_dir} cannot be written: {error.strerror or error}"
            ) from error
        finally:
            lock.close()
    return manifest


def _put_back(
    file: Path, archive: zipfile.ZipFile, manifest: Manifest, journal: Path, aside: str
) -> None:
    draft = journal.with_name(f"{JOURNAL}.restored")
    try:
        _extract(file, archive, manifest, JOURNAL, draft)
        _check_journal(draft, f"{file}: its {JOURNAL}")
        for name in sorted(set(manifest.sha256) - {JOURNAL}):
            place = journal.parent / name
            place.parent.mkdir(mode=0o700, exist_ok=True)
            code_draft = place.with_name(f".draft-{place.name}")
            try:
                _extract(file, archive, manifest, name, code_draft)
                code_draft.replace(place)
            finally:
                code_draft.unlink(missing_ok=True)
            _sync_folder(place.parent)
        if journal.exists():
            _set_aside(journal, journal.with_name(aside))
        draft.replace(journal)
        _sync_folder(journal.parent)
    finally:
        draft.unlink(missing_ok=True)


def _set_aside(journal: Path, folder: Path) -> None:
    """Keep a journal in another folder, and leave none of its log to the next one here.

    Until that is renamed into its place the database stays: a controller that starts in between
    would otherwise begin with nothing.
    """
    with contextlib.suppress(sqlite3.Error), closing(sqlite3.connect(journal)) as connection:
        # Whole without its log, where it can be read.
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    folder.mkdir(mode=0o700)
    for suffix in _SQLITE_SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            os.link(f"{journal}{suffix}", folder / f"{JOURNAL}{suffix}")
    _sync_folder(folder)
    for suffix in ("-wal", "-shm"):
        Path(f"{journal}{suffix}").unlink(missing_ok=True)


def _copy_journal(journal: Path, copy: Path) -> tuple[int, int]:
    """Copy a database as one transaction sees it; its version and term."""
    copy.touch(mode=0o600)
    try:
        with (
            closing(_connect(journal)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            # All pages in one step: a step after another begins anew whenever somebody writes.
            source.backup(target, pages=-1)
            # One file: a log beside it is not carried along.
            target.execute("PRAGMA journal_mode=DELETE").fetchall()
        return _check_journal(copy, str(journal))
    except sqlite3.Error as error:
        raise BackupError(f"{journal} cannot be copied: {error}") from error


def _check_journal(database: Path, what: str) -> tuple[int, int]:
    """The version and the term of a database that is whole.

    Raises:
        BackupError: it is damaged.
    """
    try:
        with closing(_connect(database)) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            row = connection.execute("SELECT schema_version, term FROM controller").fetchone()
    except sqlite3.Error as error:
        raise BackupError(f"{what} is damaged: {error}") from error
    if found != "ok" or row is None:
        raise BackupError(f"{what} is damaged: {found if row else 'it names no term'}")
    version, term = row
    return int(version), int(term)


def _connect(database: Path) -> sqlite3.Connection:
    # Never made: a name that is wrong must not become an empty journal.
    uri = f"file:{quote(str(database.resolve()))}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_MS / 1000)


def _code_files(state_dir: Path) -> dict[str, Path]:
    folder = state_dir / "code"
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    names = {f"code/{path.name}": path for path in found}
    return {name: path for name, path in names.items() if _CODE.fullmatch(name)}


def _write_archive(
    target: IO[bytes], sources: dict[str, Path], *, schema_version: int, term: int, now_s: float
) -> Manifest:
    digests = {}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, path in sources.items():
            # Code that no job needs any more may be deleted meanwhile.
            with contextlib.suppress(FileNotFoundError), path.open("rb") as source:
                entry = zipfile.ZipInfo(name, _zip_time(now_s))
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o600 << 16
                with archive.open(entry, "w", force_zip64=True) as inside:
                    digests[name] = _copy(source, inside)
        manifest = Manifest(
            schema_version=schema_version,
            term=term,
            made_s=now_s,
            outlast=__version__,
            sha256=digests,
        )
        document = {
            "format": FORMAT,
            "schema_version": manifest.schema_version,
            "term": manifest.term,
            "made_s": manifest.made_s,
            "made": manifest.made,
            "outlast": manifest.outlast,
            "sha256": manifest.sha256,
        }
        archive.writestr(
            zipfile.ZipInfo(MANIFEST, _zip_time(now_s)), json.dumps(document, indent=2)
        )
    return manifest


@contextmanager
def _opened(file: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except _DAMAGED as error:
        raise BackupError(f"{file} is damaged, or no copy by `outlast backup`: {error}") from error
    except OSError as error:
        raise BackupError(f"{file} cannot be read: {error.strerror or error}") from error


def _read_manifest(file: Path, archive: zipfile.ZipFile) -> Manifest:
    try:
        with archive.open(MANIFEST) as inside:
            document = json.loads(inside.read(_MAX_MANIFEST_BYTES))
        found_format = int(document["format"])
        manifest = Manifest(
            schema_version=int(document["schema_version"]),
            term=int(document["term"]),
            made_s=float(document["made_s"]),
            outlast=str(document["outlast"]),
            sha256={str(name): str(digest) for name, digest in document["sha256"].items()},
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise BackupError(
            f"{file} is no copy by `outlast backup`, or damaged: {MANIFEST}: {error}"
        ) from error
    if found_format > FORMAT or manifest.schema_version > SCHEMA_VERSION:
        raise BackupError(
            f"{file}: Outlast {manifest.outlast} made it (format {found_format}, version "
            f"{manifest.schema_version} of the journal); this one, {__version__}, reads format "
            f"{FORMAT} and versions 1 to {SCHEMA_VERSION}: restore it with that version"
        )
    wrong = [name for name in manifest.sha256 if name != JOURNAL and not _CODE.fullmatch(name)]
    if wrong or JOURNAL not in manifest.sha256:
        raise BackupError(f"{file} is damaged: {MANIFEST} names {wrong or 'no journal'}")
    return manifest


def _extract(file: Path, archive: zipfile.ZipFile, manifest: Manifest, name: str, to: Path) -> None:
    to.unlink(missing_ok=True)
    try:
        with archive.open(name) as source, _new_file(to) as target:
            digest = _copy(source, target)
    except (*_DAMAGED, KeyError, EOFError, zlib.error) as error:
        raise BackupError(f"{file} is damaged: {name}: {error}") from error
    if digest != manifest.sha256[name]:
        raise BackupError(f"{file} is damaged: {name} is not what was copied (its SHA-256 differs)")


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file for its owner only, on disk after the block."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    """Copy to the end; the SHA-256 of it."""
    found = hashlib.sha256()
    while data := source.read(CHUNK_BYTES):
        found.update(data)
        target.write(data)
    return found.hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _zip_time(now_s: float) -> tuple[int, int, int, int, int, int]:
    found = datetime.fromtimestamp(now_s, UTC)
    return (found.year, found.month, found.day, found.hour, found.minute, found.second)


def _stamp(now_s: float) -> str:
    return datetime.fromtimestamp(now_s, UTC).strftime("%Y%m%dT%H%M%SZ")
