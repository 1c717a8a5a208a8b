"""`notify` in the controller's configuration: what is read, and what is refused and how."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from controller import config_file
from controller.core.notifications.job_events import EventKind
from controller.notify.settings import Email, Slack, Webhook

URL = "https://chat.example.com/hooks/T0/secret"
MAIL = {"to": ["a@example.com"], "sender": "outlast@example.com", "host": "smtp.example.com"}


def read(tmp_path: Path, notify: object) -> config_file.Configuration:
    file = tmp_path / "controller.yaml"
    file.write_text(yaml.safe_dump({"notify": notify}))
    return config_file.read(file)


def test_all_kinds_are_read(tmp_path: Path) -> None:
    (tmp_path / "url").write_text(f"{URL}\n")
    (tmp_path / "password").write_text("pass")
    section = {
        "page": "https://outlast.example.com/",
        "slack": {"team": {"url_file": str(tmp_path / "url"), "jobs": ["prod-*"]}},
        "webhook": {"pager": {"url": URL, "events": ["failure", "note"], "wait_s": 5}},
        "email": {
            "ops": {**MAIL, "user": "u", "password_file": str(tmp_path / "password"), "port": 465}
        },
    }
    found = read(tmp_path, section).notify
    assert found.page == "https://outlast.example.com"
    team, pager, ops = (
        found.receivers[name] for name in ("slack.team", "webhook.pager", "email.ops")
    )
    assert isinstance(team, Slack)
    assert isinstance(pager, Webhook)
    assert isinstance(ops, Email)
    assert team.route.jobs == ("prod-*",)
    assert team.route.kinds == set(EventKind) - {EventKind.NOTE}
    assert pager.route.kinds == {EventKind.FAILURE, EventKind.NOTE}
    assert pager.route.wait_s == 5.0
    assert (ops.port, ops.security) == (465, "starttls")


def test_nobody_is_notified_by_default(tmp_path: Path) -> None:
    assert not config_file.read_or_default(None).notify.receivers
    assert not read(tmp_path, None).notify.receivers


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"slak": {}}, ["notify.slak", "slack"]),
        ({"page": "example.com"}, ["notify.page", "http"]),
        ({"slack": ["x"]}, ["notify.slack", "names of receivers"]),
        ({"slack": {"team": URL}}, ["notify.slack.team", "fields with values"]),
        ({"slack": {"team": {}}}, ["notify.slack.team", "url_file"]),
        ({"slack": {"team": {"url": "ftp://x/y"}}}, ["team.url", "http"]),
        ({"slack": {"team": {"url_file": "/nowhere/x"}}}, ["team.url_file", "No such file"]),
        ({"slack": {"team": {"url": URL, "urll": 1}}}, ["urll", "url"]),
        ({"webhook": {"p": {"url": URL, "events": ["fault"]}}}, ["events[0]", "incident"]),
        ({"webhook": {"p": {"url": URL, "wait_s": -1}}}, ["wait_s", "-1"]),
        ({"webhook": {"p": {"url": URL, "title": "$jb"}}}, ["p.title", "$jb", "$job"]),
        ({"webhook": {"p": {"url": URL, "text": "5 $"}}}, ["p.text", "$$"]),
        ({"email": {"o": {**MAIL, "to": ["nobody"]}}}, ["o.to", "nobody", "name@host"]),
        ({"email": {"o": {"to": ["a@b"], "sender": "c@d"}}}, ["host", "is required"]),
        ({"email": {"o": {**MAIL, "user": "u"}}}, ["password_file"]),
        ({"email": {"o": {**MAIL, "security": "ssl"}}}, ["security", "starttls"]),
        (
            {"email": {"o": {**MAIL, "user": "u", "password_file": "x", "security": "none"}}},
            ["security", "starttls, tls"],
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, section: object, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"controller\.yaml") as caught:
        read(tmp_path, section)
    for word in words:
        assert word in str(caught.value)


def test_a_secret_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("chat.example.com/hooks/hunter2")
    with pytest.raises(ValueError, match="url_file") as caught:
        read(tmp_path, {"slack": {"team": {"url_file": str(tmp_path / "url")}}})
    assert "hunter2" not in str(caught.value)
