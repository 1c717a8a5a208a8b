"""The two roots of every error we raise, split by what the caller should do.

Bad input is not here: it is a `ValueError` that names field, value and limit
(`outlast.problems.SpecError` for the job spec).
"""

from __future__ import annotations


class OutlastError(Exception):
    """Anything Outlast reports about the world, as opposed to its own mistakes."""


class RetryableError(OutlastError):
    """Trying again later may help.

    `after_s` is how long to wait first, in seconds.
    """

    def __init__(self, message: str, *, after_s: float = 1.0) -> None:
        super().__init__(message)
        self.after_s = after_s


class FatalError(OutlastError):
    """Trying again will not help; a person or another policy must act."""


class SettingError(FatalError):
    """What a field of the job spec asks for cannot be done; the message begins with the field."""


class MisfitError(FatalError):
    """A job asks for more than its node has: no fault of the node."""


class OccupiedError(FatalError):
    """A job asks for what its node has and something else uses now: no fault of the node."""
