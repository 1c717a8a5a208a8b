"""Certificates, tokens and logins, as a person uses them with a controller that asks for them."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from outlast.access import Access, Login, Logins, write_logins
from outlast.cli.errors import ExitCode
from tests.cli.running import TIMEOUT_S, Done, outlast
from tests.controller.processes import controller

SPEC = {
    "name": "tiny",
    "steps": 3,
    "model": {"layers": 1, "hidden": 32, "heads": 2, "seq_len": 32},
    "parallel": {"dp": 2, "micro_batch": 2},
    "data": {"global_batch": 4, "max_bytes": 65536},
    "resources": {"workers_per_node": 2, "device": "cpu"},
    "recovery": {"preflight": False},
}


@dataclass(frozen=True)
class Place:
    """A controller with encryption and tokens, and the files of a person."""

    folder: Path
    grpc: str

    def outlast(self, *arguments: str, stdin: str = "", **environment: str) -> Done:
        home = {"XDG_CONFIG_HOME": str(self.folder / "home"), **environment}
        return outlast(*arguments, stdin=stdin, **home)

    def login(self, name: str) -> Done:
        ca, token = self.folder / "ca" / "ca.crt", self.folder / name
        shown = ("--ca", str(ca), "--token-file", str(token), "--name", name)
        return self.outlast("login", self.grpc, *shown)


def issued(folder: Path, *arguments: str) -> str:
    done = outlast("certs", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """`outlast up` with one node of two ranks, which listens on every interface."""
    folder = tmp_path_factory.mktemp("access")
    issued(folder, "init", str(folder / "ca"))
    issued(folder, "issue", str(folder / "ca"), str(folder / "tls"), "--host", "ctl.example")
    for name, role in (("adam", "admin"), ("sam", "submitter"), ("vera", "viewer")):
        done = outlast("tokens", "add", str(folder / "tokens.yaml"), name, "--role", role)
        assert done.returncode == 0, done.stderr
        (folder / name).write_text(done.stdout)
    state = folder / "state"
    arguments = (
        *("up", "--state-dir", str(state), "--nodes", "1", "--standby", "0"),
        *("--grpc", "0.0.0.0:0", "--http", "0.0.0.0:0"),
        *("--tls-dir", str(folder / "tls"), "--tokens-file", str(folder / "tokens.yaml")),
    )
    log = folder / "log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "outlast.cli.main", *arguments], stdout=written, stderr=written
        )
    try:
        wait_for(lambda: (state / "controller.json").exists() or process.poll(), log.read_text)
        assert process.poll() is None, log.read_text()
        noted = json.loads((state / "controller.json").read_text())
        yield Place(folder=folder, grpc=noted["grpc"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == ExitCode.OK, log.read_text()
    finally:
        process.kill()
        process.wait()


def wait_for(is_so: Callable[[], Any], says: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s, says()
        time.sleep(0.05)


def test_a_job_trains_for_who_has_logged_in(place: Place, tmp_path: Path) -> None:
    done = place.login("sam")
    assert (done.returncode, done.stdout) == (0, "sam: you are sam, submitter\n"), done.stderr
    assert stat.S_IMODE((place.folder / "home/outlast/logins.yaml").stat().st_mode) == 0o600
    spec = tmp_path / "job.yaml"
    spec.write_text(yaml.safe_dump(SPEC))
    trained = place.outlast("submit", str(spec), "--watch")
    assert trained.returncode == 0, trained.stderr + trained.stdout
    jobs = json.loads(place.outlast("jobs", "--json").stdout)["jobs"]
    assert [(job["name"], job["state"], job["owner"]) for job in jobs] == [
        ("tiny", "SUCCEEDED", "sam")
    ]
    assert "owner       sam" in place.outlast("status", "tiny").stdout


def test_whoever_shows_nothing_learns_how_to_log_in(place: Place) -> None:
    state = ("--state-dir", str(place.folder / "state"))
    # The state folder has the authority, and no token.
    done = outlast("jobs", *state)
    assert done.returncode == ExitCode.BAD_INPUT
    assert "nobody is named; log in with `outlast login HOST:PORT`" in done.stderr
    token = str(place.folder / "vera")
    assert outlast("jobs", *state, OUTLAST_TOKEN_FILE=token).returncode == 0
    # Not even encrypted.
    plain = outlast("jobs", "--controller", place.grpc)
    assert plain.returncode == ExitCode.NO_CONTROLLER
    assert "one with --tls-dir needs `outlast login --ca`" in plain.stderr
    ca = str(place.folder / "ca" / "ca.crt")
    given = {"OUTLAST_CA": ca, "OUTLAST_TOKEN_FILE": token, "OUTLAST_CONTROLLER": place.grpc}
    assert outlast("whoami", **given).stdout == "you are vera, viewer\n"


def test_a_viewer_looks_and_changes_nothing(place: Place, tmp_path: Path) -> None:
    assert place.login("vera").returncode == 0
    spec = tmp_path / "job.yaml"
    spec.write_text(yaml.safe_dump({**SPEC, "name": "other"}))
    assert place.outlast("nodes").returncode == 0
    for arguments in (("submit", str(spec)), ("nodes", "cordon", "node-0"), ("audit",)):
        done = place.outlast(*arguments)
        assert done.returncode == ExitCode.BAD_INPUT
        assert "vera is viewer; this takes" in done.stderr


def test_an_admin_reads_who_did_what(place: Place) -> None:
    assert place.login("adam").returncode == 0
    assert place.outlast("nodes", "cordon", "node-0").returncode == 0
    assert place.outlast("nodes", "uncordon", "node-0").returncode == 0
    shown = place.outlast("audit", "--caller", "adam")
    assert shown.stdout.splitlines()[0].split() == [
        *("WHEN", "CALLER", "FROM", "CALL", "ABOUT", "OUTCOME")
    ]
    assert "Nodes/UncordonNode" in shown.stdout.splitlines()[1]
    lines = [json.loads(line) for line in place.outlast("audit", "--json").stdout.splitlines()]
    assert [(each["caller"], each["call"], each["about"]) for each in lines[:2]] == [
        ("adam", "Nodes/UncordonNode", "node-0"),
        ("adam", "Nodes/CordonNode", "node-0"),
    ]


def test_one_login_of_several_is_in_use(place: Place) -> None:
    for name in ("vera", "adam"):
        assert place.login(name).returncode == 0
    assert place.outlast("whoami").stdout == "you are adam, admin\n"
    assert place.outlast("whoami", "--controller", "vera").stdout == "you are vera, viewer\n"
    rows = [line.split() for line in place.outlast("logins", "--use", "vera").stdout.splitlines()]
    assert ["*", "vera", place.grpc, "yes", "token"] in rows
    assert ["adam", place.grpc, "yes", "token"] in rows
    assert place.outlast("whoami").stdout == "you are vera, viewer\n"
    assert place.outlast("logins", "--use", "none").returncode == ExitCode.BAD_INPUT
    assert place.outlast("logout").stdout == "vera: forgotten\n"
    assert "vera" not in place.outlast("logins").stdout
    assert place.outlast("logout").stderr == "outlast: no login in use\n"


def test_a_controller_of_this_machine_is_asked_as_its_own_folder_says(tmp_path: Path) -> None:
    """Whatever the environment, or a login at its address, has for another one."""
    folder = tmp_path / "state"
    with controller(folder) as found:
        home = tmp_path / "home" / "outlast" / "logins.yaml"
        home.parent.mkdir(parents=True)
        issued(tmp_path, "init", str(tmp_path / "ca"))
        ca = (tmp_path / "ca" / "ca.crt").read_text()
        other = Login(address=found.grpc, access=Access(ca=ca))
        write_logins(home, Logins(current="other", by_name={"other": other}))
        asked = ("jobs", "--state-dir", str(folder))
        given = {"XDG_CONFIG_HOME": str(tmp_path / "home")}
        assert outlast(*asked, **given).stdout == "no jobs\n"
        given["OUTLAST_CA"] = str(tmp_path / "ca" / "ca.crt")
        assert outlast(*asked, **given).stdout == "no jobs\n"
        # By its address it is the one that was logged in to.
        assert outlast("jobs", "--controller", found.grpc, **given).returncode == 3


def test_a_login_that_is_refused_is_not_kept(place: Place) -> None:
    ca = str(place.folder / "ca" / "ca.crt")
    for token, code in (("outlast_wrong", ExitCode.BAD_INPUT), (" ", ExitCode.BAD_INPUT)):
        shown = ("--ca", ca, "--name", "wrong", "--token-file", "-")
        done = place.outlast("login", place.grpc, *shown, stdin=token)
        assert done.returncode == code
    gone = place.outlast("login", "127.0.0.1:1", "--name", "wrong")
    assert gone.returncode == ExitCode.NO_CONTROLLER
    assert "wrong" not in place.outlast("logins").stdout


def test_certificates_are_shown_and_replaced(tmp_path: Path) -> None:
    ca, folder = str(tmp_path / "ca"), str(tmp_path / "node")
    assert "ca.key: the secret that signs" in issued(tmp_path, "init", ca)
    said = issued(tmp_path, "issue", ca, folder, "--node", "gpu-17", "--days", "30")
    assert said.startswith(f"{folder}: certificate of node gpu-17, until 20")
    before = (tmp_path / "node" / "tls.key").read_text()
    issued(tmp_path, "rotate", ca, folder)
    assert "is an authority's" in outlast("certs", "rotate", ca, ca).stderr
    assert (tmp_path / "node" / "tls.key").read_text() != before
    lines = dict(line.split(maxsplit=1) for line in issued(tmp_path, "show", folder).splitlines())
    assert (lines["name"], lines["role"]) == ("gpu-17", "node")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("certs", "issue", "CA", "DIR"), "give one of --host, for a controller, --node and"),
        (("certs", "issue", "CA", "DIR", "--node", "a", "--user", "b"), "give one of --host"),
        (("certs", "issue", "CA", "DIR", "--user", "a b"), "the name is 'a b'; allowed"),
        (("certs", "issue", "CA", "DIR", "--user", "a", "--role", "root"), "--role is 'root'"),
        (("certs", "issue", "none", "DIR", "--user", "a"), "none/ca.crt cannot be read"),
        (("certs", "issue", "CA", "DIR", "--host", "ctl:7070"), "--host is 'ctl:7070'; allowed"),
        (("certs", "issue", "CA", "DIR", "--host", ""), "--host is ''; allowed"),
        (("certs", "init", "CA", "--name", ""), "--name has 0 characters; allowed: 1 to 64"),
        (("certs", "show", "none"), "none/ca.crt cannot be read"),
        (("tokens", "add", "FILE", "a", "--role", "root"), "--role is 'root'; allowed: viewer"),
        (("tokens", "add", "FILE", "a b", "--role", "admin"), "the name is 'a b'; allowed"),
        (("tokens", "list", "none.yaml"), "none.yaml cannot be read"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, arguments: tuple[str, ...], why: str) -> None:
    done = outlast(*(str(tmp_path / each) if each.isupper() else each for each in arguments))
    assert done.returncode == ExitCode.BAD_INPUT
    assert why in done.stderr
    assert not (tmp_path / "FILE").exists()


def test_tokens_are_listed_and_taken_away(tmp_path: Path) -> None:
    path = str(tmp_path / "tokens.yaml")
    for name in ("alice", "kim"):
        added = ("tokens", "add", path, name, "--role", "viewer")
        assert outlast(*added, "--days", "10").stdout.startswith("outlast_")
    assert "alice has a token already" in outlast(*added[:3], "alice", *added[4:]).stderr
    listed = json.loads(outlast("tokens", "list", path, "--json").stdout)
    assert [each["name"] for each in listed] == ["alice", "kim"]
    assert outlast("tokens", "remove", path, "alice").returncode == 0
    assert "alice" not in outlast("tokens", "list", path).stdout
    assert "it has: kim" in outlast("tokens", "remove", path, "alice").stderr


@pytest.mark.parametrize("command", ["up", "controller"])
def test_nothing_listens_beyond_this_machine_without_encryption_and_login(
    tmp_path: Path, command: str
) -> None:
    state = ("--state-dir", str(tmp_path / "state"))
    done = outlast(command, *state, "--grpc", "0.0.0.0:0")
    assert done.returncode == ExitCode.BAD_INPUT
    assert "--grpc 0.0.0.0:0: anyone who reaches it could run programs on every node" in done.stderr
    for option in ("--tls-dir", "--tokens-file", "--insecure-i-know"):
        assert option in done.stderr
    opened = outlast(command, *state, "--http", "0.0.0.0:0", "--open-http")
    assert "--http 0.0.0.0:0" in opened.stderr
    assert not (tmp_path / "state").exists()
