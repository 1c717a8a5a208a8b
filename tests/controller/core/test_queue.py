"""Whose turn it is when several jobs wait for nodes, and who makes room for whom."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from controller.core import events as ev
from controller.core.node_events import NodeClosed, NodeDisconnected, WorkerExited
from controller.core.records import JobRecord, Size
from controller.core.settings import Settings
from controller.core.states import TERMINAL, JobState
from outlast.failures import FailureClass
from outlast.ids import JobId, NodeId
from tests.controller.core.driver import Driver, make_plan

RESERVE_S = 600.0


class Fleet(Driver):
    """Nodes that jobs of several owners want."""

    def __init__(self, nodes: int, **settings: object) -> None:
        super().__init__(settings=Settings(reserve_after_s=RESERVE_S, **settings))  # type: ignore[arg-type]
        for number in range(nodes):
            self.join(f"n{number}")
        self.wait(20.0)

    def ask(self, name: str, nodes: int, owner: str = "", **plan: object) -> JobRecord:
        """Submit a job; as it is then."""
        self.send(self._request(name, nodes, owner, plan))
        self.settle()
        return self.job(JobId(name))

    def _request(
        self, name: str, nodes: int, owner: str, plan: dict[str, object]
    ) -> ev.JobSubmitted:
        return ev.JobSubmitted(
            job_id=JobId(name),
            name=name,
            request_id=name,
            spec_json="{}",
            checkpoint_url="memory://",
            plan=make_plan(**{"nodes": nodes, "preflight": False, **plan}),
            owner=owner,
        )

    def ask_only(self, name: str, nodes: int, **plan: object) -> JobRecord:
        """Submit a job, and let nothing else happen."""
        self.send(self._request(name, nodes, "", plan))
        return self.job(JobId(name))

    def stopped(self, name: str, step: int) -> None:
        """The workers of a job have stopped, after this step."""
        for command_id in [each for each in self.machine.state.commands if f"{name}/" in each]:
            self.answer(command_id, completed_step=step)

    def committed(self, name: str, step: int) -> None:
        self.send(ev.CheckpointCommitted(job_id=JobId(name), step=step, is_behind=False))

    def settle(self) -> None:
        """Every order is carried out, and every job that starts takes a step."""
        for _ in range(20):
            if not self.machine.state.commands:
                break
            self.answer_all("/")
        for job in self.machine.state.live_jobs():
            if job.state is JobState.STARTING:
                self.step(job.job_id, 1)

    def step(self, name: str, step: int) -> None:
        self.send(
            ev.JobAdvanced(
                job_id=JobId(name),
                attempt=self.job(JobId(name)).attempt,
                completed_step=step,
                resumed_step=0,
                at_s=self.now_s,
            )
        )

    def end(self, name: str) -> None:
        self.send(ev.JobCancelRequested(job_id=JobId(name)))
        self.settle()

    def states(self) -> dict[str, str]:
        return {job.job_id: job.state for job in self.machine.state.jobs.values()}

    def running(self) -> list[str]:  # type: ignore[override]  # of all jobs here
        return [name for name, state in self.states().items() if state == "RUNNING"]

    def held(self) -> Counter[str]:
        """Nodes in use, by owner."""
        held = Counter[str]()
        for job in self.machine.state.live_jobs():
            held[job.owner] += self.machine.state.index.num_held.get(job.job_id, 0)
        return held


def test_a_job_takes_all_its_nodes_or_none() -> None:
    fleet = Fleet(3)
    assert fleet.ask("two", 2).state is JobState.RUNNING
    assert fleet.ask("also-two", 2).state is JobState.QUEUED
    assert fleet.held()[""] == 2
    fleet.end("two")
    assert fleet.running() == ["also-two"]


def test_those_of_a_higher_priority_come_first_and_then_who_came_first() -> None:
    fleet = Fleet(1)
    fleet.ask("first", 1)
    for name, priority in (("low", -5), ("plain", 0), ("later", 0), ("high", 5)):
        fleet.ask(name, 1, priority=priority)
        fleet.now_s += 1.0
    for name in ("first", "high", "plain", "later", "low"):
        assert fleet.running() == [name]
        fleet.end(name)


def test_of_equals_the_one_whose_owner_has_fewer_nodes_comes_first() -> None:
    fleet = Fleet(3)
    for number in range(3):
        fleet.ask(f"alice-{number}", 1, "alice")
    for number in range(2):
        fleet.ask(f"alice-later-{number}", 1, "alice")
        fleet.now_s += 1.0
    fleet.ask("kim-0", 1, "kim")
    fleet.now_s += 1.0
    fleet.ask("kim-1", 1, "kim")
    fleet.end("alice-0")
    assert fleet.held() == {"alice": 2, "kim": 1}
    fleet.end("alice-1")
    # One each: who came first.
    assert fleet.held() == {"alice": 2, "kim": 1}
    fleet.end("alice-2")
    assert fleet.held() == {"alice": 2, "kim": 1}
    fleet.end("alice-later-0")
    assert fleet.held() == {"alice": 1, "kim": 2}


def test_small_jobs_go_ahead_of_a_large_one_until_it_has_waited_for_long() -> None:
    fleet = Fleet(4)
    fleet.ask("running", 2)
    large = fleet.ask("large", 4)
    assert "waiting for 2 more node(s)" in large.reason
    assert fleet.ask("small", 1).state is JobState.RUNNING
    fleet.now_s += RESERVE_S
    late = fleet.ask("late", 1)
    assert late.state is JobState.QUEUED
    assert late.reason.startswith("waiting behind large, for which free nodes are kept")
    fleet.end("running")
    assert fleet.states()["late"] == "QUEUED"
    fleet.end("small")
    assert fleet.running() == ["large"]
    fleet.end("large")
    assert fleet.running() == ["late"]


def test_nothing_is_kept_for_a_job_that_the_fleet_is_too_small_for() -> None:
    fleet = Fleet(2)
    fleet.ask("huge", 5)
    fleet.now_s += RESERVE_S
    assert fleet.ask("small", 1).state is JobState.RUNNING


def test_an_owner_has_no_more_nodes_than_his_quota() -> None:
    fleet = Fleet(6, quotas=(("alice", 3),), quota=2)
    assert fleet.ask("a", 2, "alice").state is JobState.RUNNING
    over = fleet.ask("b", 2, "alice")
    assert over.state is JobState.QUEUED
    assert over.held_back
    assert not over.wants_nodes
    assert over.reason == (
        "waiting: alice may have 3 node(s) at a time and has 2; this job needs 2"
    )
    # Others do not wait for it, whatever its priority.
    assert fleet.ask("c", 1, "alice").state is JobState.RUNNING
    assert fleet.ask("d", 2, "kim").state is JobState.RUNNING
    assert fleet.ask("e", 1, "kim").state is JobState.QUEUED
    # Where nobody is asked who he is, there are no quotas.
    assert fleet.ask("f", 1).state is JobState.RUNNING
    fleet.end("a")
    assert "b" in fleet.running()
    assert not fleet.job(JobId("b")).held_back


def test_no_node_is_kept_for_the_time_that_a_job_waited_for_its_owners_quota() -> None:
    """Else the backlog of an owner comes before the jobs of those who have fewer nodes."""
    fleet = Fleet(3, quotas=(("alice", 2),))
    fleet.ask("sam", 1, "sam")
    for number in range(4):
        fleet.ask(f"alice-{number}", 1, "alice")
    fleet.now_s += RESERVE_S
    fleet.ask("kim-0", 1, "kim")
    assert [job.job_id for job in fleet.machine.queue()] == ["kim-0", "alice-2", "alice-3"]
    fleet.end("alice-0")
    assert fleet.held() == {"sam": 1, "alice": 1, "kim": 1}
    # Now she may have one more, and her next job has waited for a node.
    fleet.now_s += RESERVE_S
    fleet.ask("max", 1, "max")
    fleet.end("sam")
    assert fleet.states()["alice-2"] == "RUNNING"
    assert [job.job_id for job in fleet.machine.queue()] == ["max", "alice-3"]


def test_a_job_that_may_preempt_has_lower_ones_stop_after_a_step() -> None:
    fleet = Fleet(4)
    fleet.ask("old", 2)
    fleet.now_s += 100.0
    fleet.ask("new", 2)
    fleet.step("new", 7)
    fleet.now_s += 100.0
    urgent = fleet.ask_only("urgent", 2, priority=10, preempts=True)
    assert urgent.reason.startswith("waiting for new to make room: waiting for 2 more node(s)")
    new = fleet.job(JobId("new"))
    assert new.state is JobState.SUSPENDING
    assert new.reason == ("stopping workers: its nodes go to urgent, whose priority is 10, not 0")
    # Its last step is in host memory, and not in storage yet.
    fleet.stopped("new", 8)
    assert fleet.states()["urgent"] == "QUEUED"
    fleet.committed("new", 8)
    fleet.settle()
    assert sorted(fleet.running()) == ["old", "urgent"]
    new = fleet.job(JobId("new"))
    assert (new.state, new.num_yields) == (JobState.QUEUED, 1)
    assert new.retry_left == new.plan.retry_budget
    fleet.end("urgent")
    new = fleet.job(JobId("new"))
    assert (new.state, new.attempt, new.committed_step) == (JobState.RUNNING, 2, 8)


def test_a_job_that_does_not_get_its_last_step_stored_makes_room_all_the_same() -> None:
    fleet = Fleet(1)
    fleet.ask("low", 1)
    fleet.step("low", 7)
    fleet.ask_only("urgent", 1, priority=1, preempts=True)
    fleet.stopped("low", 8)
    assert fleet.states()["urgent"] == "QUEUED"
    fleet.wait(61.0)
    fleet.settle()
    assert fleet.running() == ["urgent"]


def test_nobody_stops_in_vain() -> None:
    fleet = Fleet(4)
    fleet.ask("low", 1)
    fleet.ask("equal", 3, priority=5)
    assert fleet.ask("urgent", 2, priority=5, preempts=True).state is JobState.QUEUED
    assert sorted(fleet.running()) == ["equal", "low"]


def test_as_few_stop_as_have_the_nodes() -> None:
    fleet = Fleet(4)
    fleet.ask("small", 1, priority=-2)
    fleet.ask("large", 3, priority=-1)
    fleet.ask_only("urgent", 3, preempts=True)
    # The small one would come first, and is not needed.
    assert fleet.states() == {"small": "RUNNING", "large": "SUSPENDING", "urgent": "QUEUED"}


def test_a_person_who_cancels_or_pauses_a_job_that_makes_room_is_obeyed() -> None:
    for request, state in (
        (ev.JobCancelRequested(job_id=JobId("low")), "CANCELLED"),
        (ev.JobPauseRequested(job_id=JobId("low")), "PAUSED"),
    ):
        fleet = Fleet(1)
        fleet.ask("low", 1)
        fleet.ask_only("urgent", 1, priority=1, preempts=True)
        fleet.send(request)
        fleet.settle()
        assert fleet.states() == {"low": state, "urgent": "RUNNING"}
        assert fleet.job(JobId("low")).yields_to is None


def test_nodes_that_are_given_up_for_a_job_are_kept_for_it() -> None:
    fleet = Fleet(4)
    fleet.ask("a", 2)
    fleet.ask("b", 2)
    fleet.ask_only("urgent", 4, priority=10, preempts=True)
    fleet.now_s += 1.0
    fleet.stopped("a/a1", 1)
    fleet.committed("a", 1)
    # Of the same priority, and it would find two nodes free.
    assert fleet.ask_only("small", 2, priority=10).state is JobState.QUEUED
    fleet.stopped("b/a1", 1)
    fleet.committed("b", 1)
    fleet.settle()
    assert fleet.running() == ["urgent"]


def test_nobody_stops_for_nodes_that_are_kept_for_a_job_ahead() -> None:
    fleet = Fleet(8)
    for number in range(8):
        fleet.ask(f"low-{number}", 1)
    fleet.ask("big", 8, priority=10)
    fleet.ask("urgent", 1, priority=5, preempts=True)
    assert len(fleet.running()) == 8
    fleet.end("low-0")
    assert len(fleet.running()) == 7


def test_two_urgent_jobs_do_not_take_each_others_room() -> None:
    fleet = Fleet(4)
    fleet.ask("one", 2)
    fleet.ask("two", 1)
    fleet.ask_only("first", 3, priority=1, preempts=True)
    fleet.ask_only("second", 2, priority=1, preempts=True)
    assert fleet.states()["two"] == "RUNNING"
    fleet.stopped("one/a1", 1)
    fleet.committed("one", 1)
    fleet.settle()
    assert "first" in fleet.running()


def test_one_owners_many_small_jobs_do_not_starve_anothers_large_one() -> None:
    """Each time one of them ends its owner has fewer nodes than the other has."""
    fleet = Fleet(4)
    fleet.ask("alice-long", 1, "alice")
    for number in range(3):
        fleet.ask(f"kim-{number}", 1, "kim")
    fleet.ask("alice-large", 3, "alice")
    fleet.now_s += RESERVE_S
    for number in range(3, 9):
        fleet.ask(f"kim-{number}", 1, "kim")
    for number in range(3):
        fleet.end(f"kim-{number}")
    assert "alice-large" in fleet.running()


def test_a_closed_node_is_neither_kept_nor_taken_from_a_job() -> None:
    fleet = Fleet(4)
    fleet.ask("low", 1)
    node = fleet.job(JobId("low")).nodes[0]
    assert node is not None
    fleet.send(NodeClosed(node=node, reason="cordoned by kubectl"))
    assert fleet.ask("urgent", 4, priority=1, preempts=True).state is JobState.QUEUED
    assert fleet.running() == ["low"]
    fleet.now_s += RESERVE_S
    # Four nodes will never be there for it.
    assert fleet.ask("small", 3).state is JobState.RUNNING


def test_a_moments_silence_gives_nobody_what_is_kept_for_another() -> None:
    fleet = Fleet(4)
    fleet.ask("running", 1)
    fleet.ask("large", 4)
    fleet.now_s += RESERVE_S
    assert fleet.ask("small", 1).state is JobState.QUEUED
    fleet.send(NodeDisconnected(node=NodeId("n3")))
    fleet.settle()
    assert fleet.states()["small"] == "QUEUED"


def test_a_job_that_lacks_a_node_has_others_make_room_and_makes_room_itself() -> None:
    fleet = Fleet(4)
    fleet.ask("urgent", 2, priority=1, preempts=True)
    fleet.ask("low", 2)
    lost = fleet.job(JobId("urgent")).nodes[1]
    assert lost is not None
    fleet.lose(lost)
    fleet.settle()
    fleet.committed("low", 1)
    fleet.settle()
    states = fleet.states()
    assert (states["urgent"], states["low"]) == ("RUNNING", "QUEUED")
    # It waits for a node in turn, and has the one that is left of its own.
    more = Fleet(3)
    more.ask("low", 3)
    more.lose("n1")
    more.settle()
    assert more.states()["low"] == "PROVISIONING"
    assert more.ask("urgent", 2, priority=1, preempts=True).state is JobState.RUNNING
    assert more.states()["low"] == "QUEUED"


def test_a_job_that_is_done_when_it_makes_room_is_done() -> None:
    fleet = Fleet(1)
    fleet.ask("low", 1, total_steps=10)
    fleet.ask_only("urgent", 1, priority=1, preempts=True)
    low = fleet.job(JobId("low"))
    fleet.send(
        WorkerExited(
            job_id=low.job_id,
            attempt=low.attempt,
            node=NodeId("n0"),
            rank=0,
            code=0,
            fault_class=FailureClass.NONE,
            fingerprint="",
            detail="",
            traceback="",
            completed_step=10,
            at_s=fleet.now_s,
        )
    )
    fleet.stopped("low/a1", 10)
    fleet.committed("low", 10)
    fleet.settle()
    assert fleet.states() == {"low": "SUCCEEDED", "urgent": "RUNNING"}


def test_a_job_that_could_grow_leaves_what_is_kept_for_others_and_is_not_his() -> None:
    sizes = tuple(Size(dp=dp, nodes=dp, spec_json=f'{{"dp": {dp}}}') for dp in (2, 1))
    for settings, waits, grows in (
        ({}, False, True),
        ({}, True, False),
        ({"quotas": (("alice", 1),)}, False, False),
    ):
        fleet = Fleet(2, **settings)
        small = {"sizes": sizes, "grow_after_s": 0.0}
        fleet.ask("other", 1)
        fleet.ask("elastic", 1, "alice", **small)
        if waits:
            fleet.ask("large", 2)
            fleet.now_s += RESERVE_S
        fleet.end("other")
        fleet.committed("elastic", 1)
        state = fleet.states()["elastic"]
        assert state == ("SUSPENDING" if grows else "RUNNING"), (settings, waits)


_JOBS = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.sampled_from(["alice", "kim", "sam"]),
        st.integers(-1, 1),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@given(jobs=_JOBS, order=st.randoms(use_true_random=False))
def test_whatever_comes_every_job_has_its_turn(
    jobs: list[tuple[int, str, int, bool]], order: object
) -> None:
    """Of one that fits the fleet and its owner's quota; quotas hold throughout."""
    fleet = Fleet(4, quotas=(("kim", 2),))
    for number, (nodes, owner, priority, preempts) in enumerate(jobs):
        name = f"{owner}-{number}"
        fleet.ask(name, nodes, owner, priority=priority, preempts=preempts)
        fleet.now_s += 60.0
        _check(fleet)
    had_turn: set[str] = set()
    for _ in range(4 * len(jobs)):
        running = fleet.running()
        had_turn |= set(running)
        if not running:
            break
        # Any of them ends.
        fleet.end(order.choice(running))  # type: ignore[attr-defined]
        fleet.now_s += 60.0
        _check(fleet)
    for number, (nodes, owner, _, _) in enumerate(jobs):
        fits = not (owner == "kim" and nodes > 2)
        name = f"{owner}-{number}"
        assert (name in had_turn) is fits, name
        assert (fleet.job(JobId(name)).state in TERMINAL) is fits


def _check(fleet: Fleet) -> None:
    assert fleet.held()["kim"] <= 2
    assert sum(fleet.held().values()) <= 4
    for job in fleet.machine.state.live_jobs():
        # All of its nodes, or none.
        assert fleet.machine.state.index.num_held.get(job.job_id, 0) in (0, job.plan.nodes)
