"""The job spec: what a user writes, checked completely before anything starts.

The fields and what each may be by itself. What only makes sense together is in
`outlast.rules`, and how a document becomes a spec in `outlast.spec.parse`. The spec is
converted once at the boundary; no `core/` package ever sees it.
"""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field, field_validator

from outlast.detectors import DetectorsSpec
from outlast.layout import Layout, folds
from outlast.model import ModelSpec
from outlast.queueing import QueueSpec
from outlast.recovery import RecoverySpec
from outlast.section import Section
from outlast.spec.data import DataSpec
from outlast.spec.workload import ResourcesSpec, WorkloadSpec


class ZeroSpec(Section):
    """What data-parallel replicas share instead of holding it each (ZeRO, arXiv 1910.02054)."""

    level: Literal[0, 1, 2, 3] = Field(
        0, description="0: nothing. 1: optimizer state. 2: and gradients. 3: and parameters."
    )
    reshard_after: Literal["micro_batch", "step"] | None = Field(
        None,
        description="Level 3: when gathered parameters are dropped. step where pp > 1, "
        "micro_batch elsewhere, unless given.",
    )
    reduce_after: Literal["micro_batch", "step"] | None = Field(
        None,
        description="Levels 2 and 3: when gradients are reduced; after each micro-batch saves "
        "memory and costs communication. step where pp > 1, micro_batch elsewhere, unless given.",
    )
    communication: Literal["fp32", "bf16"] | None = Field(
        None, description="Type of gradients on the wire; that of their sums unless given."
    )


RecomputeMode = Literal["none", "selective", "full", "offload"]


class ParallelSpec(Section):
    """How the model is split over ranks; the world size is tp x cp x pp x dp."""

    tp: int = Field(1, ge=1, description="Tensor-parallel degree.")
    pp: int = Field(1, ge=1, description="Pipeline stages.")
    dp: int = Field(
        1,
        ge=1,
        description="Data-parallel replicas. May be left out where resources.nodes and "
        "resources.workers_per_node say how many ranks there are.",
    )
    ep: int = Field(
        1,
        ge=1,
        description="Replicas that divide the experts of a layer among them, instead of each "
        "having all; divides dp x cp and model.moe.num_experts.",
    )
    cp: int = Field(
        1,
        ge=1,
        description="Context-parallel degree: ranks of a replica that each have a part of every "
        "sequence.",
    )
    context: Literal["all_to_all", "ring"] = Field(
        "all_to_all",
        description="How attention gets at other parts of a sequence, with cp > 1. all_to_all: "
        "ranks swap, and each has some heads of the whole sequence; tp x cp divides model.heads. "
        "ring: keys and values go from rank to rank beside the products; any number of heads.",
    )
    sequence_parallel: bool = Field(
        True, description="Shard norms, dropout and residuals over the sequence when tp > 1."
    )
    tp_chunks: int = Field(
        4,
        ge=1,
        description="Pieces that a tensor-parallel message is cut into, so that it hides behind "
        "the matrix product beside it; 1 turns overlap off.",
    )
    virtual_stages: int = Field(
        1,
        ge=1,
        description="Model chunks per rank; more than 1 needs schedule interleaved, or 2 zb-v.",
    )
    layer_split: tuple[int, ...] | None = Field(
        None,
        description="Layers of every chunk of the pipeline, in model order; even unless given.",
    )
    zero: ZeroSpec = ZeroSpec()
    recompute: RecomputeMode | tuple[RecomputeMode, ...] = Field(
        "none",
        description="What the backward pass computes again instead of keeping it. selective: the "
        "attention core. full: the whole block. offload: the same, and what it keeps, the block's "
        "input, is in host memory meanwhile. A list says it for every layer.",
    )
    micro_batch: int = Field(1, ge=1, description="Sequences in one micro-batch.")
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = Field(
        "1f1b",
        description="Pipeline schedule. zb-h1: 1F1B that computes gradients of weights when "
        "nobody waits for the stage. zb-v: the same with two chunks per rank, the second ones in "
        "the opposite order, so that the model begins and ends on the first rank.",
    )
    extra_warmup: int = Field(
        0,
        ge=0,
        description="Schedule 1f1b: micro-batches that stages go further ahead of the last one. "
        "Hides a slow link between stages, and keeps the activations of as many more.",
    )

    @field_validator("zero", mode="before")
    @classmethod
    def _only_its_level(cls, zero: object) -> object:
        """Version 0.1.0 had a number here; its jobs go on, and its controllers give it."""
        return {"level": zero} if type(zero) is int and zero in range(4) else zero

    @property
    def folds(self) -> bool:
        """Whether every second chunk goes through the stages from the last to the first."""
        return folds(self.schedule)

    @property
    def loss_stage(self) -> int:
        """The stage on which the model ends."""
        return 0 if self.folds else self.pp - 1


class ScheduleSpec(Section):
    """Learning rate over steps: linear warm-up, then down to a floor."""

    name: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="wsd: warm-up, stable, then a linear decay over the last decay_steps."
    )
    warmup_steps: int = Field(10, ge=0, description="Steps of linear warm-up.")
    decay_steps: int | None = Field(
        None, ge=1, description="wsd only: length of the decay; a tenth of all steps unless given."
    )
    min_ratio: float = Field(0.1, ge=0, le=1, description="Floor as a share of the peak.")


class LambSpec(Section):
    """LAMB's trust ratio phi(norm of the weights) / norm of the update (arXiv 1904.00962)."""

    phi_min: float = Field(0.0, ge=0, description="phi clips the norm of a tensor from below,")
    phi_max: float | None = Field(10.0, gt=0, description="and from above; null: not at all.")


class OptimizerSpec(Section):
    """AdamW or LAMB; norms and biases are not decayed."""

    name: Literal["adamw", "lamb"] = "adamw"
    lr: float = Field(1e-3, gt=0, description="Peak learning rate.")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    clip_grad_norm: float | None = Field(
        1.0, gt=0, description="Largest global gradient norm; null turns clipping off."
    )
    lamb: LambSpec = LambSpec()
    schedule: ScheduleSpec = ScheduleSpec()


class LossScaleSpec(Section):
    """fp16 only: the factor that keeps small gradients from vanishing."""

    initial: float = Field(2.0**16, gt=0, description="Scale of the first step.")
    growth_interval: int = Field(
        2000, ge=1, description="Steps without an overflow after which the scale doubles."
    )
    minimum: float = Field(1.0, gt=0, description="An overflow at this scale is an error.")


class CheckpointSpec(Section):
    """Two stages: host memory often, storage now and then."""

    url: str | None = Field(
        None,
        description="fsspec URL of the checkpoint root (file, s3, gs, hdfs, webhdfs) or a path; "
        "the controller's own folder unless given.",
    )
    load: str | None = Field(
        None,
        description="Begin with a checkpoint of another job: its checkpoint root, which is its "
        "checkpoint.url with its job id. Layouts may differ, models may not.",
    )
    load_step: int | None = Field(
        None, ge=1, description="Which of them; the newest that can be loaded unless given."
    )
    load_weights_only: bool = Field(
        False,
        description="Take its weights alone: training begins at step 0 with a fresh optimizer, on "
        "any data. A checkpoint of `outlast import hf` has nothing else.",
    )
    memory_interval_steps: int = Field(
        1, ge=1, description="Copy the state to host memory every so many steps."
    )
    storage_interval_steps: int = Field(
        50, ge=1, description="Upload a copy to the URL every so many steps, and after the last."
    )
    keep: int = Field(
        3,
        ge=2,
        description="Newest committed checkpoints kept in storage; also as many of the newest that "
        "are storage_interval_steps apart, as a graceful stop makes one of its own.",
    )
    keep_every_steps: int | None = Field(
        None, ge=1, description="Keep those whose step is a multiple of this, too."
    )
    keep_best: int = Field(
        0,
        ge=0,
        description="Keep so many with the smallest held-out loss, too; takes "
        "eval.interval_steps. A checkpoint's loss is that of the evaluation before it.",
    )
    upload_timeout_s: float = Field(
        600.0, gt=0, description="An upload that takes longer is given up and reported."
    )
    last_timeout_s: float = Field(
        600.0,
        gt=0,
        description="A job has succeeded when the checkpoint of its last step "
        "is stored. Uploads of it that fail are tried again for so long; then the job is paused, "
        "and its state kept in host memory for `outlast ckpt push`.",
    )
    upload_bytes_per_s: float | None = Field(
        None, ge=2**20, description="A node's uploads take no more than this on average."
    )
    replicas: Literal[0, 1] = Field(
        0,
        description="Copies of the newest host memory on another node, so that losing a node "
        "does not mean going back to storage. State that data parallelism keeps on another node "
        "anyway is not copied.",
    )
    replica_bytes_per_s: float | None = Field(
        None, ge=2**20, description="A node's copies take no more of the network on average."
    )
    upload_memory_bytes: int = Field(
        2**27,
        ge=2**23,
        description="Memory for the parts of uploads on their way, on each node.",
    )


class EvalSpec(Section):
    """Evaluation on the held-out split."""

    interval_steps: int | None = Field(50, ge=1, description="Every so many steps; null: never.")
    batches: int = Field(2, ge=1, description="Global batches in one evaluation.")


class JobSpec(Section):
    """A training job. Only the name has no default."""

    apiVersion: Literal["outlast/v1"] = "outlast/v1"
    kind: Literal["TrainingJob"] = "TrainingJob"
    name: str = Field(description="Lower-case letters, digits and '-', at most 53 characters.")
    steps: int = Field(100, ge=1, description="Optimizer steps to train.")
    seed: int = Field(1234, ge=0, lt=2**63, description="Seed of weights and data order.")
    precision: Literal["fp32", "fp64", "bf16", "fp16"] = Field(
        "fp32",
        description="Type of weights and maths. bf16 and fp16 keep an fp32 copy of the weights.",
    )
    loss_scale: LossScaleSpec = LossScaleSpec()
    determinism: Literal["bitwise", "fast"] = Field(
        "bitwise", description="bitwise: the same numeric environment gives the same bits."
    )
    garbage_interval_steps: int = Field(
        50,
        ge=1,
        description="Python's garbage collector is off while steps run; all ranks run it after "
        "each step that is a multiple of this.",
    )
    model: ModelSpec = ModelSpec()
    parallel: ParallelSpec = ParallelSpec()
    data: DataSpec = DataSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    resources: ResourcesSpec = ResourcesSpec()
    recovery: RecoverySpec = RecoverySpec()
    detectors: DetectorsSpec = DetectorsSpec()
    eval: EvalSpec = EvalSpec()
    workload: WorkloadSpec = WorkloadSpec()
    queue: QueueSpec = QueueSpec()

    @property
    def is_script(self) -> bool:
        """Whether it runs a command of the user's, and not the trainer."""
        return self.workload.command is not None

    @property
    def layout(self) -> Layout:
        parallel = self.parallel
        return Layout(
            tp=parallel.tp,
            pp=parallel.pp,
            # Ranks that divide sequences hold the same parameters, as replicas do.
            dp=parallel.dp * parallel.cp,
            ep=parallel.ep,
            cp=parallel.cp,
        )

    @property
    def workers_per_node(self) -> int:
        """Ranks on one node, as given or by default."""
        if self.resources.workers_per_node is not None:
            return self.resources.workers_per_node
        world = self.layout.world_size
        return max(n for n in range(1, 9) if world % n == 0)

    @property
    def num_nodes(self) -> int:
        return self.layout.world_size // self.workers_per_node

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that one replica runs per step."""
        return self.data.global_batch // (self.parallel.dp * self.parallel.micro_batch)

    @property
    def documents_reach_every_stage(self) -> bool:
        """Whether every stage of a pipeline needs to know where documents begin.

        Attention and RoPE are of every layer; learned positions are the first stage's.
        """
        turns = self.data.resets_positions and self.model.positions == "rope"
        return self.data.keeps_documents_apart or turns

    def canonical_json(self) -> str:
        """The whole spec with every default filled in; equal specs give equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)
