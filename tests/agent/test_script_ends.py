"""What a dead script has left behind about its end, as agent and controller read it.

Real ends are in `script_ends/recorded.json`, which `script_ends.record` has made.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.agent.workers.worker import Worker, post_mortem
from controller.core.edge.reports import worker_exited
from controller.core.program_error import plain
from controller.core.states import JobState
from outlast.failures import FailureClass
from outlast.ids import NodeId
from outlast.v1 import agents_pb2
from outlast.worker_contract import WorkerFiles
from tests.agent.script_ends.expected import (
    AMBIGUOUS,
    CASCADES,
    EXPECTED,
    KINDS,
    NUMBER,
    SILENT,
)
from tests.agent.script_ends.record import RECORDED
from tests.controller.core.driver import JOB, Driver

ENDS: Mapping[str, Any] = json.loads(RECORDED.read_text())


def end_of(
    folder: Path, *, code: int, log: str = "", error_file: str | None = None
) -> agents_pb2.WorkerExit:
    """What an agent says of the end of a worker that has left these files."""

    async def run() -> agents_pb2.WorkerExit:
        gone = asyncio.get_running_loop().create_future()
        worker = Worker(job_id="job", attempt=1, rank=0, paths=paths, requested_ns=0, gone=gone)
        return post_mortem(
            worker, code, out_of_memory="", max_text_bytes=65_536, stderr_tail_bytes=8_192
        )

    paths = WorkerFiles.below(folder, 0)
    paths.log.write_text(log, newline="")
    if error_file is not None:
        paths.error.write_text(error_file)
    return asyncio.run(run())


def recorded_end(folder: Path, name: str) -> agents_pb2.WorkerExit:
    end = ENDS[name]
    return end_of(folder, code=end["code"], log="\n".join(end["log"]), error_file=end["error_file"])


def class_of(exit_: agents_pb2.WorkerExit) -> tuple[FailureClass, str]:
    """What the controller makes of it: the class, and what it says in the incident."""
    exited = worker_exited(NodeId("n1"), "job", 1, 0, exit_)
    return exited.fault_class, plain(exited.detail)


def test_every_recorded_end_is_expected() -> None:
    of_both = (*SILENT, *CASCADES)
    known = {f"{kind} {name}" for kind in KINDS for name in of_both}
    assert {*EXPECTED, *AMBIGUOUS, *known} == ENDS.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_end_of_a_script_has_its_type_and_class(tmp_path: Path, name: str) -> None:
    found = recorded_end(tmp_path, name)
    assert (found.exception_type, *class_of(found)) == EXPECTED[name]
    # Without it no end is like an earlier one.
    assert worker_exited(NodeId("n1"), "job", 1, 0, found).fingerprint


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "exception_type"),
    [("lost_peer", "builtins.RuntimeError"), ("no_store", "torch.distributed.DistNetworkError")],
)
def test_a_rank_without_its_peers_is_a_cascade(
    tmp_path: Path, kind: str, name: str, exception_type: str
) -> None:
    found = recorded_end(tmp_path, f"{kind} {name}")
    assert found.exception_type == exception_type
    assert class_of(found)[0] is FailureClass.CASCADE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SILENT)
def test_an_exception_that_did_not_end_the_script_is_not_its_end(
    tmp_path: Path, kind: str, name: str
) -> None:
    found = recorded_end(tmp_path, f"{kind} {name}")
    assert (found.exception_type, found.exception_message, found.traceback) == ("", "", "")
    match found.code:
        case 1 | 7:
            assert class_of(found) == (
                FailureClass.UNKNOWN,
                f"exit code {found.code} without a word",
            )
        case code:
            assert (code, class_of(found)[1]) == (-2, "killed by SIGINT")


@pytest.mark.parametrize(
    ("name", "state", "reason"),
    [
        (
            "plain wrong argument",
            JobState.FAILED,
            "the job's own program failed before the first step, on rank 0: train.py: error: "
            "argument --lr: invalid float value: 'fast'; it would fail again, so it is not retried",
        ),
        (
            "forked no program",
            JobState.FAILED,
            "the job's own program failed: missing on every node of the job (n1, n2): outlast: "
            "cannot start './no-such-program': No such file or directory",
        ),
        (
            "forked program that is a text",
            JobState.FAILED,
            "the job cannot start as it is written: outlast: cannot start './notes.txt': "
            "Permission denied",
        ),
        (
            "recorded value_error",
            JobState.FAILED,
            f"the job's own program failed before the first step, on rank 0: ValueError: {NUMBER}; "
            "it would fail again, so it is not retried",
        ),
        ("plain no_name", JobState.STARTING, "restarting in place"),
        ("plain exit_code", JobState.STARTING, "restarting in place"),
    ],
)
def test_what_another_start_would_repeat_is_not_retried(
    tmp_path: Path, name: str, state: JobState, reason: str
) -> None:
    driver = Driver().starting(spares=0)
    driver.answer_all("/start/")
    attempt = driver.job().attempt
    for rank in (0, 1):
        left = recorded_end(tmp_path, name)
        exited = worker_exited(driver.exited(rank).node, JOB, attempt, rank, left)
        driver.send(replace(exited, at_s=driver.now_s))
    driver.answer_all("/stop/")
    assert (driver.job().state, driver.job().reason) == (state, reason)


ROWS = "3 rows are bad:\nrow 7: no label\n\nrow 9: no text\nError: see above"


@pytest.mark.parametrize("name", ["recorded own_error", "plain error_with_peer"])
def test_a_message_of_several_lines_is_whole(tmp_path: Path, name: str) -> None:
    """Of torch's report, or where torch marks each line that it prints."""
    found = recorded_end(tmp_path, name)
    assert found.exception_message == ROWS
    assert found.traceback.startswith("Traceback (most recent call last):\n  File ")
    assert found.traceback.endswith(f"\nDataError: {ROWS}\n")


def test_lines_that_may_be_of_anything_are_not_of_the_message(tmp_path: Path) -> None:
    found = recorded_end(tmp_path, "plain own_error")
    assert found.exception_message == "3 rows are bad:"
    noisy = recorded_end(tmp_path, "plain error_and_noise")
    assert noisy.exception_message == "'label'"
    assert noisy.traceback.endswith("\nKeyError: 'label'\n")


def test_the_traceback_has_what_the_exception_came_from(tmp_path: Path) -> None:
    found = recorded_end(tmp_path, "plain value_error_twice")
    assert "\nKeyError: 'label'\n\nThe above exception was the direct" in found.traceback
    group = recorded_end(tmp_path, "plain group")
    assert group.exception_message == "2 loaders failed (2 sub-exceptions)"
    assert "    | json.decoder.JSONDecodeError: Expecting" in group.traceback


def torchs(text: str, trace: str = "", timestamp: object = "1700000000") -> str:
    extra = {"py_callstack": trace, "timestamp": timestamp}
    return json.dumps({"message": {"message": text, "extraInfo": extra}})


def test_torch_says_the_second_and_the_file_the_rest_of_it(tmp_path: Path) -> None:
    error = WorkerFiles.below(tmp_path, 0).error
    second = int(time.time()) - 100
    report = torchs("ValueError: x", timestamp=str(second))
    for written, moment in ((second + 0.25, second + 0.25), (second + 7, second + 1)):
        error.write_text(report)
        os.utime(error, (written, written))
        # The clock of the node is that of the wall, but for what was set since.
        assert end_of(tmp_path, code=1).at_s == pytest.approx(moment, abs=0.1)


@pytest.mark.parametrize("timestamp", ["soon", "nan", "-1", "9" * 5_000, None, ["1"], {}])
def test_a_time_that_is_none_is_now(tmp_path: Path, timestamp: object) -> None:
    before_s = time.time()
    found = end_of(tmp_path, code=1, error_file=torchs("ValueError: x", timestamp=timestamp))
    assert found.at_s == pytest.approx(before_s, abs=60)
    assert found.exception_type == "builtins.ValueError"


@pytest.mark.parametrize(
    ("text", "trace", "exception_type", "message"),
    [
        ("OutOfMemoryError: no", "", "OutOfMemoryError", "no"),
        ("OutOfMemoryError: no", "torch.OutOfMemoryError: no\n", "torch.OutOfMemoryError", "no"),
        # It came from one of the same name.
        ("Error: no", "a.Error: yes\n\nb.Error: no\n", "b.Error", "no"),
        ("Error: no", "b.Error: no\nc.Error: of the message\n", "b.Error", "no"),
        ("some words", "", "", "some words"),
        ("all is lost: no", "", "", "all is lost: no"),
    ],
)
def test_the_full_name_is_in_the_traceback(
    tmp_path: Path, text: str, trace: str, exception_type: str, message: str
) -> None:
    found = end_of(tmp_path, code=1, error_file=torchs(text, trace))
    assert (found.exception_type, found.exception_message) == (exception_type, message)


def test_a_report_that_was_passed_on_is_read(tmp_path: Path) -> None:
    given = json.dumps({"message": "ValueError: x", "timestamp": 1_700_000_000})
    found = end_of(tmp_path, code=1, error_file=given)
    assert (found.exception_type, found.exception_message) == ("builtins.ValueError", "x")


def test_what_torch_itself_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the installed version; the recorded ones are of an earlier one one day."""
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main() -> None:
        raise json.JSONDecodeError("no", "", 0)

    error = WorkerFiles.below(tmp_path, 0).error
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error))
    with pytest.raises(json.JSONDecodeError):
        main()
    found = end_of(tmp_path, code=1)
    assert found.exception_type == "json.decoder.JSONDecodeError"
    assert found.exception_message == "no: line 1 column 1 (char 0)"
    assert found.at_s == pytest.approx(error.stat().st_mtime, abs=1.5)


@pytest.mark.parametrize(
    "left",
    [
        *(ENDS["recorded value_error"]["error_file"][:end] for end in (0, 1, 30, 200, -1)),
        *("null", "[]", "{}", '{"message": 7}', '{"message": {"message": ["a"]}}'),
        *('{"message": {"extraInfo": {}}}', '{"type": 7}', '{"type": null, "message": {}}'),
    ],
)
def test_half_a_report_is_none_and_the_log_is_read(tmp_path: Path, left: str) -> None:
    log = "\n".join(ENDS["plain no_file"]["log"])
    found = end_of(tmp_path, code=1, log=log, error_file=left)
    assert found.exception_type == "builtins.FileNotFoundError"


TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nmy.Error: no\n'


@pytest.mark.parametrize(
    ("log", "exception_type"),
    [
        (TRACE, "my.Error"),
        (f"step 3\n{TRACE}", "my.Error"),
        (TRACE + 5 * "saved\n", "my.Error"),
        (TRACE + 6 * "step\n", ""),
        (f"12:00:00 ERROR it failed\n{TRACE}", "my.Error"),
        (f"12:00:00 ERROR it failed\n{TRACE}step 4\n", ""),
        (f"{TRACE}[W721 10:00:00.1 pg.cpp:1] leaked\nn1:7:9 [0] NCCL INFO bye\n", "my.Error"),
        (TRACE + 20 * "wandb: synced\n", "my.Error"),
        (f"{TRACE}\r 30%|###  | 3/10", "my.Error"),
        (f"Exception in thread Thread-1 (f):\n{TRACE}", ""),
        (f"Exception ignored in: <function f>\n{TRACE}", ""),
        (f"Task exception was never retrieved\nfuture: <Task finished>\n{TRACE}", ""),
        (f"{TRACE}Exception in thread Thread-1 (f):\n{TRACE.replace('my.', 'your.')}", "my.Error"),
        (f"Error in sys.excepthook:\n{TRACE}\nOriginal exception was:\n{TRACE}", "my.Error"),
        # The agent reads the end of a long log.
        (TRACE[40:], ""),
        (TRACE[:-13], ""),
        (TRACE[:-14] + "\n\nmy.Error: no\n", ""),
    ],
)
def test_the_last_thing_that_is_printed_is_the_end(
    tmp_path: Path, log: str, exception_type: str
) -> None:
    assert end_of(tmp_path, code=1, log=log).exception_type == exception_type


def test_lines_of_a_rank_are_its_end_whatever_stands_between(tmp_path: Path) -> None:
    marked = [f"[rank3]: {line}" for line in TRACE.splitlines()]
    marked[2:2] = ["a thread says something"]
    log = "\n".join((*marked, *(40 * ["another thread"])))
    found = end_of(tmp_path, code=1, log=log)
    assert (found.exception_type, found.exception_message) == ("my.Error", "no")


@pytest.mark.parametrize("code", [0, 2, 3, 75, 127, -6, -9])
def test_only_exit_code_1_is_of_an_exception(tmp_path: Path, code: int) -> None:
    assert end_of(tmp_path, code=code, log=TRACE).exception_type == ""


@pytest.mark.parametrize(
    ("code", "log"),
    [
        (2, "error: no usage was shown\n"),
        (2, "usage: train.py\ntrain.py: error: no\nstep 4\n"),
        (1, "python: can't open file 'a.py': [Errno 2] No such file or directory\n"),
        (126, "outlast: cannot start './train': Text file busy\n"),
        (127, "something else\n"),
        (7, "outlast: cannot start './train': Permission denied\n"),
        (126, ""),
    ],
)
def test_a_line_is_no_reason_where_it_does_not_fit_the_exit_code(
    tmp_path: Path, code: int, log: str
) -> None:
    found = end_of(tmp_path, code=code, log=log)
    assert found.exception_type == ""
    assert class_of(found) == (FailureClass.UNKNOWN, f"exit code {code} without a word")


def test_the_log_s_end_is_kept_as_before(tmp_path: Path) -> None:
    found = end_of(tmp_path, code=1, log=f"{'x' * 100_000}\n{TRACE}")
    assert found.exception_type == "my.Error"
    assert len(found.stderr_tail) == 8_192
    assert found.stderr_tail.endswith(TRACE)
