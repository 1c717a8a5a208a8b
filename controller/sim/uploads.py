"""Checkpoints of simulated attempts on their way to the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.sim.attempt import Training

if TYPE_CHECKING:
    from controller.sim.world import World


def upload(world: World, training: Training, step: int) -> None:
    """Upload a step that every rank has sealed; it is committed a while later.

    A script that says nothing of its steps has saved it by itself.
    """
    if training.job.is_silent:
        if training.job.store_up:
            training.job.saved_step = step
            # Cut off from the controller it trains on, and the next attempt resumes from this.
            training.note_trained(step)
        return
    agents = [world.nodes[node].agent for node in training.nodes]
    delay_s = world.pace.upload_s(training.job.upload_s)
    world.timeline.after(delay_s, _commit, world, training, step, agents)


def _commit(world: World, training: Training, step: int, agents: list[object]) -> None:
    job = training.job
    nodes = [world.nodes[node] for node in training.nodes]
    present = [node.agent for node in nodes]
    coordinator = nodes[0].agent
    all_there = all(
        now is not None and now is then for now, then in zip(present, agents, strict=True)
    )
    if all_there and job.store_up:
        # Created only if absent: a zombie changes nothing that is committed.
        job.commits.setdefault(step, training.attempt)
        training.note_trained(step)
        world.trace("commit", job.job_id, f"step {step} by a{training.attempt}")
        assert coordinator is not None
        coordinator.report_commit(job.job_id, training.attempt, step, job.commits[step])
    elif coordinator is not None and coordinator is agents[0]:
        why = "No space left on device" if not job.store_up else "parts are missing"
        coordinator.report_trouble(job.job_id, training.attempt, step, why)
        # Agents insist on the last step, as long as the job waits for it.
        if step == job.last_step and not job.store_up:
            waited_s = world.now_s - training.reaches_s(step)
            if waited_s < job.plan.last_checkpoint_s:
                world.timeline.after(30.0, _commit, world, training, step, agents)
