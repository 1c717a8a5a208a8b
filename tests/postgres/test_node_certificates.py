"""Which node has got a certificate, in the database that a pair of controllers shares."""

from __future__ import annotations

import pytest

from controller.access.enrollment import Certified
from controller.store.database import DeposedError
from controller.store.node_certificates import NodeCertificates
from tests.postgres.server import needs_postgres
from tests.postgres.test_journal import opened

pytestmark = needs_postgres
FIRST = Certified(key="a" * 64, expires_s=200.25)
RENEWED = Certified(key="a" * 64, expires_s=300.5)


def test_the_controller_that_takes_over_knows_them_and_the_other_one_writes_no_more(
    url: str,
) -> None:
    with opened(url) as (database, journal), opened(url) as (other, others):
        journal.take_over()
        before = NodeCertificates(database, 0.0)
        for node, record in (("n0", FIRST), ("n1", FIRST), ("n2", FIRST), ("n0", RENEWED)):
            before.put(node, record, 0.0)
        before.drop("n2")
        before.drop("n3")
        others.take_over()
        after = NodeCertificates(other, 0.0)
        found = [after.get(node) for node in ("n0", "n1", "n2")]
        assert found == [RENEWED, FIRST, None]
        with pytest.raises(DeposedError):
            before.put("n2", FIRST, 0.0)
        with pytest.raises(DeposedError):
            before.drop("n0")
        assert (before.get("n2"), before.get("n0")) == (None, RENEWED)
        # What has expired is not kept.
        after.put("n4", RENEWED, 250.0)
        assert after.get("n1") is None
        assert NodeCertificates(other, 0.0).get("n1") is None
        assert NodeCertificates(other, 301.0).get("n0") is None
