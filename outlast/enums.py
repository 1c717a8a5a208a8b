"""`StrEnum`, also for Python 3.10: a script that uses `outlast.session` may have that."""

from __future__ import annotations

import sys

__all__ = ["StrEnum"]

if sys.version_info >= (3, 11):  # noqa: UP036
    from enum import StrEnum
else:
    from enum import Enum

    class StrEnum(str, Enum):  # noqa: UP042
        """Members that are strings, and print as such."""

        __str__ = str.__str__
        __format__ = str.__format__
