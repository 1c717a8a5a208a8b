"""What a rank begins an attempt with: a checkpoint's values, or initial ones.

What does not belong here: where a checkpoint is and which one is taken
(`checkpoint.restore.resume`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from checkpoint.restore.fetching import await_fetched
from checkpoint.restore.loaders import InPlace
from checkpoint.restore.peers import Peers
from checkpoint.restore.restore import Node, SealedStep
from checkpoint.restore.resume import OtherJob, Sources, restore
from checkpoint.restore.storage_prefetch import StoragePrefetch
from checkpoint.stage.payload import NamedTensor
from outlast.chosen import must_start_at
from outlast.worker_contract import EnvironmentField
from trainer.parallel.mesh import Mesh
from trainer.worker.assignment import Assignment
from trainer.worker.reports import write_whole
from trainer.worker.state import TrainState, environment


def _check_same_data(state: TrainState) -> None:
    """Raise ValueError on every rank alike unless all read the same text."""
    mesh = state.mesh
    number = int(state.data.digest[:15], 16)
    row = torch.tensor([number, -number], dtype=torch.int64, device=mesh.device)
    smallest, minus_largest = mesh.fold(row, lambda rows: rows.amin(dim=0)).tolist()
    if smallest != -minus_largest:
        raise ValueError(
            f"{state.data.name} holds other text or tokens on different nodes; "
            f"here its digest is {state.data.digest}"
        )


def restore_state(
    assignment: Assignment,
    state: TrainState,
    tensors: Sequence[NamedTensor],
    prefetch: StoragePrefetch,
    join: Callable[[], Peers],
    check: Callable[[], None],
    present: SealedStep | None,
) -> int:
    """The step that the rank goes on from, 0 at the beginning; its state is as after that.

    `check` raises where what ranks agreed upon may have come to nothing. `present` is the step
    that the tensors hold already, if they do.
    """
    mesh: Mesh = state.mesh
    _check_same_data(state)
    await_fetched(assignment.memory_dir, assignment.spec.recovery.first_step_timeout_s)
    sources = Sources(
        memory_dir=assignment.memory_dir,
        own=prefetch,
        committed_step=assignment.committed_step,
        skipped=assignment.skipped,
        chosen=assignment.chosen,
        only_step=must_start_at(assignment.chosen, assignment.attempt),
        other=_other_job(assignment, tensors),
        join=join,
        node=Node(folder=assignment.memory_dir.parent, ranks=frozenset(assignment.node_ranks)),
        # What is left of a start's time is for loading.
        patience_s=assignment.spec.recovery.first_step_timeout_s / 2,
    )
    restored = restore(InPlace(tensors, present=present), mesh, sources)
    # Behind all that is agreed upon, before states of other steps are dropped for it.
    check()
    at = mesh.at
    who = f"rank {mesh.rank} (pp {at.pp}, dp {at.dp}, tp {at.tp}), attempt {assignment.attempt}"
    if restored is None:
        state.initialise()
        print(f"{who}: training from the beginning", flush=True)
        changes: list[str] = []
    else:
        print(f"{who}: training on after step {restored.step}, from {restored.source}", flush=True)
        changes = state.apply_extra(restored.extra)
    state.data_parallel.refresh()
    if mesh.rank == 0:
        for line in state.data.left_out:
            print(f"data: {line}", flush=True)
    _note(assignment, state, changes, () if restored is None else restored.skipped)
    return 0 if restored is None else restored.step


def _note(
    assignment: Assignment,
    state: TrainState,
    changes: Sequence[str],
    skipped: Sequence[tuple[int, str]],
) -> None:
    """Equal bits are promised for an equal environment only: what it is goes to the controller,
    and so do checkpoints that should have been loaded."""
    document = {
        EnvironmentField.ENVIRONMENT: environment(state.mesh.device),
        EnvironmentField.CHANGES: changes,
        EnvironmentField.LEFT_OUT: state.data.left_out,
        EnvironmentField.NUM_SAMPLES: state.data.num_samples,
        EnvironmentField.SKIPPED: skipped,
    }
    write_whole(assignment.environment_path, document)


def _other_job(assignment: Assignment, tensors: Sequence[NamedTensor]) -> OtherJob | None:
    """The checkpoints of another job to begin with: a person's choice, else the spec's."""
    spec, choice = assignment.spec, assignment.chosen[-1:]
    for each in choice:
        if each.url:
            step = None if each.url_step < 0 else each.url_step
            return OtherJob(url=each.url, step=step, last_step=spec.steps, is_chosen=True)
    if spec.checkpoint.load is None:
        return None
    weights = InPlace(tensors, weights_only=True) if spec.checkpoint.load_weights_only else None
    return OtherJob(
        url=spec.checkpoint.load,
        step=spec.checkpoint.load_step,
        last_step=spec.steps,
        weights=weights,
    )
