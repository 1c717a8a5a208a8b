"""Where the controller may be: one address, or those of several of which one leads."""

from __future__ import annotations


def addresses_of(text: str) -> tuple[str, ...]:
    """The addresses of `host:port,host:port`, in the order in which they are tried."""
    return tuple(address.strip() for address in text.split(","))
