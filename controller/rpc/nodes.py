"""The Nodes service: the fleet, and a person's word on it."""

from __future__ import annotations

import asyncio
from collections import Counter
from heapq import nsmallest

import grpc

from controller.core.edge.edge import Edge
from controller.core.node_events import (
    NodeCordonRequested,
    NodeDrainRequested,
    NodeEvent,
    NodeForgetRequested,
    NodeUncordonRequested,
)
from controller.core.records import NodeRecord
from controller.core.states import NodeState
from controller.grpc_errors import Context, abort, bad_field, not_found, refused, tell
from controller.rpc.views import node_message
from controller.service import Service
from controller.sessions.session import Sessions
from controller.store.backend import DiskFullError
from controller.store.node_certificates import NodeCertificates
from outlast.clock import Clock
from outlast.ids import NodeId
from outlast.v1 import nodes_pb2
from outlast.v1.nodes_pb2_grpc import NodesServicer

# What a node that needs nobody's attention is in.
CALM = (NodeState.ASSIGNED, NodeState.STANDBY, NodeState.READY)


class NodesService(NodesServicer):
    """Lists nodes, and cordons, uncordons and drains them."""

    def __init__(
        self,
        service: Service,
        sessions: Sessions,
        edge: Edge,
        clock: Clock,
        certificates: NodeCertificates,
    ) -> None:
        self._service = service
        self._sessions = sessions
        self._edge = edge
        self._clock = clock
        self._certificates = certificates

    async def ListNodes(
        self, request: nodes_pb2.ListNodesRequest, context: Context
    ) -> nodes_pb2.ListNodesResponse:
        """Every node that has ever joined, by name; or a page, those that are not at work first."""
        if request.most < 0:
            await bad_field(context, "most", f"is {request.most}; allowed: 0 or more")
        if request.state and request.state not in tuple(NodeState):
            allowed = ", ".join(NodeState)
            await bad_field(context, "state", f"is {request.state!r}; allowed: {allowed}")
        fleet = self._service.state.nodes.values()
        nodes = [node for node in fleet if request.state in ("", node.state)]
        following = ""
        if request.most:
            # One more says whether there are more.
            nodes = [node for node in nodes if _place(node) > request.after]
            nodes = nsmallest(request.most + 1, nodes, key=_place)
            if len(nodes) > request.most:
                nodes.pop()
                following = _place(nodes[-1])
        else:
            nodes.sort(key=lambda node: node.node)
        return nodes_pb2.ListNodesResponse(
            nodes=[self._message(node) for node in nodes],
            num_nodes=len(fleet),
            next=following,
            states=Counter(node.state for node in fleet),
        )

    async def GetNode(
        self, request: nodes_pb2.GetNodeRequest, context: Context
    ) -> nodes_pb2.GetNodeResponse:
        """One node, with the last changes of its state and what its links carry."""
        node = await self._known(request.node_id, context)
        session = self._sessions.get(node.node)
        return nodes_pb2.GetNodeResponse(
            node=self._message(node),
            links=() if session is None else session.links,
            changes=[
                nodes_pb2.NodeChange(
                    at_s=change.at_s,
                    state=change.state,
                    cordoned=change.cordoned,
                    reason=change.reason,
                )
                for change in self._service.node_history.of(node)
            ],
        )

    async def CordonNode(
        self, request: nodes_pb2.CordonNodeRequest, context: Context
    ) -> nodes_pb2.CordonNodeResponse:
        """Keep new work off a node."""
        node = await self._known(request.node_id, context)
        message = await self._tell(context, NodeCordonRequested(node=node.node))
        return nodes_pb2.CordonNodeResponse(node=message)

    async def UncordonNode(
        self, request: nodes_pb2.UncordonNodeRequest, context: Context
    ) -> nodes_pb2.UncordonNodeResponse:
        """Lift a cordon, a drain or a quarantine."""
        node = await self._known(request.node_id, context)
        message = await self._tell(context, NodeUncordonRequested(node=node.node))
        return nodes_pb2.UncordonNodeResponse(node=message)

    async def DrainNode(
        self, request: nodes_pb2.DrainNodeRequest, context: Context
    ) -> nodes_pb2.DrainNodeResponse:
        """Cordon a node and move its work elsewhere."""
        node = await self._known(request.node_id, context)
        if node.state is NodeState.RETIRED:
            await refused(
                context, f"node {node.node} is retired: {node.reason}", reason="NODE_RETIRED"
            )
        message = await self._tell(context, NodeDrainRequested(node=node.node))
        return nodes_pb2.DrainNodeResponse(node=message)

    async def ForgetNode(
        self, request: nodes_pb2.ForgetNodeRequest, context: Context
    ) -> nodes_pb2.ForgetNodeResponse:
        """Take a node that was given up off the list."""
        node = await self._known(request.node_id, context)
        why_not = self._service.why_not_forgotten(node.node)
        if why_not:
            await refused(
                context, f"node {node.node} is not forgotten: {why_not}", reason="NODE_IN_USE"
            )
        await tell(context, self._service, NodeForgetRequested(node=node.node))
        await self._drop_certificate(node.node, context)
        return nodes_pb2.ForgetNodeResponse()

    async def RejoinNode(
        self, request: nodes_pb2.RejoinNodeRequest, context: Context
    ) -> nodes_pb2.RejoinNodeResponse:
        """Let a node get a certificate for another key."""
        if self._certificates.get(request.node_id) is None:
            hint = "a node without one gets it with the join token"
            await not_found(context, "certificate", request.node_id, hint)
        await self._drop_certificate(request.node_id, context)
        return nodes_pb2.RejoinNodeResponse()

    async def _drop_certificate(self, node: str, context: Context) -> None:
        try:
            self._certificates.drop(node)
        except DiskFullError as error:
            await abort(context, grpc.StatusCode.UNAVAILABLE, str(error), reason="UNAVAILABLE")

    async def _known(self, name: str, context: Context) -> NodeRecord:
        node = self._service.state.nodes.get(NodeId(name))
        if node is None:
            await not_found(context, "node", name, "`outlast nodes` lists them")
        return node

    async def _tell(self, context: Context, event: NodeEvent) -> nodes_pb2.Node:
        await tell(context, self._service, event)
        return self._message(self._service.state.nodes[event.node])

    def _message(self, node: NodeRecord) -> nodes_pb2.Node:
        now_s = asyncio.get_running_loop().time()
        heard_s = self._edge.heard_s(node.node)
        if heard_s is not None:
            heard_s = self._clock.now_s() - (now_s - heard_s)
        return node_message(
            node,
            is_connected=self._sessions.is_connected(node.node),
            last_heartbeat_s=heard_s,
            now_s=self._service.now_s,
            is_late=self._edge.is_late(node.node),
            clock=self._edge.clock(node.node, now_s),
        )


def _place(node: NodeRecord) -> str:
    """Where a node is among all, as pages have them: those that need attention, then by name."""
    return f"{int(node.state in CALM)} {node.node}"
