"""The server: users, rights and watches around the verbs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.kube.fake import pods
from tests.kube.fake.access import MASTERS, Access, User, refusal, service_account_name
from tests.kube.fake.api import Selection, Verbs, timestamp, typed
from tests.kube.fake.errors import ApiError
from tests.kube.fake.faults import Faults
from tests.kube.fake.http import HttpServer
from tests.kube.fake.resources import Target, parse_path, resources
from tests.kube.fake.store import Object, Store
from tests.kube.request import Request

# The real server's is about a minute; tests want to see one.
BOOKMARK_PERIOD_S = 0.5
_WATCH_LIMIT_S = 300


class FakeKube:
    """The server; `start` and `stop`, or a context manager."""

    def __init__(self, *, policy_version: str = "v1", num_changes: int = 10_000) -> None:
        self._resources = resources(policy_version)
        self._store = Store(num_changes)
        self._verbs = Verbs(self._store, self._resources)
        self._access = Access(self._store, self._resources)
        self._server = HttpServer(self)
        self._thread = threading.Thread(
            # Seconds until it notices that it shall end: each test waits for that.
            target=self._server.serve_forever,
            args=(0.02,),
            name="fake-kube",
        )
        self._requests: list[Request] = []
        self.faults = Faults()
        self.admin_token = self.issue_token("admin", MASTERS)
        with self._store.lock:
            for name in ("default", "kube-system"):
                self._verbs.create(self._target("namespaces"), {"metadata": {"name": name}})

    @property
    def url(self) -> str:
        """Where it listens, on loopback."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def ca(self) -> None:
        """Nothing to trust: it speaks plain HTTP."""
        return

    def start(self) -> FakeKube:
        """Serve from a thread of its own."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End every connection, then the threads."""
        self.faults.thaw()
        self._store.close()
        self._server.shutdown()
        self._server.drop_connections()
        self._thread.join()
        self._server.server_close()
        if self._server.failures:
            raise self._server.failures[0]

    def __enter__(self) -> FakeKube:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def issue_token(self, user: str, *groups: str) -> str:
        """A bearer token for a user."""
        return self._access.issue_token(User(name=user, groups=groups))

    def requests(self) -> list[Request]:
        """Everything that was asked for so far, oldest first."""
        with self._store.lock:
            return list(self._requests)

    def forget_changes(self) -> None:
        """As after a compaction: watches and chunked lists of the past get 410."""
        with self._store.lock:
            self._store.forget_changes()
            self._verbs.forget_chunks()

    def freeze(self) -> None:
        """Accept requests and answer none, watches included, until `thaw`."""
        self.faults.freeze()

    def thaw(self) -> None:
        """Answer again, beginning with what has been waiting."""
        self.faults.thaw()

    def drop_connections(self) -> None:
        """Break every connection, as the death of a server does; new ones are welcome."""
        self._server.drop_connections()

    def answer(
        self, user: User, verb: str, target: Target, query: dict[str, str], body: Any, mime: str
    ) -> tuple[int, Object]:
        """Do what an authenticated request asks: the HTTP code and the body."""
        with self._store.lock:
            self._authorize(user, verb, target)
            return self._do(verb, target, query, body, mime)

    def events(self, user: User, target: Target, query: dict[str, str]) -> Iterator[Object]:
        """The events of a watch, until its time is over; ApiError before the first one."""
        with self._store.lock:
            self._authorize(user, "watch", target)
            selection = Selection.of(target, query)
            asked = query.get("resourceVersion", "")
            if asked in ("", "0"):
                version = self._store.version
                present = self._store.find(
                    selection.resource, selection.namespace, selection.wanted
                )
            else:
                version, present = int(asked), []
        limit_s = float(query.get("timeoutSeconds") or _WATCH_LIMIT_S)
        bookmarks = query.get("allowWatchBookmarks") == "true"
        first = [{"type": "ADDED", "object": typed(target.resource, item)} for item in present]
        return self._stream(selection, first, version, time.monotonic() + limit_s, bookmarks)

    def _stream(
        self,
        selection: Selection,
        first: list[Object],
        version: int,
        end_s: float,
        bookmarks: bool,
    ) -> Iterator[Object]:
        yield from first
        bookmark_at_s = time.monotonic() + BOOKMARK_PERIOD_S
        while time.monotonic() < end_s and not self._store.is_closed:
            self.faults.wait_open()
            try:
                with self._store.lock:
                    events, version = self._verbs.watch(selection, version)
            except ApiError as error:
                # As the real server does: the answer was 200, and the stream says what is wrong.
                yield {"type": "ERROR", "object": error.status()}
                return
            yield from events
            if bookmarks and time.monotonic() >= bookmark_at_s:
                bookmark_at_s = time.monotonic() + BOOKMARK_PERIOD_S
                marked = {"metadata": {"resourceVersion": str(version)}}
                yield {"type": "BOOKMARK", "object": typed(selection.resource, marked)}
            self._store.wait(version, min(end_s, bookmark_at_s))

    def _do(
        self, verb: str, target: Target, query: dict[str, str], body: Any, mime: str
    ) -> tuple[int, Object]:
        resource, verbs = target.resource, self._verbs
        match verb:
            case "list":
                return 200, verbs.listing(target, query)
            case "get":
                return 200, typed(resource, verbs.get(target))
            case "create" if target.subresource:
                return 201, self._create_subresource(target, body)
            case "create":
                return 201, typed(resource, verbs.create(target, body))
            case "update":
                return 200, typed(resource, verbs.replace(target, body))
            case "patch":
                return 200, typed(resource, verbs.patch(target, mime, body))
            case "deletecollection":
                return 200, verbs.delete_all(target, query, _options(query, body))
        item, is_gone = verbs.delete(target, _options(query, body))
        if resource.returns_deleted or not is_gone:
            return 200, typed(resource, item)
        return 200, _success(
            200, {"name": target.name, "kind": resource.plural, "uid": item["metadata"]["uid"]}
        )

    def _create_subresource(self, target: Target, body: Any) -> Object:
        match target.subresource:
            case "binding":
                pods.bind(self._verbs, target, body)
            case "eviction":
                pods.evict(self._verbs, target, body)
            case "token":
                return self._service_account_token(target, body)
            case _:
                raise ApiError(405, "MethodNotAllowed", "the server does not allow this method")
        return _success(201, {})

    def _service_account_token(self, target: Target, body: Object) -> Object:
        self._verbs.get(target)
        name = service_account_name(target.namespace, target.name)
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{target.namespace}")
        token = self.issue_token(name, *groups)
        lifetime_s = (body.get("spec") or {}).get("expirationSeconds") or 3600
        return {
            "kind": "TokenRequest",
            "apiVersion": "authentication.k8s.io/v1",
            "metadata": {},
            "spec": {"audiences": [], "expirationSeconds": lifetime_s},
            "status": {"token": token, "expirationTimestamp": timestamp(lifetime_s)},
        }

    def discover(self, path: str) -> Object | None:
        """The list of what is served; None for the path of anything else."""
        if path.strip("/") != "apis":
            return None
        served = sorted({(item.group, item.version) for item in self._resources if item.group})
        groups = [_group(group, version) for group, version in served]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}

    def authenticate(self, header: str | None) -> User:
        """The caller; ApiError 401 for an unknown token."""
        with self._store.lock:
            return self._access.authenticate(header)

    def target(self, path: str) -> Target:
        """What a path names; ApiError 404 for what is not served."""
        return parse_path(path, self._resources)

    def _target(self, plural: str) -> Target:
        return Target(resource=next(item for item in self._resources if item.plural == plural))

    def _authorize(self, user: User, verb: str, target: Target) -> None:
        what = target.resource.name + (f"/{target.subresource}" if target.subresource else "")
        is_allowed = self._access.allows(user, verb, target)
        self._requests.append(Request(user.name, verb, what, is_allowed))
        if not is_allowed:
            raise refusal(user, verb, target)


def _options(query: dict[str, str], body: Any) -> Object:
    """DeleteOptions, from the body or from the query."""
    options = dict(body or {})
    if "gracePeriodSeconds" in query:
        options.setdefault("gracePeriodSeconds", int(query["gracePeriodSeconds"]))
    if "propagationPolicy" in query:
        options.setdefault("propagationPolicy", query["propagationPolicy"])
    return options


def _success(code: int, details: Object) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": details,
        "code": code,
    }


def _group(group: str, version: str) -> Object:
    served = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [served], "preferredVersion": served}
