"""What jobs are, in words: pure functions from messages to text.

`outlast status` answers "why is my job not training?", so every state has its
sentence here and the controller's own reason follows it. Nothing here prints.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from outlast.devices import MEASURED
from outlast.durations import duration

if TYPE_CHECKING:
    from outlast.v1.incidents_pb2 import Incident
    from outlast.v1.jobs_pb2 import Job

FINISHED = ("SUCCEEDED", "FAILED", "CANCELLED")

_MEANING = {
    "QUEUED": "It is not training: it waits for its first nodes.",
    "PROVISIONING": "It is not training: it needs nodes that it does not have.",
    "PREFLIGHT": "It is not training yet: its nodes are checked before use.",
    "STARTING": "It is about to train: workers are started and restore the newest checkpoint.",
    "RUNNING": "It is training.",
    "SUSPENDING": "It is not training: its workers are being stopped.",
    "DIAGNOSING": "It is not training: the nodes under suspicion are being checked.",
    "REPAIRING": "It is not training: bad nodes are being replaced.",
    "RESTARTING": "It is not training: the next attempt is about to start.",
    "PAUSED": "It is not training: it is paused. `outlast resume` continues it from where it was.",
    "SUCCEEDED": "It has finished: every step is done.",
    "FAILED": "It has failed and will not be tried again.",
    "CANCELLED": "It was cancelled.",
}

# Where a script differs.
_SCRIPT_MEANING = {
    "STARTING": "It is about to run: its ranks are started.",
    "RUNNING": "It is running.",
    "SUCCEEDED": "It has finished: every rank ended with exit code 0.",
}


def is_training(job: Job) -> bool:
    """Whether steps are being completed now."""
    return job.state == "RUNNING" and not _waits_for_last_checkpoint(job)


def is_script(job: Job) -> bool:
    """Whether it runs a script, of which nobody knows how many steps it will do."""
    return job.total_steps == 0


def _waits_for_last_checkpoint(job: Job) -> bool:
    return job.state == "RUNNING" and 0 < job.total_steps <= job.step


def headline(job: Job) -> str:
    """One sentence: is it training, and if not, what is it doing?"""
    if is_script(job) and job.state in _SCRIPT_MEANING:
        return _SCRIPT_MEANING[job.state]
    if _waits_for_last_checkpoint(job):
        return "It is not training: all steps are done, and the last checkpoint is being stored."
    return _MEANING.get(job.state, f"It is {job.state}.")


def job_lines(job: Job, now_s: float) -> list[tuple[str, str]]:
    """What `outlast status` says of a job: (label, text), in order."""
    until_s = job.finished_s if job.HasField("finished_s") else now_s
    lines = [
        ("job", job.job_id),
        *([("owner", job.owner)] if job.owner else []),
        ("state", f"{job.state} for {duration(now_s - job.state_since_s)}"),
        ("reason", job.reason or "none given"),
        ("progress", progress(job)),
    ]
    if is_training(job) and not (is_script(job) and job.step < 1):
        lines.append(("rate", rate(job)))
        lines += [("last step", last_step(job)), ("model FLOPs", model_flops(job))]
        lines += use_lines(job)
    restarts = f"{job.restarts} restart{'' if job.restarts == 1 else 's'}"
    if job.state not in FINISHED:
        restarts += f"; retry budget remaining: {job.retry_left}"
    lines += [
        ("attempt", f"{job.attempt} ({restarts})"),
        ("nodes", job_nodes(job)),
        ("checkpoint", checkpoint(job)),
        *([("", job.checkpoint_url)] if job.checkpoint_url else []),
        ("age", f"submitted {duration(until_s - job.submitted_s)} ago"),
    ]
    if job.HasField("finished_s"):
        lines[-1] = ("took", f"{duration(until_s - job.submitted_s)} from submission to the end")
    if job.yields:
        times = "once" if job.yields == 1 else f"{job.yields} times"
        lines.append(("queue", f"priority {job.priority}; made room for other jobs {times}"))
    lines += chosen(job)
    lines += left_out(job)
    lines += [("data", line) for line in job.data_left_out]
    return [*lines, *(("numerics", line) for line in numerics(job.environment_changes))]


def progress(job: Job) -> str:
    """How far a job is: step, share and loss."""
    # A step that was left out has none.
    has_loss = job.HasField("loss") and not math.isnan(job.loss)
    loss = f", training loss {job.loss:.4f}" if has_loss else ""
    if is_script(job):
        return f"step {job.step:,}{loss}" if job.step > 0 else "its script reports no steps"
    share = 100 * job.step / job.total_steps
    return f"step {max(job.step, 0):,} of {job.total_steps:,} ({share:.0f} %){loss}"


def numerics(changes: Iterable[str]) -> list[str]:
    """Where the numeric environment changed, once for all nodes on which it is the same."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        since, _, rest = change.partition(": ")
        node, _, what = rest.partition(": ")
        nodes.setdefault((since, what or rest), []).extend([node] if what else [])
    return [
        f"changed {since}: {what}" + (f" (on {', '.join(on)})" if on else "")
        for (since, what), on in nodes.items()
    ]


def job_nodes(job: Job) -> str:
    """The nodes that a job has, and how many it still needs."""
    held = [node for node in job.nodes if node]
    missing = len(job.nodes) - len(held)
    if job.state in FINISHED or not missing:
        return ", ".join(held) or "none"
    return f"{', '.join(held) or 'none'}; {missing} more needed"


def rate(job: Job) -> str:
    """Tokens per second and when the job will be done at that rate."""
    left_s = eta_s(job)
    if left_s is None and not (is_script(job) and job.tokens_per_s > 0):
        return "not known yet"
    each = f" ({job.tokens_per_s / job.ranks:,.0f} a rank)" if job.ranks > 1 else ""
    left = "" if left_s is None else f"; done in about {duration(left_s)}"
    return f"{job.tokens_per_s:,.0f} tokens/s{each}{left}"


def last_step(job: Job) -> str:
    """What the optimizer did last."""
    if not job.HasField("grad_norm"):
        return "none yet"
    return f"gradient norm {job.grad_norm:.4g}, learning rate {job.learning_rate:.3g}"


def model_flops(job: Job) -> str:
    """Model FLOPs per second by both conventions, and their share of the devices' peak."""
    if job.model_flops_per_s <= 0:
        return "not known yet"
    achieved, full = job.model_flops_per_s, job.full_model_flops_per_s
    words = f"{flops(achieved)}/s (full attention counted: {flops(full)}/s)"
    if not job.device:
        return words
    mfu, full_mfu = 100 * achieved / job.peak_flops_per_s, 100 * full / job.peak_flops_per_s
    each = f"{flops(job.peak_flops_per_s / job.ranks)}/s"
    peak = f"{job.ranks} x {job.device} at {each}"
    if job.device == MEASURED:
        peak = f"{job.ranks} x {each}, as the {MEASURED} has measured"
    return f"{words}; MFU {mfu:.1f} % ({full_mfu:.1f} %) of {peak}"


def use_lines(job: Job) -> list[tuple[str, str]]:
    """Where the time of a step goes, its bubble and its memory, beside what was expected."""
    if not job.HasField("step_use"):
        return []
    use, split = job.step_use, job.step_use.split
    own = ("data", "forward", "backward", "optimizer")
    work = ", ".join(f"{name} {step_part(getattr(split, f'{name}_s'))}" for name in own)
    exposed = ", ".join(
        f"{name} {step_part(getattr(split, f'{name}_exposed_s'))}"
        for name in ("tp", "pp", "dp", "other")
    )
    waiting = f"waiting for others: {exposed}; for data: {step_part(split.data_wait_s)}"
    if split.garbage_collection_s > 0:
        work += f", garbage collection {step_part(split.garbage_collection_s)}"
    lines = [("step time", f"{work}\n{waiting}")]
    if use.expected_bubble > 0:
        shares = f"{100 * use.bubble:.1f} % of the pipeline's time, {100 * use.expected_bubble:.1f}"
        lines.append(("bubble", f"{shares} % in theory"))
    memory = f"{size(use.peak_memory_bytes)} at most on a rank"
    if use.expected_memory_bytes:
        memory += f"; {size(use.expected_memory_bytes)} estimated"
    return [*lines, ("memory", memory)]


def eta_s(job: Job) -> float | None:
    """Seconds to the last step at the present pace; None while there is none."""
    return job.time_left_s if job.HasField("time_left_s") else None


def checkpoint(job: Job) -> str:
    """The newest checkpoint in storage, and what a total loss would cost now."""
    if not job.HasField("committed_step"):
        is_over = job.state in FINISHED
        return "none was committed to storage" if is_over else "none committed to storage yet"
    behind = max(0, job.step - job.committed_step)
    committed = f"step {job.committed_step:,} is committed to storage"
    if job.state in FINISHED or not behind:
        return committed
    return f"{committed}, {behind:,} step{'' if behind == 1 else 's'} behind"


def how_to_continue(job: Job) -> str:
    """Why a finished job is not resumed, and how its training is continued in another."""
    ended = f"job {job.job_id} has ended ({job.state}) and cannot be resumed"
    if not job.HasField("committed_step"):
        return f"{ended}; no checkpoint of it was committed: submit its spec again"
    step = job.committed_step
    more = "" if step < job.total_steps else f" --set steps={2 * job.total_steps}"
    load = shlex.quote(f"checkpoint.load={job.checkpoint_url}")
    return (
        f"{ended}. To train on from its checkpoint of step {step:,}: outlast submit SPEC "
        f"--set {load}{more} (steps counts from the beginning)"
    )


def chosen(job: Job) -> list[tuple[str, str]]:
    """Where people let the job go on, and what was given up for that."""
    lines = []
    for each in job.chosen_starts:
        which = f"{each.url_step:,}" if each.url_step >= 0 else "(the newest)"
        where = f"from checkpoint {each.step:,}" if each.step else "from scratch"
        if each.url:
            where = f"from checkpoint {which} in {each.url}"
        beyond = f"what was trained beyond step {each.step:,}" if each.step else "all before it"
        lines.append(f"attempt {each.attempt + 1} began {where}, as chosen; {beyond} is given up")
    return [("chosen", line) for line in lines]


def left_out(job: Job) -> list[tuple[str, str]]:
    """Where the curve has no loss because the batch gave NaN or Inf twice."""
    if not job.skipped:
        return []
    ranges = ", ".join(
        f"{each.first:,}" if each.first == each.last else f"{each.first:,}-{each.last:,}"
        for each in job.skipped
    )
    return [("left out", f"the batches of steps {ranges}: their loss was NaN or Inf, twice")]


def cost(incident: Incident) -> str:
    """What the fault cost: detection, recovery and work done again."""
    parts = []
    if incident.HasField("detection_s"):
        parts.append(f"detected after {duration(incident.detection_s)}")
    if incident.HasField("recovery_s"):
        parts.append(f"training again after {duration(incident.recovery_s)}")
    if incident.HasField("steps_redone"):
        redone = incident.steps_redone
        parts.append(f"{redone} step{'' if redone == 1 else 's'} redone")
    return ", ".join(parts) or "not known yet"


def step_part(seconds: float) -> str:
    """Part of a step: `12.3 ms`, `1.23 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def clock(at_s: float) -> str:
    """A moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def iso_time(at_s: float) -> str:
    """A moment in UTC with milliseconds, for programs."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(at_s))}.{int(at_s % 1 * 1000):03}Z"


def short_clock(at_s: float, now_s: float) -> str:
    """A moment in local time: the time of day, and the date before it if that is another."""
    moment, now = time.localtime(at_s), time.localtime(now_s)
    if moment[:3] == now[:3]:
        return time.strftime("%H:%M:%S", moment)
    return time.strftime("%b %d %H:%M" if moment[0] == now[0] else "%Y-%m-%d", moment)


def size(num_bytes: float) -> str:
    """Bytes in binary units: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} PiB"


def flops(count: float) -> str:
    """FLOPs in decimal units: `1.5 TFLOP`."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if count < 1000:
            return f"{count:.3g} {unit}FLOP"
        count /= 1000
    return f"{count:.3g} EFLOP"
