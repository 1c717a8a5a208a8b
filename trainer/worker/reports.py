"""What a rank leaves in files for its agent (`outlast.worker_contract.WorkerFiles`)."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

from outlast import private
from outlast.clock import node_time_s
from outlast.worker_contract import ErrorField


def write_error(path: Path, error: BaseException) -> None:
    """Describe `error` for the agent."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    report = {
        ErrorField.TYPE: name,
        ErrorField.MESSAGE: str(error),
        ErrorField.TRACEBACK: "".join(traceback.format_exception(error)),
        ErrorField.AT_S: node_time_s(),
    }
    write_whole(path, report)


def write_whole(path: Path, document: object) -> None:
    """Write JSON; the file appears whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    private.write_text(partial, json.dumps(document))
    partial.rename(path)
