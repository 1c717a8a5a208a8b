"""What streams of thousands of agents claim."""

from __future__ import annotations

from typing import Any

from bench.results import Claim

_HOW = (
    "python -m bench.agents; the controller on one core, agents niced on another one, a connection "
    "for each; a heartbeat of eight ranks each 2 s"
)


def claims_of(rows: list[dict[str, Any]]) -> list[Claim]:
    """The claims, of the largest fleet; and the cost of a heartbeat at each size."""
    ours = {row["agents"]: row for row in rows if row["server"] == "controller"}
    bare = {row["agents"]: row for row in rows if row["server"] == "bare"}
    most = max(ours)
    return [
        *_of_heartbeats(f"{most} agents", ours[most], bare[most]),
        *_of_faults(f"{most} agents", ours[most], bare[most]),
        *(_cost(count, each, bare[count]) for count, each in sorted(ours.items())),
    ]


def _of_heartbeats(where: str, ours: dict[str, Any], bare: dict[str, Any]) -> list[Claim]:
    return [
        Claim(
            claim=f"{where}: 99 % of heartbeats are read within",
            value=ours["p99_s"] * 1e3,
            unit="ms",
            goal="< 100",
            baseline=f"{bare['p99_s'] * 1e3:.1f} ms, bare gRPC with the same load",
            how=_HOW,
        ),
        Claim(
            claim=f"{where}: share of one core",
            value=ours["core_share"],
            unit="of a core",
            goal="< 1",
            baseline=f"{bare['core_share']:.2f}, bare gRPC",
            how=_HOW,
        ),
        Claim(
            claim=f"{where}: peak memory",
            value=ours["peak_bytes"] / 2**20,
            unit="MiB",
            goal="< 1536",
            baseline=f"{bare['peak_bytes'] / 2**20:.0f} MiB, bare gRPC",
            how=_HOW,
        ),
    ]


def _of_faults(where: str, ours: dict[str, Any], bare: dict[str, Any]) -> list[Claim]:
    return [
        Claim(
            claim=f"{where}, all connections break: until each has a session again",
            value=ours["storm_s"],
            unit="s",
            goal="< 30",
            baseline=f"{bare['join_s']:.1f} s for all to join, bare gRPC",
            how=_HOW,
        ),
        Claim(
            claim=f"{where}, one falls silent: until its job stops",
            value=ours["silent_found_s"],
            unit="s",
            goal="< 62",
            baseline="recovery.heartbeat_silent_s, 60 s",
            how=_HOW,
        ),
        Claim(
            claim=f"{where}, its job stopped, half are gone: 99 % of heartbeats are read within",
            value=ours["lost_p99_s"] * 1e3,
            unit="ms",
            goal="reported",
            baseline=f"{ours['p99_s'] * 1e3:.1f} ms before, when each told of eight ranks",
            how=_HOW,
        ),
    ]


def _cost(count: int, ours: dict[str, Any], bare: dict[str, Any]) -> Claim:
    return Claim(
        claim=f"{count} agents: CPU time of the controller for a heartbeat",
        value=_cpu_us(ours),
        unit="us",
        goal="reported",
        baseline=f"{_cpu_us(bare):.0f} us, bare gRPC",
        how=_HOW,
    )


def _cpu_us(row: dict[str, Any]) -> float:
    return float(row["core_share"] / row["heartbeats_per_s"] * 1e6)
