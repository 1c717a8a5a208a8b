"""SIGKILL of a worker to the next completed step: Outlast beside torchrun.

Same model, ranks and machine, in one interleaved run: one kill under Outlast,
one under `torchrun --max-restarts`, and so on. torchrun is set to its best:
`--monitor-interval 0.1`, a checkpoint on tmpfs every step, and
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` (as shipped it does not always resume).
The time runs from the signal until *every* rank has completed a step of the
next attempt.

    python -m bench.recovery [--runs 5]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.results import Claim, write
from outlast.blackbox import Reader, StartMark
from outlast.client import Client
from outlast.spec import JobSpec, parse_spec

VICTIM_RANK = 1
KILL_AFTER_STEP = 20
DEADLINE_S = 120.0

SPEC = {
    "name": "recovery",
    "steps": 100_000,
    "model": {"layers": 4, "hidden": 192, "heads": 4, "seq_len": 128},
    "parallel": {"dp": 2, "micro_batch": 4},
    "data": {"global_batch": 8, "max_bytes": 2**20},
    "resources": {"workers_per_node": 2},
    "checkpoint": {"storage_interval_steps": 1_000_000},
    "eval": {"interval_steps": None},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    spec = parse_spec(SPEC)
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder,
        controller(Path(folder) / "state") as client,
    ):
        for run in range(runs):
            ours = kill_under_outlast(client, Path(folder) / "state", run)
            theirs = kill_under_torchrun(spec, Path(folder) / f"torchrun-{run}")
            rows += [{"run": run, **ours}, {"run": run, **theirs}]
            print(
                f"run {run}: outlast {ours['recovery_s']:.3f} s, torchrun "
                f"{theirs['recovery_s']:.3f} s  {ours['split_s']}"
            )
    report(rows)


def report(rows: list[dict[str, Any]]) -> None:
    """Print the split and write the claims."""
    of = {
        name: [row for row in rows if row["launcher"] == name] for name in ("outlast", "torchrun")
    }
    median = {
        name: statistics.median(row["recovery_s"] for row in found) for name, found in of.items()
    }
    ratios = [
        theirs["recovery_s"] / ours["recovery_s"]
        for ours, theirs in zip(of["outlast"], of["torchrun"], strict=True)
    ]
    for name, found in of.items():
        print(f"{name}: median {median[name]:.3f} s")
        for part in found[0]["split_s"]:
            value = statistics.median(row["split_s"][part] for row in found)
            print(f"  {part:<12} {value:.3f} s")
    how = "python -m bench.recovery; paired, interleaved kills of rank 1 of 2"
    baseline = "torchrun --max-restarts --monitor-interval 0.1, per-step checkpoint on tmpfs"
    write(
        "recovery",
        rows,
        [
            Claim(
                claim="kill_torchrun_vs_ours",
                value=statistics.median(ratios),
                unit="x",
                goal=">= 5",
                baseline=baseline,
                how=how,
            ),
            Claim(
                claim="steps_lost_on_kill",
                value=max(row["steps_redone"] for row in of["outlast"]),
                unit="steps",
                goal="<= 1",
                baseline="none",
                how=how,
            ),
            Claim(
                claim="recovery_median",
                value=median["outlast"],
                unit="s",
                goal="reported",
                baseline=f"torchrun {median['torchrun']:.3f} s",
                how=how,
            ),
        ],
    )


@contextmanager
def controller(state_dir: Path) -> Iterator[Client]:
    """A controller with one local node of two workers, until the end of the block."""
    state_dir.mkdir(parents=True)
    log = (state_dir.parent / "controller.log").open("wb")
    command = [sys.executable, "-m", "controller", "--state-dir", str(state_dir)]
    command += ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    command += ["--local-nodes", "1", "--workers-per-node", "2"]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        facts = wait_for(lambda: read_json(state_dir / "controller.json"), "the controller")
        client = Client(facts["grpc"])
        wait_for(lambda: any(node.connected for node in client.nodes()), "the node to join")
        yield client
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
        log.close()


def kill_under_outlast(client: Client, state_dir: Path, run: int) -> dict[str, Any]:
    """One kill of a fresh job; its attempt 2 is what recovers."""
    job_id = client.submit({**SPEC, "name": f"recovery-{run}"}).job_id
    folders = [state_dir / "nodes"]

    def boxes(attempt: int) -> list[Reader]:
        found = sorted(folders[0].glob(f"*/jobs/{job_id}/a{attempt}/rank-*.blackbox"))
        return [box for box in map(open_box, found) if box is not None]

    def steps(attempt: int) -> list[int]:
        return [box.present().completed_step for box in boxes(attempt)]

    wait_for(lambda: min(steps(1), default=-1) >= KILL_AFTER_STEP, "the first steps")
    victim = boxes(1)[VICTIM_RANK].present().pid
    killed_s = time.time()
    os.kill(victim, signal.SIGKILL)
    wait_for(
        lambda: (
            len(boxes(2)) == 2
            and all(
                box.present().completed_step > box.present().resumed_step >= 0 for box in boxes(2)
            )
        ),
        "the next attempt's first step",
    )
    reached = max(steps(1))
    firsts = [box.new_steps()[0] for box in boxes(2)]
    end_s = max(record.end_ns for record in firsts) / 1e9
    marks = [box.marks() for box in boxes(2)]
    forked_s = max(found[StartMark.FORKED] for found in marks) / 1e9
    incident = wait_for(lambda: next(iter(client.incidents(job_id)), None), "the incident")
    suspended_s = next(entry.at_s for entry in incident.timeline if entry.phase == "starting")
    split = {"detect": incident.opened_s - killed_s, "stop": suspended_s - incident.opened_s}
    split["fork"] = forked_s - suspended_s
    before_s = forked_s
    for part, mark in (
        ("groups", StartMark.GROUPS_READY),
        ("model", StartMark.MODEL_READY),
        ("restore", StartMark.RESTORED),
    ):
        at_s = max(found[mark] for found in marks) / 1e9
        split[part] = at_s - before_s
        before_s = at_s
    split["first_step"] = end_s - before_s
    client.cancel(job_id)
    wait_for(lambda: client.get(job_id)[0].state == "CANCELLED", "the job's end")
    return {
        "launcher": "outlast",
        "recovery_s": end_s - killed_s,
        "steps_redone": max(0, reached - (firsts[0].step - 1)),
        "split_s": {name: round(value, 4) for name, value in split.items()},
    }


def kill_under_torchrun(spec: JobSpec, folder: Path) -> dict[str, Any]:
    """One kill under torchrun's elastic agent."""
    folder.mkdir(parents=True)
    memory = Path(tempfile.mkdtemp(prefix="outlast-bench-", dir="/dev/shm"))
    (folder / "spec.json").write_text(spec.canonical_json())
    events_path = folder / "events.jsonl"
    env = {
        **os.environ,
        "EVENTS": str(events_path),
        "SPEC": str(folder / "spec.json"),
        "CHECKPOINT": str(memory / "checkpoint.pt"),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=5", "--monitor-interval=0.1"]
    command += ["-m", "bench.baselines.torchrun_train"]
    with (folder / "log").open("wb") as log:
        launcher = subprocess.Popen(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:

        def events() -> list[dict[str, Any]]:
            if not events_path.exists():
                return []
            lines = events_path.read_text().splitlines()
            return [json.loads(line) for line in lines if line.endswith("}")]

        def victim() -> int | None:
            for line in events():
                is_victim = line["event"] == "step" and line["rank"] == VICTIM_RANK
                if is_victim and line["step"] >= KILL_AFTER_STEP:
                    return int(line["pid"])
            return None

        pid = wait_for(victim, "torchrun's first steps")
        killed_s = time.time()
        os.kill(pid, signal.SIGKILL)
        before = events()
        old_pids = {line["pid"] for line in before}

        def recovered() -> list[dict[str, Any]] | None:
            new = [line for line in events() if line["pid"] not in old_pids]
            ranks = {line["rank"] for line in new if line["event"] == "step"}
            return new if len(ranks) == 2 else None

        new = wait_for(recovered, "torchrun's next step")
        return torchrun_row(killed_s, before, new)
    finally:
        for pid_line in {line["pid"] for line in events()} | {launcher.pid}:
            try:
                os.kill(pid_line, signal.SIGKILL)
            except ProcessLookupError:
                continue
        launcher.wait()
        shutil.rmtree(memory)


def torchrun_row(
    killed_s: float, before: list[dict[str, Any]], new: list[dict[str, Any]]
) -> dict[str, Any]:
    """The split of a torchrun recovery, from its events."""

    def last(event: str) -> float:
        firsts: dict[int, float] = {}
        for line in new:
            if line["event"] == event:
                firsts.setdefault(line["rank"], line["at_s"])
        return max(firsts.values())

    order = ("started", "imported", "groups", "model", "restored", "step")
    names = ("detect_stop_spawn", "import", "groups", "model", "restore", "first_step")
    split = {}
    before_s = killed_s
    for name, event in zip(names, order, strict=True):
        split[name] = round(last(event) - before_s, 4)
        before_s = last(event)
    reached = max(line["step"] for line in before if line["event"] == "step")
    resumed = min(line["step"] for line in new if line["event"] == "restored")
    return {
        "launcher": "torchrun",
        "recovery_s": before_s - killed_s,
        "steps_redone": max(0, reached - resumed),
        "split_s": split,
    }


def open_box(path: Path) -> Reader | None:
    """A black box, once its rank has opened it."""
    try:
        return Reader(path)
    except (FileNotFoundError, ValueError):
        return None


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return document


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Poll until `condition` gives something true; raises after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise TimeoutError(f"waited {DEADLINE_S:.0f} s for {what}")


if __name__ == "__main__":
    main()
