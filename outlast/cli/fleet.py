"""`outlast nodes`: the fleet, and taking nodes out and back."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import typer

from outlast.cli import output
from outlast.cli.connect import controller_of
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import Controller, Json, NodeName, StateDir
from outlast.cli.usage import Commands, ListingGroup
from outlast.durations import duration

if TYPE_CHECKING:
    from outlast.v1.nodes_pb2 import Node

# Nothing runs there, and nobody expects to hear of them.
_GONE = ("RETIRED", "RELEASED")
_NODE_HEADER = ("NODE", "STATE", "SINCE", "SILENT", "CLOCK", "WORKERS", "TOPOLOGY", "JOB", "REASON")


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = Commands(
        cls=ListingGroup,
        no_args_is_help=False,
        help="The fleet, and taking nodes out and back. `outlast nodes` is `outlast nodes list`.",
    )
    group.command("list")(list_nodes)
    group.command("cordon")(cordon)
    group.command("uncordon")(uncordon)
    group.command("drain")(drain)
    group.command("forget")(forget)
    group.command("rejoin")(rejoin)
    app.add_typer(group, name="nodes")


def list_nodes(
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """List every node and what it is used for."""
    with controller_of(controller, state_dir) as client:
        found = sorted(client.nodes(), key=_natural_order)
    if json:
        output.print_json({"nodes": [output.facts(node) for node in found]})
        return
    now_s = time.time()
    output.print_table(_NODE_HEADER, [_node_row(node, now_s) for node in found], empty="no nodes")


def cordon(
    node: NodeName,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Keep new work off a node; running work continues."""
    with controller_of(controller, state_dir) as client:
        _print_node(client.cordon(node), json, "new work stays off it, running work continues")


def uncordon(
    node: NodeName,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Lift a cordon, or end a node's quarantine: a person's word wins."""
    with controller_of(controller, state_dir) as client:
        _print_node(client.uncordon(node), json, "it may be used")


def drain(
    node: NodeName,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Cordon a node and move its work elsewhere."""
    with controller_of(controller, state_dir) as client:
        _print_node(client.drain(node), json, "its work moves elsewhere")


def forget(
    node: NodeName,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Remove a retired or released node and its history from the list.

    If it comes back, it joins as a new node.
    """
    with controller_of(controller, state_dir) as client:
        client.forget_node(node)
    print(f"{node} is forgotten")


def rejoin(
    node: NodeName,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Let a node get a certificate for another key with the join token.

    For a machine that has lost the key of the certificate it got; or whose key was stolen: the
    old one is refused once another has enrolled.
    """
    with controller_of(controller, state_dir) as client:
        client.rejoin_node(node)
    print(f"{node} may get another certificate")


def _natural_order(node: Node) -> list[tuple[int, str]]:
    """node-2 before node-10."""
    parts = re.split(r"(\d+)", node.node_id)
    return [(int(part) if part.isdigit() else -1, part) for part in parts]


def _node_row(node: Node, now_s: float) -> tuple[str, ...]:
    is_silent = node.late or not node.connected
    silent = "yes" if is_silent else ""
    if is_silent and node.last_heartbeat_s:
        silent = duration(now_s - node.last_heartbeat_s)
    return (
        node.node_id,
        node.state + (", cordoned" if node.cordoned else ""),
        duration(now_s - node.state_since_s),
        silent,
        clock_words(node.clock_ahead_s, node.clock_error_s)
        if node.HasField("clock_ahead_s")
        else "",
        str(node.workers),
        node.capacity.topology,
        node.job_id or "-",
        "" if node.reason == f"runs {node.job_id}" else node.reason,
    )


def clock_words(ahead_s: float, error_s: float) -> str:
    """A clock against the controller's, in a unit that shows its error: `+1.24 ±0.08 ms`."""
    unit, scale = "s", 1.0
    for smaller, by in (("ms", 1e3), ("µs", 1e6)):
        if error_s * scale < 0.05:
            unit, scale = smaller, by
    return f"{ahead_s * scale:+.2f} ±{error_s * scale:.2f} {unit}"


def _print_node(node: Node, json: bool, what: str) -> None:
    if json:
        output.print_json({"node": output.facts(node)})
        return
    cordoned = ", cordoned" if node.cordoned else ""
    if node.state in _GONE:
        what = f"it is gone ({node.reason or 'given up'})"
        if node.cordoned:
            what += "; if it comes back, it stays cordoned until `outlast nodes uncordon`"
        what += f". `outlast nodes forget {node.node_id}` takes it off the list"
    output.print_wrapped(f"{node.node_id} is {node.state}{cordoned}: {what}")
