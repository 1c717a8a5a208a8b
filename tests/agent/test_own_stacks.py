"""Where an agent's own threads stand: looked at from outside, and never for long."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from controller.agent.workers import py_spy, stacks
from outlast.v1 import agents_pb2
from tests.agent.harness import REPOSITORY, AgentProcess, FakeController, start_job, wait_for

needs_tool = pytest.mark.skipif(py_spy.find() is None, reason="py-spy is not installed")

# A thread that starts a program waits, not to be woken, until the program has been begun; and
# that one first opens a pipe to which nobody writes.
UNWAKABLE = """
import asyncio, ctypes, os, sys, threading, time
from controller.agent.workers import py_spy, stacks
from controller.agent.workers.processes import process_state

pipe = sys.argv[1].encode()
libc = ctypes.CDLL(None)

def uploads():
    actions = ctypes.create_string_buffer(256)
    libc.posix_spawn_file_actions_init(actions)
    libc.posix_spawn_file_actions_addopen(actions, 0, pipe, os.O_RDONLY, 0)
    pid = ctypes.c_int()
    arguments = (ctypes.c_char_p * 2)(b"true", None)
    environment = (ctypes.c_char_p * 1)(None)
    libc.posix_spawn(ctypes.byref(pid), b"/bin/true", actions, None, arguments, environment)
    os.waitpid(pid.value, 0)

thread = threading.Thread(target=uploads, name="checkpoint-upload-job")
thread.start()
deadline_s = time.monotonic() + 20.0
while process_state(thread.native_id) != "D":
    if time.monotonic() > deadline_s:
        os._exit(77)
    time.sleep(0.001)
(own,) = asyncio.run(stacks.collect([]))
print(own.text)
os.close(os.open(pipe, os.O_WRONLY))
thread.join()
"""


def own_of(controller: FakeController, command: agents_pb2.Command) -> agents_pb2.RankStacks:
    command_id = controller.command(command)
    assert controller.result(command_id).ok
    (result,) = (
        event.command_result
        for event in controller.events("command_result")
        if event.command_result.command_id == command_id
    )
    (own,) = (found for found in result.stacks if found.rank == -1)
    return own


@needs_tool
def test_native_and_python_frames_of_the_agent_come_with_those_of_its_workers(
    controller: FakeController, agent: AgentProcess
) -> None:
    stop = agents_pb2.StopWorkers(timeout_s=20.0, capture_stacks=True)
    # On a busy machine py-spy may be late, and is not waited for: then once more.
    for attempt in range(1, 11):
        start_job(controller, attempt)
        command = agents_pb2.Command(job_id="job", attempt=attempt, stop_workers=stop)
        own = own_of(controller, command)
        if own.text.startswith("Process "):
            break
    assert own.text.startswith(f"Process {agent.process.pid}: ")
    # The event loop, in Python and below it.
    assert "_run_once (asyncio/base_events.py:" in own.text
    assert "epoll_wait (libc" in own.text
    (path,) = own.paths
    assert Path(path).read_text().startswith(own.text)
    beats = len(controller.heartbeats())
    wait_for(lambda: len(controller.heartbeats()) > beats, "the agent to go on")


@needs_tool
def test_an_agent_with_a_thread_that_cannot_be_woken_is_not_stopped_to_look(
    tmp_path: Path,
) -> None:
    """py-spy would wait for that thread and hold all others meanwhile."""
    pipe = tmp_path / "pipe"
    subprocess.run(["mkfifo", pipe], check=True)
    done = subprocess.run(
        [sys.executable, "-c", UNWAKABLE, str(pipe)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this kernel lets the start of a program be interrupted")
    assert done.returncode == 0, done.stderr
    reason, _, frames = done.stdout.partition("\n")
    assert reason.startswith(
        "no native frames: in the kernel, not to be woken: checkpoint-upload-job at "
    )
    assert 'Thread "checkpoint-upload-job" (in the kernel, not to be woken at ' in frames
    assert "in uploads\n" in frames


def test_a_look_at_the_agent_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = tmp_path / "py-spy"
    endless.write_text("#!/bin/sh\nexec sleep 60\n")
    endless.chmod(0o755)
    monkeypatch.setattr(py_spy, "find", lambda: str(endless))
    monkeypatch.setattr(stacks, "OWN_LOOK_S", 0.1)
    done = threading.Event()
    uploads = threading.Thread(target=done.wait, name="checkpoint-upload-job")
    uploads.start()
    try:
        (own,) = asyncio.run(stacks.collect([], within_s=30.0))
    finally:
        done.set()
        uploads.join()
    assert own.text.startswith("no native frames: py-spy dump --native: took over 0.1 s\n")
    assert 'Thread "checkpoint-upload-job" (asleep at ' in own.text
