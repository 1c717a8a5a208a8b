"""The job spec: what a user writes, checked completely before anything starts.

pydantic parses the fields; `outlast.rules` then looks at what only makes sense
together (layers over stages, heads over tp, batch over dp x micro-batch). All
problems are reported at once, each with its field path and what is allowed.

The spec is converted once at the boundary; no `core/` package ever sees it.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outlast.detectors import DetectorsSpec
from outlast.flops import ModelShape
from outlast.layout import Layout
from outlast.problems import FieldProblem, SpecError, nearest_multiples
from outlast.recovery import RecoverySpec
from outlast.rules.check import check

__all__ = ["FieldProblem", "JobSpec", "SpecError", "parse_spec"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSpec(_Section):
    """A decoder-only transformer; the defaults are a GPT with learned positions."""

    layers: int = Field(4, ge=1, description="Transformer blocks.")
    hidden: int = Field(128, ge=1, description="Width of the residual stream.")
    heads: int = Field(4, ge=1, description="Attention heads; must divide hidden.")
    kv_heads: int | None = Field(
        None, ge=1, description="Heads of keys and values (grouped queries); heads unless given."
    )
    ffn_hidden: int | None = Field(
        None, ge=1, description="Width of the MLP; 4 x hidden unless given."
    )
    vocab_size: int = Field(256, ge=2, description="Token ids; 256 for the byte tokenizer.")
    seq_len: int = Field(128, ge=1, description="Tokens in one sequence.")
    tied_embeddings: bool = Field(
        True, description="Use the token embedding as the output projection too."
    )
    block: Literal["serial", "parallel"] = Field(
        "serial",
        description="serial: the MLP reads what attention wrote. parallel: both read the same "
        "norm, y = x + attention(norm(x)) + mlp(norm(x)), and share one input projection and one "
        "reduction.",
    )
    block_norms: Literal[1, 2] = Field(
        1, description="Norms of a parallel block: one shared, or one for each branch."
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="Kind of every norm.")
    norm_bias: bool = Field(True, description="A LayerNorm adds a bias too.")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon of every norm.")
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = Field(
        "gelu_tanh", description="Non-linearity of the MLP; swiglu has a gate beside its input."
    )
    positions: Literal["learned", "rope", "none"] = Field(
        "learned", description="How a token knows its place."
    )
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary frequencies.")
    rope_fraction: float = Field(
        1.0, gt=0, le=1, description="Share of a head's width that is rotated."
    )
    rope_pairs: Literal["halves", "neighbours"] = Field(
        "halves",
        description="Which values of a head turn together: i and i + width/2 (Llama), "
        "or 2i and 2i + 1 (GPT-J).",
    )
    window: int | None = Field(
        None, ge=1, description="Local layers attend to this many tokens, the own one included."
    )
    window_pattern: tuple[Literal["local", "global"], ...] = Field(
        ("local",),
        min_length=1,
        description="Kinds of layers with a window, repeated over the depth. Global layers attend "
        "to everything before them.",
    )
    attention_bias: bool = Field(True, description="Biases in the attention's linear layers.")
    mlp_bias: bool = Field(True, description="Biases in the MLP's linear layers.")
    head_bias: bool = Field(False, description="A bias in an output projection of its own.")
    logit_scale: float = Field(1.0, gt=0, description="Factor on the logits.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Of embeddings and of what a branch adds to the residual."
    )
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Of attention weights.")
    init_std: float = Field(0.02, gt=0, description="Standard deviation of initial weights.")

    @property
    def mlp_hidden(self) -> int:
        return self.ffn_hidden if self.ffn_hidden is not None else 4 * self.hidden

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads if self.kv_heads is not None else self.heads

    @property
    def shape(self) -> ModelShape:
        """What decides the model's FLOPs."""
        kinds: tuple[int | None, ...] = (None,)
        if self.window is not None:
            kinds = tuple(self.window if k == "local" else None for k in self.window_pattern)
        return ModelShape(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.num_kv_heads,
            mlp_hidden=self.mlp_hidden,
            vocab_size=self.vocab_size,
            seq_len=self.seq_len,
            gated=self.activation == "swiglu",
            windows=kinds,
        )


class ZeroSpec(_Section):
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


RecomputeMode = Literal["none", "selective", "full"]


class ParallelSpec(_Section):
    """How the model is split over ranks; the world size is tp x pp x dp."""

    tp: int = Field(1, ge=1, description="Tensor-parallel degree.")
    pp: int = Field(1, ge=1, description="Pipeline stages.")
    dp: int = Field(
        1,
        ge=1,
        description="Data-parallel replicas. May be left out where resources.nodes and "
        "resources.workers_per_node say how many ranks there are.",
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
        1, ge=1, description="Model chunks per rank; more than 1 needs schedule interleaved."
    )
    layer_split: tuple[int, ...] | None = Field(
        None,
        description="Layers of every chunk of the pipeline, in model order; even unless given.",
    )
    zero: ZeroSpec = ZeroSpec()
    recompute: RecomputeMode | tuple[RecomputeMode, ...] = Field(
        "none",
        description="What the backward pass computes again instead of keeping it. selective: the "
        "attention core. full: the whole block. A list says it for every layer.",
    )
    micro_batch: int = Field(1, ge=1, description="Sequences in one micro-batch.")
    schedule: Literal["gpipe", "1f1b", "interleaved"] = Field(
        "1f1b", description="Pipeline schedule."
    )
    extra_warmup: int = Field(
        0,
        ge=0,
        description="Schedule 1f1b: micro-batches that stages go further ahead of the last one. "
        "Hides a slow link between stages, and keeps the activations of as many more.",
    )


class DataSpec(_Section):
    """Where tokens come from."""

    source: str = Field(
        "python-stdlib",
        min_length=1,
        description="'python-stdlib' (the text that ships with Python), a text file, "
        "or a folder whose text files are read.",
    )
    tokenizer: Literal["byte"] = Field("byte", description="Bytes are the tokens.")
    global_batch: int = Field(8, ge=1, description="Sequences in one optimizer step.")
    validation_fraction: float = Field(
        0.02, gt=0, lt=0.5, description="Share of the tokens held out for evaluation."
    )
    max_bytes: int = Field(
        16 * 2**20, ge=2**12, description="Read at most this many bytes of the source."
    )


class ScheduleSpec(_Section):
    """Learning rate over steps: linear warm-up, then down to a floor."""

    name: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="wsd: warm-up, stable, then a linear decay over the last decay_steps."
    )
    warmup_steps: int = Field(10, ge=0, description="Steps of linear warm-up.")
    decay_steps: int | None = Field(
        None, ge=1, description="wsd only: length of the decay; a tenth of all steps unless given."
    )
    min_ratio: float = Field(0.1, ge=0, le=1, description="Floor as a share of the peak.")


class LambSpec(_Section):
    """LAMB's trust ratio phi(norm of the weights) / norm of the update (arXiv 1904.00962)."""

    phi_min: float = Field(0.0, ge=0, description="phi clips the norm of a tensor from below,")
    phi_max: float | None = Field(10.0, gt=0, description="and from above; null: not at all.")


class OptimizerSpec(_Section):
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


class LossScaleSpec(_Section):
    """fp16 only: the factor that keeps small gradients from vanishing."""

    initial: float = Field(2.0**16, gt=0, description="Scale of the first step.")
    growth_interval: int = Field(
        2000, ge=1, description="Steps without an overflow after which the scale doubles."
    )
    minimum: float = Field(1.0, gt=0, description="An overflow at this scale is an error.")


class CheckpointSpec(_Section):
    """Two stages: host memory often, storage now and then."""

    url: str | None = Field(
        None,
        description="fsspec URL of the checkpoint root; the controller's own folder unless given.",
    )
    load: str | None = Field(
        None,
        description="Begin with a checkpoint of another job: its checkpoint root, which is its "
        "checkpoint.url with its job id. Layouts may differ, models may not.",
    )
    load_step: int | None = Field(
        None, ge=1, description="Which of them; the newest that can be loaded unless given."
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


class ResourcesSpec(_Section):
    """Nodes the job runs on."""

    nodes: int | None = Field(
        None,
        ge=1,
        description="World size / workers_per_node unless given. Given without parallel.dp, it "
        "decides how many replicas there are.",
    )
    workers_per_node: int | None = Field(
        None, ge=1, description="Ranks on one node; the largest divisor of the world size up to 8."
    )
    standby: int = Field(0, ge=0, description="Checked spare nodes to hold ready.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto takes CUDA where every worker of a node can have its own GPU."
    )


class EvalSpec(_Section):
    """Evaluation on the held-out split."""

    interval_steps: int | None = Field(50, ge=1, description="Every so many steps; null: never.")
    batches: int = Field(2, ge=1, description="Global batches in one evaluation.")


class JobSpec(_Section):
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
    model: ModelSpec = ModelSpec()
    parallel: ParallelSpec = ParallelSpec()
    data: DataSpec = DataSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    resources: ResourcesSpec = ResourcesSpec()
    recovery: RecoverySpec = RecoverySpec()
    detectors: DetectorsSpec = DetectorsSpec()
    eval: EvalSpec = EvalSpec()

    @property
    def layout(self) -> Layout:
        return Layout(tp=self.parallel.tp, pp=self.parallel.pp, dp=self.parallel.dp)

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

    def canonical_json(self) -> str:
        """The whole spec with every default filled in; equal specs give equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)


def parse_spec(document: object) -> JobSpec:
    """The spec in `document` (parsed YAML or JSON).

    Raises:
        SpecError: with every problem found.
    """
    if not isinstance(document, dict):
        kind = type(document).__name__
        problem = FieldProblem(field="(document)", message=f"must be a mapping, not {kind}")
        raise SpecError((problem,))
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        raise SpecError(tuple(_explain(detail) for detail in error.errors())) from error
    spec = _with_dp(spec)
    problems = tuple(check(spec))
    if problems:
        raise SpecError(problems)
    return spec


def _with_dp(spec: JobSpec) -> JobSpec:
    """The spec with the number of replicas that its number of nodes gives, if it leaves it open.

    Raises:
        SpecError: no number of replicas fits.
    """
    nodes, per_node = spec.resources.nodes, spec.resources.workers_per_node
    if nodes is None or "dp" in spec.parallel.model_fields_set:
        return spec
    if per_node is None:
        problem = FieldProblem(
            field="resources.workers_per_node",
            message="is required when resources.nodes is given without parallel.dp",
        )
        raise SpecError((problem,))
    ranks, per_replica = nodes * per_node, spec.parallel.tp * spec.parallel.pp
    if ranks % per_replica:
        problem = FieldProblem(
            field="resources.nodes",
            message=f"is {nodes}; at {per_node} workers per node that is {ranks} ranks, which "
            f"replicas of tp x pp = {per_replica} ranks do not fill; allowed: ranks in "
            f"{{{nearest_multiples(ranks, per_replica)}, ...}}",
        )
        raise SpecError((problem,))
    parallel = spec.parallel.model_copy(update={"dp": ranks // per_replica})
    return spec.model_copy(update={"parallel": parallel})


def _explain(detail: Any) -> FieldProblem:
    """pydantic's finding in our words: what was given and what is allowed."""
    field = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        section = detail["loc"][:-1]
        allowed = ", ".join(_fields_at(section))
        return FieldProblem(field=field, message=f"is not a field; allowed here: {allowed}")
    if detail["type"] == "missing":
        return FieldProblem(field=field, message="is required")
    return FieldProblem(field=field, message=f"is {detail['input']!r}; {detail['msg']}")


def _fields_at(path: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = JobSpec
    for part in path:
        inner = section.model_fields[str(part)].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        section = inner
    return list(section.model_fields)
