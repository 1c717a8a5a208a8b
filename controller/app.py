"""One controller's life, from lock to last byte: `run`.

On SIGINT or SIGTERM it leaves in order: it stops listening to its own machine
first, so that the end of its local nodes is no fault, then ends them. When it is
killed instead, agents and training go on, and the next `run` finds them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

from controller import join_token, state_dir
from controller.addresses import name_of, reachable
from controller.assembly import Controller, assemble
from controller.http_port import HttpPort
from controller.local.cluster import LocalCluster
from controller.notify import metrics as notifications
from controller.notify.notifier import Notifier
from controller.options import Options
from controller.otlp import metrics as otlp_metrics
from controller.otlp.export import start as start_export
from controller.otlp.incidents import export_incidents
from controller.otlp.queue import ExportQueue
from controller.retention import Keeper
from controller.takeover import StoppedError, begin_alone
from outlast.errors import FatalError, OutlastError
from outlast.ids import NodeId
from outlast.log_format import say_last
from outlast.startup import stop_signals

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_BROKEN, EXIT_REFUSED = 0, 1, 2
# Read at a time of standard input, which is expected to be empty.
_STDIN_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A controller that listens."""

    grpc: str
    http: str
    term: int
    adopted: int = 0
    """Local nodes that an earlier controller left running."""
    dead: tuple[NodeId, ...] = ()
    """Local nodes whose agents have ended, and which stay away."""


OnReady = Callable[[Running], None]


def main(options: Options, on_ready: OnReady | None = None) -> int:
    """Run a controller until a signal ends it; its exit code. Errors are one clear line."""
    try:
        asyncio.run(run(options, on_ready))
    except OutlastError as error:
        say_last("outlast", error)
        is_refusal = isinstance(error, FatalError) and not isinstance(error, LoopEndedError)
        return EXIT_REFUSED if is_refusal else EXIT_BROKEN
    return EXIT_OK


class LoopEndedError(FatalError):
    """The controller's loop failed; the process must end."""


async def run(
    options: Options, on_ready: OnReady | None = None, *, stop: asyncio.Event | None = None
) -> None:
    """One controller's life; returns after SIGINT, SIGTERM or `stop`.

    Raises:
        FatalError: it could not start (state directory, second controller, port),
            or its loop failed: then local nodes are left running, as after a crash.
    """
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop.set)
    if options.stop_with_stdin:
        _stop_with_stdin(loop, stop)
    async with AsyncExitStack() as stack:
        port = HttpPort(options)
        stack.callback(port.close)
        if options.wait:
            port.begin_standby()
        try:
            lock, lease = await begin_alone(options, stop, stack, port.waits_for)
        except StoppedError:
            return
        port.takes_over()
        if options.token_file is not None:
            join_token.make_if_missing(options.token_file)
            join_token.read(options.token_file)
        otlp = start_export("outlast-controller", options.otlp_endpoint, os.environ, {})
        if otlp is not None:
            stack.callback(otlp.close)
        http = port.bind()
        controller = assemble(options, lease)
        grpc = controller.bind(options.grpc)
        if options.node_ca is not None:
            node_grpc = controller.bind_nodes(options.node_address)
            logger.info("nodes with a certificate connect to: %s", node_grpc)
        if options.insecure:
            logger.warning(
                "--insecure-i-know: anyone who can reach %s, or read what travels there, may be "
                "able to submit jobs, and so run programs on every node, as the user of the agents",
                grpc,
            )
        running = Running(grpc=grpc, http=name_of(http), term=controller.journal.term)
        lock.say(grpc=running.grpc, http=running.http)
        await port.end_standby()
        await _Life(options, running, controller, stop, otlp).live(http, on_ready)


class _Life:
    """A controller from its first call to its last."""

    def __init__(
        self,
        options: Options,
        running: Running,
        controller: Controller,
        stop: asyncio.Event,
        otlp: ExportQueue | None,
    ) -> None:
        self._options = options
        self._running = running
        self._controller = controller
        self._service = controller.parts.service
        self._stop = stop
        self._own = controller.server.bind_own(options.state_dir)
        self._cluster = controller.make_cluster(options, reachable(running.grpc), self._own)
        self._file = options.state_dir / "controller.json"
        self._otlp = otlp
        # The controller ends when one of these does.
        self._vital: list[asyncio.Task[None]] = []
        self._others: list[asyncio.Task[None]] = []

    async def live(self, http: socket.socket, on_ready: OnReady | None) -> None:
        """Work until `stop`, then leave in order.

        Raises:
            LoopEndedError: a part without which it cannot go on has ended.
        """
        if self._cluster is not None:
            self._controller.effects.use(self._cluster)
        stopped = self._begin(http)
        try:
            await self._start(on_ready)
            await asyncio.wait([*self._vital, stopped], return_when=asyncio.FIRST_COMPLETED)
            _raise_failure(self._vital)
            await self._leave()
        finally:
            await self._close()

    def _begin(self, http: socket.socket) -> asyncio.Task[None]:
        keeper = Keeper(self._service, self._options.retention, self._controller.parts.code)
        notifier = Notifier(self._service, self._options.notify, self._options.state_dir)
        self._controller.metrics.add(partial(notifications.collect, notifier))
        self._controller.metrics.add(partial(otlp_metrics.collect, self._otlp))
        stopped = asyncio.create_task(_until(self._stop), name="stop")
        self._vital = [
            asyncio.create_task(self._service.run(), name="service"),
            asyncio.create_task(self._controller.web.serve(http, self._own), name="web"),
        ]
        self._others = [
            asyncio.create_task(keeper.run(), name="retention"),
            asyncio.create_task(notifier.run(), name="notifications"),
            asyncio.create_task(self._controller.parts.trends.run(), name="trends"),
            stopped,
        ]
        self._others.append(asyncio.create_task(self._controller.lease.keep(), name="lease"))
        self._vital.append(self._others[-1])
        if self._otlp is not None:
            incidents = export_incidents(self._service, self._otlp)
            self._others.append(asyncio.create_task(incidents, name="incidents for OTLP"))
        if self._cluster is not None:
            self._others.append(asyncio.create_task(self._cluster.failed(), name="cluster"))
            self._vital.append(self._others[-1])
        return stopped

    async def _start(self, on_ready: OnReady | None) -> None:
        running, cluster = self._running, self._cluster
        if cluster is not None and self._options.fresh:
            await cluster.forget_everything()
        await self._controller.server.start()
        listens = {
            "pid": os.getpid(),
            "grpc": reachable(running.grpc),
            "http": reachable(running.http),
        }
        if self._controller.parts.tls is not None:
            listens["ca"] = self._controller.parts.tls.ca
        state_dir.write_whole(self._file, listens)
        if cluster is not None:
            await cluster.start()
        if isinstance(cluster, LocalCluster):
            running = replace(running, adopted=cluster.adopted, dead=cluster.dead)
        logger.info(
            "controller listens: grpc=%s http=%s term=%d", running.grpc, running.http, running.term
        )
        if on_ready is not None:
            on_ready(running)

    async def _leave(self) -> None:
        logger.info("controller stops")
        self._service.is_leaving = True
        if self._cluster is not None:
            # Agents say goodbye, and that is journalled: no fault of theirs at the next start.
            await self._cluster.stop_all()
        if isinstance(self._cluster, LocalCluster) and self._options.stop_with_stdin:
            self._cluster.forget_memory()
        self._service.stop()
        self._file.unlink(missing_ok=True)

    async def _close(self) -> None:
        self._service.stop()
        self._controller.web.stop()
        await self._controller.parts.runs.close()
        await self._controller.server.stop()
        if self._cluster is not None:
            await self._cluster.leave()
        for task in self._others:
            task.cancel()
        await asyncio.gather(*self._vital, *self._others, return_exceptions=True)


def _stop_with_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Set `stop` when standard input ends.

    Raises:
        FatalError: it is no pipe and no terminal.
    """
    number = sys.stdin.fileno()

    def look() -> None:
        if not os.read(number, _STDIN_BYTES):
            loop.remove_reader(number)
            stop.set()

    try:
        loop.add_reader(number, look)
    # A file, or /dev/null.
    except PermissionError as error:
        raise FatalError(
            "--stop-with-stdin takes a pipe or a terminal as standard input"
        ) from error


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()


def _raise_failure(parts: Sequence[asyncio.Task[None]]) -> None:
    for task in parts:
        if task.done() and not task.cancelled() and task.exception() is not None:
            error = task.exception()
            if not isinstance(error, OutlastError):
                logger.error("the controller's %s failed", task.get_name(), exc_info=error)
            raise LoopEndedError(
                f"stopped, because its {task.get_name()} failed: {error}; agents and training "
                "go on; start it again with the same --state-dir"
            ) from error
        if task.done():
            raise LoopEndedError(f"stopped, because its {task.get_name()} ended")
