"""Names within a folder of code: what they may be, and where its links may lead."""

from __future__ import annotations


def wrong_with_name(name: str) -> str | None:
    """Why a file of an archive may not be called so; None if it may."""
    parts = name.split("/")
    if name.startswith("/"):
        return "is absolute"
    if not name.isprintable():
        return "has characters that cannot be printed, or is not UTF-8"
    if any(part in ("", ".", "..") for part in parts):
        return "is not a plain relative path"
    return None


def leads_out(name: str, target: str) -> bool:
    """Whether a link called `name` with this target leaves the folder, by its words alone."""
    if target.startswith("/") or not target:
        return True
    depth = name.count("/")
    for part in target.split("/"):
        if part == "..":
            depth -= 1
        elif part not in ("", "."):
            depth += 1
        if depth < 0:
            return True
    return False
