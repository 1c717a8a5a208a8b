"""What a step used, measured where it is used.

The meter stands between the pipeline engine and whoever else listens to its chunks:
it notes how long forward and backward passes take, and takes out what they waited
for others. Each pass goes to the black box as it ends. At the end of a step the meter
adds what the groups say of their messages.
Times are those of whoever does the work: on a GPU the device's, as far as they are
known when the step is taken.

What does not belong here: the meaning of the numbers. `outlast.blackbox` has that.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from outlast.blackbox import Group, Pass, Phase, SpanRecord, StepUse
from trainer.parallel.timeline import Timeline


class Messages(Protocol):
    """What a group says of its messages so far."""

    @property
    def waited_ns(self) -> int:
        """The rank stood still for them."""
        ...

    @property
    def in_flight_ns(self) -> int:
        """They were under way, waited for or not."""
        ...

    @property
    def bytes_sent(self) -> int: ...


class Listener(Protocol):
    """What is recorded of a chunk's passes, as `trainer.parallel.hooks.ChunkHooks`."""

    def before_forward(self, chunk: int, micro_batch: int) -> None: ...
    def after_forward(self, chunk: int, micro_batch: int) -> None: ...
    def before_backward(self, chunk: int, micro_batch: int) -> None: ...
    def after_backward(self, chunk: int, micro_batch: int, *, last: bool) -> None: ...
    def after_inputs(self, chunk: int, micro_batch: int, *, last: bool) -> None: ...
    def before_weights(self, chunk: int, micro_batch: int) -> None: ...
    def after_weights(self, chunk: int, micro_batch: int) -> None: ...


class Timing(Protocol):
    """What the engine says of its last run."""

    @property
    def busy_s(self) -> float: ...

    @property
    def waited_s(self) -> float: ...


class StepMeter:
    """Measures steps; to the engine it is a listener, and passes on what it hears."""

    def __init__(
        self,
        groups: Mapping[Group, Sequence[Messages]],
        memory: PeakMemory,
        timeline: Timeline,
        inner: Listener | None = None,
    ) -> None:
        """`groups` has all that one kind of group sends; a pipeline may have two."""
        self._groups = groups
        self._memory = memory
        self._timeline = timeline
        self._inner = inner
        self._add_span: Callable[[SpanRecord], None] = _ignore
        self._pass_ns = {Pass.FORWARD: 0, Pass.BACKWARD: 0}
        # When the present pass began, and what the rank had waited by then.
        self._began = (0, 0)
        self._before = self._read()

    def before_forward(self, chunk: int, micro_batch: int) -> None:
        if self._inner is not None:
            self._inner.before_forward(chunk, micro_batch)
        self._timeline.stamp(self._begin)

    def after_forward(self, chunk: int, micro_batch: int) -> None:
        self._timeline.stamp(partial(self._end, Pass.FORWARD, chunk, micro_batch))
        if self._inner is not None:
            self._inner.after_forward(chunk, micro_batch)

    def before_backward(self, chunk: int, micro_batch: int) -> None:
        if self._inner is not None:
            self._inner.before_backward(chunk, micro_batch)
        self._timeline.stamp(self._begin)

    def after_backward(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        self._timeline.stamp(partial(self._end, Pass.BACKWARD, chunk, micro_batch))
        if self._inner is not None:
            self._inner.after_backward(chunk, micro_batch, last=last)

    def after_inputs(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        self._timeline.stamp(partial(self._end, Pass.BACKWARD, chunk, micro_batch))
        if self._inner is not None:
            self._inner.after_inputs(chunk, micro_batch, last=last)

    def before_weights(self, chunk: int, micro_batch: int) -> None:
        if self._inner is not None:
            self._inner.before_weights(chunk, micro_batch)
        self._timeline.stamp(self._begin)

    def after_weights(self, chunk: int, micro_batch: int) -> None:
        # A part of the backward pass, by itself.
        self._timeline.stamp(partial(self._end, Pass.BACKWARD, chunk, micro_batch))
        if self._inner is not None:
            self._inner.after_weights(chunk, micro_batch)

    def begin(self, add_span: Callable[[SpanRecord], None]) -> None:
        """A step begins: evaluations and checkpoints before it are none of its use.

        `add_span` gets each pass of the step as it ends.
        """
        self._add_span = add_span
        self._before = self._read()
        self._pass_ns = dict.fromkeys(self._pass_ns, 0)

    def take(self, timing: Timing, *, data_wait_ns: int = 0) -> StepUse:
        """What the step has used; `timing` is of its run of the engine."""
        # All of its passes have ended, on a device as well.
        self._add_span = _ignore
        then, now = self._before, self._read()
        return StepUse(
            forward_ns=self._pass_ns[Pass.FORWARD],
            backward_ns=self._pass_ns[Pass.BACKWARD],
            busy_ns=round(timing.busy_s * 1e9),
            waited_ns=round(timing.waited_s * 1e9),
            hidden_ns={group: now[group].hidden_ns - then[group].hidden_ns for group in now},
            sent_bytes={group: now[group].sent_bytes - then[group].sent_bytes for group in now},
            data_wait_ns=data_wait_ns,
            data_waits=int(data_wait_ns > 0),
            peak_memory_bytes=self._memory.read(),
        )

    def _read(self) -> dict[Group, _Reading]:
        return {group: _Reading(messages) for group, messages in self._groups.items()}

    def _begin(self, now_ns: int) -> None:
        self._began = (now_ns, self._waited_ns())

    def _end(self, work: Pass, chunk: int, micro_batch: int, now_ns: int) -> None:
        start_ns, waited_before_ns = self._began
        waited_ns = max(0, self._waited_ns() - waited_before_ns)
        self._pass_ns[work] += now_ns - start_ns - waited_ns
        self._add_span(
            SpanRecord(
                phase=Phase.FORWARD_BACKWARD,
                work=work,
                chunk=chunk,
                micro_batch=micro_batch,
                start_ns=start_ns,
                end_ns=now_ns,
                waited_ns=waited_ns,
            )
        )

    def _waited_ns(self) -> int:
        """For how long the rank has stood still for others so far."""
        return sum(one.waited_ns for messages in self._groups.values() for one in messages)


def _ignore(span: SpanRecord) -> None:
    """Of passes that are no step's: a warm-up's, or those of a step that is done again."""


class _Reading:
    """A group's counters at one moment."""

    __slots__ = ("hidden_ns", "sent_bytes")

    def __init__(self, messages: Sequence[Messages]) -> None:
        self.hidden_ns = sum(max(0, one.in_flight_ns - one.waited_ns) for one in messages)
        self.sent_bytes = sum(one.bytes_sent for one in messages)


class PeakMemory:
    """The most memory that the rank has used since this was made.

    On a GPU it is what torch has allocated there. A CPU's allocator keeps no such
    count, so there it is the growth of the process: make it before the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base_bytes = 0 if device.type == "cuda" else _resident_peak_bytes()

    def read(self) -> int:
        """Bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _resident_peak_bytes() - self._base_bytes


def _resident_peak_bytes() -> int:
    # Linux counts it in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
