"""A Kubernetes API server in memory, for tests.

It speaks HTTP to the official client and keeps what our adapter leans on: versions, conflicts,
selectors, patches, watches, eviction, rights. `tests/kube/test_contract.py` holds it to the real
server; what that suite does not ask, it need not do, and it says 400 rather than pretend. Like the
real server alone, it has no controllers: nobody binds pods, runs them or collects garbage.
"""

from tests.kube.fake.server import FakeKube

__all__ = ["FakeKube"]
