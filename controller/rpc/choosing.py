"""Where a person wants a paused job to go on: looked at in storage before anything starts.

What is looked at are the records and the sizes of the files, and in another folder than the job's
own, whether they are of its model. Every byte is compared with its
checksum when the job loads it; what turns out damaged then pauses the job again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from checkpoint.core import names
from checkpoint.core.manifest import Manifest
from checkpoint.loading import wrong_with_saved_model
from checkpoint.storage.storage import Storage
from checkpoint.upload.cleaning import committed_by
from controller.core.records import JobRecord
from controller.specs import spec_of
from outlast.chosen import ChosenStart, is_given_up
from outlast.errors import OutlastError
from outlast.skipped import is_undone
from outlast.v1 import jobs_pb2

# A client waits for 30 s.
_LOOK_S = 25.0
_CALL_S = 10.0
_MAX_LISTED = 12


class ChoiceError(Exception):
    """A choice that cannot be followed: the field of the request, and why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


def is_choice(request: jobs_pb2.ResumeJobRequest) -> bool:
    """Whether a request says where to go on."""
    has_step = request.HasField("checkpoint_step")
    return request.from_scratch or has_step or request.checkpoint_url != ""


async def chosen_start(job: JobRecord, request: jobs_pb2.ResumeJobRequest, url: str) -> ChosenStart:
    """Where a job is to go on by a request that says so; `url` is its URL in our spelling.

    Raises:
        ChoiceError: there is nothing to go on from, or the request contradicts itself.
    """
    step = request.checkpoint_step if request.HasField("checkpoint_step") else None
    if request.from_scratch:
        if step is not None or url:
            raise ChoiceError("from_scratch", "is given with a checkpoint; allowed: one of both")
        return ChosenStart(step=0, attempt=job.attempt)
    field = "checkpoint_step" if step is not None else "checkpoint_url"
    if url == job.checkpoint_url:
        if step is None:
            raise ChoiceError(field, f"is the job's own folder {url}; give a step of its own")
        url = ""
    try:
        async with asyncio.timeout(_LOOK_S):
            place = _Place(job=job, url=url, field=field)
            found = await asyncio.to_thread(place.look, step)
    except TimeoutError as error:
        at = url or job.checkpoint_url
        why = f"cannot be looked at: {at} did not answer in {_LOOK_S:g} s"
        raise ChoiceError(field, why) from error
    except OutlastError as error:
        raise ChoiceError(field, f"cannot be loaded: {error}") from error
    if url:
        return ChosenStart(
            step=0, attempt=job.attempt, url=url, url_step=-1 if step is None else step
        )
    return ChosenStart(step=found, attempt=job.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A folder of checkpoints that a job may go on from: another's, or with "" its own."""

    job: JobRecord
    url: str
    field: str

    def look(self, wanted: int | None) -> int:
        """The step that was chosen, of a checkpoint that is there as far as can be seen."""
        storage = Storage(self.url or self.job.checkpoint_url, deadline_s=_CALL_S)
        try:
            steps = [step for step in storage.committed_steps() if self._counts(storage, step)]
            step = next(iter(steps), None) if wanted is None else wanted
            if step is None or step not in steps:
                raise self._absent(storage, step, steps)
            last = self.job.plan.total_steps
            if last is not None and step >= last:
                raise ChoiceError(
                    self.field,
                    f"is {step}, and training ends with step {last}: nothing "
                    f"would be left to train; committed in {storage.url}: {_listed(steps)}",
                )
            _, manifest = storage.read_commit(step)
            self._refuse_other_model(step, manifest)
            missing = _wrong_file(storage, manifest)
            if missing:
                raise ChoiceError(
                    self.field,
                    f"is {step}, whose checkpoint is damaged: {missing}; `outlast ckpt salvage` "
                    f"saves the rest; committed in {storage.url}: {_listed(steps)}",
                )
            return step
        finally:
            storage.close()

    def _counts(self, storage: Storage, step: int) -> bool:
        """Whether a committed checkpoint is one of the job's history, or not its own at all."""
        if self.url:
            return True
        if is_undone(self.job.skipped, step):
            return False
        # Of a choice from which nothing was trained nothing has come: it is made anew.
        in_force = self.job.chosen[: self.job.num_begun]
        return not in_force or not is_given_up(in_force, step, committed_by(storage, step))

    def _refuse_other_model(self, step: int, manifest: Manifest) -> None:
        """Ranks would find it too, each at its first tensor, after processes were made."""
        if not self.url:
            return
        spec = spec_of(self.job.spec_json)
        if spec.is_script:
            return
        wrong = wrong_with_saved_model(spec, self.url, step, manifest)
        if wrong is not None:
            raise ChoiceError("checkpoint_url", wrong)

    def _absent(self, storage: Storage, step: int | None, steps: list[int]) -> ChoiceError:
        if not steps:
            return ChoiceError(
                self.field,
                f"names a checkpoint in {storage.url}, and none is committed there; "
                "`outlast resume --from-scratch` begins anew",
            )
        message = f"is {step}; committed in {storage.url}: {_listed(steps)}"
        return ChoiceError(self.field, message)


def _wrong_file(storage: Storage, manifest: Manifest) -> str:
    """The first file of a checkpoint that is not there in its size; "" when all are."""
    folder = names.attempt_folder(manifest.step, manifest.attempt)
    sizes = {entry.name: entry.nbytes for entry in storage.entries(folder)}
    for part in manifest.parts:
        found = sizes.get(part.file)
        if found is None:
            return f"{folder}/{part.file} is missing"
        if found != part.nbytes:
            return f"{folder}/{part.file} has {found} bytes, not {part.nbytes}"
    return ""


def _listed(steps: list[int]) -> str:
    more = len(steps) - _MAX_LISTED
    shown = ", ".join(map(str, steps[:_MAX_LISTED]))
    return f"{shown} and {more} more" if more > 0 else shown
