"""Who may call what: the roles of callers, and the least that each call takes."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Role(enum.IntEnum):
    """What a caller may do; each includes those before it."""

    VIEWER = 1
    """Look at everything: jobs, their output, nodes, incidents."""
    SUBMITTER = 2
    """Submit jobs, and pause, resume and cancel one's own."""
    OPERATOR = 3
    """The jobs of others, nodes, and diagnostics."""
    ADMIN = 4
    """Read who did what."""

    @property
    def word(self) -> str:
        """As files and messages have it."""
        return self.name.lower()


# What is said in place of a role where a node calls.
NODE = "node"
ROLES = {role.word: role for role in Role}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What one method takes."""

    role: Role | None
    """None: nodes call it, and show a join token or a node's certificate."""
    changes: bool = False
    """It is written down who called it."""
    of_owner: bool = False
    """Of a job of somebody else it takes an operator."""


_LOOK = Rule(role=Role.VIEWER)
_NODE = Rule(role=None)
_OWN_JOB = Rule(role=Role.SUBMITTER, changes=True, of_owner=True)
_OPERATE = Rule(role=Role.OPERATOR, changes=True)

RULES: Mapping[str, Rule] = {
    f"/outlast.v1.{method}": rule
    for rule, methods in (
        (
            _LOOK,
            (
                "Access/WhoAmI",
                "Diagnostics/WatchDiagnostics",
                "Diagnostics/ListDiagnostics",
                "Diagnostics/GetDiagnostics",
                "Incidents/ListIncidents",
                "Incidents/GetIncident",
                "Jobs/CheckFit",
                "Jobs/GetHistory",
                "Jobs/GetJob",
                "Jobs/ListJobs",
                "Jobs/WatchJob",
                "Jobs/Logs",
                "Nodes/GetNode",
                "Nodes/ListNodes",
                "Ranks/ListRanks",
                "Ranks/ReadTimes",
                "Trends/GetJobTrends",
                "Trends/ListNodeStatistics",
            ),
        ),
        (Rule(role=Role.SUBMITTER), ("Code/FindCode",)),
        (Rule(role=Role.SUBMITTER, changes=True), ("Code/PutCode", "Jobs/Submit")),
        (
            _OWN_JOB,
            (
                "Jobs/CancelJob",
                "Jobs/PauseJob",
                "Jobs/ResumeJob",
                "Jobs/PushCheckpoint",
                # They hold its processes up.
                "Ranks/ReadStacks",
                "Ranks/RecordProfile",
            ),
        ),
        (
            _OPERATE,
            (
                "Diagnostics/RunDiagnostics",
                "Nodes/CordonNode",
                "Nodes/UncordonNode",
                "Nodes/DrainNode",
                "Nodes/ForgetNode",
                "Nodes/RejoinNode",
            ),
        ),
        (Rule(role=Role.ADMIN), ("Access/ReadAudit",)),
        # Enrollment writes down itself who has got a certificate, and who has not.
        (_NODE, ("Agents/Session", "Code/GetCode", "Enrollment/Enroll")),
    )
    for method in methods
}
# What says no more than that the controller is there: probes have no token.
FOR_ALL = ("/grpc.health.v1.Health/Check",)
# The names of all methods, for tools that ask for them.
_OTHER = _LOOK


def rule_of(method: str) -> Rule | None:
    """What a call by this name takes; None for what everybody may call."""
    if method in FOR_ALL:
        return None
    return RULES.get(method, _OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls."""

    name: str
    role: Role | None
    """None: a node."""

    @property
    def word(self) -> str:
        """The role, as files and messages have it."""
        return NODE if self.role is None else self.role.word


# Where nobody is asked who he is.
ANYBODY = Caller(name="", role=Role.ADMIN)


def refusal(caller: Caller, rule: Rule, owner: str | None) -> str:
    """Why a caller may not do this; "" where it may. `owner`: of the job that it is about."""
    if rule.role is None:
        # Without certificates a join token decides, which the services of nodes look at.
        return ""
    if caller.role is None:
        return f"{caller.name} is a node, and may make the calls of nodes only"
    if caller.role < rule.role:
        return f"{caller.name} is {caller.role.word}; this takes {rule.role.word}"
    is_others = owner is not None and owner != caller.name
    if rule.of_owner and is_others and caller.role < Role.OPERATOR:
        whose = f"is of {owner}" if owner else "has no owner"
        return (
            f"this job {whose}, and {caller.name} is {caller.role.word}; "
            f"this takes its owner or {Role.OPERATOR.word}"
        )
    return ""
