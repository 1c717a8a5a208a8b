"""Deletes what is older, or more, than is kept of jobs and nodes, once it is archived.

What may go is decided by `core.retention`, and decided again by the machine when it happens. With
an archive nothing is deleted that is not written there; a store that does not answer is asked
again at the next look. Loss curves are no part of the journal: they are deleted page by page when
their job is gone, also one that was deleted right before a crash. Archives of code stay while a
job that has not ended names them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from checkpoint.storage.storage import Storage
from controller import archive
from controller.core.events import RecordsExpired
from controller.core.incident_cut import IncidentCut
from controller.core.incident_record import IncidentRecord
from controller.core.records import JobRecord
from controller.core.retention import Expired, Retention, expired
from controller.service import Service
from controller.specs import code_digest_of
from controller.store.code import CodeStore
from outlast.errors import OutlastError
from outlast.ids import IncidentId, JobId, NodeId

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 60.0


class Keeper:
    """Keeps one controller's records within their bounds."""

    def __init__(
        self,
        service: Service,
        limits: Retention,
        code: CodeStore | None = None,
        *,
        open_storage: Callable[[str], Storage] = Storage,
    ) -> None:
        self._service = service
        self._limits = limits
        self._code = code
        self._open_storage = open_storage
        self._storage: Storage | None = None
        self._failure = ""

    async def run(self) -> None:
        """Look for as long as the controller lives."""
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            try:
                await self.look()
            except OutlastError as error:
                # Read-only, or stopping: at the next look it may be different.
                logger.warning("nothing is deleted at present: %s", error)
            except Exception as error:  # noqa: BLE001  # a mistake of ours must not be the last look
                self._service.guard.note("retention", error)

    async def look(self) -> int:
        """Archive and delete what has expired; how many things that was."""
        # First: it takes no room in the journal, and may make some.
        await self._delete_code()
        if self._service.read_only:
            return 0
        due = expired(
            self._service.state,
            self._limits,
            self._service.now_s,
            may_forget=lambda node: self._service.why_not_forgotten(node) == "",
        )
        if self._limits.archive_url and due:
            due = await self._archived(due)
        if due:
            await self._service.tell(
                RecordsExpired(
                    jobs=due.jobs, incidents=due.incidents, cuts=due.cuts, nodes=due.nodes
                )
            )
        await self._delete_curves()
        return len(due)

    async def _archived(self, due: Expired) -> Expired:
        """What of it is in the archive now."""
        state = self._service.state
        jobs: list[JobId] = []
        incidents: list[IncidentId] = []
        cuts: list[IncidentCut] = []
        nodes: list[NodeId] = []
        try:
            for job_id in due.jobs:
                job = state.jobs[job_id]
                data = await self._job_file(job, list(state.incidents_of(job)))
                await self._write(archive.job_path(job_id), data)
                jobs.append(job_id)
            for incident_id in due.incidents:
                data = archive.incident_file(state.incidents[incident_id])
                await self._write(archive.incident_path(incident_id), data)
                incidents.append(incident_id)
            for cut in due.cuts:
                await self._write(*archive.cut_file(state.incidents[cut.incident], cut))
                cuts.append(cut)
            for node_id in due.nodes:
                await self._write(*archive.node_file(state.nodes[node_id]))
                nodes.append(node_id)
        # Whatever a store's library raises: what is not archived is not deleted.
        except Exception as error:  # noqa: BLE001
            if str(error) != self._failure:
                logger.warning(
                    "the archive %s cannot be written, and nothing is deleted before it can: %s",
                    self._limits.archive_url,
                    error,
                )
            self._failure = str(error)
        else:
            self._failure = ""
        return Expired(
            jobs=tuple(jobs), incidents=tuple(incidents), cuts=tuple(cuts), nodes=tuple(nodes)
        )

    async def _job_file(self, job: JobRecord, incidents: list[IncidentRecord]) -> bytes:
        """Page by page: the loop has other things to do."""
        file = archive.JobFile(job, incidents, self._service.now_s)
        version = 0
        while True:
            rows, version = self._service.curves.changed_since(job.job_id, version)
            if not rows:
                return file.finish()
            file.add_steps(rows)
            await asyncio.sleep(0)

    async def _write(self, path: str, data: bytes) -> None:
        def write() -> None:
            if self._storage is None:
                self._storage = self._open_storage(self._limits.archive_url)
            self._storage.write_bytes(path, data)

        await asyncio.to_thread(write)

    async def _delete_curves(self) -> None:
        for job_id in _gone(self._service.curves.jobs(), self._service.state.jobs):
            while not self._service.curves.forget(job_id):
                await asyncio.sleep(0)
        for job_id in _gone(self._service.history.jobs(), self._service.state.jobs):
            self._service.history.forget(job_id)

    async def _delete_code(self) -> None:
        """Delete the code of jobs that have ended: it will not start again."""
        if self._code is None:
            return
        live = self._service.state.live_jobs()
        used = {code_digest_of(job.submitted_spec_json) for job in live} - {""}
        await asyncio.to_thread(self._code.delete_unused, used)


def _gone(jobs: Iterable[JobId], known: dict[JobId, JobRecord]) -> list[JobId]:
    return [job_id for job_id in jobs if job_id not in known]
