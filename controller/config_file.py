"""The controller's configuration file: YAML, each section the settings of one part."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml

from checkpoint.storage.drivers import missing_driver
from controller.core.retention import Retention
from controller.core.settings import Settings
from controller.notify import settings as notify
from outlast.code.digest import DEFAULT_MAX_BYTES
from outlast.rules.places import wrong_with_place

# Each node of a job fetches it from the controller.
MAX_CODE_MIB = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What the file says; a section that is not there has its defaults."""

    retention: Retention = field(default_factory=Retention)
    max_code_bytes: int = DEFAULT_MAX_BYTES
    """`code.max_mib`."""
    notify: notify.Notify = notify.NOBODY
    settings: Settings = field(default_factory=Settings)
    """`queue`: how long a job waits before nodes are kept for it, and quotas."""


def read(path: Path) -> Configuration:
    """Read a configuration file.

    Raises:
        ValueError: naming file, field, value and what is allowed.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    try:
        sections = _mapping({} if document is None else document, "the file")
        _check_names(sections, ("code", "notify", "queue", "retention"), "")
        return Configuration(
            retention=_retention(sections.get("retention") or {}),
            max_code_bytes=_max_code_bytes(sections.get("code") or {}),
            notify=_notify(sections.get("notify") or {}),
            settings=_queue(sections.get("queue") or {}),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_or_default(path: Path | None) -> Configuration:
    """The configuration of a file, or the defaults of a controller that was given none.

    Raises:
        ValueError: as `read`.
    """
    return Configuration() if path is None else read(path)


def _notify(given: object) -> notify.Notify:
    values = _mapping(given, "notify")
    _check_names(values, notify.FIELDS_OF_NOTIFY, "notify.")
    return notify.parse(values)


def _retention(given: object) -> Retention:
    values = _mapping(given, "retention")
    known = {each.name: each.default for each in fields(Retention)}
    _check_names(values, tuple(known), "retention.")
    for name, value in values.items():
        default = known[name]
        if isinstance(default, str):
            is_right, allowed = isinstance(value, str), "text"
        elif isinstance(default, int):
            is_right, allowed = type(value) is int, "a whole number"
        else:
            is_right, allowed = type(value) in (int, float), "a number"
        if not is_right:
            raise ValueError(f"retention.{name} is {value!r}; allowed: {allowed}")
    retention = Retention(**values)  # type: ignore[arg-type]  # each was looked at above
    url = retention.archive_url
    wrong = wrong_with_place(url, "ended-jobs") if url else None
    if wrong is not None:
        raise ValueError(f"retention.archive_url {wrong}")
    if (missing := missing_driver(url)) is not None:
        raise ValueError(f"retention.archive_url: {missing}")
    return retention


def _max_code_bytes(given: object) -> int:
    values = _mapping(given, "code")
    _check_names(values, ("max_mib",), "code.")
    mib = values.get("max_mib", DEFAULT_MAX_BYTES >> 20)
    if type(mib) is not int or not 1 <= mib <= MAX_CODE_MIB:
        raise ValueError(f"code.max_mib is {mib!r}; allowed: a whole number, 1 to {MAX_CODE_MIB}")
    return mib << 20


def _queue(given: object) -> Settings:
    values = _mapping(given, "queue")
    _check_names(
        values, ("reserve_after_s", "nodes_per_owner", "owners", "most_priority"), "queue."
    )
    reserve_s = values.get("reserve_after_s", Settings().reserve_after_s)
    if type(reserve_s) not in (int, float) or not 0 <= float(str(reserve_s)) < math.inf:
        raise ValueError(f"queue.reserve_after_s is {reserve_s!r}; allowed: seconds, 0 or more")
    owners = _mapping(values.get("owners") or {}, "queue.owners")
    quotas = tuple((name, _quota(each, f"queue.owners.{name}")) for name, each in owners.items())
    each_may = values.get("nodes_per_owner")
    quota = None if each_may is None else _quota(each_may, "queue.nodes_per_owner")
    most = values.get("most_priority", Settings().most_priority)
    if type(most) is not int or not -100 <= most <= 100:
        raise ValueError(f"queue.most_priority is {most!r}; allowed: a whole number, -100 to 100")
    return Settings(
        reserve_after_s=float(str(reserve_s)), quotas=quotas, quota=quota, most_priority=most
    )


def _quota(given: object, where: str) -> int:
    if type(given) is not int or given < 0:
        raise ValueError(f"{where} is {given!r}; allowed: a number of nodes, 0 or more")
    return given


def _mapping(given: object, what: str) -> dict[str, object]:
    if not isinstance(given, dict):
        raise ValueError(f"{what} is {given!r}; allowed: fields with values, such as `name: 1`")
    return {str(name): value for name, value in given.items()}


def _check_names(given: dict[str, object], known: tuple[str, ...], prefix: str) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; perhaps {prefix}{near[0]}" if near else ""
            raise ValueError(f"{prefix}{name} is not known; allowed: {', '.join(known)}{hint}")
