"""Finding the controller and the job or node that a command is about."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cli.errors import CliError, ExitCode
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.specfile import describe_problems

if TYPE_CHECKING:
    from outlast.access import Access
    from outlast.cli.places import Nodes
    from outlast.client import Client
    from outlast.v1.incidents_pb2 import Incident
    from outlast.v1.jobs_pb2 import Job

# Ids that a message lists.
MAX_LISTED = 8

# `plan` works without a controller, and does not wait long for one.
LOOK_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Controller:
    """One to call, and what it is shown."""

    address: str
    access: Access

    def client(self, *, longest_call_s: float = math.inf) -> Client:
        """A connection to it."""
        from outlast.client import Client

        return Client(self.address, access=self.access, longest_call_s=longest_call_s)


def find_controller(given: str, state_dir: Path) -> Controller:
    """The controller that is meant: HOST:PORT or the name of a login as given; else that of a
    state directory other than the default; else the login in use; else the default's.

    Raises:
        CliError: nothing says which (exit code 3), or what it is shown cannot be read.
    """
    from outlast.access import (
        ENVIRONMENT,
        AccessError,
        logins_file,
        noted_in,
        of,
        read_logins,
    )

    try:
        logins = read_logins(logins_file())
        login = logins.by_name.get(given or logins.current)
        if given and login is None:
            return Controller(given, of(given))
        is_default = state_dir.expanduser() == DEFAULT_STATE_DIR.expanduser()
        if login is None or not (given or is_default):
            login = noted_in(state_dir)
        elif any(name in os.environ for name in ENVIRONMENT):
            return Controller(login.address, of(login.address))
    except AccessError as error:
        raise CliError(str(error)) from error
    if login is None:
        path = state_dir.expanduser() / "controller.json"
        raise CliError(
            f"no controller: {path} does not name one. Start one with `outlast up`, or say "
            "where it is with --controller HOST:PORT or OUTLAST_CONTROLLER",
            ExitCode.NO_CONTROLLER,
        )
    return Controller(login.address, login.access)


@contextmanager
def controller_of(controller: str, state_dir: Path) -> Iterator[Client]:
    """A client for the controller; what goes wrong on the way becomes a CliError."""
    from outlast.client import UnavailableError
    from outlast.errors import OutlastError
    from outlast.problems import SpecError

    found = find_controller(controller, state_dir)
    try:
        with found.client() as client:
            yield client
    except UnavailableError as error:
        why = _unreachable(found, controller, error.why)
        raise CliError(why, ExitCode.NO_CONTROLLER) from error
    except SpecError as error:
        raise CliError(describe_problems("the request", error)) from error
    except OutlastError as error:
        raise CliError(str(error)) from error


def connector(controller: str, state_dir: Path) -> Callable[[], Client]:
    """Makes a client each time; looks the address up anew, since it may have changed. The login is
    the one that is in use now, whichever will be.

    Raises UnavailableError while no controller is noted.
    """
    named = controller or _login_in_use(state_dir)

    def connect() -> Client:
        from outlast.client import UnavailableError

        try:
            if not controller and named != _login_named(named):
                raise CliError(f"the login {named!r} is not kept any more")
            return find_controller(named, state_dir).client()
        except CliError as error:
            raise UnavailableError(str(error)) from error

    return connect


def _login_named(name: str) -> str:
    """The name again, if there is a login of it; "" where there is none."""
    from outlast.access import AccessError, logins_file, read_logins

    try:
        return name if name in read_logins(logins_file()).by_name else ""
    except AccessError as error:
        raise CliError(str(error)) from error


def _login_in_use(state_dir: Path) -> str:
    """The name of the login that commands mean now; "" where they mean none."""
    from outlast.access import AccessError, logins_file, read_logins

    if state_dir.expanduser() != DEFAULT_STATE_DIR.expanduser():
        return ""
    try:
        return read_logins(logins_file()).current
    except AccessError:
        return ""


def where_nodes_are(controller: str, state_dir: Path) -> Nodes:
    """Whether a job's nodes are this machine, so that its files can be looked at.

    An address of this machine may be that of a tunnel, so what its nodes say counts.
    """
    from outlast.channel import is_loopback
    from outlast.cli.places import Nodes
    from outlast.errors import OutlastError

    try:
        meant = find_controller(controller, state_dir)
    except CliError:
        return Nodes.UNKNOWN
    if not is_loopback(meant.address.rpartition(":")[0]):
        return Nodes.ELSEWHERE
    try:
        with meant.client() as client:
            found = [node.address for node in client.nodes(timeout_s=LOOK_TIMEOUT_S)]
    except OutlastError:
        return Nodes.UNKNOWN
    if found:
        return Nodes.HERE if all(map(is_loopback, found)) else Nodes.ELSEWHERE
    return Nodes.UNKNOWN if controller else Nodes.HERE


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


def _unreachable(found: Controller, controller: str, why: str) -> str:
    where = "" if controller else ", where the state folder or the login says that it runs"
    encrypted = (
        f" It was asked as its authority's certificate demands: {why}."
        if found.access.ca
        else " It is asked in clear text: one with --tls-dir needs `outlast login --ca`."
    )
    return (
        f"no controller answers at {found.address}{where}. Start one with `outlast up`, or say "
        f"where it is with --controller HOST:PORT or OUTLAST_CONTROLLER.{encrypted}"
    )
