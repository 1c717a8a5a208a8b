"""How many nodes each image is to have: jobs that bring an image need nodes that run it.

Pure. While the cluster has hosts for all, each image gets what its jobs want. Where it has not,
jobs are served in turn, or two of them would hold half of their hosts each and wait for the
other half for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from controller.core.records import JobRecord, NodeRecord
from controller.core.spares import spares_wanted
from controller.core.states import JobState
from controller.kube.observed import Pod

_WAITING = (JobState.QUEUED, JobState.PROVISIONING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """How many nodes of one image a job needs, or are kept as warm spares."""

    nodes: int
    image: str = ""


def claims(jobs: Iterable[JobRecord], workers: int) -> tuple[Claim, ...]:
    """The nodes, with `workers` places each, that jobs need: running jobs first, then queued ones
    by priority, of equal ones in the order of submission, then warm spares.

    A job that needs larger nodes cannot be helped; it says so itself.
    """
    live = [job for job in jobs if job.wants_nodes and job.plan.workers_per_node <= workers]
    live.sort(key=lambda job: (job.state in _WAITING, -job.plan.priority, job.submitted_s))
    wanted = [Claim(nodes=job.plan.wanted_nodes, image=job.plan.need.image) for job in live]
    spares = [Claim(nodes=count, image=image) for image, count in spares_wanted(live).items()]
    return tuple(claim for claim in (*wanted, *spares) if claim.nodes)


def shares(
    claims: Iterable[Claim], useful: Iterable[NodeRecord], on_the_way: Iterable[Pod], room: int
) -> Counter[str]:
    """Nodes by image, of those that the jobs have or await; `room` is how many hosts have been
    ours as far as they are there and can be used."""
    pods = tuple(on_the_way)
    wanted, served = Counter[str](), Counter[str]()
    left = room
    for claim in claims:
        wanted[claim.image] += claim.nodes
        served[claim.image] += min(claim.nodes, left)
        left -= min(claim.nodes, left)
    if len(wanted) < 2 or not any(pod.finds_no_host for pod in pods):
        return wanted
    held = Counter(node.image for node in useful)
    held.update(pod.image for pod in pods if pod.host is not None)
    return served if any(held[image] < count for image, count in served.items()) else wanted
