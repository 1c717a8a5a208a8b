"""The line between an agent and the controller, as gRPC over TCP behaves.

Within a session messages arrive in order or the session breaks; whoever notices
first may be either side, and one side may never notice: then only silence tells.
What is lost with a session is sent again in the next one, so the other side
meets duplicates, and commands may overtake each other across sessions.

What does not belong here: what messages mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from controller.sim.timeline import Timeline
from outlast.ids import NodeId

# A cut that heals sooner is bridged by TCP's retransmissions; a longer one ends the session.
TCP_PATIENCE_S = 20.0


@dataclass(slots=True)
class Weather:
    """How bad the network is just now; bursts change it for a while."""

    delay_s: tuple[float, float] = (0.001, 0.05)
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0

    def clear(self) -> None:
        self.delay_s = (0.001, 0.05)
        self.loss = self.duplication = self.reordering = 0.0


@dataclass(slots=True, eq=False)
class Session:
    """One connection. Each end has its own idea of whether it is open."""

    node: NodeId
    number: int
    open_at_agent: bool = True
    open_at_controller: bool = False
    broken: bool = False
    # The interval between heartbeats that its agent was given.
    period_s: float = 0.0
    # What a cut holds up: (to the controller?, deliver, arguments).
    held: list[tuple[bool, Callable[..., None], tuple[object, ...]]] = field(default_factory=list)
    # When the newest message in each direction arrives; the next may not come earlier.
    up_s: float = 0.0
    down_s: float = 0.0


class Network:
    """Carries messages of sessions; knows who is cut off."""

    def __init__(self, timeline: Timeline, random: Random) -> None:
        self.weather = Weather()
        self._timeline = timeline
        self._random = random
        self._cuts: dict[NodeId, int] = {}
        self._sessions: dict[NodeId, Session] = {}
        self._num_sessions = 0
        # Told when the session of a node ends at the agent's or the controller's side.
        self.on_agent_lost: Callable[[Session], None] = lambda _: None
        self.on_controller_lost: Callable[[Session], None] = lambda _: None

    def is_cut(self, node: NodeId) -> bool:
        return self._cuts.get(node, 0) > 0

    def cut(self, node: NodeId) -> None:
        """Nothing goes through to or from the node; the session breaks if this lasts."""
        self._cuts[node] = self._cuts.get(node, 0) + 1
        session = self._sessions.get(node)
        if session is not None and not session.broken:
            self._timeline.after(TCP_PATIENCE_S, self._patience_ends, session)

    def heal(self, node: NodeId) -> None:
        """One cut ends; held messages arrive if the session outlived it."""
        self._cuts[node] = max(0, self._cuts.get(node, 0) - 1)
        session = self._sessions.get(node)
        if self.is_cut(node) or session is None or session.broken:
            return
        held, session.held = session.held, []
        for up, deliver, args in held:
            self.send(session, deliver, *args, up=up)

    def open(self, node: NodeId) -> Session:
        """A new connection of the node's agent."""
        self._num_sessions += 1
        session = Session(node=node, number=self._num_sessions)
        self._sessions[node] = session
        return session

    def session(self, node: NodeId) -> Session | None:
        return self._sessions.get(node)

    def drop(self, session: Session, *, at_agent: bool, at_controller: bool) -> None:
        """End a session; either side may learn of it now, later or never."""
        session.broken = True
        session.held.clear()
        if at_agent and session.open_at_agent:
            session.open_at_agent = False
            self.on_agent_lost(session)
        if at_controller and session.open_at_controller:
            session.open_at_controller = False
            self.on_controller_lost(session)

    def send(self, session: Session, deliver: Callable[..., None], *args: object, up: bool) -> None:
        """Bring a message over, unless the session does not live that long."""
        if session.broken:
            return
        if self.is_cut(session.node):
            session.held.append((up, deliver, args))
            return
        weather, random = self.weather, self._random
        if weather.loss and random.random() < weather.loss:
            self._lose(session)
            return
        at_s = self._timeline.now_s + random.uniform(*weather.delay_s)
        if not up and weather.reordering and random.random() < weather.reordering:
            # A command overtaken by later ones, as when a session replaces another. Events
            # keep their order: the agent resends them in order in every session.
            at_s += random.uniform(0.0, 2.0)
        elif up:
            at_s = session.up_s = max(at_s, session.up_s)
        else:
            at_s = session.down_s = max(at_s, session.down_s)
        self._timeline.at(at_s, self._arrive, session, up, deliver, args)
        if weather.duplication and random.random() < weather.duplication:
            self._timeline.at(
                at_s + random.uniform(0.0, 30.0), self._arrive, session, up, deliver, args
            )

    def _arrive(
        self, session: Session, up: bool, deliver: Callable[..., None], args: tuple[object, ...]
    ) -> None:
        if session.broken:
            return
        if self.is_cut(session.node):
            session.held.append((up, deliver, args))
        else:
            deliver(*args)

    def _lose(self, session: Session) -> None:
        """A message that TCP could not bring over takes the session with it."""
        session.broken = True
        session.held.clear()
        random = self._random
        self._timeline.after(random.uniform(0.0, TCP_PATIENCE_S), self._agent_notices, session)
        if random.random() < 0.7:
            self._timeline.after(
                random.uniform(0.0, TCP_PATIENCE_S), self._controller_notices, session
            )

    def _patience_ends(self, session: Session) -> None:
        if not session.broken and self.is_cut(session.node):
            self._lose(session)

    def _agent_notices(self, session: Session) -> None:
        self.drop(session, at_agent=True, at_controller=False)

    def _controller_notices(self, session: Session) -> None:
        self.drop(session, at_agent=False, at_controller=True)
