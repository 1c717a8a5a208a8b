"""The verbs: what a request does to the store. No HTTP, no users."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.kube.fake import errors
from tests.kube.fake.kinds import admit_new, admit_status, admit_update
from tests.kube.fake.patch import apply_patch
from tests.kube.fake.resources import Resource, Target
from tests.kube.fake.selectors import Predicate, selects
from tests.kube.fake.store import Change, Object, Store

# What only the server writes.
_GUARDED = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "namespace",
    "generation",
)
# Its holder waits for its dependents, which a controller would collect.
_FOREGROUND = "foregroundDeletion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What a list or a watch is about."""

    resource: Resource
    namespace: str
    wanted: Predicate

    @classmethod
    def of(cls, target: Target, query: dict[str, str]) -> Selection:
        """From a request; ApiError 400 for selectors that make no sense."""
        wanted = selects(
            target.resource.plural, query.get("labelSelector", ""), query.get("fieldSelector", "")
        )
        if target.name:
            name = target.name
            return cls(
                resource=target.resource,
                namespace=target.namespace,
                wanted=lambda item: item["metadata"]["name"] == name and wanted(item),
            )
        return cls(resource=target.resource, namespace=target.namespace, wanted=wanted)


@dataclass(slots=True)
class Verbs:
    """Everything that can be done to objects; the caller holds the store's lock."""

    store: Store
    resources: tuple[Resource, ...]
    # The rest of lists that clients read in chunks, by continue token.
    _chunks: dict[str, list[Object]] = field(default_factory=dict)

    def get(self, target: Target) -> Object:
        """The stored object."""
        item = self.store.get(target.resource, target.namespace, target.name)
        if item is None:
            raise errors.not_found(target.resource.name, target.name)
        return item

    def listing(self, target: Target, query: dict[str, str]) -> Object:
        """A list object, or a chunk of one when `limit` asks for it."""
        if token := query.get("continue"):
            if token not in self._chunks:
                raise errors.gone("The provided continue parameter is too old")
            items, version = self._chunks.pop(token), token.partition("-")[0]
        else:
            selection = Selection.of(target, query)
            items = self.store.find(selection.resource, selection.namespace, selection.wanted)
            version = str(self.store.version)
        limit = int(query.get("limit") or 0) or len(items)
        metadata: Object = {"resourceVersion": version}
        if items[limit:]:
            metadata["continue"] = f"{version}-{secrets.token_hex(8)}"
            metadata["remainingItemCount"] = len(items) - limit
            self._chunks[metadata["continue"]] = items[limit:]
        resource = target.resource
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": metadata,
            "items": items[:limit],
        }

    def forget_chunks(self) -> None:
        """As after a compaction: half-read lists are gone."""
        self._chunks.clear()

    def create(self, target: Target, body: Object) -> Object:
        """A new object, as the server fills it in."""
        resource = target.resource
        _check_type(resource, body)
        item = {key: value for key, value in body.items() if key not in ("kind", "apiVersion")}
        metadata = dict(item.get("metadata") or {})
        if resource.namespaced:
            if metadata.setdefault("namespace", target.namespace) != target.namespace:
                raise errors.bad_request(
                    "the namespace of the provided object does not match the namespace sent on "
                    "the request"
                )
            self._check_namespace(target, metadata.get("name", ""))
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + secrets.token_hex(3)[:5]
        if metadata.get("resourceVersion"):
            raise errors.bad_request("resourceVersion should not be set on objects to be created")
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = timestamp()
        for key in ("deletionTimestamp", "deletionGracePeriodSeconds"):
            metadata.pop(key, None)
        item = admit_new(resource, {**item, "metadata": metadata})
        name = item["metadata"]["name"]
        if self.store.get(resource, target.namespace, name) is not None:
            raise errors.already_exists(resource.name, name)
        return self.store.put(resource, item)

    def replace(self, target: Target, body: Object) -> Object:
        """PUT: the whole object, or its status."""
        _check_type(target.resource, body)
        before = self.get(target)
        item = {key: value for key, value in body.items() if key not in ("kind", "apiVersion")}
        version = (item.get("metadata") or {}).get("resourceVersion")
        if target.resource.needs_version and not version:
            raise errors.invalid(
                target.resource.name,
                target.name,
                "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update",
            )
        return self._write(target, before, item)

    def patch(self, target: Target, content_type: str, change: Any) -> Object:
        """PATCH: a part of the object, or of its status."""
        before = self.get(target)
        patched = apply_patch(content_type, before, change)
        patched = {key: item for key, item in patched.items() if key not in ("kind", "apiVersion")}
        return self._write(target, before, patched)

    def delete(self, target: Target, options: Object) -> tuple[Object, bool]:
        """The object's last state, and whether it is gone rather than on its way."""
        return self.remove(target.resource, self.get(target), options)

    def delete_all(self, target: Target, query: dict[str, str], options: Object) -> Object:
        """Delete what selectors choose; the list of what was there."""
        found = self.listing(target, {**query, "limit": ""})
        for item in found["items"]:
            self.remove(target.resource, item, options)
        return found

    def remove(self, resource: Resource, item: Object, options: Object) -> tuple[Object, bool]:
        """Delete one object: at once, or gracefully, or after its finalizers."""
        metadata = item["metadata"]
        _check_preconditions(resource, item, options.get("preconditions") or {})
        finalizers = list(metadata.get("finalizers") or ())
        if options.get("propagationPolicy") == "Foreground" and _FOREGROUND not in finalizers:
            finalizers.append(_FOREGROUND)
        if resource.kind == "Namespace":
            # A controller would empty it, and then let it go.
            terminating = {**item, "status": {"phase": "Terminating"}}
            return self.store.put(resource, _doomed(terminating, finalizers, 0)), False
        known_s, wanted_s = metadata.get("deletionGracePeriodSeconds"), _grace_s(item, options)
        if known_s and (wanted_s is None or wanted_s >= known_s):
            # It is going already, and only a shorter time would change that.
            return item, False
        grace_s = wanted_s or 0
        if grace_s or finalizers or (resource.kind == "Pod" and known_s != 0):
            # Watches see even a pod that goes at once marked before it is gone.
            item = self.store.put(resource, _doomed(item, finalizers, grace_s))
        if grace_s or finalizers:
            return item, False
        return self.store.remove(resource, item), True

    def watch(self, selection: Selection, version: int) -> tuple[list[Object], int]:
        """Events after a version, and the version that they lead to."""
        changes = self.store.changes(selection.resource, selection.namespace, version)
        found = [_event(selection, change) for change in changes]
        return [event for event in found if event is not None], self.store.version

    def _write(self, target: Target, before: Object, item: Object) -> Object:
        resource, name = target.resource, target.name
        metadata = dict(item.get("metadata") or {})
        kept = before["metadata"]
        if metadata.get("name", name) != name:
            raise errors.bad_request(
                f"the name of the object ({metadata['name']}) does not match the name on the URL "
                f"({name})"
            )
        # A status is written without a look at the rest, where we have defined the kind.
        is_blind = target.subresource == "status" and resource.group == "outlast.dev"
        if not is_blind and metadata.get("uid", kept["uid"]) != kept["uid"]:
            raise errors.conflict(
                resource.name,
                name,
                f"Precondition failed: UID in precondition: {metadata['uid']}, "
                f"UID in object meta: {kept['uid']}",
            )
        if metadata.get("resourceVersion", kept["resourceVersion"]) != kept["resourceVersion"]:
            raise errors.changed(resource.name, name)
        metadata |= {"name": name, "resourceVersion": kept["resourceVersion"]}
        for key in _GUARDED:
            metadata.pop(key, None)
            if key in kept:
                metadata[key] = kept[key]
        item = {**item, "metadata": {key: value for key, value in metadata.items() if value != {}}}
        if target.subresource == "status":
            item = admit_status(before, item)
        else:
            item = admit_update(resource, before, item)
        written = self.store.put(resource, item)
        going = written["metadata"]
        if (
            "deletionTimestamp" in going
            and not going.get("finalizers")
            and not going.get("deletionGracePeriodSeconds")
        ):
            return self.store.remove(resource, written)
        return written

    def _check_namespace(self, target: Target, name: str) -> None:
        namespaces = next(item for item in self.resources if item.kind == "Namespace")
        namespace = self.store.get(namespaces, "", target.namespace)
        if namespace is None:
            raise errors.not_found("namespaces", target.namespace)
        if namespace["status"]["phase"] == "Terminating":
            raise errors.forbidden(
                f'{target.resource.name} "{name}" is forbidden: unable to create new content in '
                f"namespace {target.namespace} because it is being terminated"
            )


def timestamp(after_s: float = 0.0) -> str:
    """Now, or so many seconds later, as the API spells time."""
    return (datetime.now(UTC) + timedelta(seconds=after_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


def typed(resource: Resource, item: Object) -> Object:
    """An object with its kind, as answers carry it; items of lists go without."""
    return {"kind": resource.kind, "apiVersion": resource.api_version, **item}


def _event(selection: Selection, change: Change) -> Object | None:
    """A change as a watch with these selectors sees it: objects come and go by their labels."""
    was = change.before is not None and selection.wanted(change.before)
    now = change.after is not None and selection.wanted(change.after)
    if not was and not now:
        return None
    kind = "MODIFIED" if was and now else "ADDED" if now else "DELETED"
    item = change.after if change.after is not None else change.before
    assert item is not None
    if kind == "DELETED":
        # The state that the watch knew, at the version of the change.
        item = {
            **(change.before or item),
            "metadata": {
                **(change.before or item)["metadata"],
                "resourceVersion": str(change.version),
            },
        }
    return {"type": kind, "object": typed(selection.resource, item)}


def _check_type(resource: Resource, body: Any) -> None:
    if not isinstance(body, dict):
        raise errors.bad_request("the body is no object")
    kind = body.get("kind") or resource.kind
    version = body.get("apiVersion") or resource.api_version
    if (kind, version) != (resource.kind, resource.api_version):
        raise errors.bad_request(
            f"the API version in the data ({version}, {kind}) does not match the expected API "
            f"version ({resource.api_version}, {resource.kind})"
        )


def _check_preconditions(resource: Resource, item: Object, wanted: Object) -> None:
    metadata = item["metadata"]
    for key, label in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        if wanted.get(key) not in (None, metadata[key]):
            raise errors.conflict(
                resource.name,
                metadata["name"],
                f"Precondition failed: {label} in precondition: {wanted[key]}, "
                f"{label} in object meta: {metadata[key]}",
            )


def _grace_s(item: Object, options: Object) -> int | None:
    """How long an object may take to end, None for as long as it was told before.

    Only pods that are placed and run take any time.
    """
    given: int | None = options.get("gracePeriodSeconds")
    if "terminationGracePeriodSeconds" not in (item.get("spec") or {}):
        return 0
    if "deletionTimestamp" in item["metadata"]:
        return given
    if not item["spec"].get("nodeName") or item["status"]["phase"] in ("Succeeded", "Failed"):
        return 0
    own: int = item["spec"]["terminationGracePeriodSeconds"]
    return own if given is None else given


def _doomed(item: Object, finalizers: list[str], grace_s: int) -> Object:
    metadata = {
        **item["metadata"],
        "deletionTimestamp": timestamp(grace_s),
        "deletionGracePeriodSeconds": grace_s,
    }
    if finalizers:
        metadata["finalizers"] = finalizers
    return {**item, "metadata": metadata}
