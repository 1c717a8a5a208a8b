"""`outlast track`: a job's curve into TensorBoard or Weights & Biases, as it grows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from outlast.cli import output
from outlast.cli.connect import controller_of, find_job
from outlast.cli.describe import FINISHED
from outlast.cli.errors import CliError
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import AnyJobName, Controller, StateDir
from outlast.errors import RetryableError
from outlast.tracking.points import Curve, News

if TYPE_CHECKING:
    from outlast.client import Client
    from outlast.v1.jobs_pb2 import Job

# A controller that is away comes back, and the job trains on without it.
RETRY_S = 2.0


class Tracker(Protocol):
    """Where a curve goes."""

    last_step: int
    """That it has already."""

    def write(self, news: News) -> None: ...

    def close(self) -> None: ...


def track(
    job: AnyJobName = "",
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="DIR", help="Write TensorBoard's files to DIR/JOB."),
    ] = None,
    wandb: Annotated[
        str,
        typer.Option("--wandb", metavar="PROJECT", help="Write a run of this project of W&B."),
    ] = "",
    wandb_dir: Annotated[
        Path,
        typer.Option("--wandb-dir", metavar="DIR", help="Where W&B keeps its files."),
    ] = Path(),
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Keep the run of W&B here; `wandb sync` sends it later."),
    ] = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Write a job's curve to TensorBoard or Weights & Biases as it grows, until the job ends.

    Started again, it goes on where it was: no step is written twice, and none is missing.
    """
    if tensorboard is None and not wandb:
        raise CliError("nowhere to write to: give --tensorboard DIR or --wandb PROJECT")
    with controller_of(controller, state_dir) as client:
        found = find_job(client, job)
        trackers = _trackers(found, tensorboard, wandb, wandb_dir, offline=offline)
        try:
            _follow(client, found.job_id, trackers)
        finally:
            for tracker in trackers:
                tracker.close()


def _trackers(
    job: Job, tensorboard: Path | None, project: str, wandb_dir: Path, *, offline: bool
) -> list[Tracker]:
    from google.protobuf.json_format import MessageToDict

    from outlast.tracking.tensorboard import TensorBoard
    from outlast.tracking.wandb import WandB

    made: list[Tracker] = []
    if tensorboard is not None:
        folder = tensorboard / job.job_id
        made.append(_made("tensorboard", lambda: TensorBoard(folder)))
    if project:
        spec = MessageToDict(job.spec)
        made.append(
            _made(
                "wandb",
                lambda: WandB(
                    wandb_dir, project=project, job_id=job.job_id, spec=spec, offline=offline
                ),
            )
        )
    return made


def _made(name: str, make: Callable[[], Tracker]) -> Tracker:
    try:
        return make()
    except ModuleNotFoundError as error:
        raise CliError(f"{name} is not installed; `pip install outlast[trackers]`") from error


def _follow(client: Client, job_id: str, trackers: list[Tracker]) -> None:
    """Until the job has ended and all of its curve is written."""
    from outlast.client_errors import LoginOverError

    curves = [(tracker, Curve(last_step=tracker.last_step)) for tracker in trackers]
    newest = min(curve.last_step for _, curve in curves)
    is_away = False
    while True:
        try:
            for update in client.watch(job_id, after_step=newest):
                is_away = False
                for tracker, curve in curves:
                    tracker.write(curve.take(update.steps))
                newest = max((each.step for each in update.steps), default=newest)
                if update.HasField("job") and update.job.state in FINISHED:
                    output.print_message(
                        f"{job_id} is {update.job.state}; step {newest} is written"
                    )
            return
        except LoginOverError:
            # The next call sends the renewed token; without one, its error says what to do.
            continue
        except RetryableError as error:
            if not is_away:
                output.print_message(f"outlast: {error}; trying again")
            is_away = True
            time.sleep(RETRY_S)
