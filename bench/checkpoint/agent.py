"""The uploader as a node's agent runs it, in a process of its own (`agent.memory.uploads`).

`python -m bench.checkpoint.agent PLAN` follows one plan until its input ends, and prints
a line for every checkpoint that exists. `Agent` is the other end.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpoint.core.manifest import CommitRecord
from checkpoint.stage.damage import Damage
from checkpoint.upload.commit import Committed
from controller.agent.memory.uploads import UploadPlan, Uploads

_DEADLINE_S = 300.0
_JOB = "job-1"


class Agent:
    """Uploads what ranks seal below `memory_dir` to `url`; a context manager."""

    def __init__(self, url: str, memory_dir: Path, *, bytes_per_s: float | None = None) -> None:
        plan = UploadPlan(
            url=url,
            job_id=_JOB,
            memory_dir=memory_dir,
            local_ranks=(0,),
            saver_ranks=(0,),
            is_coordinator=True,
            timeout_s=_DEADLINE_S,
            interval_steps=1,
            keep=2,
            keep_every_steps=None,
            keep_best=0,
            memory_bytes=2**27,
            bytes_per_s=bytes_per_s,
            owner="the benchmark",
        )
        document = json.dumps({**asdict(plan), "memory_dir": str(memory_dir)})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.checkpoint.agent", document],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._changed = threading.Condition()
        self._committed_at_s: dict[int, float] = {}
        self._trouble = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=_DEADLINE_S)
        self._reader.join(timeout=_DEADLINE_S)
        self._process.stdout.close()

    def has_committed(self, step: int) -> bool:
        """Whether the checkpoint of `step` exists in storage.

        Raises:
            RuntimeError: uploads fail.
        """
        if self._trouble:
            raise RuntimeError(self._trouble)
        return step in self._committed_at_s

    def committed_at_s(self, step: int) -> float:
        """When the agent heard that the checkpoint of `step` exists; waits for it."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.has_committed(step), _DEADLINE_S):
                raise TimeoutError(f"step {step} was not committed in {_DEADLINE_S:.0f} s")
        return self._committed_at_s[step]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            news = json.loads(line)
            with self._changed:
                if "trouble" in news:
                    self._trouble = news["trouble"]
                else:
                    self._committed_at_s[news["step"]] = news["at_s"]
                self._changed.notify_all()


class _Printer:
    """Hears what becomes of uploads."""

    def upload_committed(self, job_id: str, committed: Committed) -> None:
        _say({"step": committed.step, "at_s": time.time()})

    def upload_found(self, job_id: str, found: CommitRecord) -> None:
        """Nothing was there before."""

    def upload_trouble(self, job_id: str, step: int, stage: str, detail: str) -> None:
        _say({"trouble": f"step {step}, {stage}: {detail}"})

    def memory_damaged(self, job_id: str, damage: Damage) -> None:
        _say({"trouble": damage.what})


def _say(news: dict[str, Any]) -> None:
    print(json.dumps(news), flush=True)


async def _follow(plan: UploadPlan) -> None:
    uploads = Uploads(_Printer())
    await uploads.follow(plan)
    await asyncio.to_thread(sys.stdin.read)
    await uploads.stop()


def main() -> None:
    document = json.loads(sys.argv[1])
    ranks = {name: tuple(document[name]) for name in ("local_ranks", "saver_ranks")}
    plan = UploadPlan(**{**document, **ranks, "memory_dir": Path(document["memory_dir"])})
    asyncio.run(_follow(plan))


if __name__ == "__main__":
    main()
