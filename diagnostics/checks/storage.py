"""Write, flush, read back and delete a file where checkpoints go.

A folder that this node mounts is measured here; any other store is tried by the
program that the node's owner names, in a process of its own, since a store's client
may hang. Slowness is a warning at most, since others write there too; so is a
refusal, which speaks against the store and not against the node.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

from diagnostics import children
from diagnostics.checks.base import Context, Emit, SkipCheckError
from diagnostics.contention import Contention
from diagnostics.core.finding import Localises, Measurement
from outlast.startup import python_command

# Starting Python and a store's client takes seconds on a busy node; a store that works answers
# within a second. Less than the check has, so that its reason is reported.
PROBE_TIMEOUT_S = 12.0


def run(context: Context, emit: Emit) -> None:
    """Probe the store of `context.checkpoint_url`.

    Raises:
        SkipCheckError: there is no URL, or nothing that could try it.
    """
    url = context.checkpoint_url
    if not url:
        raise SkipCheckError("no job writes checkpoints from here; check a job's nodes with --job")
    started_s = time.monotonic()
    folder = local_folder(url)
    if folder is None and not context.storage_probe:
        raise SkipCheckError(f"only folders of this machine are probed here, not {url}")
    if folder is None:
        refusal = _try(context.storage_probe, url)
    else:
        refusal = _measure(context, folder, emit)
    emit(
        Measurement(
            test="storage",
            metric="refusals",
            value=float(bool(refusal)),
            unit="",
            localises=Localises.NODE,
            duration_s=time.monotonic() - started_s,
            detail=refusal or f"{url} can be written",
            at_most=0.0,
            bad_is_fault=False,
        )
    )


def _try(module: str, url: str) -> str:
    """Why a store cannot be used, "" when it can."""
    try:
        tried = subprocess.run(
            [*python_command(module), url],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_TIMEOUT_S,
            check=False,
            preexec_fn=children.tied(),
        )
    except subprocess.TimeoutExpired:
        return f"{url}: no answer in {PROBE_TIMEOUT_S:g} s"
    said = tried.stderr.strip().splitlines()
    if tried.returncode == 0:
        return ""
    return said[-1] if said else f"{url}: the probe ended with code {tried.returncode}"


def _measure(context: Context, folder: Path, emit: Emit) -> str:
    """Emit what a folder can do; why it cannot be used, "" when it can."""
    try:
        _probe(context, folder, emit)
    except OSError as error:
        return str(error)
    return ""


def _probe(context: Context, folder: Path, emit: Emit) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Nodes share the folder and a node may be checked twice at once.
    probe = folder / f".outlast-probe-{context.node}-{os.getpid()}"
    num_bytes = context.effort.storage_bytes
    payload = os.urandom(num_bytes)
    started_s = time.monotonic()
    contention = Contention()
    try:
        write_s = _write(probe, payload)
        wrong = count_wrong_bytes(payload, _read(probe))
    finally:
        probe.unlink(missing_ok=True)
    duration_s = time.monotonic() - started_s
    emit(
        Measurement(
            test="storage",
            metric="wrong_bytes",
            value=float(wrong),
            unit="bytes",
            localises=Localises.NODE,
            duration_s=duration_s,
            detail=f"{num_bytes >> 20} MiB written to {folder} and read back",
            at_most=0.0,
        )
    )
    emit(
        Measurement(
            test="storage",
            metric="write_bandwidth",
            value=num_bytes / 1e6 / max(write_s, 1e-9),
            unit="MB/s",
            localises=Localises.NODE,
            duration_s=duration_s,
            detail=f"{num_bytes >> 20} MiB with fsync to {folder}",
            baseline_key=f"storage/{folder}/{num_bytes}",
            bad_is_fault=False,
            contended_ratio=contention.ratio(),
        )
    )


def local_folder(url: str) -> Path | None:
    """The folder that a checkpoint URL names on this machine, if it names one."""
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    if not parts.scheme and url.startswith("/"):
        return Path(url)
    return None


def count_wrong_bytes(wanted: bytes, found: bytes) -> int:
    """How many bytes differ; missing and surplus ones count."""
    if wanted == found:
        return 0
    differing = sum(a != b for a, b in zip(wanted, found, strict=False))
    return differing + abs(len(wanted) - len(found))


def _write(path: Path, payload: bytes) -> float:
    started_s = time.monotonic()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        view = memoryview(payload)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return time.monotonic() - started_s


def _read(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY)
    try:
        # Otherwise the page cache answers, and the medium is not read at all.
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)
