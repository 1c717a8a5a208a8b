"""`outlast plan` and `outlast schema`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from outlast.cli.errors import CliError, ExitCode
from outlast.cli.fit import asked_fit, fit_warnings, missing_nodes
from outlast.cli.plan_facts import estimate, plan_facts
from outlast.cli.specfile import load_spec
from outlast.client import Client
from outlast.errors import OutlastError
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from outlast.v1 import jobs_pb2
from tests.cli.running import outlast, outlast_json

TINY = {
    "name": "tiny",
    "steps": 20,
    "model": {"layers": 4, "hidden": 64, "heads": 4, "seq_len": 32},
    "parallel": {"tp": 2, "pp": 2, "dp": 2, "micro_batch": 2},
    "data": {"global_batch": 16},
    "resources": {"workers_per_node": 2},
}


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


def test_plan_prints_layout_memory_bubble_and_traffic(spec_file: Path) -> None:
    done = outlast("plan", str(spec_file))
    assert done.returncode == ExitCode.OK, done.stderr
    assert "tp 2 x pp 2 x dp 2 = 8 ranks on 4 node(s) of 2" in done.stdout
    words = ("parameters", "bubble", "traffic", "memory of one rank", "host checkpoints")
    for word in (*words, "of tmpfs on a node of 2"):
        assert word in done.stdout


def test_plan_shows_parts_of_sequences_and_what_they_send(spec_file: Path) -> None:
    done = outlast("plan", str(spec_file), "--set", "parallel.dp=1", "--set", "parallel.cp=2")
    assert done.returncode == ExitCode.OK, done.stderr
    assert "tp 2 x cp 2 x pp 2 x dp 1 = 8 ranks on 4 node(s) of 2" in done.stdout
    assert "cp [0 2] [1 3] [4 6] [5 7]" in done.stdout
    assert re.search(r"pp [^,]+,\s+cp\s+\d", done.stdout)


def test_plan_json_adds_up(spec_file: Path) -> None:
    found = outlast_json("plan", str(spec_file))
    assert found["world_size"] == 8
    assert found["tokens_per_step"] == 16 * 32
    assert found["total_tokens"] == 20 * 16 * 32
    assert found["groups"]["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    parts = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")
    parts += ("buffers_bytes", "working_bytes")
    for rank in found["ranks"]:
        assert rank["device_bytes"] == sum(rank[part] for part in parts)
    assert 0 < found["bubble"] < 1
    assert found["spec"]["model"]["vocab_size"] == 256
    # Two ranks on a node, of one stage here; a slot has a header and frames besides state.
    stage = max(found["ranks"], key=lambda rank: rank["host_memory_bytes"])
    assert found["node_host_memory_bytes"] == 2 * stage["host_memory_bytes"]
    assert stage["host_memory_bytes"] > stage["host_slots_bytes"]


def test_set_changes_the_plan(spec_file: Path) -> None:
    found = outlast_json("plan", str(spec_file), "--set", "parallel.tp=4", "--set", "name=other")
    assert found["world_size"] == 16
    assert found["name"] == "other"


def test_plan_with_one_rank_has_no_bubble_and_no_traffic() -> None:
    spec = parse_spec({"name": "single"})
    facts = plan_facts(spec, estimate(spec))
    assert facts["bubble"] == 0
    assert facts["communication"]["total_bytes"] == 0


def test_plan_projects_a_step_on_a_device(spec_file: Path) -> None:
    done = outlast("plan", str(spec_file), "--device", "h100", "--link", "50GB/s")
    assert done.returncode == ExitCode.OK, done.stderr
    for word in ("on h100", "66.9 TFLOP/s in fp32", "MFU", "tokens/s"):
        assert word in done.stdout
    assert "link 50 GB/s, 450 GB/s inside a node (tp)" in done.stdout
    found = outlast_json("plan", str(spec_file), "--device", "90G")["projection"]
    assert found["peak_flops_per_s"] == 90e9
    assert 0 < found["mfu_windowed"] < found["mfu_full"] < 1


def test_replicas_in_one_node_are_projected_on_its_links(spec_file: Path) -> None:
    four = ("--set", "resources.workers_per_node=4")
    done = outlast("plan", str(spec_file), "--device", "h100", *four)
    assert "link 25 GB/s, 450 GB/s inside a node (tp, dp)" in done.stdout


EXPERTS = ("model.moe.num_experts=4", "model.mlp_bias=false", "parallel.ep=2")


@pytest.mark.parametrize(
    ("changes", "links", "exposed"),
    [
        (("parallel.tp=1", "parallel.cp=2"), "(cp)", "cp"),
        (("parallel.tp=1", *EXPERTS), "(experts)", "experts"),
        (("parallel.cp=2", "resources.workers_per_node=4"), "(tp, cp)", "tp+cp"),
        (("resources.workers_per_node=4", *EXPERTS), "(tp, experts)", "tp+experts"),
        (("parallel.tp=1",), "", "tp"),
    ],
)
def test_parts_of_sequences_and_experts_are_named_by_what_they_are(
    spec_file: Path, changes: tuple[str, ...], links: str, exposed: str
) -> None:
    given = [part for each in ("parallel.dp=4", *changes) for part in ("--set", each)]
    done = outlast("plan", str(spec_file), "--device", "h100", *given)
    assert done.returncode == ExitCode.OK, done.stderr
    words = " ".join(done.stdout.split())
    inside = f", 450 GB/s inside a node {links}" if links else ""
    assert f"link 25 GB/s{inside}; 20 us a message" in words
    assert f"exposed {exposed} " in words


def test_a_named_gpu_is_planned_with_its_larger_moments(spec_file: Path) -> None:
    """It computes the loss of more tokens at a time; of a number of FLOP/s nothing is known."""
    wide = ("--set", "model.vocab_size=262144", "--set", "model.hidden=16")
    number, gpu = (
        outlast_json("plan", str(spec_file), "--device", device, *wide)["ranks"][-1]
        for device in ("90G", "h100")
    )
    assert gpu["working_bytes"] - number["working_bytes"] == 32 * 131_072 * 4
    assert gpu["activations_bytes"] == number["activations_bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "abacus"), "allowed: a100-40gb"),
        (("--device", "h100", "--link", "fast"), "not a number of B/s"),
        (("--device", "h100", "--latency", "inf"), "--latency is 'inf'"),
        (("--link", "50GB/s"), "--link, --latency and --kernels: are of a projection; allowed: "),
        (("--latency", "5"), "are of a projection; allowed: with --device"),
        (("--kernels", "0.5"), "are of a projection; allowed: with --device"),
    ],
)
def test_unknown_devices_and_links_are_refused(
    spec_file: Path, options: tuple[str, ...], message: str
) -> None:
    done = outlast("plan", str(spec_file), *options)
    assert done.returncode == ExitCode.BAD_INPUT
    assert message in done.stderr


def test_a_script_is_checked_and_not_estimated(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: mine\nworkload: {command: [python, -m, mine]}\n")
    done = outlast("plan", str(path))
    assert done.returncode != 0
    assert "the spec is fine; what a script needs" in done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("model.hidden=16384", "model.layers=64"), "more than the 37.3 GiB of the device"),
        (("data.global_batch=4",), "1 micro-batches do not fill 2 stages"),
        (("parallel.dp=1", "parallel.zero.level=1"), "has one replica"),
        (("parallel.tp=4",), "a tensor group of 4 ranks spans nodes of 2"),
    ],
)
def test_plan_warns_of_what_will_not_fit_or_will_be_slow(
    spec_file: Path, changes: tuple[str, ...], message: str
) -> None:
    given = [part for change in changes for part in ("--set", change)]
    found = outlast_json("plan", str(spec_file), "--device", "a100-40gb", *given)
    assert any(message in line for line in found["warnings"])


def test_every_problem_of_a_spec_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("name: Bad_Name\nsteps: 0\nmodel: {hiden: 64}\nextra: 1\n")
    done = outlast("plan", str(path))
    assert done.returncode == ExitCode.BAD_INPUT
    for field in ("steps", "model.hiden", "extra"):
        assert f"  {field}: " in done.stderr
    assert "Traceback" not in done.stderr


def test_cross_field_problems_say_what_is_allowed(spec_file: Path) -> None:
    with pytest.raises(CliError, match=r"model\.heads: is 4, which parallel\.tp = 3"):
        load_spec(spec_file, ["parallel.tp=3"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", r"job.yaml, line 1, column 5: not YAML: expected the node content"),
        ("- 1\n- 2\n", "must be a mapping of fields, .*, not a list"),
        ("", "must be a mapping of fields, .*, and this is empty"),
    ],
)
def test_what_is_no_spec_at_all_is_said_plainly(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(CliError, match=message) as caught:
        load_spec(path)
    assert caught.value.code == ExitCode.BAD_INPUT


def test_missing_file_and_bad_assignment_are_named(tmp_path: Path, spec_file: Path) -> None:
    with pytest.raises(CliError, match=r"cannot read .*nothing\.yaml"):
        load_spec(tmp_path / "nothing.yaml")
    with pytest.raises(CliError, match="expected path=value"):
        load_spec(spec_file, ["parallel.tp"])


def test_spec_can_come_from_standard_input() -> None:
    done = outlast("plan", "-", "--json", stdin=json.dumps(TINY))
    assert done.returncode == ExitCode.OK, done.stderr
    assert json.loads(done.stdout)["name"] == "tiny"


def test_schema_is_valid_and_names_every_section() -> None:
    done = outlast("schema")
    assert done.returncode == ExitCode.OK
    schema = json.loads(done.stdout)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["required"] == ["name"]
    assert set(schema["properties"]) == set(JobSpec.model_fields)
    # Every reference leads somewhere.
    for reference in _references(schema):
        assert reference.removeprefix("#/$defs/") in schema["$defs"]
    assert schema["additionalProperties"] is False


def _references(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in _references(value)]
    if isinstance(node, list):
        return [found for value in node for found in _references(value)]
    return []


LARGE: list[dict[str, Any]] = [
    {"model": {"layers": 100_000}},
    {
        "model": {"layers": 2**17},
        "parallel": {"pp": 1024},
        "data": {"global_batch": 2**30},
    },
    {
        "model": {"layers": 2**15},
        "parallel": {"pp": 32, "schedule": "interleaved", "virtual_stages": 256},
        "data": {"global_batch": 2**20},
    },
    {"parallel": {"dp": 100_000}, "data": {"global_batch": 100_000}},
    {"model": {"vocab_size": 2**30, "seq_len": 2**20}, "data": {"max_bytes": 2**40}},
]


@pytest.mark.parametrize("sections", LARGE, ids=lambda sections: next(iter(sections)))
def test_the_largest_specs_are_planned_in_seconds(sections: dict[str, Any]) -> None:
    """Work that grows with the square of anything would take hours: the timeout would end it."""
    spec = parse_spec({"name": "a", **sections})
    facts = plan_facts(spec, estimate(spec))
    assert facts["world_size"] == spec.layout.world_size
    assert facts["node_host_memory_bytes"] > 0


def test_missing_nodes_are_said_with_what_the_job_needs() -> None:
    fit = jobs_pb2.CheckFitResponse(connected=1, fitting=1, needed=2, need="2 worker places")
    [line] = missing_nodes(fit, "waits")
    needs = "the job needs 2 nodes with 2 worker places each"
    assert line.startswith(f"1 node is connected, and {needs}: it waits for the others; `outlast ")
    assert fit_warnings(fit) == missing_nodes(fit, "would wait")
    fit.connected = 3
    fit.brings_nodes = True
    [line] = missing_nodes(fit, "waits")
    assert line.startswith("1 of 3 connected nodes have what the job needs, and the job needs 2")
    assert line.endswith("it waits for the others; the cluster brings nodes by itself")
    fit.fitting = 2
    assert missing_nodes(fit, "waits") == []


def test_a_controller_that_refuses_to_check_a_spec_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = mock.Mock(side_effect=OutlastError("it is read-only"))
    monkeypatch.setattr(Client, "check_fit", refused)
    said = asked_fit({}, "127.0.0.1:1", tmp_path)
    assert said == "the controller at 127.0.0.1:1 could not check it: it is read-only"
