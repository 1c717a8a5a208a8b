"""`outlast curve`: every step of a job once, for a person, a spreadsheet or a program."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import output
from outlast.cli.connect import controller_of, find_job
from outlast.cli.errors import CliError
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import AnyJobName, Controller, Json, StateDir
from outlast.given_up import without_given_up
from outlast.perplexity import perplexity

if TYPE_CHECKING:
    from outlast.v1.common_pb2 import StepReport

_HEADER = ("STEP", "TRAIN LOSS", "HELD-OUT LOSS", "PERPLEXITY", "GRAD NORM", "RATE", "TOKENS/S")
_COLUMNS = (
    *("step", "attempt", "train_loss", "held_out_loss", "held_out_perplexity", "grad_norm"),
    *("learning_rate", "tokens", "duration_s", "at_s"),
)


def curve(
    job: AnyJobName = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Print the loss curve of a job: each step once, however often it was restarted.

    A step that was done again has the numbers of the last time. The held-out loss is that of
    eval.interval_steps; of several held-out sets with names it is the mean, and CSV and JSON
    have the loss and perplexity of each.
    """
    if as_csv and json:
        raise CliError("--csv and --json are both given; keep one of them")
    with controller_of(controller, state_dir) as client:
        _, reports = client.get(find_job(client, job).job_id, with_steps=True)
    rows = rows_of(reports)
    if json:
        output.print_json({"steps": rows})
    elif as_csv:
        own = [key for name in _sets_of(reports) for key in _keys_of(name)]
        writer = csv.DictWriter(sys.stdout, [*_COLUMNS, *own], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        output.print_table(_HEADER, [_shown(row) for row in rows], empty="no steps yet")


def rows_of(reports: Sequence[StepReport]) -> list[dict[str, Any]]:
    """The curve by step, without steps that were given up; a batch that was left out has no
    loss."""
    sets = _sets_of(reports)
    return [_row(each, sets) for each in without_given_up(reports)]


def _sets_of(reports: Sequence[StepReport]) -> list[str]:
    """The names of held-out sets, where there are several."""
    return sorted({name for report in reports for name in report.eval_losses})


def _keys_of(name: str) -> tuple[str, str]:
    return f"held_out_loss/{name}", f"held_out_perplexity/{name}"


def _row(report: StepReport, sets: Sequence[str]) -> dict[str, Any]:
    held_out = report.eval_loss if report.HasField("eval_loss") else None
    has_batch = report.tokens > 0
    own: dict[str, float | None] = {}
    for name in sets:
        loss = report.eval_losses.get(name)
        own |= zip(_keys_of(name), (loss, None if loss is None else perplexity(loss)), strict=True)
    return {
        "step": report.step,
        "attempt": report.attempt,
        "train_loss": report.loss if has_batch else None,
        "held_out_loss": held_out,
        "held_out_perplexity": None if held_out is None else perplexity(held_out),
        "grad_norm": report.grad_norm if has_batch else None,
        "learning_rate": report.learning_rate,
        "tokens": report.tokens,
        "duration_s": report.duration_s,
        "at_s": report.at_s,
        **own,
    }


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    speed = row["tokens"] / row["duration_s"] if row["duration_s"] else None
    return (
        str(row["step"]),
        _or_dash(row["train_loss"], ".4f"),
        _or_dash(row["held_out_loss"], ".4f"),
        _or_dash(row["held_out_perplexity"], ".4g"),
        _or_dash(row["grad_norm"], ".3g"),
        f"{row['learning_rate']:.3g}",
        _or_dash(speed, ",.0f"),
    )


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
