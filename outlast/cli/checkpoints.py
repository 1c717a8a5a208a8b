"""`outlast ckpt`: the checkpoints of a job in storage, by its name or the URL of its folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import describe, output
from outlast.cli.convert import convert
from outlast.cli.errors import CliError, ExitCode
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.job_folder import Folder, nothing_there, url_of
from outlast.cli.options import Controller, Json, StateDir
from outlast.cli.progress import bytes_bar
from outlast.cli.push import push
from outlast.cli.salvage import salvage
from outlast.cli.usage import Commands

if TYPE_CHECKING:
    from pathlib import Path

    from checkpoint.catalog import Listed
    from checkpoint.core.manifest import Manifest
    from checkpoint.storage.storage import Storage

_HEADER = ("STEP", "ATTEMPT", "SIZE", "PARTS", "HELD-OUT LOSS", "STORED", "NOTES")

Step = Annotated[int, typer.Argument(metavar="STEP", min=0, help="Step of a checkpoint.")]
Steps = Annotated[list[int], typer.Argument(metavar="STEP", min=0, help="Steps of checkpoints.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = Commands(
        no_args_is_help=True, help="Checkpoints in storage: look after them, move them."
    )
    group.command("ls")(list_checkpoints)
    group.command("show")(show)
    group.command("verify")(verify)
    group.command("pin")(pin)
    group.command("unpin")(unpin)
    group.command("rm")(remove)
    group.command("sweep")(sweep)
    group.command("copy")(copy)
    group.command("convert")(convert)
    group.command("push")(push)
    group.command("salvage")(salvage)
    app.add_typer(group, name="ckpt")


def list_checkpoints(
    job: Folder,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """List the checkpoints that exist, newest first.

    STORED is when a checkpoint was completed in this folder: of a copy, when
    it was copied.
    """
    from checkpoint.catalog import listing

    with _opened(job, controller, state_dir) as (storage, url):
        found = listing(storage)
        if not found:
            raise nothing_there(storage, url)
    if json:
        output.print_json({"url": url, "checkpoints": [asdict(one) for one in found]})
        return
    output.print_table(_HEADER, [_row(one) for one in found], empty="")


def show(
    job: Folder,
    step: Annotated[
        int | None, typer.Argument(metavar="STEP", min=0, help="The newest unless given.")
    ] = None,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Tell what a checkpoint is made of."""
    from checkpoint.catalog import listing
    from checkpoint.storage.leases import pin_reason

    with _opened(job, controller, state_dir) as (storage, url):
        chosen = _chosen(storage, listing(storage), url, step)
        reason = pin_reason(storage, chosen.step) if chosen.is_pinned else ""
        manifest = None if chosen.problem else storage.read_commit(chosen.step)[1]
    if json:
        parts = [] if manifest is None else _parts(manifest)
        output.print_json({"url": url, **asdict(chosen), "pin_reason": reason, "parts": parts})
        return
    output.print_lines(_lines(chosen, manifest, reason))


def verify(
    job: Folder,
    steps: Annotated[
        list[int] | None,
        typer.Argument(metavar="STEP", min=0, help="The newest unless given."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All that exist.")] = False,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Read every byte of checkpoints and hold it to its checksum; exit code 1 if any is damaged."""
    from checkpoint import catalog

    if every and steps:
        given = " ".join(map(str, steps))
        raise CliError(f"--all is every step, and STEP is given, too ({given}); leave one out")
    with _opened(job, controller, state_dir) as (storage, url):
        listed = catalog.listing(storage)
        wanted = steps or [_chosen(storage, listed, url, None).step]
        chosen = listed if every else [_chosen(storage, listed, url, step) for step in wanted]
        problems: dict[int, list[str]] = {}
        for one in chosen:
            with bytes_bar(f"step {one.step}", one.size_bytes, quiet=json) as on_bytes:
                problems[one.step] = catalog.verify(storage, one.step, on_bytes)
    if json:
        output.print_json({"url": url, "problems": problems})
    else:
        for step, found in problems.items():
            print(f"step {step}: {'damaged' if found else 'whole'}")
            for problem in found:
                print(f"  {problem}")
    if any(problems.values()):
        raise typer.Exit(ExitCode.JOB_FAILED)


def pin(
    job: Folder,
    step: Step,
    reason: Annotated[
        str,
        typer.Option("--reason", metavar="WORDS", help="Why it is kept; `ckpt show` prints it."),
    ] = "",
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Keep a checkpoint whatever the retention of its job says."""
    from checkpoint.storage import leases

    with _opened(job, controller, state_dir) as (storage, url):
        if step not in storage.committed_steps():
            raise CliError(f"{url}: no checkpoint of step {step}")
        leases.pin(storage, step, reason)
    print(f"step {step} is pinned")


def unpin(
    job: Folder,
    step: Step,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Leave a pinned checkpoint to the retention of its job again."""
    from checkpoint.storage import leases

    with _opened(job, controller, state_dir) as (storage, _url):
        leases.unpin(storage, step)
    print(f"step {step} is not pinned")


def remove(
    job: Folder,
    steps: Steps,
    force: Annotated[
        bool, typer.Option("--force", help="Also the newest, pinned ones, and ones being read.")
    ] = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Delete checkpoints for good."""
    from checkpoint import catalog

    with _opened(job, controller, state_dir) as (storage, _url):
        catalog.remove(storage, steps, force=force)
    print(f"removed: {', '.join(str(step) for step in steps)}")


def sweep(
    job: Folder,
    idle_s: Annotated[
        float,
        typer.Option(
            "--idle-s",
            metavar="SECONDS",
            min=0,
            help="Only what nobody has written to for so long.",
        ),
    ] = 7200.0,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Delete what dead uploads left behind; a job that runs does so by itself."""
    from checkpoint.core.retention import RetentionPolicy
    from checkpoint.upload.cleaning import Cleaner

    with _opened(job, controller, state_dir) as (storage, _url):
        Cleaner(storage, RetentionPolicy(keep=1), grace_s=idle_s).sweep()
    print("swept")


def copy(
    job: Folder,
    step: Step,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="Folder to copy to, a path or an fsspec URL: any that `checkpoint.load` of a "
            "job is to name, with or without a job's id at its end.",
        ),
    ],
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Copy a checkpoint to another store, verifying every byte on the way."""
    from checkpoint import catalog

    with (
        _opened(job, controller, state_dir) as (source, url),
        _storage(target) as other,
    ):
        chosen = _chosen(source, catalog.listing(source), url, step)
        with bytes_bar(f"step {step}", chosen.size_bytes, quiet=False) as on_bytes:
            catalog.copy(source, step, other, on_bytes)
    print(f"step {step} is at {target}")


@contextmanager
def _opened(job: str, controller: str, state_dir: Path) -> Iterator[tuple[Storage, str]]:
    """The storage of a job and its URL."""
    url = url_of(job, controller, state_dir)
    with _storage(url) as storage:
        yield storage, url


@contextmanager
def _storage(url: str) -> Iterator[Storage]:
    """What is at a path or URL; errors of storage become messages."""
    from checkpoint.storage.storage import Storage
    from outlast.errors import OutlastError

    try:
        storage = Storage(url)
        try:
            yield storage
        finally:
            storage.close()
    except OutlastError as error:
        raise CliError(str(error)) from error


def _chosen(storage: Storage, found: list[Listed], url: str, step: int | None) -> Listed:
    if not found:
        raise nothing_there(storage, url)
    if step is None:
        return found[0]
    for one in found:
        if one.step == step:
            return one
    known = ", ".join(str(one.step) for one in found)
    raise CliError(f"{url}: no checkpoint of step {step} (there: {known})")


def _row(one: Listed) -> tuple[str, ...]:
    notes = [
        *(["pinned"] if one.is_pinned else []),
        *(["being read"] if one.is_read else []),
        *([f"damaged: {one.problem}"] if one.problem else []),
    ]
    return (
        str(one.step),
        _or_dash(one.attempt),
        "-" if one.size_bytes is None else describe.size(one.size_bytes),
        _or_dash(one.num_parts),
        "-" if one.eval_loss is None else f"{one.eval_loss:.4f}",
        "-" if one.written_at_s is None else describe.clock(one.written_at_s),
        ", ".join(notes),
    )


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _parts(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {
            "rank": part.rank,
            "file": part.file,
            "size_bytes": part.nbytes,
            "tensors": len(part.tensors),
        }
        for part in manifest.parts
    ]


def _lines(one: Listed, manifest: Manifest | None, reason: str) -> list[tuple[str, str]]:
    lines = [
        (label.lower(), value) for label, value in zip(_HEADER, _row(one), strict=True) if value
    ]
    if reason:
        lines.append(("pinned for", reason))
    if manifest is not None:
        lines.append(("world size", str(manifest.world_size)))
        lines += [
            (
                "files",
                f"{part['file']}  {describe.size(part['size_bytes'])}, {part['tensors']} tensors",
            )
            for part in _parts(manifest)
        ]
    return lines
