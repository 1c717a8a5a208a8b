"""`outlast ckpt`, on checkpoints that an uploader made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkpoint.storage.storage import Storage
from outlast.cli.errors import ExitCode
from tests.checkpoint.helpers import commit_steps
from tests.cli.running import outlast, outlast_json


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"file://{tmp_path}/store/job-1"
    commit_steps(made, tmp_path / "memory", [50, 100, 150])
    return made


def test_ls_lists_newest_first(url: str) -> None:
    done = outlast("ckpt", "ls", url)
    assert done.returncode == ExitCode.OK, done.stderr
    header, *rows = done.stdout.splitlines()
    # Another loss than that of `outlast status`: of the last evaluation on held-out samples.
    names = ["STEP", "ATTEMPT", "SIZE", "PARTS", "HELD-OUT", "LOSS", "STORED", "NOTES"]
    assert header.split() == names
    assert [row.split()[0] for row in rows] == ["150", "100", "50"]


def test_ls_json_is_for_programs(url: str) -> None:
    found = outlast_json("ckpt", "ls", url)
    assert found["url"] == url
    assert [one["step"] for one in found["checkpoints"]] == [150, 100, 50]
    assert not any(one["is_pinned"] for one in found["checkpoints"])


def test_plain_path_is_a_url_too(url: str) -> None:
    assert outlast("ckpt", "ls", url.removeprefix("file://")).stdout.count("\n") == 4


def test_folder_without_checkpoints_says_what_a_url_is(tmp_path: Path) -> None:
    (tmp_path / "gpt-tiny-c3vvg").mkdir()
    for command in ("ls", "verify", "show"):
        done = outlast("ckpt", command, str(tmp_path))
        assert done.returncode == ExitCode.BAD_INPUT
        assert "with its id at the end; there is gpt-tiny-c3vvg" in done.stderr
    done = outlast("ckpt", "ls", f"{tmp_path}/nothing", "--json")
    assert done.returncode == ExitCode.BAD_INPUT
    assert "no such folder" in done.stderr
    assert not (tmp_path / "nothing").exists()


def test_word_that_is_no_url_is_a_job_and_needs_a_controller(tmp_path: Path) -> None:
    done = outlast("ckpt", "ls", "gpt-tiny", "--state-dir", str(tmp_path))
    assert done.returncode == ExitCode.NO_CONTROLLER
    assert "'gpt-tiny' is no URL or folder, so it should be a job: no controller" in done.stderr


def test_show_tells_the_newest_and_its_files(url: str) -> None:
    done = outlast("ckpt", "show", url)
    assert done.returncode == ExitCode.OK, done.stderr
    assert done.stdout.splitlines()[0].split() == ["step", "150"]
    found = outlast_json("ckpt", "show", url, "50")
    assert found["step"] == 50
    [part] = found["parts"]
    assert (part["rank"], part["tensors"]) == (0, 7)


def test_verify_says_whole_or_what_is_damaged(url: str, tmp_path: Path) -> None:
    done = outlast("ckpt", "verify", url, "--all")
    assert done.returncode == ExitCode.OK, done.stderr
    assert done.stdout.splitlines() == ["step 150: whole", "step 100: whole", "step 50: whole"]
    manifest = tmp_path / "store/job-1/step-00000100.1/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    done = outlast("ckpt", "verify", url, "100", "50")
    assert done.returncode == ExitCode.JOB_FAILED
    assert "step 100: damaged" in done.stdout
    assert "step-00000100.1/manifest.json" in done.stdout
    assert "step 50: whole" in done.stdout
    done = outlast("ckpt", "verify", url, "--all", "50")
    assert done.returncode == ExitCode.BAD_INPUT
    assert "--all is every step, and STEP is given, too (50); leave one out" in done.stderr
    found = outlast_json("ckpt", "verify", url, "50")
    assert found["problems"] == {"50": []}


def test_pin_and_unpin(url: str) -> None:
    assert outlast("ckpt", "pin", url, "50", "--reason", "for the paper").returncode == 0
    assert "pinned" in outlast("ckpt", "ls", url).stdout
    assert "for the paper" in outlast("ckpt", "show", url, "50").stdout
    refused = outlast("ckpt", "rm", url, "50")
    assert refused.returncode == ExitCode.BAD_INPUT
    assert "it is pinned" in refused.stderr
    assert outlast("ckpt", "unpin", url, "50").returncode == 0
    assert "pinned" not in outlast("ckpt", "ls", url).stdout
    missing = outlast("ckpt", "pin", url, "51")
    assert "no checkpoint of step 51" in missing.stderr


def test_rm_removes_what_is_not_needed(url: str) -> None:
    refused = outlast("ckpt", "rm", url, "150")
    assert refused.returncode == ExitCode.BAD_INPUT
    assert "newest" in refused.stderr
    done = outlast("ckpt", "rm", url, "50", "100")
    assert done.stdout == "removed: 50, 100\n"
    assert Storage(url).committed_steps() == [150]


def test_sweep_removes_what_a_dead_upload_left(url: str, tmp_path: Path) -> None:
    remains = tmp_path / "store/job-1/step-00000200.1/__0_0.distcp"
    remains.parent.mkdir()
    remains.write_bytes(b"half")
    assert outlast("ckpt", "sweep", url).returncode == ExitCode.OK
    assert remains.exists()
    os.utime(remains, (1, 1))
    assert outlast("ckpt", "sweep", url).stdout == "swept\n"
    assert not remains.parent.exists()
    assert Storage(url).committed_steps() == [150, 100, 50]


def test_copy_makes_it_exist_elsewhere(url: str, tmp_path: Path) -> None:
    target = f"{tmp_path}/elsewhere/job-1"
    done = outlast("ckpt", "copy", url, "100", target)
    assert done.returncode == ExitCode.OK, done.stderr
    assert Storage(target).committed_steps() == [100]
    assert outlast("ckpt", "verify", target).stdout == "step 100: whole\n"


def test_copy_takes_its_target_for_a_path_and_no_job(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Nobody is asked for a job of this name, and the folder is not there yet.
    done = outlast("ckpt", "copy", url, "100", "backup", "--state-dir", "nowhere")
    assert done.returncode == ExitCode.OK, done.stderr
    assert Storage(f"{tmp_path}/backup").committed_steps() == [100]


def test_unknown_kind_of_store_is_named(url: str) -> None:
    done = outlast("ckpt", "ls", "nosuch://bucket/job")
    assert done.returncode == ExitCode.BAD_INPUT
    assert "nosuch://bucket/job" in done.stderr


def test_salvage_of_a_whole_checkpoint_is_one_to_go_on_with(url: str, tmp_path: Path) -> None:
    done = outlast("ckpt", "salvage", url, "-o", f"{tmp_path}/saved")
    assert done.returncode == ExitCode.OK, done.stderr
    assert "7 tensors whole" in done.stdout
    assert f"outlast resume JOB --checkpoint {tmp_path}/saved" in " ".join(done.stdout.split())
    assert Storage(f"{tmp_path}/saved").committed_steps() == [150]


def test_salvage_says_what_is_lost_within_80_columns(url: str, tmp_path: Path) -> None:
    path = Path(url.removeprefix("file://")) / "step-00000050.1/__0_0.distcp"
    path.write_bytes(path.read_bytes()[:300])
    target = ["-o", f"{tmp_path}/saved", "--step", "50"]
    done = outlast("ckpt", "salvage", url, *target, COLUMNS="80")
    assert done.returncode == ExitCode.JOB_FAILED, done.stderr
    assert "the file ends at byte 300" in " ".join(done.stdout.split())
    rows = done.stdout.split("LOST\n")[1].splitlines()
    assert rows[0].split() == ["32", "0", "model.weight[0:4,", "0:8]"]
    links = [line for line in done.stdout.splitlines() if str(tmp_path) not in line]
    assert max(map(len, links)) <= 80
    assert (tmp_path / "saved/salvage.json").exists()


def test_salvage_refuses_a_folder_in_use_and_a_step_that_is_not_there(
    url: str, tmp_path: Path
) -> None:
    done = outlast("ckpt", "salvage", url, "-o", f"{url}/saved")
    assert done.returncode == ExitCode.BAD_INPUT
    assert "in the checkpoint's own folder" in done.stderr
    done = outlast("ckpt", "salvage", url, "--step", "7", "-o", f"{tmp_path}/saved")
    assert done.returncode == ExitCode.BAD_INPUT
    assert "has nothing of step 7" in done.stderr
