"""What the stacks of a process say in one line."""

from __future__ import annotations

from diagnostics.core.stacks import fingerprint_of, location_of, main_thread, parse

# As py-spy 0.4.3 prints a worker that waits for a peer, native frames and all.
WAITS = """Process 27717: /usr/bin/python -m trainer.worker.standby --control-fd 14
Python v3.11.7 (/usr/bin/python3.11)

Thread 27717 (idle): "MainThread"
    0x7efec54a3f16 (libc.so.6)
    pthread_cond_timedwait (libc.so.6)
    gloo::transport::tcp::UnboundBuffer::waitRecv (libtorch_cpu.so)
    _Exchange.complete (trainer/parallel/gloo.py:135)
    TrainLoop.train_step (trainer/worker/loop.py:102)
    run (trainer/worker/process.py:83)
Thread 27801 (active): "loader"
    read (trainer/data/loader.py:12)
Thread 27802 (idle)
    clone (libc.so.6)
"""
LOADS = """Thread 5 (active): "MainThread"
    sleep (my/data.py:9)
    TrainLoop.train_step (trainer/worker/loop.py:92)
    run (trainer/worker/process.py:83)
"""


def test_threads_and_frames_are_read() -> None:
    threads = parse(WAITS)
    assert [(t.name, t.state, len(t.frames)) for t in threads] == [
        ("MainThread", "idle", 6),
        ("loader", "active", 1),
        ("", "idle", 1),
    ]
    main = main_thread(threads)
    assert main is not None
    assert main.frames[0].function == "0x7efec54a3f16"


def test_the_place_is_the_innermost_python_code() -> None:
    assert location_of(WAITS) == "_Exchange.complete (trainer/parallel/gloo.py:135)"
    assert location_of(LOADS) == "sleep (my/data.py:9)"
    assert location_of("Error: Permission denied") == ""


def test_fingerprints_leave_out_what_differs_without_meaning() -> None:
    moved = WAITS.replace("27717", "999").replace("gloo.py:135", "gloo.py:140")
    assert (
        fingerprint_of(WAITS)
        == fingerprint_of(moved)
        == "run>TrainLoop.train_step>_Exchange.complete"
    )
    assert fingerprint_of(LOADS) != fingerprint_of(WAITS)
