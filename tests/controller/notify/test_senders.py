"""What receivers get: JSON, Slack's format, mail; each from a real server's side."""

from __future__ import annotations

import hashlib
import hmac
import json
import shlex
import ssl
import subprocess
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

from controller.core.notifications.grouping import Message
from controller.core.notifications.job_events import EventKind, JobEvent
from controller.notify import senders
from controller.notify.settings import Email, Slack, Webhook
from outlast.ids import JobId
from outlast.ports import free_port
from tests.controller.notify.receivers import http_receiver

PAGE = "https://outlast.example.com"
FAULT = JobEvent(
    key="incident/j-1-1",
    kind=EventKind.INCIDENT,
    job=JobId("j-1"),
    at_s=1_700_000_000.0,
    incident="j-1-1",
    cause="node_lost",
    action="replace_nodes",
    reason="no heartbeat <for 10 s> & gone",
    nodes=("n3",),
    step=41,
)
RECOVERY = JobEvent(
    key="recovery/j-1-1",
    kind=EventKind.RECOVERY,
    job=JobId("j-1"),
    at_s=1_700_000_075.0,
    incident="j-1-1",
    cause="node_lost",
    step=41,
    lost_s=75.0,
)
MESSAGE = Message(job=JobId("j-1"), events=(FAULT, RECOVERY))


def test_webhook_gets_all_of_it_signed(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k1\n")
    with http_receiver() as it:
        hook = Webhook(url=it.url, secret_file=str(tmp_path / "key"))
        senders.send(hook, MESSAGE, PAGE)
        senders.send(hook, MESSAGE, PAGE)
    (headers, body), (_, again) = it.got
    assert again == body
    document = json.loads(body)
    assert document["id"] == headers["Outlast-Id"]
    signature = hmac.new(b"k1", body, hashlib.sha256).hexdigest()
    assert headers["Outlast-Signature"] == f"sha256={signature}"
    assert headers["Content-Type"] == "application/json"
    assert (document["job"], document["event"], document["version"]) == ("j-1", "recovery", 1)
    assert document["title"] == "j-1: trains again after node lost, 1 min 15 s lost"
    assert document["link"] == f"{PAGE}/jobs/j-1"
    assert [each["kind"] for each in document["events"]] == ["incident", "recovery"]
    assert document["events"][0]["nodes"] == ["n3"]
    assert "2023-11-14 22:13:20Z node lost after step 41 on n3: no heartbeat" in document["text"]


def test_slack_gets_text_without_markup_of_ours() -> None:
    with http_receiver() as it:
        senders.send(Slack(url=it.url), MESSAGE, PAGE)
    (attachment,) = json.loads(it.got[0][1])["attachments"]
    assert attachment["title"] == "j-1: trains again after node lost, 1 min 15 s lost"
    assert attachment["title_link"] == f"{PAGE}/jobs/j-1"
    assert "&lt;for 10 s&gt; &amp; gone" in attachment["text"]
    assert attachment["color"] == "#2da44e"


def test_words_may_be_others() -> None:
    hook = {"title": "[$event] $job $cause $lost", "text": "$count: $headline at $step $$1"}
    with http_receiver() as it:
        senders.send(Webhook(url=it.url, **hook), MESSAGE, "")
    document = json.loads(it.got[0][1])
    assert document["title"] == "[recovery] j-1 node_lost 1 min 15 s"
    assert document["text"] == "2: trains again after node lost, 1 min 15 s lost at 41 $1"
    assert document["link"] == ""


@pytest.mark.parametrize(
    ("status", "words"), [(500, "500: broken"), (404, "404: broken"), (302, "302")]
)
def test_what_is_not_taken_is_an_error_without_the_url(status: int, words: str) -> None:
    with http_receiver() as it, http_receiver() as other:
        it.status, it.answer = status, b"broken"
        it.headers = {"Location": other.url} if status == 302 else {}
        with pytest.raises(senders.DeliveryError, match=words) as caught:
            senders.send(Webhook(url=it.url), MESSAGE, PAGE)
        assert other.got == []
    assert "hunter2" not in str(caught.value)


def test_nobody_there_is_an_error() -> None:
    with http_receiver() as it:
        url = it.url
    with pytest.raises(senders.DeliveryError, match="refused"):
        senders.send(Slack(url=url), MESSAGE, PAGE)


def test_file_of_a_url_is_read_at_each_message(tmp_path: Path) -> None:
    file = tmp_path / "url"
    with http_receiver() as it:
        file.write_text("http://127.0.0.1:1/gone")
        slack = Slack(url_file=str(file))
        with pytest.raises(senders.DeliveryError):
            senders.send(slack, MESSAGE, PAGE)
        file.write_text(it.url)
        senders.send(slack, MESSAGE, PAGE)
        file.unlink()
        with pytest.raises(senders.DeliveryError, match="url_file"):
            senders.send(slack, MESSAGE, PAGE)
    assert len(it.got) == 1


class Mailbox:
    """Keeps mails; takes none for `full@example.com`."""

    def __init__(self) -> None:
        self.mails: list[Any] = []

    async def handle_RCPT(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address.startswith("full@"):
            return "452 its mailbox is full"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        assert isinstance(envelope.content, bytes)
        mail = message_from_bytes(envelope.content, policy=policy.default)
        self.mails.append((envelope.mail_from, list(envelope.rcpt_tos), mail))
        return "250 OK"


def _check_password(
    server: object, session: object, envelope: object, mechanism: str, data: object
) -> AuthResult:
    assert isinstance(data, LoginPassword)
    is_right = (data.login, data.password) == (b"u", b"pass")
    return AuthResult(success=is_right, handled=is_right)


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A server's, whom this process trusts."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        shlex.split(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
            f"-subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout {key} -out {cert}"
        ),
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


@pytest.mark.filterwarnings("ignore:Requiring AUTH:UserWarning")
@pytest.mark.parametrize("security", ["none", "starttls", "tls"])
def test_mail(security: Any, certificate: ssl.SSLContext, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("pass\n")
    box = Mailbox()
    options: dict[str, Any] = {}
    if security == "tls":
        options = {"ssl_context": certificate}
    elif security == "starttls":
        options = {"tls_context": certificate, "require_starttls": True}
    if security != "none":
        options |= {
            "authenticator": _check_password,
            "auth_required": True,
            "auth_require_tls": security == "starttls",
        }
    server = Controller(
        box, hostname="127.0.0.1", port=free_port(), server_hostname="localhost", **options
    )
    server.start()
    try:
        has_login = security != "none"
        mail = Email(
            to=("a@example.com", "b@example.com"),
            sender="outlast@example.com",
            host="localhost",
            port=server.port,
            security=security,
            user="u" if has_login else "",
            password_file=str(tmp_path / "password") if has_login else "",
        )
        senders.send(mail, MESSAGE, PAGE)
        some = mail.model_copy(update={"to": ("a@example.com", "full@example.com")})
        with pytest.raises(senders.PartlyDeliveredError, match="for full@"):
            senders.send(some, MESSAGE, PAGE)
        if has_login:
            (tmp_path / "password").write_text("other")
            with pytest.raises(senders.DeliveryError, match="535"):
                senders.send(mail, MESSAGE, PAGE)
    finally:
        server.stop()
    (sender, to, got), (_, partly, _) = box.mails
    assert (sender, to) == ("outlast@example.com", ["a@example.com", "b@example.com"])
    assert partly == ["a@example.com"]
    assert got["Subject"] == "j-1: trains again after node lost, 1 min 15 s lost"
    assert got["References"] == "<j-1@example.com>"
    text = got.get_content()
    assert "node lost after step 41 on n3: no heartbeat <for 10 s> & gone" in text
    assert f"{PAGE}/jobs/j-1" in text


def test_a_server_that_nobody_vouches_for_gets_no_mail(
    certificate: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    box = Mailbox()
    server = Controller(box, hostname="127.0.0.1", port=free_port(), tls_context=certificate)
    server.start()
    try:
        mail = Email(to=("a@b.c",), sender="o@b.c", host="localhost", port=server.port)
        with pytest.raises(senders.DeliveryError, match="certificate"):
            senders.send(mail, MESSAGE, PAGE)
    finally:
        server.stop()
    assert box.mails == []
