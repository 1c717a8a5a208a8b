"""What is wrong with a folder of code, or with an archive of one."""

from __future__ import annotations


class CodeError(ValueError):
    """A folder that cannot be sent, or an archive that cannot be unpacked; the message says why."""
