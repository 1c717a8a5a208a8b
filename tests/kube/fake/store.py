"""The objects, one counter of versions, and a bounded memory of changes.

Objects are never changed in place: whoever holds one may read it without the lock. Every caller
but those of `wait` and `close` holds `lock`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from tests.kube.fake.errors import gone
from tests.kube.fake.resources import Resource
from tests.kube.fake.selectors import Predicate

Object = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One write: `before` is None for a creation, `after` for a removal."""

    version: int
    plural: str
    namespace: str
    before: Object | None
    after: Object | None


class Store:
    """Holds `num_changes` changes for watches that resume; older versions are 410."""

    def __init__(self, num_changes: int) -> None:
        self.lock = threading.RLock()
        self._written = threading.Condition(self.lock)
        self._objects: dict[str, dict[tuple[str, str], Object]] = {}
        self._changes: deque[Change] = deque(maxlen=num_changes)
        # Not 1: a client that treats versions as small numbers should fail.
        self.version = 1000
        self._forgotten_version = self.version
        self.is_closed = False

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """The object; None when there is none."""
        return self._objects.get(resource.plural, {}).get((namespace, name))

    def find(self, resource: Resource, namespace: str, wanted: Predicate) -> list[Object]:
        """Objects by namespace and name; an empty `namespace` means all."""
        found = sorted(self._objects.get(resource.plural, {}).items())
        return [item for (place, _), item in found if namespace in ("", place) and wanted(item)]

    def put(self, resource: Resource, item: Object) -> Object:
        """Write an object; nothing happens, and no version is used, when it is the same."""
        metadata = item["metadata"]
        namespace = metadata.get("namespace", "")
        place = self._objects.setdefault(resource.plural, {})
        before = place.get((namespace, metadata["name"]))
        if before is not None and item == before:
            return before
        after = {**item, "metadata": {**metadata, "resourceVersion": str(self.version + 1)}}
        place[namespace, metadata["name"]] = after
        self._note(resource.plural, namespace, before, after)
        return after

    def remove(self, resource: Resource, item: Object) -> Object:
        """Drop an object; returns its last state, as watches see it."""
        metadata = item["metadata"]
        namespace = metadata.get("namespace", "")
        before = self._objects[resource.plural].pop((namespace, metadata["name"]))
        last = {**before, "metadata": {**metadata, "resourceVersion": str(self.version + 1)}}
        self._note(resource.plural, namespace, last, None)
        return last

    def changes(self, resource: Resource, namespace: str, after_version: int) -> list[Change]:
        """Changes later than a version, oldest first; ApiError 410 when some are forgotten."""
        if after_version < self._forgotten_version:
            raise gone(f"too old resource version: {after_version} ({self._forgotten_version})")
        return [
            change
            for change in self._changes
            if change.version > after_version
            and change.plural == resource.plural
            and namespace in ("", change.namespace)
        ]

    def wait(self, version: int, until_s: float) -> None:
        """Sleep until something is written after `version`, a monotonic time, or the end."""
        with self._written:
            self._written.wait_for(
                lambda: self.version > version or self.is_closed,
                timeout=max(0.0, until_s - time.monotonic()),
            )

    def close(self) -> None:
        """Wake whoever waits: the server ends."""
        with self._written:
            self.is_closed = True
            self._written.notify_all()

    def forget_changes(self) -> None:
        """As after a compaction: every version but the present one is too old."""
        self._changes.clear()
        self._forgotten_version = self.version

    def _note(
        self, plural: str, namespace: str, before: Object | None, after: Object | None
    ) -> None:
        self.version += 1
        if len(self._changes) == self._changes.maxlen:
            self._forgotten_version = self._changes[0].version
        self._changes.append(
            Change(
                version=self.version,
                plural=plural,
                namespace=namespace,
                before=before,
                after=after,
            )
        )
        self._written.notify_all()
