"""The checks themselves, on this machine, and that they notice what they are for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diagnostics.checks import collectives, device, storage
from diagnostics.checks.base import Context, SkipCheckError
from diagnostics.core.baseline import Baseline
from diagnostics.core.finding import CheckVerdict, Finding, Measurement
from diagnostics.core.plans import PREFLIGHT
from diagnostics.core.verdicts import judge


def context(**changes: object) -> Context:
    plain = Context(
        node="node-0",
        workers=2,
        device="cpu",
        checkpoint_url="",
        storage_probe="",
        effort=PREFLIGHT.effort,
        counters_file=Path("/nowhere"),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # field values of any type


def collect(check: Callable[..., None], where: Context) -> dict[str, Measurement]:
    found: dict[str, Measurement] = {}
    check(where, lambda item: found.__setitem__(f"{item.test}.{item.metric}", item))
    return found


def run_preflight(tmp_path: Path, *options: str) -> list[Finding]:
    baseline = tmp_path / "node-0" / "baseline.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "diagnostics.runner", "--suite", "preflight"),
            *("--node", "node-0", "--workers", "2", "--deadline-s", "60", "--device", "cpu"),
            *("--baseline-file", str(baseline), *options),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=100,
    )
    return [Finding.from_json(line) for line in done.stdout.splitlines()]


def test_preflight_measures_a_healthy_node_and_remembers_it(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    found = run_preflight(tmp_path, "--checkpoint-url", checkpoints.as_uri())
    skipped = [item.test for item in found if item.verdict is CheckVerdict.SKIP]
    measured = [item for item in found if item.verdict is not CheckVerdict.SKIP]
    assert set(skipped) <= {"gpu"}
    assert [(item.test, item.metric) for item in measured if item.test != "gpu"] == [
        ("inventory", "cpus"),
        ("inventory", "memory"),
        ("inventory", "counters_at_rest"),
        ("compute", "differing_elements"),
        ("compute", "matmul_throughput"),
        ("memory", "copy_bandwidth"),
        ("loopback", "wrong_bytes"),
        ("loopback", "bandwidth"),
        ("all_reduce", "wrong_elements"),
        ("all_reduce", "bus_bandwidth"),
        ("all_to_all", "wrong_elements"),
        ("all_to_all", "bus_bandwidth"),
        ("storage", "wrong_bytes"),
        ("storage", "write_bandwidth"),
        ("storage", "refusals"),
    ]
    assert {item.verdict for item in measured} == {CheckVerdict.PASS}
    assert all(item.value > 0 for item in measured if item.baseline_key)
    (digest,) = {item.digest for item in measured if item.metric == "differing_elements"}
    assert len(digest) == 64
    kept = Baseline.from_json((tmp_path / "node-0" / "baseline.json").read_text())
    assert len(kept.runs) == 6
    assert os.listdir(checkpoints) == []
    assert sorted(os.listdir(tmp_path / "node-0")) == ["baseline.json", "counters.json"]


def test_unusable_baseline_file_does_not_stop_the_checks(tmp_path: Path) -> None:
    baseline = tmp_path / "node-0" / "baseline.json"
    baseline.parent.mkdir()
    baseline.write_text("not json")
    found = run_preflight(tmp_path, "--checkpoint-url", "s3://bucket/run")
    assert found[-1].verdict is CheckVerdict.SKIP
    assert found[-1].detail == "only folders of this machine are probed here, not s3://bucket/run"
    assert len(Baseline.from_json(baseline.read_text()).runs) == 5


def test_one_flipped_bit_is_a_differing_element() -> None:
    healthy = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    flipped = healthy.clone()
    flipped.view(torch.int32)[3, 5] ^= 1
    # What a comparison of sums would miss.
    assert torch.allclose(flipped.sum(), healthy.sum())
    assert device.count_differing_elements(healthy, flipped) == 1
    assert device.count_differing_elements(healthy, healthy.clone()) == 0


def test_a_device_that_is_wrong_only_under_load_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = torch.mm, 0

    def mm(*operands: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        nonlocal calls
        calls += 1
        result = right(*operands, out=out)
        # Seldom, and long after the first products were right.
        if calls > 300 and calls % 50 == 0:
            result.view(torch.int32)[0, 0] ^= 1
        return result

    effort = replace(PREFLIGHT.effort, matmul_size=32, burn_s=1.0, measure_s=0.001)
    healthy = collect(device.run, context(effort=effort))
    assert healthy["compute.differing_elements_under_load"].value == 0
    monkeypatch.setattr(torch, "mm", mm)
    found = collect(device.run, context(effort=effort))
    assert found["compute.differing_elements"].value == 0
    assert found["compute.differing_elements_under_load"].value > 0
    under_load = judge(found["compute.differing_elements_under_load"], Baseline(), "node-0")
    assert under_load.verdict is CheckVerdict.FAIL


def test_same_nan_is_the_same_and_other_zero_is_not() -> None:
    first = torch.tensor([float("nan"), 0.0])
    assert device.count_differing_elements(first, first.clone()) == 0
    assert device.count_differing_elements(first, torch.tensor([float("nan"), -0.0])) == 1


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_expected_results_of_collectives_are_exact(world_size: int) -> None:
    num_elements = 30 * world_size
    inputs = [collectives.pattern(num_elements, rank) for rank in range(world_size)]
    assert torch.equal(collectives.expected_sum(num_elements, world_size), sum(inputs))
    for rank in range(world_size):
        received = torch.cat([item.chunk(world_size)[rank] for item in inputs])
        wanted = collectives.expected_exchange(num_elements, rank, world_size)
        assert torch.equal(wanted, received)


def test_pattern_repeats_and_differs_by_rank() -> None:
    first, second = collectives.pattern(5000, 0), collectives.pattern(5000, 1)
    assert first.shape == (5000,)
    assert not torch.equal(first, second)
    assert torch.equal(first[1021:2042], first[:1021])


def test_wrong_elements_are_counted_nans_included() -> None:
    wanted = torch.arange(4.0)
    assert collectives.count_wrong_elements(wanted.clone(), wanted) == 0
    result = torch.tensor([0.0, 1.5, 2.0, float("nan")])
    assert collectives.count_wrong_elements(result, wanted) == 2


def test_single_worker_has_nobody_to_exchange_with() -> None:
    with pytest.raises(SkipCheckError, match="one worker"):
        collectives.run(context(workers=1), lambda item: None)


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("file:///data/my%20runs", "/data/my runs"),
        ("file://localhost/data", "/data"),
        ("/data/runs", "/data/runs"),
    ],
)
def test_urls_of_local_folders_are_measured(url: str, folder: str) -> None:
    assert storage.local_folder(url) == Path(folder)


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://b", "file://host/data", "runs/here"])
def test_other_urls_are_skipped_where_nothing_can_try_them(url: str) -> None:
    with pytest.raises(SkipCheckError, match="only folders of this machine"):
        storage.run(context(checkpoint_url=url), lambda item: None)


@pytest.mark.parametrize(
    ("url", "module", "refusal"),
    [
        ("memory://bucket/run", "checkpoint.storage.probe", ""),
        ("nosuch://bucket/run", "checkpoint.storage.probe", "Protocol not known: nosuch"),
        ("http://127.0.0.1:1/run", "checkpoint.storage.probe", "use file, s3, gs, hdfs or webhdfs"),
        ("memory://bucket/run", "tests.agent.endless_import", "no answer in 3 s"),
        ("memory://bucket/run", "no.such.module", "No module named"),
    ],
)
def test_stores_of_any_kind_are_tried_and_refusals_speak_against_no_node(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, refusal: str
) -> None:
    if "endless" in module:
        monkeypatch.setattr(storage, "PROBE_TIMEOUT_S", 3.0)
    found = collect(storage.run, context(checkpoint_url=url, storage_probe=module))
    assert list(found) == ["storage.refusals"]
    assert found["storage.refusals"].value == float(bool(refusal))
    assert (refusal or "can be written") in found["storage.refusals"].detail
    verdict = judge(found["storage.refusals"], Baseline(), "node-0").verdict
    assert verdict is (CheckVerdict.WARN if refusal else CheckVerdict.PASS)


def test_without_a_job_there_is_no_checkpoint_path_to_probe() -> None:
    with pytest.raises(SkipCheckError, match="no job writes checkpoints"):
        storage.run(context(), lambda item: None)


def test_storage_probe_measures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    found = collect(storage.run, context(checkpoint_url=str(tmp_path / "new" / "folder")))
    assert found["storage.wrong_bytes"].value == 0
    assert found["storage.write_bandwidth"].value > 0
    assert not found["storage.write_bandwidth"].bad_is_fault
    assert os.listdir(tmp_path / "new" / "folder") == []


def test_storage_that_cannot_be_written_speaks_against_no_node(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = collect(storage.run, context(checkpoint_url=str(tmp_path / "file")))
    refusal = found["storage.refusals"]
    assert "File exists" in refusal.detail
    assert judge(refusal, Baseline(), "node-0").verdict is CheckVerdict.WARN


@pytest.mark.parametrize(
    ("found", "wrong"), [(b"abcd", 0), (b"abxd", 1), (b"abc", 1), (b"abcdef", 2), (b"", 4)]
)
def test_bytes_that_came_back_wrong_are_counted(found: bytes, wrong: int) -> None:
    assert storage.count_wrong_bytes(b"abcd", found) == wrong
