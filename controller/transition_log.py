"""Tells the log what the journal took in: each change of state, once, with its reason."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import StrEnum
from typing import assert_never

from controller.core.changes import (
    AttemptPut,
    CheckpointStored,
    CheckpointWaited,
    CommandClosed,
    CommandOpened,
    IncidentGrown,
    IncidentPut,
    IncidentsPruned,
    JobExplained,
    JobForgotten,
    JobPruned,
    JobPut,
    NodeChecked,
    NodeForgotten,
    NodePut,
    RanksDone,
    State,
    StateChange,
)
from controller.core.incident_cut import IncidentCut
from controller.core.written import CommandsClosed, CommandsOpened, RecordChanged

logger = logging.getLogger(__name__)


class TransitionLog:
    """Logs changes of jobs, nodes and incidents."""

    def __init__(self, state: State) -> None:
        self._logged: dict[str, StrEnum] = {}
        for job in state.jobs.values():
            self._logged[job.job_id] = job.state
        for node in state.nodes.values():
            self._logged[node.node] = node.state
        for incident in state.incidents.values():
            self._logged[incident.incident] = incident.state

    def tell(self, changes: Iterable[StateChange]) -> None:
        """Log what these changes, just journalled, have changed."""
        for change in changes:
            match change:
                case JobPut(job=job):
                    if self._is_news(job.job_id, job.state):
                        logger.info(
                            "job %s: job=%s attempt=%d %s",
                            job.state,
                            job.job_id,
                            job.attempt,
                            job.reason,
                        )
                case NodePut(node=node):
                    if self._is_news(node.node, node.state):
                        logger.info("node %s: node=%s %s", node.state, node.node, node.reason)
                case NodeForgotten(node=node_id):
                    self._logged.pop(node_id, None)
                    logger.info("node forgotten: node=%s", node_id)
                case IncidentPut(incident=incident):
                    if self._is_news(incident.incident, incident.state):
                        logger.info(
                            "incident %s: incident=%s cause=%s %s",
                            incident.state,
                            incident.incident,
                            incident.cause,
                            incident.reason,
                        )
                case JobPruned(job_id=job_id, incidents=incidents):
                    for each in (job_id, *incidents):
                        self._logged.pop(each, None)
                    logger.info("job deleted from the list: job=%s", job_id)
                case IncidentsPruned(incidents=incidents):
                    for each in incidents:
                        self._logged.pop(each, None)
                    logger.info("incidents deleted: %d, oldest %s", len(incidents), incidents[0])
                case AttemptPut():
                    pass  # The job's own line says that one begins.
                case JobExplained() | NodeChecked() | JobForgotten() | RanksDone():
                    pass  # No state changes with them.
                case CheckpointStored() | CheckpointWaited() | IncidentGrown() | IncidentCut():
                    pass  # Nor with them.
                case CommandOpened(command=command):
                    logger.debug("command opened: command=%s", command.command_id)
                case CommandClosed(command_id=command_id, why=why):
                    logger.debug("command closed: command=%s %s", command_id, why)
                case CommandsOpened() | CommandsClosed() | RecordChanged():
                    pass  # Only the journal has these.
                case _:
                    assert_never(change)

    def _is_news(self, what: str, state: StrEnum) -> bool:
        is_news = self._logged.get(what) is not state
        self._logged[what] = state
        return is_news
