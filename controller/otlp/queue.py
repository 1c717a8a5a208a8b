"""Records on their way out: bounded, in batches, from a thread of its own.

`put` never blocks. Where records come faster than they are exported, the oldest are dropped and
counted.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

from controller.otlp.records import Record

logger = logging.getLogger(__name__)

# A few megabytes at most, and a minute of a hundred records a second.
MAX_RECORDS = 8_192
MAX_BATCH = 512
PERIOD_S = 1.0
CLOSE_S = 2.0
OUTCOMES = ("exported", "dropped", "failed")

Export = Callable[[Sequence[Record]], bool]


class ExportQueue:
    """Exports what is put into it for as long as it is open."""

    def __init__(self, export: Export, *, max_records: int = MAX_RECORDS) -> None:
        """`export` may take its time; False or an error means that the batch is lost."""
        self._export = export
        self._max_records = max_records
        self._records: deque[Record] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closed = False
        self._is_failing = False
        self._counts = Counter(dict.fromkeys(OUTCOMES, 0))
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Have a record exported soon."""
        with self._lock:
            if self._is_closed:
                return
            if len(self._records) >= self._max_records:
                self._records.popleft()
                self._counts["dropped"] += 1
            self._records.append(record)
            is_batch = len(self._records) >= MAX_BATCH
        if is_batch:
            self._wake.set()

    def left_out(self, num_records: int) -> None:
        """So many records came too fast even to be put here."""
        with self._lock:
            self._counts["dropped"] += num_records

    def counts(self) -> dict[str, int]:
        """Records by outcome."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Export what is left, if that can be done in a moment."""
        with self._lock:
            self._is_closed = True
        self._wake.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait(PERIOD_S)
            self._wake.clear()
            # What was put before it was closed is sent once more.
            is_last = self._is_closed
            while self._send_batch():
                pass

    def _send_batch(self) -> bool:
        """Whether there was something to send, and it was taken."""
        with self._lock:
            batch = [self._records.popleft() for _ in range(min(MAX_BATCH, len(self._records)))]
        if not batch:
            return False
        why = "it was refused, or nobody answered in time"
        try:
            is_exported = self._export(batch)
        except Exception as error:  # noqa: BLE001  # of a library; the next batch is another try
            is_exported, why = False, repr(error)
        with self._lock:
            self._counts["exported" if is_exported else "failed"] += len(batch)
        if not is_exported and not self._is_failing:
            logger.warning("logs cannot be exported by OTLP: %s", why)
        self._is_failing = not is_exported
        return is_exported
