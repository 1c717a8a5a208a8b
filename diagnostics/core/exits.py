"""What kind of failure ended a worker, from what it left behind.

The controller decides by this class whether to restart, to look at the node or
to tell the user, so a symptom must never pass for a cause: losing a connection
is what a rank says when *another* one died, and loses against anything else.

The table is data (`diagnostics.core.rules`).

What does not belong here: comparing ranks (the earliest initiating failure
wins), and what to do about it.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace

from diagnostics.core.rules.exit_meaning import ExitRule
from diagnostics.core.rules.exits import EXITS
from outlast.enums import StrEnum
from outlast.failures import FailureClass
from outlast.worker_contract import CLEAN_CODES, KILLED

# Advice, not evidence: from here on a line names causes that need not be there.
_ADVICE = re.compile(
    r"(?:This )?(?:might be|could be|may be|is typically) caused by.*|CUDA_LAUNCH_BLOCKING.*|"
    r"[Cc]ompile with `?TORCH_USE_CUDA_DSA.*"
)
# An error thrown in C++ and passed on: nothing the user wrote.
_NATIVE = re.compile(r"\.(?:cc|cpp|cu|cuh|h|hpp):\d+|^c10::|^\[enforce fail")
# Exceptions of the interpreter that a connection or a file raises, not a mistake.
_ENVIRONMENT = ("OSError", "TimeoutError", "InterruptedError", "BlockingIOError")
# Modules whose own exception classes say nothing about the user's code.
_OURS = ("outlast.", "trainer.", "checkpoint.", "controller.", "diagnostics.", "torch.")
# Before the line with which a program says why it ends itself.
_ENDED_ITSELF = "SystemExit: "
# A line of a traceback that names an exception: its own, or one that it came from.
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Timeout)\b.*")
_FRAME = re.compile(r'^  File "([^"]+)", line', re.MULTILINE)
_OUR_FILE = re.compile(r"/(?:outlast|trainer|checkpoint|diagnostics)/[\w/]+\.py$")

# Classes that any better evidence may replace.
_SOFT = (FailureClass.CASCADE, FailureClass.UNKNOWN)


class Where(StrEnum):
    """Which of the facts decided."""

    EXIT_CODE = "exit code"
    EXCEPTION = "exception"
    STDERR = "standard error"
    COUNT = "kernel's count"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFacts:
    """What a worker left behind. Everything but the code may be empty."""

    # Exit code, or minus the signal number.
    code: int
    # First exception, as `module.Class` and its message; `SystemExit` for a program that says in
    # one line why it ends itself.
    exception_type: str = ""
    exception_message: str = ""
    # Of that exception, with those that it came from.
    traceback: str = ""
    # End of its standard error.
    stderr_tail: str = ""
    # By which of the kernel's counts it was killed for want of memory, by nobody else.
    out_of_memory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """The class of an exit, what decided it, and the words that did."""

    exit_class: FailureClass
    where: Where
    reason: str
    # Of the table; "" where none of its rules was asked or knew the words.
    rule: str = ""

    @property
    def message(self) -> str:
        """The reason, and by which rule of which table it is one."""
        if not self.rule:
            return self.reason
        which = f"class {str(self.exit_class)!r}, {EXITS.cite(self.rule)}"
        return f"{self.reason} ({self.where}, {which})"


def classify(facts: ExitFacts) -> Classification:
    """The class of a worker's exit.

    Initiating causes win over cascades, the exception over standard error, both
    over the kernel's count, and that over the bare signal.
    """
    if facts.code in CLEAN_CODES:
        return _classification(FailureClass.CLEAN, Where.EXIT_CODE, f"exit code {facts.code}")
    exception = _exception(facts)
    if exception is not None and exception.exit_class not in _SOFT:
        return exception
    tail = _stderr(facts)
    if tail is not None and tail.exit_class not in _SOFT:
        return tail
    if facts.code == KILLED and facts.out_of_memory:
        reason = f"killed by SIGKILL: {facts.out_of_memory}"
        return _classification(FailureClass.OOM_HOST, Where.COUNT, reason)
    # What the worker wrote about itself came before the signal, which may be no
    # more than the agent's own clean-up.
    for found in (exception, tail):
        # Also an exception of which it is known that no peer is its cause.
        if found is not None and found.rule:
            return found
    if facts.code < 0:
        name = _signal_name(-facts.code)
        return _classification(FailureClass.KILLED_BY_SIGNAL, Where.EXIT_CODE, f"killed by {name}")
    if exception is not None:
        return exception
    reason = f"exit code {facts.code} without a word"
    return _classification(FailureClass.UNKNOWN, Where.EXIT_CODE, reason)


def _exception(facts: ExitFacts) -> Classification | None:
    if not facts.exception_type:
        return None
    # Types of the interpreter carry no module in a traceback; match them alike.
    kind = facts.exception_type.removeprefix("builtins.")
    text = f"{kind}: {facts.exception_message}"
    rule = EXITS.first(_ADVICE.sub("", text))
    # What a program says as it ends itself is all that there is to say.
    reason = text.removeprefix(_ENDED_ITSELF).partition("\n")[0][:300]
    if rule is not None:
        where = Where.STDERR if text.startswith(_ENDED_ITSELF) else Where.EXCEPTION
        found = _by_rule(rule, where, reason)
        is_doubtful = _came_of_others(facts) or _is_our_assertion(facts)
        if found.exit_class is FailureClass.PROGRAM_ERROR and is_doubtful:
            return replace(found, exit_class=FailureClass.USER_ERROR)
        return found
    is_native = bool(_NATIVE.search(facts.exception_message))
    is_user_error = not is_native and kind not in _ENVIRONMENT and not kind.startswith(_OURS)
    exit_class = FailureClass.USER_ERROR if is_user_error else FailureClass.UNKNOWN
    return _classification(exit_class, Where.EXCEPTION, reason)


def _came_of_others(facts: ExitFacts) -> bool:
    """Whether an exception that the program made came from one that it need not have made.

    `except OSError: raise ValueError` says what the program made of a failure, not what failed.
    The traceback shows the exceptions that one came from, also those of a data loader's process.
    """
    raised = (line for line in facts.traceback.splitlines() if _RAISED.match(line))
    rules = (EXITS.first(_ADVICE.sub("", line.removeprefix("builtins."))) for line in raised)
    return any(
        rule is None or rule.means.fault_class is not FailureClass.PROGRAM_ERROR for rule in rules
    )


def _is_our_assertion(facts: ExitFacts) -> bool:
    """Whether one of our own modules found what cannot be: our mistake, or bits that changed."""
    kind = facts.exception_type.removeprefix("builtins.")
    frames = _FRAME.findall(facts.traceback)
    return kind == "AssertionError" and bool(frames) and bool(_OUR_FILE.search(frames[-1]))


def _stderr(facts: ExitFacts) -> Classification | None:
    """The first initiating line of standard error, or else the first cascade.

    After SIGKILL only the kernel's own words count: whatever the worker had
    printed before is no reason to be killed.
    """
    cascade: Classification | None = None
    for line in facts.stderr_tail.splitlines():
        rule = EXITS.first(_ADVICE.sub("", line))
        if rule is None or not rule.means.in_stderr:
            continue
        if facts.code == KILLED and rule.means.fault_class is not FailureClass.OOM_HOST:
            continue
        found = _by_rule(rule, Where.STDERR, line.strip()[:300])
        if rule.means.fault_class is not FailureClass.CASCADE:
            return found
        cascade = cascade or found
    return cascade


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _by_rule(rule: ExitRule, where: Where, reason: str) -> Classification:
    return Classification(
        exit_class=rule.means.fault_class, where=where, reason=reason, rule=rule.name
    )


def _classification(exit_class: FailureClass, where: Where, reason: str) -> Classification:
    return Classification(exit_class=exit_class, where=where, reason=reason)
