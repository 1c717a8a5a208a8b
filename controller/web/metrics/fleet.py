"""Nodes as the controller sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import Metric

from controller.core.leaving import recent_stops
from controller.core.spares import spares_wanted
from controller.core.states import AWAY, FREE, NodeState
from controller.families import Counter, Family, Gauge
from controller.web.metrics.sources import Sources

_BY_NODE = ("node",)

STATE = Gauge("outlast_node_state", "1 for the node's present state", ("node", "state"))
CONNECTED = Gauge("outlast_node_connected", "Whether its agent has a session", _BY_NODE)
HEARTBEAT = Gauge("outlast_node_heartbeat_age_seconds", "Since it was last heard", _BY_NODE)
CLOCK_AHEAD = Gauge(
    "outlast_node_clock_ahead_seconds",
    "By how much its clock is ahead of the controller's, from heartbeats' round trips",
    _BY_NODE,
)
CLOCK_ERROR = Gauge(
    "outlast_node_clock_error_seconds", "How far that may be wrong at most", _BY_NODE
)
QUARANTINES = Gauge("outlast_node_quarantines", "How often it was quarantined of late", _BY_NODE)
STOPS = Gauge(
    "outlast_node_agent_stops",
    "How often its agent was stopped in order within the last hour while a job was at work there",
    _BY_NODE,
)
SPARE = Gauge("outlast_spare_nodes", "Connected nodes that are free")
SPARES_WANTED = Gauge(
    "outlast_spare_nodes_wanted",
    "Warm spare nodes that jobs ask for: the most of any of them",
)
EVICTIONS = Counter("outlast_node_evictions_total", "Nodes taken out of the cluster")
REQUESTS = Counter("outlast_node_requests_total", "Times that the cluster was asked for nodes")
FAMILIES: tuple[Family, ...] = (
    *(STATE, CONNECTED, HEARTBEAT, CLOCK_AHEAD, CLOCK_ERROR, QUARANTINES, STOPS),
    *(SPARE, SPARES_WANTED, EVICTIONS, REQUESTS),
)


def collect(sources: Sources) -> Iterator[Metric]:
    """The families of this subject."""
    sessions, counts = sources.sessions, sources.effects.counts
    nodes = [n for n in sources.service.state.nodes.values() if n.state not in AWAY]
    states = [(state, str(state)) for state in NodeState]
    yield STATE.of(
        ((node.node, name), node.state is state) for node in nodes for state, name in states
    )
    yield CONNECTED.of(((node.node,), sessions.is_connected(node.node)) for node in nodes)
    now_s = asyncio.get_running_loop().time()
    yield HEARTBEAT.of(
        ((node.node,), max(0.0, now_s - heard_s))
        for node in nodes
        if (heard_s := sources.edge.heard_s(node.node)) is not None
    )
    clocks = [(node.node, sources.edge.clock(node.node, now_s)) for node in nodes]
    yield CLOCK_AHEAD.of(((node,), each.ahead_s) for node, each in clocks if each is not None)
    yield CLOCK_ERROR.of(((node,), each.error_s) for node, each in clocks if each is not None)
    yield QUARANTINES.of(((node.node,), len(node.quarantines_s)) for node in nodes)
    wall_s = sources.service.now_s
    yield STOPS.of(((node.node,), len(recent_stops(node, wall_s))) for node in nodes)
    spare = sum(
        node.state in FREE and sessions.is_connected(node.node) and not node.cordoned
        for node in nodes
    )
    yield SPARE.value(spare)
    yield SPARES_WANTED.value(sum(spares_wanted(sources.service.state.jobs.values()).values()))
    yield EVICTIONS.value(counts["EvictNode"])
    yield REQUESTS.value(counts["ProvisionNodes"])
