"""A request as a server remembers it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Request:
    """What somebody asked for, as rights name it."""

    user: str
    verb: str
    resource: str
    """plural.group or plural, with /subresource."""
    is_allowed: bool = True
