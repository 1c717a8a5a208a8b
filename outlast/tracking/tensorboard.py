"""A job's curve in TensorBoard's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outlast.tracking.points import News


class TensorBoard:
    """Event files in a folder. What they have is what was written: nothing else is kept."""

    def __init__(self, folder: Path) -> None:
        """Raises ModuleNotFoundError: tensorboard is not installed."""
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event: Any = event_pb2.Event
        self._session_log: Any = event_pb2.SessionLog
        self._summary: Any = summary_pb2.Summary
        self.last_step = _last_step(folder)
        self._writer: Any = EventFileWriter(str(folder))

    def write(self, news: News) -> None:
        """Add points; they are on disk afterwards."""
        if news.invalid_from is not None:
            # TensorBoard leaves out what earlier events have from this step on.
            start = self._session_log(status=self._session_log.START)
            event = self._event(step=news.invalid_from, session_log=start)
            self._writer.add_event(event)
        for point in news.points:
            values = [
                self._summary.Value(tag=tag, simple_value=value)
                for tag, value in point.values.items()
            ]
            summary = self._summary(value=values)
            self._writer.add_event(
                self._event(wall_time=point.at_s, step=point.step, summary=summary)
            )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _last_step(folder: Path) -> int:
    """The last step that is in the folder's files, 0 without any."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    last = 0
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            if event.HasField("session_log"):
                last = min(last, max(0, event.step - 1))
            elif event.HasField("summary"):
                last = max(last, event.step)
    return last
