"""`outlast plan --search`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from outlast.cli.errors import ExitCode
from outlast.spec.parse import parse_spec
from tests.cli.running import outlast, outlast_json

DOCUMENT: dict[str, Any] = {
    "name": "found",
    "steps": 1000,
    "precision": "bf16",
    "model": {"preset": "gpt2-xl", "vocab_multiple": 128, "heads": 20},
    "data": {"global_batch": 64},
    # Of another cluster: none of it is right here.
    "parallel": {"tp": 7, "pp": 5, "recompute": "full", "sequence_parallel": False},
}
SEARCH = ("--search", "--nodes", "2", "--device", "a100-40gb")


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(DOCUMENT))
    return path


def test_a_search_prints_layouts_reasons_and_the_section_to_paste(spec_file: Path) -> None:
    done = outlast("plan", str(spec_file), *SEARCH, "--price", "2.5", COLUMNS="80")
    assert done.returncode == ExitCode.OK, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    for word in ("MFU %", "HFU %", "memory", "takeaways", "longer", "TP/(nX)", "device-hours"):
        assert word in done.stdout
    text, found, section = done.stdout.partition("\nparallel:\n")
    assert found
    pasted = yaml.safe_load(found + section)
    spec = parse_spec({**DOCUMENT, **pasted})
    assert spec.layout.world_size == 16
    assert not spec.parallel.sequence_parallel
    first = next(line for line in text.splitlines() if line.startswith("tp ")).split()
    row = text.splitlines()[[line.split() for line in text.splitlines()].index(first) + 1].split()
    assert row[:3] == [str(pasted["parallel"][name]) for name in ("tp", "pp", "dp")]


def test_a_search_as_json_is_what_a_plan_of_it_says(spec_file: Path, tmp_path: Path) -> None:
    found = outlast_json("plan", str(spec_file), *SEARCH, "--top", "2", "--price", "1")
    assert [set(each["terms_s"]) for each in found["layouts"]] == [
        {"products", "recompute", "bubble", "tp", "pp", "dp"}
    ] * 2
    assert found["layouts"][0]["longer"] == 0
    assert {each["takeaway"] for each in found["takeaways"]} == {
        *("tensor_in_nodes", "least_model_parallel", "micro_batch")
    }
    training = found["training"]
    assert training["price"] == pytest.approx(training["device_hours"])
    pasted = tmp_path / "pasted.yaml"
    sections = {name: found[name] for name in ("parallel", "resources")}
    pasted.write_text(yaml.safe_dump({**DOCUMENT, **sections}))
    planned = outlast_json("plan", str(pasted), "--device", "a100-40gb")
    assert planned["projection"]["step_s"] == pytest.approx(found["layouts"][0]["step_s"])
    assert max(rank["device_bytes"] for rank in planned["ranks"]) <= found["memory_bytes"]


def test_held_fields_of_the_spec_are_kept(spec_file: Path) -> None:
    options = ("--hold", "parallel.recompute", "--hold", "tp", "--set", "parallel.tp=2")
    found = outlast_json("plan", str(spec_file), *SEARCH, *options)
    for each in found["layouts"]:
        assert (each["parallel"]["recompute"], each["parallel"]["tp"]) == ("full", 2)


def test_what_belongs_to_one_layout_is_left_out(spec_file: Path) -> None:
    """With it, only layouts would be looked at that could have it too."""
    found = outlast_json("plan", str(spec_file), *SEARCH)
    one_layout = ("parallel.layer_split=[24,24]", "parallel.extra_warmup=1")
    options = [part for each in one_layout for part in ("--set", each)]
    assert outlast_json("plan", str(spec_file), *SEARCH, *options) == found


def test_gradients_are_sent_in_the_type_that_the_spec_says(spec_file: Path) -> None:
    replicas = ("--hold", "dp", "--set", "parallel.dp=16")
    narrow = ("--set", "parallel.zero.communication=bf16")
    wide, found = (
        outlast_json("plan", str(spec_file), *SEARCH, *replicas, *options)
        for options in ((), narrow)
    )
    assert found["parallel"]["zero"]["communication"] == "bf16"
    assert {each["parallel"]["zero"]["communication"] for each in found["layouts"]} == {"bf16"}
    assert found["layouts"][0]["step_s"] < wide["layouts"][0]["step_s"]
    done = outlast("plan", str(spec_file), *SEARCH, *replicas, *narrow)
    assert "    communication: bf16\n" in done.stdout


def test_messages_of_parts_of_sequences_are_named(spec_file: Path) -> None:
    parts = (*SEARCH, "--hold", "cp", "--set", "parallel.cp=2")
    both = outlast("plan", str(spec_file), *parts)
    assert "exposed tp+cp " in both.stdout
    done = outlast("plan", str(spec_file), *parts, "--hold", "tp", "--set", "parallel.tp=1")
    words = " ".join(done.stdout.split())
    assert "exposed cp " in words
    assert "exposed tp" not in words


def test_nodes_have_as_many_ranks_as_the_spec_says_or_8(spec_file: Path) -> None:
    per_node = "resources.workers_per_node"
    for value, ranks in (("null", 8), ("4", 4)):
        found = outlast_json("plan", str(spec_file), *SEARCH, "--set", f"{per_node}={value}")
        assert found["resources"] == {"nodes": 2, "workers_per_node": ranks}
        first = found["layouts"][0]["parallel"]
        assert first["tp"] * first["pp"] * first["dp"] == 2 * ranks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--search", "--device", "h100"), "--nodes: is required with --search; allowed: 1 or"),
        (("--search", "--nodes", "2"), "--device: is required with --search; allowed: a name"),
        (("--nodes", "2"), "are for a search; allowed: with --search"),
        (("--device", "h100", "--top", "2"), "are for a search; allowed: with --search"),
        ((*SEARCH, "--hold", "model.heads"), "allowed: parallel.tp, parallel.cp, "),
        ((*SEARCH, "--memory", "much"), "--memory: 'much' is not a number of B"),
        ((*SEARCH, "--memory", "100M"), "layouts fits: on 2 nodes of 8 a rank needs"),
        ((*SEARCH, "--device", "90G"), "--memory: is required with --device 90G"),
        ((*SEARCH, "--set", "data.global_batch=0"), "data.global_batch"),
        ((*SEARCH, "--set", "steps=0"), "steps"),
        ((*SEARCH, "--set", 'workload.command=["a"]'), "workload.command: a script's model"),
        (
            (*SEARCH, "--set", "parallel.tp=16", "--hold", "tp"),
            "model.heads: is 20, which parallel.tp = 16 does not divide",
        ),
    ],
)
def test_what_a_search_cannot_work_with_is_named(
    spec_file: Path, options: tuple[str, ...], message: str
) -> None:
    done = outlast("plan", str(spec_file), *options)
    assert done.returncode == ExitCode.BAD_INPUT
    assert message in done.stderr
    assert "Traceback" not in done.stderr
