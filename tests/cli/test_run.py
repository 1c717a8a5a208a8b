"""`outlast run`: what it refuses, what it shows, what it says of faults and how it ends."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from checkpoint.core.names import OWNER
from outlast.cli.errors import CliError, ExitCode
from outlast.cli.run.checks import workers_here, workers_there
from outlast.cli.run.folders import RunFolders, checkpoint_root
from outlast.cli.run.notes import Notes, end_of
from outlast.cli.run.output import FILE_NAME, Output, Wanted
from outlast.cli.run.stops import Stops, exit_code
from outlast.torchrun.flags import run_options
from outlast.v1 import code_pb2
from outlast.v1.code_pb2_grpc import CodeServicer, add_CodeServicer_to_server
from outlast.v1.common_pb2 import NodeCapacity
from outlast.v1.incidents_pb2 import Incident
from outlast.v1.jobs_pb2 import Job
from outlast.v1.nodes_pb2 import Node
from tests.cli.running import TIMEOUT_S, outlast


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text("name: x")
    (tmp_path / "package").mkdir()
    return tmp_path


REFUSED = (
    ("trian.py", "trian.py: no such file in "),
    ("package", "package is a folder; give the script in it"),
    ("job.yaml", "job.yaml is no script; `outlast submit job.yaml` runs a job spec"),
    ("train", "; for a module: -m train"),
    ("-m no.such", "-m no.such: no module no in "),
    ("--no-python ./train.py", "--no-python ./train.py is not executable"),
    ("--no-python no-such", "--no-python no-such: no such program on the PATH"),
    ("--nproc-per-node xpu train.py", "--nproc-per-node xpu: XPUs are not counted"),
    ("--nproc-per-node 0 train.py", "--nproc-per-node is 0; allowed: 1 or more"),
    ("--nproc-per-node 5000 train.py", "workload.workers_per_node: is 5000; allowed: at most 1024"),
    ("--server host train.py", "--server is 'host'; it must be host:port"),
    ("--code . train.py", "--code goes with --server"),
    ("--server h:1 gone.py", "gone.py: no such file in "),
    ("--log-dir job.yaml -t 3 train.py", "--log-dir job.yaml: "),
    ("", "the following arguments are required"),
)


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_what_cannot_run_is_refused_by_name_before_anything_starts(
    folder: Path, line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "outlast.cli.embedded.EmbeddedController.start", lambda _: pytest.fail("begun")
    )
    done = outlast("run", *line.split())
    assert done.returncode == ExitCode.BAD_INPUT
    assert message in done.stderr
    assert done.stdout == ""


def test_a_flag_without_effect_is_named_in_a_warning(folder: Path) -> None:
    done = outlast("run", "--node-rank", "1", "gone.py")
    assert "warning: --node-rank 1 has no effect with outlast run: " in done.stderr


def test_a_script_that_no_controller_can_be_asked_to_run_is_told(folder: Path) -> None:
    done = outlast("run", "--server", "127.0.0.1:1", "train.py")
    assert done.returncode == ExitCode.NO_CONTROLLER
    assert "no controller answers at 127.0.0.1:1" in done.stderr


class Stuck(CodeServicer):
    """A controller to which a folder is never sent to the end."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()

    def FindCode(self, request: Any, context: Any) -> code_pb2.FindCodeResponse:
        return code_pb2.FindCodeResponse(max_bytes=64 << 20)

    def PutCode(self, request_iterator: Any, context: Any) -> code_pb2.PutCodeResponse:
        ended = threading.Event()
        context.add_callback(ended.set)
        self.has_begun.set()
        assert ended.wait(TIMEOUT_S)
        return code_pb2.PutCodeResponse()


def test_ctrl_c_ends_the_command_while_a_folder_is_sent(folder: Path) -> None:
    controller = Stuck()
    server = grpc.server(ThreadPoolExecutor(4), options=(("grpc.so_reuseport", 0),))
    add_CodeServicer_to_server(controller, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    words = ["run", "--server", f"127.0.0.1:{port}", "--code", ".", "train.py"]
    command = [sys.executable, "-m", "outlast.cli.main", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert controller.has_begun.wait(TIMEOUT_S)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
            server.stop(0).wait()
    assert process.returncode == exit_code(-signal.SIGINT)
    assert "Traceback" not in said


def test_help_before_the_script_is_ours_and_after_it_the_scripts(folder: Path) -> None:
    done = outlast("run", "--nproc-per-node", "2", "--help")
    assert done.returncode == ExitCode.OK
    assert done.stdout.startswith("Usage: outlast run ")
    assert "--max-restarts N" in done.stdout
    assert "--node-rank" not in done.stdout, "it has no effect"
    assert "Usage" not in outlast("run", "gone.py", "--help").stdout


@pytest.mark.parametrize(
    ("counted", "visible", "gpus", "expected"),
    [
        *((3, None, 8, 3), ("gpu", None, 8, 8), ("auto", None, 8, 8), ("auto", "0,1", 8, 2)),
        *(("auto", None, 0, 6), ("cpu", None, 8, 6), ("auto", "", 8, 6)),
    ],
)
def test_ranks_of_this_machine_are_counted_as_torchrun_does(
    counted: object,
    visible: str | None,
    gpus: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("controller.agent.observe.capacity.count_gpus", lambda: gpus)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert workers_here(counted, environ) == expected


def test_ranks_of_a_controllers_nodes_are_those_of_the_smallest() -> None:
    nodes = [
        Node(connected=True, capacity=NodeCapacity(gpus=gpus, cpus=cpus))
        for gpus, cpus in ((8, 96), (4, 48))
    ] + [Node(connected=False, capacity=NodeCapacity(gpus=1, cpus=2)), Node(connected=True)]
    assert [workers_there(counted, nodes) for counted in ("gpu", "cpu", 7)] == [4, 48, 7]
    with pytest.raises(CliError, match="give a number"):
        workers_there("auto", [Node(connected=True)])
    without = [Node(connected=True, capacity=NodeCapacity(cpus=2))]
    with pytest.raises(CliError, match="one of the connected nodes has no GPU"):
        workers_there("gpu", without)


class Shown:
    """An output whose files are below a folder, and what it showed."""

    def __init__(self, line: str, folder: Path, workers_per_node: int) -> None:
        wanted = Wanted.by(run_options(f"{line} x.py".split(), {}), workers_per_node)
        self.folder = folder
        self.screen = io.BytesIO()
        self.output = Output(wanted, folder if wanted.has_files else None, self.screen)

    @property
    def text(self) -> str:
        return self.screen.getvalue().decode()

    @property
    def files(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.folder)): path.read_text()
            for path in sorted(self.folder.rglob(FILE_NAME))
        }


def test_output_of_one_rank_is_shown_byte_by_byte(tmp_path: Path) -> None:
    shown = Shown("", tmp_path, 1)
    for data in (b"  5 %\r", b" 10 %\r", b"\xff\xfe", b"no end"):
        shown.output.take(0, 1, data)
        assert shown.screen.getvalue().endswith(data)
    shown.output.end()
    assert shown.screen.getvalue() == b"  5 %\r 10 %\r\xff\xfeno end"


def test_output_of_several_ranks_is_shown_in_lines_with_the_rank(tmp_path: Path) -> None:
    shown = Shown("", tmp_path, 2)
    shown.output.take(0, 1, b"a\nb")
    shown.output.take(1, 1, b"c\n")
    # Killed in the middle of its line.
    shown.output.take(0, 2, b"again\nend")
    shown.output.end()
    assert shown.text.splitlines() == [
        *("[rank 0] a", "[rank 1] c", "[rank 0] b", "[rank 0] again", "[rank 0] end")
    ]


@pytest.mark.parametrize(
    ("line", "shown_ranks", "files"),
    [
        ("--redirects 3", "", "0123"),
        ("--redirects 0:3", "13", "02"),
        ("--tee 3", "0123", "0123"),
        ("--tee 0:1", "0123", "02"),
        ("--redirects 3 --tee 0:3", "02", "0123"),
        ("--local-ranks-filter 1", "13", ""),
    ],
)
def test_output_goes_to_files_as_the_flags_say(
    line: str, shown_ranks: str, files: str, tmp_path: Path
) -> None:
    shown = Shown(f"--nnodes 2 {line}", tmp_path, 2)
    for rank in range(4):
        shown.output.take(rank, 1, f"{rank}\n".encode())
        shown.output.take(rank, 2, b"")
    shown.output.end()
    assert "".join(each[-1] for each in shown.text.splitlines()) == shown_ranks
    written = {name: text for name, text in shown.files.items() if text}
    assert written == {f"attempt_0/{rank}/{FILE_NAME}": f"{rank}\n" for rank in files}


def incident(number: int, **changes: object) -> Incident:
    values = {"attempt": number, "action": "restart_in_place", "reason": "rank 1 failed"}
    return Incident(incident_id=f"job.i{number}", **{**values, **changes})


def test_a_fault_is_told_once_when_it_is_decided_and_once_when_the_job_goes_on() -> None:
    notes = Notes()
    assert notes.take([incident(1, action="", reason="")]) == []
    assert notes.take([incident(1)]) == ["fault: rank 1 failed"]
    assert notes.take([incident(1)]) == []
    over = incident(1, state="CLOSED", recovery_s=1.5)
    assert notes.take([over]) == ["attempt 2 runs, 1.5 s after the fault"]
    assert notes.take([over, incident(2, state="CLOSED")]) == [
        *("fault: rank 1 failed", "attempt 3 runs")
    ]


def test_what_stops_nothing_and_what_the_end_says_are_no_notes() -> None:
    found = [incident(1, is_note=True), incident(2, action="fail"), incident(3, action="pause")]
    assert Notes().take(found) == []


@pytest.mark.parametrize(
    ("job", "code", "messages"),
    [
        (Job(state="SUCCEEDED"), 0, []),
        (Job(name="j", state="FAILED", reason="why"), 1, ["j failed: why"]),
        (Job(name="j", state="FAILED", reason="why", exit_code=7), 7, ["j failed: why"]),
        (Job(name="j", state="FAILED", reason="why", exit_code=-9), 137, ["j failed: why"]),
        # It ended too early.
        (Job(name="j", state="FAILED", reason="why", exit_code=0), 1, ["j failed: why"]),
        (Job(name="j", state="FAILED", error="T:\n E\n", ranks=2), 1, ["T:\n E", "j failed: "]),
        # Its only rank has printed it.
        (Job(name="j", state="FAILED", error="T:\n E\n", ranks=1), 1, ["j failed: "]),
        (Job(name="j", state="FAILED", reason="why", error="E"), 1, ["j failed: why"]),
        (Job(name="j", state="CANCELLED", reason="why"), 1, ["j was cancelled: why"]),
        (Job(name="j", state="PAUSED", reason="why"), 1, ["j is PAUSED: why"]),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(
    job: Job, code: int, messages: list[str]
) -> None:
    assert end_of(job) == (code, messages)


def test_the_first_signal_decides_the_exit_code() -> None:
    stops = Stops()
    assert not stops.is_asked
    stops.ask(signal.SIGTERM)
    stops.ask(signal.SIGINT)
    assert (stops.count, stops.code) == (2, 143)
    assert [exit_code(code) for code in (0, 3, -9)] == [0, 3, 137]


def test_checkpoints_outlive_the_run_and_empty_folders_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = checkpoint_root(tmp_path)
    for job_id, has_saved in (("train-1", True), ("train-2", False)):
        folders = RunFolders(root)
        folders.state.mkdir()
        step = root / job_id / "step-7"
        step.mkdir(parents=True)
        (root / job_id / OWNER).touch()
        if has_saved:
            (step / "shard").write_text("state")
        folders.close(job_id, is_kept=False)
        assert not folders.base.exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        *("outlast-runs", OWNER, "shard", "step-7", "train-1")
    ]
    assert capsys.readouterr().err == f"outlast: checkpoints are kept in {root / 'train-1'}\n"


def test_a_reason_has_the_flag_in_place_of_the_field_of_a_spec() -> None:
    job = Job(name="j", state="FAILED", reason="exit code 7; recovery.retry_budget is 0")
    assert end_of(job)[1] == ["j failed: exit code 7; --max-restarts is 0"]
