"""What a check says: raw measurements, and findings with a verdict.

A check only *measures*; it never judges. `verdicts` turns its measurements
into findings, which are what the controller, the journal and the user see. A
finding mirrors `outlast.v1.Finding` field by field, so that an edge converts
it with no table.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum

from diagnostics.core import flatjson


class CheckVerdict(StrEnum):
    """What a finding says about its node.

    Only FAIL speaks against the hardware. INCONCLUSIVE (could not tell), SKIP
    (does not apply here) and ERROR (the check itself broke) are neither good
    nor bad news.
    """

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    SKIP = "skip"
    ERROR = "error"


class ThresholdSource(StrEnum):
    """Where a threshold comes from."""

    SPEC = "spec"
    OWN_BASELINE = "own_baseline"
    # Healthy values of the same kind, of whichever pair of nodes, in earlier runs.
    FLEET_BASELINE = "fleet_baseline"
    PEERS = "peers"
    NONE = "none"


class Localises(StrEnum):
    """What a failure would point at."""

    DEVICE = "device"
    NODE = "node"
    LINK = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One number that a check took, before anyone judged it."""

    test: str
    metric: str
    value: float
    unit: str
    localises: Localises
    duration_s: float
    detail: str = ""
    # Where the history of comparable values is kept. Everything that changes
    # the value without being a fault (sizes, device, library) is part of it.
    # Empty when the value is not compared with a history.
    baseline_key: str = ""
    # The value must not exceed this, whatever the history says.
    at_most: float | None = None
    # False where a bad value proves no fault (others may slow it down, a counter may rise
    # for innocent reasons): it is a warning at most.
    bad_is_fault: bool = True
    # Share of the time in which something on this machine waited for a CPU.
    contended_ratio: float = 0.0
    # The other node of a measurement between two.
    peer: str = ""
    # Digest of an exact result. Every device with the same `digest_key` must have the same.
    digest: str = ""
    digest_key: str = ""

    def to_json(self) -> str:
        """One line of JSON."""
        return flatjson.to_json(self)

    @staticmethod
    def from_json(text: str) -> Measurement:
        """The measurement that `to_json` wrote; raises ValueError for anything else."""
        return flatjson.from_json(Measurement, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One judged fact about a node, or about the link from it to `peer`."""

    test: str
    node: str
    metric: str
    value: float
    unit: str
    threshold: float | None
    threshold_source: ThresholdSource
    verdict: CheckVerdict
    localises: Localises
    detail: str
    duration_s: float
    peer: str = ""
    baseline_key: str = ""
    digest: str = ""
    digest_key: str = ""
    contended_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name in ("value", "threshold", "duration_s"):
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"finding {self.test}.{self.metric}: {name} is {number}")

    def to_fields(self) -> dict[str, str | float]:
        """Keyword arguments of the protobuf message: enums as text, no absent threshold."""
        return {
            name: str(value) if isinstance(value, StrEnum) else value
            for name, value in asdict(self).items()
            if value is not None
        }

    def to_json(self) -> str:
        """One line of JSON."""
        return flatjson.to_json(self)

    @staticmethod
    def from_json(text: str) -> Finding:
        """The finding that `to_json` wrote; raises ValueError for anything else."""
        return flatjson.from_json(Finding, text)
