"""Sending a message to a receiver of each kind. The calls block, so they run in threads."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import smtplib
import ssl
import urllib.error
import urllib.request
from dataclasses import asdict
from email.message import EmailMessage
from email.utils import format_datetime, localtime
from typing import Any

from controller.core.notifications.grouping import Message
from controller.core.notifications.job_events import EventKind
from controller.notify import wording
from controller.notify.settings import Email, HttpReceiver, Receiver, Slack, Webhook, read_secret
from outlast.errors import FatalError, RetryableError

TIMEOUT_S = 10.0
_MAX_SUBJECT = 200
_COLOURS = {
    EventKind.INCIDENT: "#d29922",
    EventKind.NOTE: "#6e7781",
    EventKind.RECOVERY: "#2da44e",
    EventKind.PAUSED: "#d29922",
    EventKind.FAILURE: "#cf222e",
    EventKind.COMPLETION: "#2da44e",
}


class DeliveryError(RetryableError):
    """A receiver did not take a message."""


class PartlyDeliveredError(FatalError):
    """A mail server took a message for some of its addresses only."""


def send(receiver: Receiver, message: Message, page: str) -> None:
    """Hand one message to one receiver.

    Raises:
        DeliveryError: it did not take it, or does not answer. Names no URL: some are secrets.
        PartlyDeliveredError: a mail server took it for some of its readers only.
    """
    try:
        match receiver:
            case Webhook():
                _post(receiver, _webhook(receiver, message, page), _id_of(message))
            case Slack():
                _post(receiver, _slack(receiver, message, page), _id_of(message))
            case Email():
                _mail(receiver, message, page)
            case _:
                raise AssertionError(f"no way to send to {type(receiver).__name__}")
    except ValueError as error:
        raise DeliveryError(str(error)) from error


def _id_of(message: Message) -> str:
    """The same for the same events, so that a receiver can recognise a repetition."""
    return hashlib.sha256("\n".join(message.keys).encode()).hexdigest()[:32]


def _webhook(receiver: Receiver, message: Message, page: str) -> dict[str, Any]:
    return {
        "version": 1,
        "id": _id_of(message),
        "job": message.job,
        "event": str(message.newest.kind),
        "title": wording.title(message, receiver.title, page),
        "text": wording.text(message, receiver.text, page),
        "link": wording.link(message, page),
        "events": [asdict(event) for event in message.events],
    }


def _slack(receiver: Receiver, message: Message, page: str) -> dict[str, Any]:
    title = _escaped(wording.title(message, receiver.title, page))
    attachment = {
        "color": _COLOURS[message.newest.kind],
        "fallback": title,
        "title": title,
        "text": _escaped(wording.text(message, receiver.text, page)),
    }
    if page:
        attachment["title_link"] = wording.link(message, page)
    return {"attachments": [attachment]}


def _escaped(text: str) -> str:
    """As Slack wants what is no markup of its own, such as a mention of everybody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _post(receiver: HttpReceiver, document: dict[str, Any], message_id: str) -> None:
    url = receiver.url or read_secret("url_file", receiver.url_file)
    body = json.dumps(document).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "outlast"}
    headers["Outlast-Id"] = message_id
    if isinstance(receiver, Webhook) and receiver.secret_file:
        secret = read_secret("secret_file", receiver.secret_file).encode()
        signature = hmac.new(secret, body, hashlib.sha256).hexdigest()
        headers["Outlast-Signature"] = f"sha256={signature}"
    request = urllib.request.Request(url, data=body, headers=headers, method="POST")
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as response:
            response.read(1)
    except urllib.error.HTTPError as error:
        with error:
            why = _beginning_of(error) or error.reason
        raise DeliveryError(f"it answered {error.code}: {why}") from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        reason = getattr(error, "reason", None) or repr(error)
        raise DeliveryError(f"it cannot be reached: {reason}") from error


def _beginning_of(error: urllib.error.HTTPError) -> str:
    """What a refusal says, if it can be read."""
    try:
        return error.read(200).decode(errors="replace").strip()
    except (http.client.HTTPException, OSError):
        return ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Messages go to the configured address only: a redirect is an error."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _mail(receiver: Email, message: Message, page: str) -> None:
    mail = EmailMessage()
    mail["From"] = receiver.sender
    mail["To"] = ", ".join(receiver.to)
    mail["Subject"] = wording.title(message, receiver.title, page)[:_MAX_SUBJECT]
    mail["Date"] = format_datetime(localtime())
    mail["Message-ID"] = f"<{_id_of(message)}@{receiver.sender.rpartition('@')[2]}>"
    # Mails about one job are one thread, where a reader puts those together.
    mail["References"] = f"<{message.job}@{receiver.sender.rpartition('@')[2]}>"
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(wording.text(message, receiver.text, page) + "\n")
    try:
        with _connected(receiver) as server:
            if receiver.user:
                password = read_secret("password_file", receiver.password_file)
                server.login(receiver.user, password)
            refused = server.send_message(mail)
    except (smtplib.SMTPException, OSError) as error:
        raise DeliveryError(f"{receiver.host}:{receiver.port}: {error}") from error
    if refused:
        # A retry would send it to the other addresses again.
        raise PartlyDeliveredError(f"not taken for {', '.join(sorted(refused))}")


def _connected(receiver: Email) -> smtplib.SMTP:
    context = ssl.create_default_context()
    if receiver.security == "tls":
        return smtplib.SMTP_SSL(receiver.host, receiver.port, timeout=TIMEOUT_S, context=context)
    server = smtplib.SMTP(receiver.host, receiver.port, timeout=TIMEOUT_S)
    if receiver.security == "starttls":
        try:
            server.starttls(context=context)
        except BaseException:
            server.close()
            raise
    return server
