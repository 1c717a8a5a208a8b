"""Bounds that hold for all jobs and nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Bounds of the fleet as a whole; jobs bring their own in the spec."""

    # After a start: agents reconnect within a heartbeat or two.
    reconcile_s: float = 10.0
    # How long the controller distrusts its own eyes after many nodes went quiet at once.
    blind_s: float = 300.0
    blind_share: float = 0.3
    blind_min_nodes: int = 3
    # Losses that fall into one such window count as "at once".
    blind_window_s: float = 10.0
    breaker_share: float = 0.1
    breaker_window_s: float = 600.0
    # A quarantined node may be tried again after so long.
    cooldown_s: float = 600.0
    # A quarantined node that never came back by then is given up.
    abandon_s: float = 7200.0
    retire_after_quarantines: int = 3
    retire_window_s: float = 7 * 86400.0
    suspect_s: float = 1800.0
    # A standby takes a place without another check within so long of its last one.
    standby_recheck_s: float = 3600.0
    fleet_check_timeout_s: float = 300.0
    # What a job lacks on a node because something else uses it is asked for again so much later.
    occupied_retry_s: float = 30.0
    # Free nodes are kept for a job that waits and is next once it has waited for so long.
    reserve_after_s: float = 600.0
    # Nodes that an owner's jobs may have at a time: those that have a number of their own, and any
    # other one; None: as many as there are.
    quotas: tuple[tuple[str, int], ...] = ()
    quota: int | None = None
    # The highest priority that who may only submit can give a job.
    most_priority: int = 100
    # Whether the cluster brings nodes by itself, which may have what the present ones lack.
    brings_nodes: bool = False

    def quota_of(self, owner: str) -> int | None:
        """How many nodes the jobs of an owner may have at a time; None: any number."""
        return dict(self.quotas).get(owner, self.quota) if owner else None
