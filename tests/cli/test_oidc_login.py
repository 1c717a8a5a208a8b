"""`outlast login` at an issuer with device authorization, for a controller that trusts it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from outlast.access import Access, AccessError, LoginsBusyError, logins_file, of
from outlast.cli import oidc_login
from outlast.cli.errors import ExitCode
from outlast.cli.follow import Follower
from outlast.client import Client
from outlast.oidc.device_code import GRANT_TYPE
from outlast.oidc.issuer import IssuerUnavailableError, OidcClient
from outlast.v1.jobs_pb2 import Job
from tests.cli.running import TIMEOUT_S, Done, outlast
from tests.controller.access.device_issuer import CLIENT, USER_CODE, DeviceIssuer
from tests.controller.access.provider import AUDIENCE, KIM, ROLES
from tests.controller.fakes import spec_document
from tests.controller.processes import controller
from tests.e2e.cluster import wait_for

REFRESH = "refresh_token"


@dataclass(frozen=True)
class Place:
    """A controller, the issuer that it names, and a person's folder."""

    issuer: DeviceIssuer
    grpc: str
    tokens_file: Path
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"XDG_CONFIG_HOME": str(self.home)}

    @property
    def kept(self) -> dict[str, Any]:
        """Logins as their file has them."""
        found: dict[str, Any] = yaml.safe_load(logins_file(self.environment).read_text())["logins"]
        return found

    def outlast(self, *arguments: str) -> Done:
        return outlast(*arguments, **self.environment)

    def login(self, *arguments: str, says: str = "y") -> Done:
        """At a terminal, where a person answers what is asked."""
        given = ("login", self.grpc, "--name", "lab", *arguments)
        return outlast(*given, stdin=f"{says}\n", is_terminal=True, **self.environment)

    @property
    def named(self) -> tuple[str, ...]:
        """What says enough for nobody to be asked."""
        return ("--oidc-issuer", self.issuer.url, "--oidc-client-id", CLIENT)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """The same in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "outlast.cli.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment},
        )


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DeviceIssuer, str, Path]]:
    folder = tmp_path_factory.mktemp("oidc")
    issuer = DeviceIssuer()
    path = folder / "tokens.yaml"
    path.write_text(yaml.safe_dump([entry(issuer)]))
    with controller(folder / "state", "--tokens-file", str(path)) as found:
        yield issuer, found.grpc, path
    issuer.close()


def entry(issuer: DeviceIssuer, **changes: str) -> dict[str, Any]:
    return issuer.issuer(roles=ROLES, client_id=CLIENT, **changes).document()


@pytest.fixture
def place(trusting: tuple[DeviceIssuer, str, Path], tmp_path: Path) -> Iterator[Place]:
    issuer, grpc, path = trusting
    before, code, discovery = path.read_text(), dict(issuer.code), dict(issuer.discovery)
    yield Place(issuer=issuer, grpc=grpc, tokens_file=path, home=tmp_path)
    path.write_text(before)
    issuer.code = code
    issuer.discovery.clear()
    issuer.discovery.update(discovery)
    for queue in (issuer.asked, issuer.refusals, issuer.lives_s):
        queue.clear()
    issuer.changes = {}
    issuer.before_refresh = lambda: None


def test_an_address_is_enough_where_the_controller_names_its_issuer(place: Place) -> None:
    pending = (400, {"error": "authorization_pending"})
    place.issuer.refusals = [pending, pending]
    done = place.login()
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"lab: you are {KIM.name}, submitter\n"
    lines = [line.strip() for line in done.stderr.splitlines()]
    for each in (f"{place.issuer.url}/device", USER_CODE):
        assert each in lines
    assert f"{place.issuer.url}/device?user_code={USER_CODE}" in lines
    assert "Waiting for up to 10 min 0 s; Ctrl-C ends it." in lines
    begin, *polls = place.issuer.asked
    assert begin == {
        "client_id": CLIENT,
        "scope": "openid email offline_access",
        "audience": AUDIENCE,
    }
    assert len(polls) == 3
    assert {each["client_id"] for each in polls} == {CLIENT}
    for name in ("logins.yaml", "logins.yaml.lock"):
        assert stat.S_IMODE((place.home / "outlast" / name).stat().st_mode) == 0o600
    assert place.outlast("jobs").stdout == "no jobs\n"
    assert place.outlast("whoami").stdout == f"you are {KIM.name}, submitter\n"
    assert place.issuer.forms(REFRESH) == []


def test_a_person_may_say_which_issuer_and_as_what(place: Place, tmp_path: Path) -> None:
    place.tokens_file.write_text(yaml.safe_dump([{**entry(place.issuer), "client_id": "other"}]))
    (tmp_path / "secret").write_text("s&cret\n")
    given = (*place.named, "--oidc-scope", "openid", "--oidc-scope", "groups")
    done = place.outlast(
        "login",
        place.grpc,
        "--name",
        "lab",
        *given,
        "--oidc-client-secret-file",
        str(tmp_path / "secret"),
    )
    assert done.returncode == 0, done.stderr
    assert place.issuer.asked[0] == {
        "client_id": CLIENT,
        "scope": "openid groups",
        # client_secret_basic, unless the issuer has the other way.
        "Authorization": "Basic b3V0bGFzdC1jbGk6cyUyNmNyZXQ=",
    }
    place.issuer.discovery["token_endpoint_auth_methods_supported"] = ["client_secret_post"]
    again = place.outlast("login", "lab", "--oidc-audience", AUDIENCE)
    assert again.returncode == 0, again.stderr
    assert place.issuer.asked[-1]["client_secret"] == "s&cret"
    assert place.issuer.forms(GRANT_TYPE)[-1]["client_id"] == CLIENT


def test_of_several_issuers_one_is_chosen(place: Place) -> None:
    both = [entry(place.issuer), {**entry(place.issuer, audience="b"), "client_id": "b"}]
    place.tokens_file.write_text(yaml.safe_dump(both))
    done = place.login()
    assert done.returncode == ExitCode.BAD_INPUT
    assert "choose with --oidc-issuer and --oidc-client-id" in done.stderr
    assert place.login("--oidc-client-id", CLIENT).returncode == 0


def test_a_token_that_has_expired_is_renewed_before_the_call(place: Place) -> None:
    place.issuer.lives_s = [5.0]
    assert place.login().returncode == 0
    before = place.kept["lab"]
    assert place.outlast("whoami").stdout == f"you are {KIM.name}, submitter\n"
    assert [form["refresh_token"] for form in place.issuer.forms(REFRESH)] == [
        before["oidc"]["refresh_token"]
    ]
    after = place.kept["lab"]
    assert after["token"] != before["token"]
    assert after["oidc"] == {**before["oidc"], "refresh_token": place.issuer.current}
    assert place.outlast("jobs").returncode == 0
    assert len(place.issuer.forms(REFRESH)) == 1


def test_a_client_that_lasts_renews_its_token_between_calls(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an issuer that gives no new refresh token takes the one that it gave."""
    place.issuer.lives_s = [5.0, 5.0, 5.0]
    assert place.login().returncode == 0
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place.home))
    with Client(place.grpc) as client:
        for _ in range(2):
            assert client.who_am_i().name == KIM.name
        place.issuer.changes = {"refresh_token": None}
        kept = place.issuer.current
        assert client.list() == ()
    assert len(place.issuer.forms(REFRESH)) == 3
    assert place.kept["lab"]["oidc"]["refresh_token"] == kept


def test_a_token_is_renewed_and_shown_while_a_stream_is_open(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.issuer.lives_s = [12.0]
    assert place.login().returncode == 0
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place.home))
    with Client(place.grpc) as client:
        job = client.submit(spec_document(name="watched"), wait_for_nodes=True)
        watched = client.watch(job.job_id)
        assert next(watched).job.job_id == job.job_id
        assert place.issuer.forms(REFRESH) == []
        # Ten seconds before its end, while nothing is said of the job.
        wait_for(lambda: place.issuer.forms(REFRESH) or None, "the token is renewed")
        watched.close()
        client.cancel(job.job_id)


def test_a_token_that_the_controller_calls_expired_is_renewed(place: Place) -> None:
    """Where this machine's clock is behind."""
    place.issuer.lives_s = [-5.0]
    assert place.login().returncode == 0
    path = logins_file(place.environment)
    document = yaml.safe_load(path.read_text())
    document["logins"]["lab"]["token"] = place.issuer.token(exp=time.time() - 3600, aud=AUDIENCE)
    document["logins"]["lab"]["oidc"]["expires_s"] = time.time() + 600
    path.write_text(yaml.safe_dump(document))
    assert place.outlast("whoami").stdout == f"you are {KIM.name}, submitter\n"
    assert len(place.issuer.forms(REFRESH)) == 1


def test_two_commands_at_once_use_a_refresh_token_once(place: Place) -> None:
    place.issuer.lives_s = [5.0]
    assert place.login().returncode == 0
    both_came = threading.Event()

    def wait_for_another() -> None:
        if len(place.issuer.forms(REFRESH)) > 1:
            both_came.set()
        # The other command has long begun by then, and waits for the lock.
        both_came.wait(2.0)

    place.issuer.before_refresh = wait_for_another
    running = [place.start("whoami") for _ in range(2)]
    ends = [(*each.communicate(timeout=TIMEOUT_S), each.returncode) for each in running]
    assert ends == [(f"you are {KIM.name}, submitter\n", "", 0)] * 2
    assert len(place.issuer.forms(REFRESH)) == 1


def test_a_login_that_has_ended_is_made_again_by_its_name(place: Place) -> None:
    place.issuer.lives_s = [5.0]
    assert place.login().returncode == 0
    place.issuer.current = "revoked"
    done = place.outlast("jobs")
    assert done.returncode == ExitCode.BAD_INPUT
    assert f"the token of {place.issuer.url} is not renewed: " in done.stderr
    assert "invalid_grant: Token is not active; run `outlast login lab` again" in done.stderr
    again = place.outlast("login", "lab")
    assert (again.returncode, again.stdout) == (0, f"lab: you are {KIM.name}, submitter\n")
    assert list(place.kept) == ["lab"]
    assert place.outlast("jobs").returncode == 0


def test_without_a_refresh_token_the_login_ends_with_the_token(place: Place) -> None:
    place.issuer.lives_s, place.issuer.changes = [5.0], {"refresh_token": None}
    assert place.login().returncode == 0
    done = place.outlast("jobs")
    assert done.returncode == ExitCode.BAD_INPUT
    assert "it gave no refresh token" in done.stderr
    assert "run `outlast login lab` again" in done.stderr


@pytest.mark.parametrize(
    ("status", "why"), [(503, "answered with status 503"), (429, "answered with status 429")]
)
def test_an_issuer_that_is_away_ends_no_login(place: Place, status: int, why: str) -> None:
    # The controller takes it for half a minute more, as clocks differ.
    place.issuer.lives_s = [-5.0]
    assert place.login().returncode == 0
    path = "/.well-known/openid-configuration"
    place.issuer.documents[path] = (status, {})
    done = place.outlast("jobs")
    place.issuer.documents[path] = (200, place.issuer.discovery)
    assert done.returncode == ExitCode.BAD_INPUT
    assert "cannot be renewed now" in done.stderr
    assert why in done.stderr
    assert place.outlast("jobs").returncode == 0


def test_whoever_logs_out_meanwhile_renews_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.issuer.lives_s = [5.0]
    assert place.login().returncode == 0
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place.home))
    access = of(place.grpc)
    assert place.outlast("logout").stdout.startswith("lab: forgotten, and ended")
    done = place.outlast("logins")
    assert "no logins" in done.stdout
    with Client(place.grpc, access=access) as client:
        with pytest.raises(Exception, match="its login is not kept any more"):
            client.who_am_i()
        # A stream says the same.
        with pytest.raises(Exception, match="its login is not kept any more"):
            next(client.watch("job"))


@pytest.mark.parametrize(
    ("refusal", "why"),
    [
        ((400, {"error": "access_denied"}), "the login was denied at the issuer"),
        ((400, {"error": "expired_token"}), "the code has expired (the issuer does not take"),
        (
            (401, {"error": "invalid_client", "error_description": "who?\x1b[2J"}),
            "the issuer ended the login: invalid_client: who??[2J",
        ),
        ((404, "elsewhere"), "the issuer ended the login: it answered with status 404"),
        ((200, {}), "has neither id_token nor access_token"),
        ((200, "tokens"), "answered with what is no JSON object"),
        ((200, {"id_token": "a\nb"}), "no text of printable characters"),
    ],
)
def test_what_ends_a_login_is_said_and_nothing_is_kept(
    place: Place, refusal: tuple[int, Any], why: str
) -> None:
    place.issuer.refusals = [refusal]
    done = place.login()
    assert done.returncode == ExitCode.BAD_INPUT
    assert why in " ".join(done.stderr.split())
    assert not logins_file(place.environment).exists()


def test_a_code_that_nobody_confirms_expires(place: Place) -> None:
    place.issuer.code["expires_in"] = 0.15
    place.issuer.refusals = [(400, {"error": "authorization_pending"})] * 9
    done = place.login()
    assert done.returncode == ExitCode.BAD_INPUT
    assert "nobody confirmed it in time" in done.stderr
    assert len(place.issuer.forms(GRANT_TYPE)) < 9


def test_the_access_token_is_taken_where_only_it_is_for_the_controller(place: Place) -> None:
    given = place.issuer.token(sub="u-17")
    place.issuer.changes = {"id_token": place.issuer.token(aud=CLIENT), "access_token": given}
    assert place.login().returncode == 0
    assert place.kept["lab"]["token"] == given
    place.issuer.changes["access_token"] = place.issuer.token(iss="https://another.example")
    done = " ".join(place.login().stderr.split())
    assert f"gave no token for the audience '{AUDIENCE}'" in done
    assert f"the ID token is for '{CLIENT}'" in done
    assert "the access token is of the issuer 'https://another.example'" in done


def test_ctrl_c_ends_a_login_at_once(place: Place) -> None:
    place.issuer.code["interval"] = 3600
    process = place.start("login", place.grpc, *place.named)
    assert process.stderr is not None
    while "Waiting for" not in process.stderr.readline():
        assert process.poll() is None
    begun_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, err) == (ExitCode.INTERRUPTED, "", "")
    assert time.monotonic() - begun_s < 10.0
    assert not logins_file(place.environment).exists()


def test_no_login_begins_whose_token_would_travel_in_clear_text(place: Place) -> None:
    client = OidcClient(issuer=place.issuer.url, client_id=CLIENT)
    chosen = oidc_login.Chosen(client=client, is_offered=False)
    with pytest.raises(AccessError, match="is not sent in clear text"):
        oidc_login.confirmed("127.0.0.1:7070,ctl.example:7070", Access(), chosen)
    assert place.issuer.asked == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--token-file", "-", "--oidc-issuer", "https://a"), "give --token-file, or the --oidc"),
        (("--oidc-issuer", "https://a.example"), "--oidc-client-id is missing, and the controller"),
        (("--oidc-client-id", "nobody"), "the controller names no issuer; say which"),
        (("--oidc-ca", "/nowhere/ca.crt"), "/nowhere/ca.crt cannot be read"),
        (("--oidc-ca", __file__), "has no certificate (PEM)"),
        (
            ("--oidc-issuer", "http://login.example", "--oidc-client-id", "a"),
            "the issuer is 'http://login.example'; allowed: an https:// URL",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    place: Place, arguments: tuple[str, ...], why: str
) -> None:
    done = place.login(*arguments)
    assert done.returncode == ExitCode.BAD_INPUT
    assert why in " ".join(done.stderr.split())


def test_a_controller_that_names_no_issuer_wants_a_token_as_before(place: Place) -> None:
    plain = {name: value for name, value in entry(place.issuer).items() if name != "client_id"}
    place.tokens_file.write_text(yaml.safe_dump([plain]))
    done = place.outlast("login", place.grpc)
    assert done.returncode == ExitCode.BAD_INPUT
    assert "nobody is named; log in with" in done.stderr
    assert place.issuer.asked == []


@pytest.mark.parametrize(
    "away",
    [
        IssuerUnavailableError("the issuer does not answer"),
        LoginsBusyError("a lock does not answer"),
    ],
)
def test_following_a_job_goes_on_while_a_token_cannot_be_renewed(away: Exception) -> None:
    def connect() -> Client:
        raise away

    follower = Follower(connect, Job(job_id="job", state="RUNNING"))
    follower.start()
    wait_for(lambda: "does not answer" in follower.snapshot().trouble, "the trouble to be said")
    follower.stop()
