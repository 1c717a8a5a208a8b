"""A job that is hit twice, seen by a real Prometheus and a real Alertmanager.

Once it is the demo, from beginning to end; once a job that still trains while it is
asked about. Every query of every dashboard and every recorded series has data by then,
and every metric that an alert asks for exists. The alert of the fault reaches a webhook
and resolves where nobody replaces the lost node until it has been told: the demo's
standby takes over between two looks of Prometheus.
Durations of the rules are shortened; promtool tests them as they are.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller.local.cluster import LocalConfig
from controller.local.processes import kill, members_of
from tests.controller.notify.receivers import HttpReceiver, http_receiver
from tests.controller.processes import Controller, controller, node_pids
from tests.e2e.cluster import DEADLINE_S, Cluster, wait_for
from tests.prometheus.servers import Api, Hook, alertmanager, prometheus
from tests.prometheus.test_dashboards import FILES, load
from tests.prometheus.test_rules import known_metrics, rules
from tests.prometheus.tools import RULES, needs_prometheus, promtool

# The demo takes under four minutes alone.
DEMO_DEADLINE_S = 500.0

pytestmark = [needs_prometheus, pytest.mark.timeout(900)]

# What cannot have data here, and why. The reason holds only while the metric is absent.
EXCUSED = {
    "outlast_agent_replicas_brought": "the job keeps no copies on other nodes",
    "outlast_agent_replica_fetches": "the job keeps no copies on other nodes",
    "outlast_gpu_xid_events_total": "no GPU has reported an XID, as should be",
    "outlast_gpu_": "this machine has no GPU, or nvidia-ml-py is not installed",
    "outlast_job_mfu_trend": "a trend needs a day",
    "outlast_job_late_launch": "no hour is over",
    "outlast_job_periodic_stall": "the steps are looked at every ten minutes",
    "outlast_node_slowest_ratio": "nodes are compared in windows of ten minutes",
    "outlast_node_slow": "nodes are compared in windows of ten minutes",
    "outlast_node_last_to_enter_ratio": "nodes are compared in windows of ten minutes",
    "outlast_agent_replica_bytes": "the job keeps no copies on other nodes",
    "outlast_rdma_": "this machine has no RDMA port",
    "outlast_link_": "nodes of one machine are reached through loopback",
    "outlast_notifications_": "nobody is to be notified",
    "outlast_kube_": "these nodes are processes of this machine",
    "outlast_diagnostic_bad_": "no link is bad, as should be",
    'verdict="fail"': "no check has failed, as should be",
}
_SELECTOR = re.compile(
    r"(?:[a-z_]+:)?outlast_[a-z0-9_]+(?::[a-z0-9_]+)?(?:\{[^}]*\})?|\bup\{[^}]*\}"
)


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has recovered from both faults."""

    api: Api
    job_id: str
    start_s: float
    # A moment after the recovery at which the job trained.
    training_s: float


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """`outlast demo` as everybody runs it."""
    folder = tmp_path_factory.mktemp("demo")
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*(sys.executable, "-m", "outlast.cli.main", "demo", "--out", str(folder / "out"))],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        address = folder / "out" / "faulted" / "controller.json"
        wait_for(address.exists, "the demo's controller")
        http = json.loads(address.read_text())["http"]
        with prometheus(folder / "prometheus", http, RULES / "rules") as api:
            start_s = time.time()
            # An incident is over a few steps after its job trains again.
            both = "sum by (job_id) (outlast_incidents_total) >= 2"
            over = wait_for(lambda: api.now(both), "both incidents to be over", DEMO_DEADLINE_S)
            mean = "fleet:outlast_incident_recovery_seconds:mean"
            wait_for(lambda: bool(api.now(mean)), "the incidents to be recorded")
            training_s = time.time()
            assert process.wait(DEMO_DEADLINE_S) == 0, log.read_text()
            yield Run(api, over[0]["metric"]["job_id"], start_s, training_s)
    finally:
        # The demo leaves nothing behind when it is asked to end.
        process.terminate()
        process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def hook() -> Iterator[Hook]:
    """Who is told of alerts."""
    it = Hook()
    yield it
    it.close()


@pytest.fixture(scope="module")
def receiver() -> Iterator[HttpReceiver]:
    """Who is notified by the controller itself."""
    with http_receiver() as it:
        yield it


@pytest.fixture(scope="module")
def live(
    tmp_path_factory: pytest.TempPathFactory, hook: Hook, receiver: HttpReceiver
) -> Iterator[Run]:
    """A job that goes on training."""
    folder = tmp_path_factory.mktemp("observed")
    nodes = ("--local-nodes", "2", "--workers-per-node", "2")
    configuration = folder / "controller.yaml"
    webhook = {"test": {"url": receiver.url, "repeat_s": 0}}
    configuration.write_text(json.dumps({"notify": {"webhook": webhook}}))
    with (
        controller(folder / "state", *nodes, "--config", str(configuration)) as it,
        alertmanager(folder / "alertmanager", hook.url) as alerts_to,
        prometheus(folder / "prometheus", it.http, RULES / "rules", alerts_to) as api,
    ):
        yield from _break(it, api, hook, folder)


@pytest.fixture(scope="module", params=["live", "demo"])
def run(request: pytest.FixtureRequest) -> Run:
    """One after the other."""
    found: Run = request.getfixturevalue(request.param)
    return found


def _break(process: Controller, api: Api, hook: Hook, folder: Path) -> Iterator[Run]:
    """Kill a worker, then a node; a new node joins when the alert has been told."""
    start_s = time.time()
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(2)
    job_id = cluster.submit(
        steps=1_000_000,
        parallel={"dp": 4, "micro_batch": 1},
        resources={"workers_per_node": 2},
        eval={"interval_steps": 50},
    )
    cluster.wait_step(job_id, 45)
    cluster.kill_rank(job_id, attempt=1, rank=2)
    wait_for(lambda: cluster.job(job_id).attempt == 2, "a second attempt")
    cluster.wait_state(job_id, "RUNNING")
    _lose(process, "node-1")
    hook.wait("OutlastJobInterrupted", "firing")
    agent = _join(process, folder)
    try:
        cluster.wait_state(job_id, "RUNNING")
        hook.wait("OutlastJobInterrupted", "resolved")
        reached = cluster.job(job_id).step
        cluster.wait_step(job_id, reached + 50)
        # A rate takes two scrapes of all ranks, a rule one more look at it.
        slowdown = "job_stage:outlast_rank_work_seconds:slowdown5m"
        wait_for(lambda: bool(api.since(start_s, slowdown)), "the ranks to be compared")
        run = Run(api, job_id, start_s, time.time())
        # All is recorded; what trains on would only slow the demo down.
        with cluster.client as client:
            client.cancel(job_id)
        yield run
    finally:
        agent.terminate()
        agent.wait(DEADLINE_S)


def test_alert_of_the_fault_reaches_a_person_and_resolves(live: Run, hook: Hook) -> None:
    fired = hook.wait("OutlastJobInterrupted", "firing")
    assert fired["labels"] == {
        "alertname": "OutlastJobInterrupted",
        "job_id": live.job_id,
        "severity": "critical",
    }
    assert live.job_id in fired["annotations"]["summary"]
    assert fired["annotations"]["runbook_url"].endswith("#outlastjobinterrupted")
    resolved = hook.wait("OutlastJobInterrupted", "resolved")
    assert resolved["endsAt"] > fired["startsAt"]


def test_the_controller_notifies_of_faults_and_recoveries(
    live: Run, receiver: HttpReceiver
) -> None:
    def sent() -> set[tuple[str, str]]:
        events = (event for _, body in receiver.got for event in json.loads(body)["events"])
        return {(event["kind"], event["cause"]) for event in events}

    both = {("recovery", "worker_killed"), ("recovery", "node_lost")}
    wait_for(lambda: both <= sent(), "both recoveries to be sent")


def test_agents_are_found_and_a_new_one_too(live: Run) -> None:
    def up() -> set[str]:
        found = live.api.now('up{job="outlast-agents"} == 1')
        return {series["metric"]["node"] for series in found}

    wait_for(lambda: up() == {"node-0", "node-9"}, "Prometheus to see the nodes as they are")
    assert up() == {"node-0", "node-9"}


def test_every_panel_has_data(run: Run) -> None:
    empty = [
        f"{path.stem}: {panel['title']}: {target['expr']}"
        for path in FILES
        for panel in load(path.name)["panels"]
        for target in panel.get("targets", ())
        if not _has_data(run, target["expr"], instant=bool(target["instant"]))
    ]
    assert not empty, "\n".join(empty)


def test_every_annotation_and_variable_has_data(run: Run) -> None:
    for path in FILES:
        document = load(path.name)
        for annotation in document["annotations"].get("list", ()):
            assert _has_data(run, annotation["expr"]), annotation
        for variable in document["templating"]["list"]:
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", str(variable["query"]))
            if found is not None:
                values = run.api.get(f"label/{found[2]}/values", **{"match[]": found[1]})
                assert values, variable


def test_every_rule_is_evaluated_and_every_recorded_series_exists(run: Run) -> None:
    groups = run.api.get("rules")["groups"]
    found = [rule for group in groups for rule in group["rules"]]
    assert len(found) == len(list(rules()))
    broken = [(rule["name"], rule["lastError"]) for rule in found if rule["health"] != "ok"]
    assert not broken
    recorded = [rule["record"] for rule in rules() if "record" in rule]
    assert [name for name in recorded if not run.api.since(run.start_s, name)] == []


def test_every_metric_that_an_alert_asks_for_exists(run: Run) -> None:
    missing = [
        f"{rule['alert']}: {selector}"
        for rule in rules()
        if "alert" in rule
        for selector in _SELECTOR.findall(rule["expr"])
        if not _has_data(run, selector)
    ]
    assert not missing, "\n".join(missing)


def test_only_what_is_documented_is_shown(run: Run) -> None:
    shown = {name for name in run.api.get("label/__name__/values") if name.startswith("outlast_")}
    assert shown <= known_metrics()
    absent = known_metrics() - shown
    absent = {name for name in absent if ":" not in name and not _excuse(run, name)}
    assert absent == set()


def test_both_pages_pass_promtool(live: Run) -> None:
    targets = live.api.get("targets", state="active")["activeTargets"]
    pages = {target["labels"]["job"]: target["scrapeUrl"] for target in targets}
    assert set(pages) == {"outlast-controller", "outlast-agents"}
    for url in pages.values():
        with urllib.request.urlopen(url, timeout=10) as answer:
            promtool("check", "metrics", text=answer.read().decode())


def _has_data(run: Run, expr: str, *, instant: bool = False) -> bool:
    """Whether a query returns anything; what is excused counts as having data."""
    expr = expr.replace('"$job_id"', f'"{run.job_id}"').replace('"$node"', '".+"')
    expr = expr.replace("$__rate_interval", "10s")
    found = run.api.at(run.training_s, expr) if instant else run.api.since(run.start_s, expr)
    return bool(found) or _excuse(run, expr) is not None


def _excuse(run: Run, expr: str) -> str | None:
    """Why a query may have no data; None when it may not."""
    for part, reason in EXCUSED.items():
        if part in expr and not run.api.since(run.start_s, _present(part)):
            return reason
    return None


def _present(part: str) -> str:
    """A query for anything that would void the excuse."""
    return f"{{{part}}}" if "=" in part else f'{{__name__=~"{part}.+"}}'


def _lose(process: Controller, node: str) -> None:
    """Kill every process of a node and wipe its host memory."""
    session = node_pids(process.state_dir)[node]

    def is_dead() -> bool:
        members = members_of([session])
        for pid in members:
            kill(pid)
        return not members

    wait_for(is_dead, f"{node} to die")
    memory = LocalConfig(
        state_dir=process.state_dir, nodes=1, workers_per_node=1, controller_address=""
    ).memory_dir
    shutil.rmtree(memory / node, ignore_errors=True)


def _join(process: Controller, folder: Path) -> subprocess.Popen[bytes]:
    """A node that is started by hand, with metrics."""
    command: list[Any] = [sys.executable, "-m", "controller.agent", "--node", "node-9"]
    command += ["--controller", process.grpc, "--workers", "2", "--metrics-port", "0"]
    command += ["--state-dir", folder / "agent", "--memory-dir", folder / "memory"]
    command += ["--data-dir", process.state_dir / "data", *process.join_arguments]
    with (folder / "agent.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
