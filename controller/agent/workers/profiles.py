"""Where a worker is for some seconds: py-spy samples it from outside while it goes on."""

from __future__ import annotations

import asyncio
import gzip

from controller.agent.workers import py_spy
from controller.agent.workers.worker import Worker
from outlast.v1 import agents_pb2

# py-spy reads the program's symbols before the first sample, beside other work for a while.
START_S = 20.0
# Gzipped: a minute of 250 samples a second of a dozen threads is a fraction of it.
MAX_BYTES = 8 * 2**20


async def record(
    worker: Worker, recording: agents_pb2.Recording, *, native: bool
) -> agents_pb2.RankProfile:
    """A profile of a worker that goes on meanwhile; at its end what there is until then."""
    tool = py_spy.find()
    if tool is None:
        return _none(py_spy.MISSING)
    try:
        file = py_spy.memory_file("profile")
    except OSError as error:
        return _none(f"no file in memory for it: {error}")
    with file:
        # Threads that wait are in it: where a rank waits for others is what one looks for.
        command = [tool, "record", "--pid", str(worker.pid), "--idle", "--format", "speedscope"]
        command += ["--rate", str(recording.rate), "--native" if native else "--nonblocking"]
        command += ["--duration", str(recording.seconds)]
        command += ["--output", f"/proc/self/fd/{file.fileno()}"]
        try:
            async with asyncio.timeout(recording.seconds + START_S):
                code, _, reason = await py_spy.run(*command, pass_fds=(file.fileno(),))
        except TimeoutError:
            return _none(f"py-spy took over {START_S:g} s more than {recording.seconds} s")
        if code:
            return _none(f"py-spy record: {reason}")
        file.seek(0)
        text = file.read()
    if not text:
        return _none("py-spy has written nothing")
    found = await asyncio.to_thread(gzip.compress, text, 6)
    if len(found) > MAX_BYTES:
        return _none(f"it has {len(found):,} bytes gzipped; allowed: {MAX_BYTES:,}; lower --rate")
    return agents_pb2.RankProfile(speedscope=found)


def _none(why: str) -> agents_pb2.RankProfile:
    return agents_pb2.RankProfile(problem=why)
