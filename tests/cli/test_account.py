"""`outlast report` and its page, and the page of `outlast simulate`: every number is there."""

from __future__ import annotations

import json

import pytest

from outlast.cli import account
from outlast.cli.errors import ExitCode
from outlast.cli.pages.job import render
from outlast.v1.incidents_pb2 import Incident
from outlast.v1.jobs_pb2 import Job
from tests.cli.running import outlast

JOB = Job(
    job_id="tiny-1",
    name="<tiny>",
    state="RUNNING",
    seconds={"productive": 900.0, "restore": 60.0, "redo": 40.0},
    ettr=0.9,
    ettr_last_hour=0.9,
)
INCIDENTS = (
    Incident(
        incident_id="tiny-1.i1",
        cause="node_lost",
        reason="n1 & n2 are gone",
        seconds={"detect": 5.0, "restore": 60.0, "redo": 35.0},
        recovery_s=65.0,
        steps_redone=7,
    ),
    Incident(incident_id="tiny-1.i2", cause="storage", reason="the store is slow"),
)
SIMULATION = ("simulate", "--nodes", "16", "--days", "1", "--rate", "60", "--no-what-if")


def test_the_account_as_json_has_every_part_and_cause() -> None:
    facts = account.facts(JOB, INCIDENTS)
    assert facts["wall_s"] == 1000.0
    assert facts["steps_lost"] == 7
    assert facts["steps_left_out"] == []
    assert facts["causes"][0] == {
        "cause": "node_lost",
        "incidents": 1,
        "mttr_s": 65.0,
        "lost_s": 100.0,
    }


def test_the_page_of_a_job_shows_parts_and_incidents_and_escapes_them() -> None:
    page = render(JOB, INCIDENTS)
    for text in ("90.00 %", "part-redo", "tiny-1.i1", "n1 &amp; n2 are gone", "&lt;tiny&gt;"):
        assert text in page
    assert "<tiny>" not in page


def test_simulate_prints_json_with_ettr_violations_and_incidents() -> None:
    done = outlast(*SIMULATION, "--elastic", "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    facts = json.loads(done.stdout)
    assert 0.5 < facts["ettr"] < 1.0
    assert facts["violations"] == []
    assert facts["incidents"] > 0
    assert all(each["source"] for each in facts["durations"].values())
    assert facts["replay"].startswith("outlast simulate --nodes 16")
    assert "--elastic" in facts["replay"].split()


def test_simulate_writes_a_page(tmp_path_factory: pytest.TempPathFactory) -> None:
    page = tmp_path_factory.mktemp("page") / "simulation.html"
    done = outlast(*SIMULATION, "--html", str(page))
    assert done.returncode == ExitCode.OK, done.stderr
    assert "invariants  all held" in done.stdout
    text = page.read_text(encoding="utf-8")
    assert "ETTR over the run" in text
    assert "The Llama 3 Herd of Models" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--duration", "nccl=0"), "nothing in a recovery is free"),
        (("--duration", "nccl"), "expected NAME=SECONDS"),
        (("--mix", "llama9"), "no mix is called 'llama9'"),
        (("--only", "x"), "expected numbers of faults"),
    ],
)
def test_simulate_refuses_what_makes_no_sense(arguments: tuple[str, ...], told: str) -> None:
    done = outlast("simulate", *arguments)
    assert done.returncode == ExitCode.BAD_INPUT
    assert told in done.stderr
