"""Receivers of notifications: section `notify` of the controller's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from controller.core.notifications.grouping import Route
from controller.core.notifications.job_events import EventKind
from controller.notify.wording import FIELDS, TEXT, TITLE
from outlast.problems import described, name_of, shown
from outlast.rules.fields import explain
from outlast.section import Section

_MAX_NAME = 63


class Receiver(Section):
    """What every receiver has."""

    events: Annotated[
        tuple[Literal["incident", "note", "recovery", "paused", "failure", "completion"], ...],
        Field(min_length=1),
    ] = ("incident", "recovery", "paused", "failure", "completion")
    jobs: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    wait_s: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    repeat_s: Annotated[float, Field(ge=0, le=86_400)] = 600.0
    title: str = TITLE
    text: str = TEXT

    @property
    def route(self) -> Route:
        """Which events it receives, and how they are grouped."""
        return Route(
            kinds=frozenset(map(EventKind, self.events)),
            jobs=self.jobs,
            wait_s=self.wait_s,
            repeat_s=self.repeat_s,
        )


class HttpReceiver(Receiver):
    """A receiver with a URL, which may be a secret and is then in a file."""

    url: str = ""
    url_file: str = ""


class Webhook(HttpReceiver):
    """A URL that accepts JSON."""

    secret_file: str = ""


class Slack(HttpReceiver):
    """An incoming webhook of Slack, or of a chat that accepts the same messages."""


class Email(Receiver):
    """Mail by SMTP."""

    to: Annotated[tuple[str, ...], Field(min_length=1)]
    sender: str
    host: str
    port: Annotated[int, Field(ge=1, le=65_535)] = 587
    security: Literal["starttls", "tls", "none"] = "starttls"
    user: str = ""
    password_file: str = ""


_KINDS: dict[str, type[Receiver]] = {"webhook": Webhook, "slack": Slack, "email": Email}
FIELDS_OF_NOTIFY = ("page", *_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """All receivers, by kind and name, such as `slack.team`."""

    receivers: Mapping[str, Receiver]
    page: str = ""
    """Where people reach the web page, for links; "": no links."""


NOBODY = Notify(receivers={})


def parse(given: Mapping[str, object]) -> Notify:
    """The section `notify`, whose names are known; every file that it names is read once.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    page = given.get("page", "")
    if not isinstance(page, str) or (page and not _is_http(page)):
        raise ValueError(f"notify.page is {shown(page)}; allowed: a URL of http or https")
    receivers: dict[str, Receiver] = {}
    for kind in _KINDS:
        named = given.get(kind) or {}
        if not isinstance(named, dict):
            raise ValueError(
                f"notify.{kind} is {shown(named)}; allowed: names of receivers, each with fields"
            )
        for name, fields in named.items():
            receivers[f"{kind}.{name}"] = _receiver(kind, name, fields)
    return Notify(receivers=receivers, page=page.rstrip("/"))


def _receiver(kind: str, name: object, fields: object) -> Receiver:
    at = f"notify.{kind}.{name_of(name)}"
    if not (isinstance(name, str) and name.isprintable() and 1 <= len(name) <= _MAX_NAME):
        raise ValueError(f"{at}: allowed is a name of 1 to {_MAX_NAME} characters")
    if not isinstance(fields, dict) or not all(isinstance(each, str) for each in fields):
        raise ValueError(f"{at} is {shown(fields)}; allowed: fields with values")
    section = _KINDS[kind]
    try:
        receiver = section.model_validate(fields)
    except ValidationError as error:
        problems, _ = explain(section, fields, error.errors(include_url=False))
        raise ValueError(described(at, problems)) from error
    for field in ("title", "text"):
        _check_template(f"{at}.{field}", getattr(receiver, field))
    if isinstance(receiver, HttpReceiver):
        _check_url(at, receiver)
    elif isinstance(receiver, Email):
        _check_mail(at, receiver)
    return receiver


def _check_template(at: str, given: str) -> None:
    template = Template(given)
    if not template.is_valid():
        raise ValueError(f"{at} is {shown(given)}; a dollar sign of its own is written $$")
    unknown = [name for name in template.get_identifiers() if name not in FIELDS]
    if unknown:
        raise ValueError(f"{at} has ${unknown[0]}; allowed: {', '.join(f'${f}' for f in FIELDS)}")


def _check_url(at: str, receiver: HttpReceiver) -> None:
    if bool(receiver.url) == bool(receiver.url_file):
        raise ValueError(f"{at} needs one of url and url_file (a file that holds the URL)")
    url, field = receiver.url, "url"
    if receiver.url_file:
        url, field = read_secret(f"{at}.url_file", receiver.url_file), "url_file"
    if not _is_http(url):
        # The URL of a chat is a credential: what a file holds is not shown.
        shown_url = shown(url) if receiver.url else "another text"
        raise ValueError(f"{at}.{field} is {shown_url}; allowed: a URL of http or https")
    if isinstance(receiver, Webhook) and receiver.secret_file:
        read_secret(f"{at}.secret_file", receiver.secret_file)


def _check_mail(at: str, receiver: Email) -> None:
    for field, address in (("sender", receiver.sender), *(("to", to) for to in receiver.to)):
        local, _, domain = address.rpartition("@")
        if not local or not domain or any(c.isspace() or c in "<>," for c in address):
            raise ValueError(f"{at}.{field} has {shown(address)}; allowed: name@host")
    if bool(receiver.user) != bool(receiver.password_file):
        raise ValueError(f"{at} needs both of user and password_file, or neither")
    if receiver.password_file:
        if receiver.security == "none":
            raise ValueError(f"{at}.security is 'none'; allowed with a password: starttls, tls")
        read_secret(f"{at}.password_file", receiver.password_file)


def read_secret(at: str, path: str) -> str:
    """What a file holds, without the end of its line; read again at each use, as it may change.

    Raises:
        ValueError: it cannot be read, or holds nothing.
    """
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise ValueError(f"{at} is {shown(path)}, which cannot be read: {why}") from error
    if not text:
        raise ValueError(f"{at} is {shown(path)}, which is empty")
    return text


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
