"""Where the controller may be: one address, or those of several of which one leads."""

from __future__ import annotations


def addresses_of(text: str) -> tuple[str, ...]:
    """The addresses of `host:port,host:port`, in the order in which they are tried."""
    found = tuple(stripped for address in text.split(",") if (stripped := address.strip()))
    return found or (text,)
