"""What the adapter relies on, asked of both servers: the fake is only as good as this suite."""

from __future__ import annotations

from tests.kube.cluster import Kube


def test_namespace(kube: Kube) -> None:
    assert kube.core().read_namespace(kube.namespace).status.phase == "Active"
