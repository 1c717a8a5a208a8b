"""The rule of every field of every message that an agent may send, by the message's name.

A field without a rule fails a test, so a new one cannot be forgotten. Bounds are wide: they
keep out what cannot be, not what is unusual.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from controller.core.edge.rules import (
    MAX_COUNT,
    MAX_DURATION_S,
    AnyReal,
    Data,
    Flag,
    Many,
    Moment,
    Name,
    Number,
    Pairs,
    Part,
    Reason,
    Rule,
    Text,
)
from outlast.ids import IMAGE_PATTERN

# Ranks on one node; more in a heartbeat is a mistake of the sender.
MAX_RANKS = 1_024
# Links of one node.
MAX_LINKS = 256
# Ranks of one job.
MAX_WORLD = 2**20
MAX_FINDINGS = 10_000

_JOB = re.compile(r"[a-z0-9][-a-z0-9]{0,127}")
_NODE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,251}[A-Za-z0-9])?")
# A host's name or an address, of the sixth version too, perhaps with its zone.
_HOST = re.compile(r"[-A-Za-z0-9_.:%]{1,253}")
_ADDRESS = re.compile(r"([-A-Za-z0-9_.]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
# Ids that we made ourselves: of commands, orders and queries.
_ID = re.compile(r"[-A-Za-z0-9_./:]{1,512}")
_TOKEN = re.compile(r"[-A-Za-z0-9_=+/.]{0,512}")
_WORD = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_STATE = re.compile(r"[A-Za-z]?")

_JOB_ID = Name(_JOB)
# An event may be of no job.
_JOB_OR_NONE = Name(re.compile(rf"({_JOB.pattern})?"))
_ATTEMPT = Number(1, MAX_COUNT)
_ATTEMPT_OR_NONE = Number(0, MAX_COUNT)
_RANK = Number(0, MAX_WORLD - 1)
_SEQ = Number(1, MAX_COUNT)
_STEP = Number(0, MAX_COUNT)
_STEP_OR_NONE = Number(-1, MAX_COUNT)
_PORT = Number(0, 65_535)
# The message counts without its time, its size or its figures.
_DURATION = Number(0.0, MAX_DURATION_S, instead=0.0)
_SIZE = Number(0, MAX_COUNT, instead=0)
_RATE = Number(0.0, 1e15, instead=0.0)
_STEP_IF_KNOWN = Number(-1, MAX_COUNT, instead=-1)
# Of a clock: for two centuries.
_NANOSECONDS = Number(0, 2**62, instead=0)
_TITLE = Text(256)
_LINE = Text(4_096)
_PAGE = Text(65_536, keeps_end=True)
_STACKS = Text(65_536)
# Findings are compared with each other; infinities cannot be.
_FIGURE = Number(-1e300, 1e300, instead=0.0)

FIELDS: Mapping[str, Mapping[str, Rule]] = {
    "AgentMessage": {
        "hello": Part(),
        "heartbeat": Part(),
        "event": Part(),
        "log_chunk": Part(),
        "check_report": Part(),
        "inventory": Part(),
    },
    "Inventory": {"worker_statuses": Many(Part(), 4 * MAX_RANKS)},
    "Hello": {
        "node_id": Name(_NODE),
        "incarnation": Name(re.compile(r"[-A-Za-z0-9_.]{1,128}")),
        "address": Name(_HOST),
        "rendezvous_port": _PORT,
        "workers": Number(1, MAX_RANKS),
        "version": _TITLE,
        "worker_statuses": Many(Part(), 4 * MAX_RANKS),
        "metrics_address": Name(re.compile(f"({_ADDRESS.pattern})?"), instead=""),
        "replica_port": Number(0, 65_535, instead=0),
        "replica_token": Name(_TOKEN, instead=""),
        "predecessor": Name(re.compile(r"[-A-Za-z0-9_.]{0,128}"), instead=""),
        "capacity": Part(),
        "inventory_follows": Flag(),
    },
    "NodeCapacity": {
        "gpus": Number(0, MAX_RANKS, instead=0),
        "gpu_model": _TITLE,
        "gpu_memory_bytes": _SIZE,
        "cpus": Number(0, 2**20, instead=0),
        "memory_bytes": _SIZE,
        "host_memory_bytes": _SIZE,
        "host_memory_free_bytes": _SIZE,
        "image": Name(re.compile(f"({IMAGE_PATTERN.pattern})?"), instead=""),
        "topology": _TITLE,
    },
    "WorkerStatus": {
        "job_id": _JOB_ID,
        "attempt": _ATTEMPT,
        "rank": _RANK,
        "running": Flag(),
        "exit": Part(),
    },
    "WorkerExit": {
        # Exit codes and signals fit into a byte each; a process ended in any case.
        "code": Number(-255, 255, instead=1),
        "exception_type": _TITLE,
        "exception_message": _PAGE,
        "traceback": _PAGE,
        "at_s": Moment(),
        "stderr_tail": _PAGE,
        "completed_step": _STEP_IF_KNOWN,
        "last_operation": Part(),
        "stopped": Flag(),
        "out_of_memory": _LINE,
    },
    "Heartbeat": {
        "seq": Number(0, MAX_COUNT, instead=0),
        "at_s": Moment(),
        "ranks": Many(Part(), MAX_RANKS),
        "clock_sent_ns": _NANOSECONDS,
        "clock": Part(),
        "links": Many(Part(), MAX_LINKS),
    },
    "LinkWindow": {
        "link": _TITLE,
        "is_rdma": Flag(),
        "seconds": _DURATION,
        "num_samples": _SIZE,
        "received": Part(),
        "sent": Part(),
        "longest_silence_s": _DURATION,
        "period_s": _DURATION,
        "finding": _LINE,
    },
    "LinkRates": {"least": _RATE, "mean": _RATE, "most": _RATE},
    "ClockRoundTrip": {
        "sent_ns": _NANOSECONDS,
        "received_ns": _NANOSECONDS,
        "answered_ns": _NANOSECONDS,
        "returned_ns": _NANOSECONDS,
    },
    "Operation": {
        "op": _TITLE,
        "group": _TITLE,
        "sequence": _STEP,
        "detail": Number(-1, 2**31 - 1, instead=-1),
        "is_inside": Flag(),
        "peer": Number(-1, MAX_WORLD, instead=-1),
    },
    "RankSummary": {
        "job_id": _JOB_ID,
        "attempt": _ATTEMPT,
        "rank": _RANK,
        "phase": Text(64),
        "completed_step": _STEP_OR_NONE,
        "resumed_step": _STEP_OR_NONE,
        "last_operation": Part(),
        "last_op_age_s": _DURATION,
        "step_age_s": _DURATION,
        "use": Part(),
        "stalled_s": _DURATION,
        "stall_limit_s": _DURATION,
        "stall_limit_source": _LINE,
        "entered": Pairs(keys=_TITLE, values=_STEP, most=256),
        "process_state": Name(_STATE, instead="", reason=Reason.UNKNOWN_WORD),
        "reports_no_steps": Flag(),
    },
    "RankUse": {
        "split": Part(),
        "pipeline_busy_s": _DURATION,
        "pipeline_waited_s": _DURATION,
        "peak_memory_bytes": _SIZE,
        "expected_memory_bytes": _SIZE,
        "expected_bubble": Number(0.0, 1.0, instead=0.0),
    },
    "StepSplit": {
        "data_s": _DURATION,
        "forward_s": _DURATION,
        "backward_s": _DURATION,
        "optimizer_s": _DURATION,
        "tp_exposed_s": _DURATION,
        "pp_exposed_s": _DURATION,
        "dp_exposed_s": _DURATION,
        "other_exposed_s": _DURATION,
        "data_wait_s": _DURATION,
        "garbage_collection_s": _DURATION,
    },
    "AgentEvent": {
        "seq": _SEQ,
        "job_id": _JOB_OR_NONE,
        "attempt": _ATTEMPT_OR_NONE,
        "at_s": Moment(),
        "command_result": Part(),
        "worker_exited": Part(),
        "step_reports": Part(),
        "checkpoint_committed": Part(),
        "checkpoint_trouble": Part(),
        "progress": Part(),
        "host_sign": Part(),
        "goodbye": Part(),
    },
    "Goodbye": {"incarnation": Name(re.compile(r"[-A-Za-z0-9_.]{1,128}"))},
    "HostSign": {
        "subject": Name(_WORD, reason=Reason.UNKNOWN_WORD),
        "what": _LINE,
        "message": _LINE,
        "spares_node": Flag(),
    },
    "CommandResult": {
        "command_id": Name(_ID),
        "ok": Flag(),
        "detail": _PAGE,
        "completed_step": _STEP_IF_KNOWN,
        "findings": Many(Part(), MAX_FINDINGS),
        "error_kind": Name(
            # Kinds that this version does not know are the machine's to judge.
            re.compile(f"({_WORD.pattern})?"),
            instead="internal",
            reason=Reason.UNKNOWN_WORD,
        ),
        "stacks": Many(Part(), MAX_RANKS),
    },
    "RankStacks": {
        # -1 is the node's agent.
        "rank": Number(-1, MAX_WORLD - 1),
        "location": _LINE,
        "text": _STACKS,
        "paths": Many(_LINE, 64),
    },
    "WorkerExited": {"rank": _RANK, "exit": Part()},
    "StepReports": {"reports": Many(Part(), 100_000)},
    "StepReport": {
        "step": Number(1, MAX_COUNT),
        # 0 is the event's own.
        "attempt": _ATTEMPT_OR_NONE,
        "loss": AnyReal(),
        "grad_norm": AnyReal(),
        "learning_rate": AnyReal(),
        "tokens": Number(0, MAX_COUNT),
        "duration_s": Number(0.0, MAX_DURATION_S),
        "at_s": Moment(),
        "eval_loss": AnyReal(),
        "eval_losses": Pairs(keys=_TITLE, values=AnyReal(), most=16),
        "split": Part(),
    },
    "CheckpointCommitted": {
        "step": _STEP,
        "size_bytes": _SIZE,
        "upload_s": _DURATION,
        "total_s": _DURATION,
        "is_behind": Flag(),
        "stalled_s": _DURATION,
        "saved_by_attempt": _STEP,
    },
    "CheckpointTrouble": {
        "step": _STEP_IF_KNOWN,
        "stage": Name(_WORD, instead="upload", reason=Reason.UNKNOWN_WORD),
        "detail": _LINE,
    },
    "ProgressMade": {
        "completed_step": _STEP_OR_NONE,
        "resumed_step": _STEP_OR_NONE,
        "completed_at_s": Moment(),
        "start_split_s": Pairs(keys=Text(64), values=Number(0.0, MAX_DURATION_S), most=32),
        "environment": Pairs(keys=Text(128), values=Text(512), most=128),
        "environment_changes": Many(Text(1_024), 64),
        "data_left_out": Many(Text(1_024), 64),
        "num_samples": Number(0, MAX_COUNT, instead=0),
    },
    "LogChunk": {
        "query_id": Name(_ID),
        "rank": _RANK,
        "attempt": _ATTEMPT_OR_NONE,
        "data": Data(16 * 2**20),
        "end": Flag(),
        # Of old lines too, and 0 where nobody asked.
        "at_s": Number(0.0, 1e11, instead=0.0),
        "is_selected": Flag(),
    },
    "CheckReport": {
        "order_id": Name(_ID),
        "findings": Many(Part(), MAX_FINDINGS),
        "done": Flag(),
        "listening_port": Number(1, 65_535),
        "begun": Flag(),
    },
    # Words that are not known become the mildest ones where findings are read.
    "Finding": {
        "test": _TITLE,
        "node": _TITLE,
        "metric": _TITLE,
        "value": _FIGURE,
        "unit": Text(64),
        "threshold": _FIGURE,
        "threshold_source": Text(64),
        "verdict": Text(64),
        "localises": Text(64),
        "detail": _LINE,
        "duration_s": _DURATION,
        "peer": _TITLE,
        "baseline_key": Text(1_024),
        "digest": Text(1_024),
        "digest_key": Text(1_024),
        "contended_ratio": _DURATION,
    },
}
