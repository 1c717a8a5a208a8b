"""The agent itself: its line to the controller, its workers, what it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric

from checkpoint.memory import held_bytes
from controller.agent.mistakes import PARTS
from controller.agent.observe.metrics.reading import Reading
from controller.families import Counter, Family, Gauge

WORKERS = Gauge("outlast_agent_workers_running", "Worker processes")
CONNECTED = Gauge("outlast_agent_connected", "1 while a controller is connected")
SESSIONS = Counter("outlast_agent_sessions_total", "Connections to a controller")
HEARTBEATS = Counter("outlast_agent_heartbeats_total", "Heartbeats sent")
BUFFERED = Gauge("outlast_agent_events_buffered", "Events that no controller has confirmed yet")
DROPPED = Counter("outlast_agent_events_dropped_total", "Events crowded out of the buffer")
STANDBY = Counter("outlast_agent_standby_restarts_total", "Ends of the standby process")
MEMORY = Gauge("outlast_agent_host_memory_bytes", "Host memory that checkpoints take")
MISTAKES = Counter(
    "outlast_agent_errors_total",
    "Errors in the agent's background tasks, which are restarted, by task",
    ("part",),
)
EXITS = Counter("outlast_agent_worker_exits_total", "Workers that ended, by how", ("outcome",))
UPLOADS = Counter(
    "outlast_agent_uploads_total",
    "Checkpoints committed from here, and troubles on the way",
    ("outcome",),
)
SLOTS_GUARDED = Counter(
    "outlast_agent_slots_guarded_total",
    "Host-memory slots by outcome: checksummed, overwritten before that, or refused as damaged",
    ("outcome",),
)
GUARDED_BYTES = Counter(
    "outlast_agent_slot_checksum_bytes_total", "Bytes of host memory that were checksummed"
)
GUARD_DELAY = Counter(
    "outlast_agent_slot_checksum_delay_seconds_total",
    "Seconds from seals to checksums, all slots together: damage in between is not found",
)
REPLICA_BYTES = Counter(
    "outlast_agent_replica_bytes_total",
    "Bytes of host memory copied between nodes: sent, received, fetched after a loss",
    ("way",),
)
REPLICAS_BROUGHT = Counter(
    "outlast_agent_replicas_brought_total",
    "Copies that other nodes brought here: kept, torn on the way, refused",
    ("outcome",),
)
REPLICA_FETCHES = Counter(
    "outlast_agent_replica_fetches_total",
    "Ranks looked after at a start: present here, fetched from another node, lost",
    ("outcome",),
)
REPLICAS_HELD = Gauge("outlast_agent_replicas_held", "Ranks of other nodes with a copy here")
REPLICA_LAG = Gauge(
    "outlast_agent_replica_lag_steps", "Steps by which copies are behind the ranks of this node"
)
FAMILIES: tuple[Family, ...] = (
    *(WORKERS, CONNECTED, SESSIONS, HEARTBEATS, BUFFERED, DROPPED),
    *(STANDBY, MISTAKES, MEMORY, EXITS, UPLOADS),
    *(SLOTS_GUARDED, GUARDED_BYTES, GUARD_DELAY),
    *(REPLICA_BYTES, REPLICAS_BROUGHT, REPLICA_FETCHES, REPLICAS_HELD, REPLICA_LAG),
)


def collect(reading: Reading, memory_dir: Path) -> Iterator[Metric]:
    """The families of this subject."""
    yield WORKERS.value(reading.workers_running)
    yield CONNECTED.value(reading.is_connected)
    yield SESSIONS.value(reading.sessions)
    yield HEARTBEATS.value(reading.heartbeats)
    yield BUFFERED.value(reading.events_buffered)
    yield DROPPED.value(reading.events_dropped)
    yield STANDBY.value(reading.standby_restarts)
    mistakes = {**dict.fromkeys(PARTS, 0), **reading.mistakes}
    yield MISTAKES.of(((part,), count) for part, count in mistakes.items())
    yield MEMORY.value(held_bytes([memory_dir]))
    yield EXITS.of(((outcome,), count) for outcome, count in reading.worker_exits.items())
    yield UPLOADS.of(((outcome,), count) for outcome, count in reading.uploads.items())
    guarded = reading.guarded
    outcomes = ("summed", "overwritten", "damaged")
    yield SLOTS_GUARDED.of(((outcome,), getattr(guarded, outcome)) for outcome in outcomes)
    yield GUARDED_BYTES.value(guarded.nbytes)
    yield GUARD_DELAY.value(guarded.delay_s)
    replicas = reading.replicas
    yield REPLICA_BYTES.of(((way,), count) for way, count in replicas.bytes.items())
    yield REPLICAS_BROUGHT.of(((outcome,), count) for outcome, count in replicas.outcomes.items())
    yield REPLICA_FETCHES.of(((outcome,), count) for outcome, count in replicas.fetches.items())
    yield REPLICAS_HELD.value(replicas.num_held)
    yield REPLICA_LAG.value(replicas.lag_steps)
