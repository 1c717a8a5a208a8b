"""One step by oneself before the first real one, where receives would hold up the device.

On NCCL a receive that is posted ahead is a kernel that spins on the device until its
message comes, and that message may wait for work of this very rank. Whatever waits for
the whole device in between waits for ever: the measurements by which torch.compile
chooses kernels, the loading of what it made, an allocator that gives memory back. All
of these belong to first times. So a rank of a pipeline does everything once, alone,
before the first receive is posted: a whole step, because the memory of fewer
micro-batches would still have to grow, and an evaluation, which is compiled without
gradients. It costs the time of one step at each start.

Nothing remains of it: random states are put back, the next step clears the gradients,
and dropout masks do not depend on what ran before.
"""

from __future__ import annotations

import torch

from trainer.parallel.mesh import Mesh
from trainer.worker.state import TrainState


def is_needed(mesh: Mesh) -> bool:
    """Whether receives are posted ahead as kernels. On CPUs gloo waits in its own thread."""
    return mesh.device.type == "cuda" and mesh.layout.pp > 1


def warm_up(state: TrainState, step: int) -> None:
    """Do the work of `step`, and of an evaluation, without messages between stages.

    All ranks do: those of tensor and data-parallel groups do it together.
    """
    devices = [state.mesh.device] if state.mesh.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if state.spec.eval.interval_steps is not None:
            # Before the step, whose end drops the weights that ZeRO has gathered for both.
            # Sequences of all sets are of one length.
            first = next(iter(state.data.evaluations.values()))
            state.eval_engine.warm_up(first.micro_batches(1))
        micro_batches = state.data.train.micro_batches(step)
        state.data_parallel.prefetch()
        state.data_parallel.begin_step(len(micro_batches))
        state.train_engine.warm_up(micro_batches)
        state.data_parallel.finish_gradients()
    state.mesh.timeline.finish()
