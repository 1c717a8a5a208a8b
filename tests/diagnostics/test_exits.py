"""What ended a worker, from what it left behind."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from diagnostics.core.exits import ExitFacts, Where, classify
from diagnostics.core.rules.exits import EXITS
from outlast.failures import FailureClass
from outlast.worker_contract import CLEAN_CODES

GLOO_LOST = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
    "peer [127.0.0.1]:24988. This is typically caused by a remote worker crashing. Check the logs "
    "of the remote worker before reporting an error. GLHF!"
)


def test_sample_as_an_exception_gets_the_class_of_its_rule() -> None:
    samples = [(rule, text) for rule in EXITS.rules for text in rule.matches]
    for rule, text in samples:
        kind, separator, message = text.partition(": ")
        if not separator or " " in kind or not kind.endswith("Error"):
            continue
        facts = ExitFacts(code=1, exception_type=kind, exception_message=message)
        assert classify(facts).exit_class is rule.means.fault_class, text


@pytest.mark.parametrize("code", CLEAN_CODES)
def test_finished_and_stopped_workers_did_not_fail(code: int) -> None:
    assert classify(ExitFacts(code=code)).exit_class is FailureClass.CLEAN


def test_lost_connection_is_a_cascade() -> None:
    facts = ExitFacts(code=1, exception_type="builtins.RuntimeError", exception_message=GLOO_LOST)
    found = classify(facts)
    assert (found.exit_class, found.where) == (FailureClass.CASCADE, Where.EXCEPTION)
    assert found.reason.startswith("RuntimeError: [")


def test_words_name_the_rule_and_the_version_of_its_table() -> None:
    found = classify(ExitFacts(code=1, exception_type="MemoryError"))
    assert found.message == (
        "MemoryError:  (exception, class 'oom_host', "
        f"rule 'host allocation' of table {EXITS.version})"
    )
    printed = classify(ExitFacts(code=-6, stderr_tail="CUDA out of memory\n"))
    assert printed.message.startswith("CUDA out of memory (standard error, class 'cuda_oom', rule")


def test_words_that_no_rule_knows_name_none() -> None:
    assert classify(ExitFacts(code=-9)).message == "killed by SIGKILL"
    unknown = classify(ExitFacts(code=1, exception_type="my.Error", exception_message="seven"))
    assert unknown.message == "my.Error: seven"


def test_initiating_cause_in_standard_error_beats_a_cascade() -> None:
    facts = ExitFacts(
        code=1,
        exception_type="RuntimeError",
        exception_message=GLOO_LOST,
        stderr_tail="CUDA error: uncorrectable ECC error encountered\nConnection closed by peer",
    )
    found = classify(facts)
    assert (found.exit_class, found.where) == (FailureClass.DEVICE, Where.STDERR)


def test_exception_beats_noise_in_standard_error() -> None:
    facts = ExitFacts(
        code=1,
        exception_type="KeyError",
        exception_message="'input_ids'",
        stderr_tail="NCCL WARN something odd\nOut of memory: Killed process 3 (cc1plus)",
    )
    assert classify(facts).exit_class is FailureClass.PROGRAM_ERROR


def test_cascade_stays_a_cascade_when_the_agent_then_kills_the_worker() -> None:
    facts = ExitFacts(
        code=-signal.SIGKILL, exception_type="RuntimeError", exception_message=GLOO_LOST
    )
    assert classify(facts).exit_class is FailureClass.CASCADE


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV"), (signal.SIGTERM, "SIGTERM")],
)
def test_bare_signal_is_named(number: int, name: str) -> None:
    found = classify(ExitFacts(code=-number))
    assert (found.exit_class, found.reason) == (FailureClass.KILLED_BY_SIGNAL, f"killed by {name}")


def test_unnamed_signal_is_numbered() -> None:
    assert classify(ExitFacts(code=-33)).reason == "killed by signal 33"


def test_sigkill_with_the_kernel_s_line_is_out_of_memory() -> None:
    tail = "step 40 loss 2.1\nMemory cgroup out of memory: Killed process 87 (python3)\n"
    found = classify(ExitFacts(code=-signal.SIGKILL, stderr_tail=tail))
    assert found.exit_class is FailureClass.OOM_HOST


COUNTED = "for want of memory the kernel has killed one more process of its cgroup"


@pytest.mark.parametrize("before", ["", "RuntimeError"])
def test_sigkill_that_the_kernel_has_counted_is_out_of_memory(before: str) -> None:
    """Even where it had lost a connection before: others may have been killed first."""
    found = classify(
        ExitFacts(
            code=-signal.SIGKILL,
            exception_type=before,
            exception_message=GLOO_LOST if before else "",
            out_of_memory=COUNTED,
        )
    )
    assert (found.exit_class, found.where) == (FailureClass.OOM_HOST, Where.COUNT)
    assert found.message == f"killed by SIGKILL: {COUNTED}"


def test_other_ends_are_not_explained_by_a_count() -> None:
    aborted = classify(ExitFacts(code=-signal.SIGABRT, out_of_memory=COUNTED))
    assert aborted.exit_class is FailureClass.KILLED_BY_SIGNAL
    mistaken = classify(
        ExitFacts(code=-signal.SIGKILL, exception_type="KeyError", out_of_memory=COUNTED)
    )
    assert mistaken.exit_class is FailureClass.PROGRAM_ERROR


def test_sigkill_is_not_explained_by_earlier_warnings() -> None:
    tail = "[W] Connection reset by peer, retrying\nOSError: [Errno 28] No space left on device\n"
    found = classify(ExitFacts(code=-signal.SIGKILL, stderr_tail=tail))
    assert found.exit_class is FailureClass.KILLED_BY_SIGNAL


def test_abort_is_explained_by_what_was_printed_before() -> None:
    tail = "terminate called after throwing an instance of 'std::bad_alloc'\n"
    found = classify(ExitFacts(code=-signal.SIGABRT, stderr_tail=tail))
    assert found.exit_class is FailureClass.OOM_HOST


def test_advice_is_no_evidence() -> None:
    tail = "RuntimeError: boom, which might be caused by CUDA out of memory or NCCL error\n"
    assert (
        classify(ExitFacts(code=-6, stderr_tail=tail)).exit_class is FailureClass.KILLED_BY_SIGNAL
    )


def test_exception_class_of_the_user_is_a_user_error() -> None:
    facts = ExitFacts(code=1, exception_type="my_model.DataError", exception_message="bad row 7")
    assert classify(facts).exit_class is FailureClass.USER_ERROR


def test_plain_runtime_error_from_python_is_a_user_error() -> None:
    facts = ExitFacts(
        code=1, exception_type="builtins.RuntimeError", exception_message="loss is negative"
    )
    assert classify(facts).exit_class is FailureClass.USER_ERROR


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RuntimeError", "[enforce fail at CPUAllocator.cpp:76] something new"),
        ("torch.AcceleratorError", "something new"),
        ("outlast.errors.FatalError", "something of ours"),
        ("OSError", "[Errno 99] something of the system"),
    ],
)
def test_unknown_failure_below_the_user_s_code_is_not_blamed_on_it(kind: str, message: str) -> None:
    facts = ExitFacts(code=1, exception_type=kind, exception_message=message)
    assert classify(facts).exit_class is FailureClass.UNKNOWN


def test_exit_code_without_a_word_is_unknown() -> None:
    found = classify(ExitFacts(code=3))
    assert (found.exit_class, found.reason) == (FailureClass.UNKNOWN, "exit code 3 without a word")


@pytest.mark.parametrize(
    ("kind", "message", "traceback", "certain"),
    [
        ("KeyError", "'text'", "", True),
        (
            "ValueError",
            "bad row 7",
            "KeyError: 'row'\n\nDuring handling\nValueError: bad row 7",
            True,
        ),
        (
            "KeyError",
            "Caught KeyError in DataLoader worker process 0.",
            "KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most "
            "recent call last):\n  File \"data.py\", line 3, in get\nKeyError: 'text'\n",
            True,
        ),
        # What the program makes of a failure is not what failed.
        (
            "ValueError",
            "no row",
            "OSError: [Errno 5] Input/output error\n\nValueError: no row",
            False,
        ),
        ("ValueError", "no row", "my.CacheError: timed out\n\nValueError: no row", False),
        (
            "ValueError",
            "no row",
            "torch.AcceleratorError: new\n\nbuiltins.ValueError: no row",
            False,
        ),
        ("AssertionError", "", '  File "/x/model.py", line 3, in f\nAssertionError', True),
        # It cannot be, our own code says: a mistake of ours, or bits that changed.
        ("AssertionError", "", '  File "/x/trainer/loop.py", line 3, in f\nAssertionError', False),
    ],
)
def test_an_exception_of_the_program_is_certain_unless_it_came_of_another_one(
    kind: str, message: str, traceback: str, certain: bool
) -> None:
    facts = ExitFacts(code=1, exception_type=kind, exception_message=message, traceback=traceback)
    expected = FailureClass.PROGRAM_ERROR if certain else FailureClass.USER_ERROR
    assert classify(facts).exit_class is expected


@pytest.mark.parametrize(
    ("kind", "exit_class"),
    [
        ("MemoryError", FailureClass.OOM_HOST),
        ("ConnectionResetError", FailureClass.CASCADE),
        ("FileNotFoundError", FailureClass.MISSING),
        ("ImportError", FailureClass.MISSING),
        ("OSError", FailureClass.UNKNOWN),
        ("RuntimeError", FailureClass.USER_ERROR),
        ("UnicodeDecodeError", FailureClass.USER_ERROR),
        ("json.decoder.JSONDecodeError", FailureClass.USER_ERROR),
    ],
)
def test_what_a_node_or_the_moment_can_cause_is_no_certain_error_of_the_program(
    kind: str, exit_class: FailureClass
) -> None:
    facts = ExitFacts(code=1, exception_type=kind, exception_message="x")
    assert classify(facts).exit_class is exit_class


def test_a_service_out_of_reach_is_no_peer_s_doing() -> None:
    """Whatever stands in the log: it is not looked for on other ranks, and tried again."""
    message = "<urlopen error [Errno 111] Connection refused>"
    facts = ExitFacts(
        code=1,
        exception_type="urllib.error.URLError",
        exception_message=message,
        stderr_tail="ConnectionRefusedError: [Errno 111] Connection refused\n",
    )
    found = classify(facts)
    assert (found.exit_class, found.where) == (FailureClass.UNKNOWN, Where.EXCEPTION)
    ecc = "CUDA error: uncorrectable ECC error encountered\n"
    assert classify(replace(facts, stderr_tail=ecc)).exit_class is FailureClass.DEVICE


def test_what_a_program_says_as_it_ends_itself_is_the_reason() -> None:
    line = "train.py: error: argument --lr: invalid float value: 'fast'"
    found = classify(ExitFacts(code=2, exception_type="SystemExit", exception_message=line))
    assert (found.exit_class, found.reason) == (FailureClass.PROGRAM_ERROR, line)
    assert found.where is Where.STDERR
