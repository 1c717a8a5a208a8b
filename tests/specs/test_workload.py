"""Job specs that run a script: filled in, checked, and with paths of the submitter's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from outlast.cli.errors import CliError
from outlast.cli.places import Nodes, resolved_lines
from outlast.cli.specfile import load_spec
from outlast.problems import SpecError
from outlast.rules.workload import MAX_SIZES, script_index, smaller_sizes
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from outlast.submission import resolve_places

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def script(more: dict[str, Any] | None = None, **workload: object) -> dict[str, Any]:
    command = {"command": ["python", "/job/train.py"], **workload}
    return {"name": "mine", "workload": command, **(more or {})}


def problems(document: object) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_spec(document)
    return {problem.field: problem.message for problem in caught.value.problems}


def test_a_script_runs_one_rank_on_one_node_unless_told_otherwise() -> None:
    spec = parse_spec(script())
    assert spec.is_script
    assert (spec.num_nodes, spec.workers_per_node, spec.layout.world_size) == (1, 1, 1)
    assert spec.recovery.hang_timeout_s == 600
    assert (spec.workload.preload, spec.workload.stop_signal) == (("torch",), "SIGTERM")


def test_nodes_and_ranks_of_a_script_decide_its_world_size() -> None:
    spec = parse_spec(script({"resources": {"nodes": 3}}, workers_per_node=4))
    assert (spec.num_nodes, spec.workers_per_node, spec.layout.world_size) == (3, 4, 12)
    given = parse_spec(script({"recovery": {"hang_timeout_s": 50}}, min_nodes=2, max_nodes=5))
    assert (given.num_nodes, given.recovery.hang_timeout_s) == (5, 50)


def test_a_spec_that_was_written_out_is_the_same_spec() -> None:
    spec = parse_spec(script({"resources": {"nodes": 3}}, workers_per_node=4))
    assert parse_spec(spec.model_dump(mode="json")) == spec
    assert JobSpec.model_validate_json(spec.canonical_json()) == spec


def test_each_field_of_the_trainer_is_named_with_what_to_do() -> None:
    found = problems(
        script(
            {
                "steps": 5,
                "seed": 1,
                "precision": "bf16",
                "determinism": "fast",
                "garbage_interval_steps": 5,
                "loss_scale": {"initial": 2},
                "model": {"layers": 2},
                "parallel": {"tp": 2, "dp": 7},
                "data": {"global_batch": 4},
                "optimizer": {"lr": 1},
                "eval": {"batches": 1},
                "checkpoint": {"load": "/a", "memory_interval_steps": 2, "keep_best": 1},
            }
        )
    )
    assert set(found) == {
        *("steps", "seed", "precision", "determinism", "loss_scale.initial", "model.layers"),
        *("parallel.tp", "parallel.dp", "data.global_batch", "optimizer.lr", "eval.batches"),
        *("checkpoint.load", "checkpoint.memory_interval_steps", "checkpoint.keep_best"),
        "garbage_interval_steps",
    }
    assert found["model.layers"] == (
        "is 2, which only the built-in trainer reads; with workload.command leave it out, and "
        "give it to the script as an argument"
    )


def test_what_a_script_obeys_may_be_given() -> None:
    parse_spec(
        script(
            {
                "checkpoint": {"url": "/ckpt", "keep": 5},
                "recovery": {"retry_budget": 3},
                "resources": {"nodes": 2, "standby": 1, "device": "cpu"},
            },
            env={"LR": "1"},
            working_dir="/job",
            python_path=["/job/lib"],
            preload="off",
            python="/venv/bin/python",
            stop_signal="SIGUSR1",
            stop_grace_s=5,
        )
    )


@pytest.mark.parametrize(
    ("document", "field", "message"),
    [
        (script(min_nodes=2), "workload.max_nodes", "is required with workload.min_nodes"),
        (script(max_nodes=2), "workload.min_nodes", "is required with workload.max_nodes"),
        (script(min_nodes=3, max_nodes=2), "workload.min_nodes", "at most workload.max_nodes = 2"),
        (
            script({"resources": {"nodes": 3}}, min_nodes=1, max_nodes=2),
            "resources.nodes",
            "is 3, and workload.max_nodes is 2; give one of them",
        ),
        (
            script({"resources": {"workers_per_node": 3}}, workers_per_node=2),
            "resources.workers_per_node",
            "is 3, and workload.workers_per_node is 2; give one of them",
        ),
        (script(stop_signal="SIGKILL"), "workload.stop_signal", "allowed: SIGTERM, SIGINT, SIGHUP"),
        (script(stop_signal="SIGTREM"), "workload.stop_signal", "did you mean SIGTERM?"),
        (script(command=[]), "workload.command", "one or more of text"),
        (script(command=["python", 3]), "workload.command[1]", "put it in quotes"),
        (script(command=["a\0b"]), "workload.command", "without NUL"),
        (script(env={"A=B": "1"}), "workload.env", "names of letters, digits and '_'"),
        (script(env={"A": 1}), "workload.env", "allowed: a section of names and text"),
        (script(workers_per_node=5000), "workload.workers_per_node", "at most 1024"),
        (script({"resources": {"nodes": 10**7}}), "resources.nodes", "at most 131072"),
        (script({"detectors": {"spike": "act"}}), "detectors.spike", "allowed: off, log"),
        (
            script({"detectors": {"rollback_steps": 5}}),
            "detectors.rollback_steps",
            "which only the built-in trainer reads",
        ),
        (
            script({"recovery": {"elastic": {"min_dp": 1}}}),
            "recovery.elastic.min_dp",
            "give workload.min_nodes and workload.max_nodes",
        ),
        (
            {"name": "a", "workload": {"env": {"A": "1"}}},
            "workload.env",
            "applies only with workload.command",
        ),
    ],
)
def test_what_a_script_cannot_run_with_is_named(
    document: dict[str, Any], field: str, message: str
) -> None:
    found = problems(document)
    assert set(found) == {field}
    assert message in found[field]


def test_an_elastic_script_has_a_spec_for_each_smaller_number_of_nodes() -> None:
    spec = parse_spec(script(min_nodes=2, max_nodes=5, workers_per_node=3))
    sizes = smaller_sizes(spec)
    assert [size.num_nodes for size in sizes] == [4, 3, 2]
    assert [size.layout.world_size for size in sizes] == [12, 9, 6]
    assert all(parse_spec(size.model_dump(mode="json")) == size for size in sizes)
    many = smaller_sizes(parse_spec(script(min_nodes=1, max_nodes=10_000)))
    assert len(many) <= MAX_SIZES + 1
    assert many[-1].num_nodes == 1
    assert smaller_sizes(parse_spec(script(min_nodes=2, max_nodes=2))) == []


@pytest.mark.parametrize(
    ("command", "index"),
    [
        (["python", "train.py", "--lr"], 1),
        (["/usr/bin/python3.11", "-u", "train"], 2),
        (["python", "-m", "pkg", "train.py"], None),
        (["python", "-c", "pass"], None),
        (["./run.sh", "train.py"], 0),
        (["train.py"], 0),
        (["bash", "run.sh"], None),
        ([], None),
    ],
)
def test_the_script_of_a_command_is_found(command: list[str], index: int | None) -> None:
    assert script_index(command) == index


def test_relative_paths_are_below_the_folder_of_the_submitter() -> None:
    given = script(
        command=["python", "src/train.py", "data/x"], working_dir=".", python_path=["lib", "/abs"]
    )
    resolved, written = resolve_places(given, Path("/home/me"))
    assert resolved["workload"] == {
        "command": ["python", "/home/me/src/train.py", "data/x"],
        "working_dir": "/home/me",
        "python_path": ["/home/me/lib", "/abs"],
    }
    assert written == {
        "workload.command": "src/train.py",
        "workload.working_dir": ".",
        "workload.python_path": "lib",
    }
    assert given["workload"]["command"][1] == "src/train.py"


@pytest.mark.parametrize(
    ("python", "found"),
    [
        (".venv/bin/python", "/home/me/.venv/bin/python"),
        ("../bin/python3.12", "/home/bin/python3.12"),
        ("python3.12", "python3.12"),
        ("/usr/bin/python3", "/usr/bin/python3"),
    ],
)
def test_an_interpreter_is_found_from_any_folder(python: str, found: str) -> None:
    given = script(command=[python, "train.py"], python=python)
    resolved, written = resolve_places(given, Path("/home/me"))
    assert resolved["workload"] == {"command": [found, "/home/me/train.py"], "python": found}
    assert written.get("workload.python") == (None if python == found else python)


def test_what_relative_paths_of_tokens_mean_is_said_by_their_paths() -> None:
    data = {"tokens": {"web": 2, "books": 1}, "validation_tokens": {"law": "a", "code": "b"}}
    document, written = resolve_places({"name": "a", "data": data}, Path("/home/me"))
    assert resolved_lines(JobSpec.model_validate(document), written) == [
        "data.tokens: web, books is /home/me/web, /home/me/books",
        "data.validation_tokens: a, b is /home/me/a, /home/me/b",
    ]


@pytest.mark.parametrize(
    ("given", "meant", "relative"),
    [
        ("held", "/home/me/held", "held"),
        ({"a": "held", "b": "/x"}, {"a": "/home/me/held", "b": "/x"}, "held"),
        ({"a": "a", "b": "../b"}, {"a": "/home/me/a", "b": "/home/b"}, "a, ../b"),
        ({"a": 3}, {"a": 3}, None),
        ("s3://bucket/x", "s3://bucket/x", None),
    ],
)
def test_held_out_sets_are_below_the_submitters_folder(
    given: object, meant: object, relative: str | None
) -> None:
    resolved, written = resolve_places({"data": {"validation_tokens": given}}, Path("/home/me"))
    assert resolved["data"]["validation_tokens"] == meant
    assert written.get("data.validation_tokens") == relative


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ({"working_dir": "/home/me"}, "train.py"),
        ({"working_dir": "/home"}, "/home/me/train.py"),
        ({}, "/home/me/train.py"),
    ],
)
def test_a_script_in_the_folder_that_ranks_run_in_keeps_its_relative_path(
    where: dict[str, str], found: str
) -> None:
    given = script(command=["python", "train.py"], **where)
    resolved, _ = resolve_places(given, Path("/home/me"))
    assert resolved["workload"]["command"] == ["python", found]


def spec_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_relative_paths_must_exist_on_the_submitters_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = spec_file(
        tmp_path,
        monkeypatch,
        "name: a\nworkload: {command: [python, train.py], working_dir: w, python_path: [lib]}\n",
    )
    with pytest.raises(CliError) as caught:
        load_spec(path, nodes=Nodes.ELSEWHERE)
    message = str(caught.value)
    assert "workload.command: is 'train.py', taken as '/" in message
    assert "workload.working_dir: is 'w'" in message
    assert "workload.python_path: is 'lib'" in message
    (tmp_path / "train.py").touch()
    (tmp_path / "w").mkdir()
    (tmp_path / "lib").mkdir()
    checked = load_spec(path, nodes=Nodes.ELSEWHERE)
    assert f"workload.command: train.py is python {tmp_path}/train.py" in checked.resolved


def test_absolute_paths_that_nodes_may_have_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = spec_file(tmp_path, monkeypatch, "name: a\nworkload: {command: [python, /no/x.py]}\n")
    assert "workload.command is '/no/x.py'" in load_spec(path).seen.warnings[0]
    with pytest.raises(CliError, match="there is no file of that name"):
        load_spec(path, nodes=Nodes.HERE)


@pytest.mark.parametrize(
    "path", sorted((EXAMPLES / "scripts").glob("*.yaml")), ids=lambda path: path.name
)
def test_the_jobs_of_example_scripts_run_scripts_that_are_there(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    command = document["workload"]["command"]
    index = script_index(command)
    assert index is not None
    assert (EXAMPLES.parent / command[index]).is_file()
    assert not load_spec(path).seen.warnings
