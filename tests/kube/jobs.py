"""TrainingJobs in the hands of a user, and calls of a Jobs service that a test plays."""

from __future__ import annotations

from typing import Any

from kubernetes import client

from controller.kube.training_job import GROUP, KIND, PLURAL, VERSION
from tests.kube.cluster import Kube

Json = dict[str, Any]


class TrainingJobs:
    """As kubectl makes and shows them."""

    def __init__(self, kube: Kube) -> None:
        self._api: Any = client.CustomObjectsApi(kube.client())
        self._place = (GROUP, VERSION, kube.namespace, PLURAL)

    def apply(self, name: str, labels: dict[str, str] | None = None, **spec: Any) -> Json:
        found: Json = self._api.create_namespaced_custom_object(
            *self._place,
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "metadata": {"name": name, "labels": labels or {}},
                "spec": spec,
            },
        )
        return found

    def change(self, name: str, **spec: Any) -> None:
        self._api.patch_namespaced_custom_object(*self._place, name, {"spec": spec})

    def delete(self, name: str) -> None:
        self._api.delete_namespaced_custom_object(*self._place, name)

    def say(self, name: str, status: Json) -> None:
        """Write a status as a controller does."""
        self._api.patch_namespaced_custom_object_status(*self._place, name, {"status": status})

    def status(self, name: str) -> Json:
        found: Json = self._api.get_namespaced_custom_object(*self._place, name)
        return found.get("status") or {}


class Asked:
    """Notes what is asked, and refuses what it is told to."""

    def __init__(self, why: str = "") -> None:
        self.calls: list[tuple[str, str]] = []
        self.documents: list[Json] = []
        self.why = why

    async def submit(self, document: Json, request_id: str) -> str:
        self.calls.append(("submit", request_id))
        self.documents.append(document)
        return self.why

    async def cancel(self, job_id: str) -> None:
        self.calls.append(("cancel", job_id))

    async def pause(self, job_id: str) -> None:
        self.calls.append(("pause", job_id))

    async def resume(self, job_id: str) -> None:
        self.calls.append(("resume", job_id))

    async def close(self) -> None:
        self.calls.append(("close", ""))
