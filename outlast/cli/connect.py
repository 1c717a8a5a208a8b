"""Finding the controller and the job or node that a command is about."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cli.errors import CliError, ExitCode
from outlast.cli.specfile import describe_problems

if TYPE_CHECKING:
    from outlast.cli.places import Nodes
    from outlast.client import Client
    from outlast.v1.incidents_pb2 import Incident
    from outlast.v1.jobs_pb2 import Job

# Ids that a message lists.
MAX_LISTED = 8

# `plan` works without a controller, and does not wait long for one.
LOOK_TIMEOUT_S = 3.0


def resolve_address(controller: str, state_dir: Path) -> str:
    """HOST:PORT as given, or as the controller on `state_dir` noted it.

    Raises:
        CliError: neither says anything (exit code 3).
    """
    if controller:
        return controller
    path = state_dir.expanduser() / "controller.json"
    try:
        noted = json.loads(path.read_text())
        return str(noted["grpc"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CliError(
            f"no controller: {path} does not name one. Start one with `outlast up`, or say "
            "where it is with --controller HOST:PORT or OUTLAST_CONTROLLER",
            ExitCode.NO_CONTROLLER,
        ) from error


@contextmanager
def controller_of(controller: str, state_dir: Path) -> Iterator[Client]:
    """A client for the controller; what goes wrong on the way becomes a CliError."""
    from outlast.client import Client, UnavailableError
    from outlast.errors import OutlastError
    from outlast.problems import SpecError

    address = resolve_address(controller, state_dir)
    try:
        with Client(address) as client:
            yield client
    except UnavailableError as error:
        raise CliError(_unreachable(address, controller), ExitCode.NO_CONTROLLER) from error
    except SpecError as error:
        raise CliError(describe_problems("the request", error)) from error
    except OutlastError as error:
        raise CliError(str(error)) from error


def connector(controller: str, state_dir: Path) -> Callable[[], Client]:
    """Makes a client each time; looks the address up anew, since it may have changed.

    Raises UnavailableError while no controller is noted.
    """

    def connect() -> Client:
        from outlast.client import Client, UnavailableError

        try:
            return Client(resolve_address(controller, state_dir))
        except CliError as error:
            raise UnavailableError(str(error)) from error

    return connect


def where_nodes_are(controller: str, state_dir: Path) -> Nodes:
    """Whether a job's nodes are this machine, so that its files can be looked at.

    An address of this machine may be that of a tunnel, so what its nodes say counts.
    """
    from outlast.cli.places import Nodes
    from outlast.client import Client
    from outlast.errors import OutlastError

    try:
        address = resolve_address(controller, state_dir)
    except CliError:
        return Nodes.UNKNOWN
    if not _is_loopback(address.rpartition(":")[0]):
        return Nodes.ELSEWHERE
    try:
        with Client(address) as client:
            found = [node.address for node in client.nodes(timeout_s=LOOK_TIMEOUT_S)]
    except OutlastError:
        return Nodes.UNKNOWN
    if found:
        return Nodes.HERE if all(map(_is_loopback, found)) else Nodes.ELSEWHERE
    return Nodes.UNKNOWN if controller else Nodes.HERE


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def find_job(client: Client, wanted: str) -> Job:
    """The job with this id or name, or the only one whose id or name begins so.

    Several jobs may share a name, of which one has not finished; that one, or else the
    newest, is meant. No name at all means the only job, or the only one not finished.

    Raises:
        CliError: none, or several that it could be.
    """
    from outlast.cli.describe import FINISHED

    jobs = list(client.list())
    if not wanted:
        return _only(jobs)
    for job in jobs:
        if job.job_id == wanted:
            return job
    named = [job for job in jobs if job.name == wanted]
    if named:
        unfinished = [job for job in named if job.state not in FINISHED]
        return max(unfinished or named, key=lambda job: job.submitted_s)
    begun = [job for job in jobs if job.job_id.startswith(wanted)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        ids = ", ".join(sorted(job.job_id for job in begun)[:MAX_LISTED])
        raise CliError(f"job {wanted!r} could be any of: {ids}")
    raise CliError(f"no job {wanted!r}; `outlast jobs` lists them")


def _only(jobs: list[Job]) -> Job:
    from outlast.cli.describe import FINISHED

    for candidates in (jobs, [job for job in jobs if job.state not in FINISHED]):
        if len(candidates) == 1:
            return candidates[0]
    if not jobs:
        raise CliError("there is no job; `outlast submit SPEC` makes one")
    newest = sorted(jobs, key=lambda job: -job.submitted_s)
    listed = ", ".join(f"{job.job_id} ({job.state})" for job in newest[:MAX_LISTED])
    more = f" and {len(jobs) - MAX_LISTED} more" if len(jobs) > MAX_LISTED else ""
    raise CliError(f"which job? There are {listed}{more}")


def find_incident(client: Client, wanted: str) -> Incident:
    """The incident with this id, or the only one whose id is short for it.

    `i2` is enough where one job has an i2, and `gpt-tiny.i2` names the job as `find_job` does.

    Raises:
        CliError: none, or several that it could be.
    """
    from outlast.client import NotFoundError

    try:
        return client.incident(wanted)
    except NotFoundError:
        pass
    job, dot, number = wanted.rpartition(".")
    if dot and any(each.name == job or each.job_id.startswith(job) for each in client.list()):
        found = client.incidents(find_job(client, job).job_id)
        ids = [each for each in found if each.incident_id.rpartition(".")[2] == number]
    else:
        found = client.incidents()
        ids = [each for each in found if each.incident_id.endswith(f".{wanted}")] or [
            each for each in found if each.incident_id.startswith(wanted)
        ]
    if len(ids) == 1:
        return ids[0]
    if ids:
        listed = ", ".join(sorted(each.incident_id for each in ids)[:MAX_LISTED])
        raise CliError(f"incident {wanted!r} could be any of: {listed}")
    raise CliError(f"no incident {wanted!r}; `outlast incidents` lists them")


def _unreachable(address: str, controller: str) -> str:
    where = "" if controller else ", where the state folder says that it runs"
    return (
        f"no controller answers at {address}{where}. Start one with `outlast up`, or say where "
        "it is with --controller HOST:PORT or OUTLAST_CONTROLLER"
    )
