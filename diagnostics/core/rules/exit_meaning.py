"""What a message at the end of a worker means."""

from __future__ import annotations

from dataclasses import dataclass

from diagnostics.core.rules.table import Rule
from outlast.failures import FailureClass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitMeaning:
    """The class of a failure."""

    fault_class: FailureClass
    # Whether the rule may decide from standard error, where warnings stand as well.
    in_stderr: bool = True


ExitRule = Rule[ExitMeaning]
