"""This node's half of a test with another node, as a child process with a deadline."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from diagnostics import children
from diagnostics.checks import pair
from diagnostics.checks.base import Context, Emit
from diagnostics.checks.reporting import reporting
from diagnostics.core.finding import CheckVerdict, Finding, Measurement
from diagnostics.core.links import TEST
from diagnostics.core.orders import Order, OrderKind, listening
from diagnostics.core.verdicts import unjudged, unmeasured

# The partner's silence must show as a time-out of its own before the child is killed.
_MARGIN_S = 2.0


def run_pair(order: Order, context: Context) -> Iterator[str]:
    """The lines of a pair test: where a host listens, then what was found."""
    started_s = time.monotonic()
    pairing = pair.Pairing(
        address=order.address, peer=order.peer, timeout_s=max(order.deadline_s - _MARGIN_S, 1.0)
    )
    if order.kind is OrderKind.GUEST:
        yield from _findings(
            order,
            context,
            lambda emit: pair.guest(context, pairing, order.peer_address, order.peer_port, emit),
        )
        return
    try:
        listener = _listen(order.address)
    except OSError as error:
        reason = f"cannot listen on {order.address}: {error}"
        yield _trouble(order, context, CheckVerdict.ERROR, reason, started_s)
        return
    with listener:
        yield listening(listener.getsockname()[1])
        yield from _findings(
            order, context, lambda emit: pair.host(context, pairing, listener, emit)
        )


def _findings(order: Order, context: Context, check: Callable[[Emit], None]) -> Iterator[str]:
    started_s = time.monotonic()
    try:
        for line in children.lines_of_child(reporting(check), order.deadline_s):
            ((kind, text),) = json.loads(line).items()
            if kind == "measurement":
                yield unjudged(Measurement.from_json(text), context.node).to_json()
            else:
                yield _trouble(order, context, CheckVerdict.ERROR, text, started_s)
    except children.DeadlineError as error:
        broken = pair.broken(order.peer, str(error), started_s)
        yield unjudged(broken, context.node).to_json()
    except (children.ChildDiedError, ValueError) as error:
        yield _trouble(order, context, CheckVerdict.ERROR, str(error), started_s)


def _trouble(
    order: Order, context: Context, verdict: CheckVerdict, reason: str, started_s: float
) -> str:
    finding: Finding = unmeasured(
        TEST, context.node, verdict, reason, duration_s=time.monotonic() - started_s
    )
    return replace(finding, peer=order.peer).to_json()


def _listen(address: str) -> socket.socket:
    family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server((target[0], 0), family=family)
