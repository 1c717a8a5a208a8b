"""Whether a node gets a certificate, and for whom an agent may speak: decisions only.

A join token is shared by a fleet, so that by itself it proves no name. The first key that enrols
under a name is put on record, and as long as its certificate holds nobody else gets in under that
name with the join token. A node that renews keeps its key: an answer that was lost changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

# Clocks of nodes differ: certificates hold from so long before they are made.
BACKDATED_S = 300.0
REJOIN = "`outlast nodes rejoin {node}` lets it get another one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """The newest certificate that a node has got."""

    key: str
    """SHA-256 of its public key, in hexadecimal."""
    expires_s: float
    """In seconds since 1970."""

    def holds(self, now_s: float) -> bool:
        """Whether it binds the node's name still."""
        return now_s <= self.expires_s


def renewal_due_s(begins_s: float, expires_s: float, spread: float = 0.0) -> float:
    """When to renew a certificate: after two thirds of its time, and `spread` of it.

    A third is left for a controller that is away: 8 hours of 24.
    """
    return begins_s + (2 / 3 + spread) * (expires_s - begins_s)


def why_not_enrolled(node: str, record: Certified | None, key: str, now_s: float) -> str:
    """Why a node gets no certificate for `key` by the join token; "" if it does.

    The same key may enrol again: its owner has not got the answer, or asks at a restart.
    """
    if record is None or record.key == key or not record.holds(now_s):
        return ""
    return f"node {node} has a certificate for another key; {REJOIN.format(node=node)}"


def why_not_renewed(
    node: str, record: Certified | None, key: str, shown: Certified, shown_name: str
) -> str:
    """Why a node gets no certificate for `key` by the one that it shows; "" if it does.

    `shown` is a certificate that holds: TLS and the gate have seen to that.
    """
    if shown_name != node:
        return f"the certificate is that of node {shown_name}, not of {node}"
    if key != shown.key:
        return f"node {node} renews the certificate of another key than it shows"
    if record is None:
        return (
            f"the certificate of node {node} is not on record: an operator took it off, or issued "
            "it by hand; show the join token"
        )
    return "" if record.key == key else f"node {node} has enrolled with another key since"


def why_not_heard(node: str, record: Certified | None, key: str | None, now_s: float) -> str:
    """Why an agent may not speak for a node; "" if it may.

    `key`: that of the certificate it shows, which names the node; None with the join token alone.
    What an operator issued by hand is on no record, and is good for a node that has not enrolled.
    """
    if record is None or not record.holds(now_s) or record.key == key:
        return ""
    if key is None:
        return (
            f"node {node} has a certificate, and the join token alone was shown; "
            f"{REJOIN.format(node=node)}"
        )
    return f"node {node} has a certificate for another key; {REJOIN.format(node=node)}"
