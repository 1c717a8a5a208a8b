"""Rules that another layout could satisfy: how the model and the batch are cut."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outlast.problems import FieldProblem, closest, collect, divisors, only_with, shown
from outlast.rules.divides import Divides

if TYPE_CHECKING:
    from outlast.spec import JobSpec


# Far above the largest clusters. What is made for each rank must fit the controller.
MAX_RANKS = 2**20
# Where each copy goes is found by comparing the nodes of all groups.
MAX_RANKS_WITH_REPLICAS = 2**17
# Longer examples are not read.
_MAX_CHUNKS_SHOWN = 64
_CHUNKS_OF_V = 2


def check(spec: JobSpec) -> list[FieldProblem]:
    """What keeps this layout from working."""
    return collect(RULES, spec)


def _check_heads(spec: JobSpec) -> list[FieldProblem]:
    cp = 1 if spec.parallel.context == "ring" else spec.parallel.cp
    return _split("model.heads", spec.model.heads, tp=spec.parallel.tp, cp=cp)


def _check_kv_heads(spec: JobSpec) -> list[FieldProblem]:
    kv_heads, tp = spec.model.num_kv_heads, spec.parallel.tp
    if kv_heads == spec.model.heads:
        return []
    if tp <= kv_heads or tp % kv_heads:
        found = _tensor_split(spec, "model.kv_heads", kv_heads)
        return [
            replace(each, message=f"{each.message} or multiples of {kv_heads}") for each in found
        ]
    # Ranks that share a head hold equal parts of its key and value.
    width, sharing = spec.model.width_of_head, tp // kv_heads
    # Norms of all heads together have a weight for each row of a key.
    rows, of_what = (width, "key") if spec.model.qk_norm == "all" else (2 * width, "key and value")
    if rows % sharing == 0:
        return []
    allowed = ", ".join(str(kv_heads * each) for each in closest(divisors(rows), sharing))
    return [
        FieldProblem(
            field="parallel.tp",
            message=f"is {tp}; {sharing} ranks for each of model.kv_heads = {kv_heads} do not "
            f"divide the {rows} rows of its {of_what}; allowed: {allowed}",
        )
    ]


def _check_context_heads(spec: JobSpec) -> list[FieldProblem]:
    """Ranks that divide sequences divide heads, too: of keys and values whole ones, or copies."""
    tp, cp, kv_heads = spec.parallel.tp, spec.parallel.cp, spec.model.num_kv_heads

    def fits(degree: int) -> bool:
        ranks = tp * degree
        return kv_heads % ranks == 0 or ranks % kv_heads == 0

    # In a ring heads stay together.
    if spec.parallel.context == "ring":
        return []
    # What does not divide the heads of queries, or does not fit without cp, is said of these.
    if cp == 1 or spec.model.heads % (tp * cp) or not fits(1) or fits(cp):
        return []
    degrees = [each for each in divisors(spec.model.heads // tp) if fits(each)]
    allowed = ", ".join(map(str, closest(degrees, cp)))
    return [
        FieldProblem(
            field="parallel.cp",
            message=f"is {cp}; tp x cp = {tp * cp} neither divides model.kv_heads = {kv_heads} nor "
            f"is a multiple of it; allowed: {allowed}",
        )
    ]


def _check_mlp(spec: JobSpec) -> list[FieldProblem]:
    return _tensor_split(spec, "model.ffn_hidden", spec.model.mlp_hidden)


def _check_experts(spec: JobSpec) -> list[FieldProblem]:
    """Each expert is split as an MLP is."""
    moe = spec.model.moe
    if moe.num_experts == 0:
        return []
    of_layers = [] if moe.ffn_hidden is None else [("ffn_hidden", moe.ffn_hidden)]
    widths = [*of_layers, ("shared_ffn_hidden", moe.shared_ffn_hidden)]
    return [
        problem
        for name, width in widths
        if width
        for problem in _tensor_split(spec, f"model.moe.{name}", width)
    ]


def _check_expert_parallel(spec: JobSpec) -> list[FieldProblem]:
    ep, number = spec.parallel.ep, spec.model.moe.num_experts
    if ep == 1:
        return []
    if number == 0:
        return [only_with("parallel.ep", ep, "model.moe.num_experts > 0", 0)]
    field = "parallel.dp" if spec.parallel.cp == 1 else "parallel.dp x parallel.cp"
    return [
        problem
        for field, value in ((field, spec.layout.dp), ("model.moe.num_experts", number))
        for problem in Divides(field=field, value=value, by_name="parallel.ep", by=ep).problems()
    ]


def _check_vocabulary(spec: JobSpec) -> list[FieldProblem]:
    found = _tensor_split(spec, "model.vocab_size", spec.model.vocab_rows)
    # Of a padded one, the number that is given is not the one that does not fit.
    field, by = "model.vocab_multiple", spec.parallel.tp
    if found and spec.model.vocab_multiple > 1:
        given = f"is {spec.model.vocab_multiple}, which makes {spec.model.vocab_rows} rows"
        allowed = f"allowed: multiples of parallel.tp = {by}"
        return [FieldProblem(field=field, message=f"{given}; {allowed}")]
    return [replace(each, message=f"{each.message}; or {field} = {by}") for each in found]


def _check_sequence(spec: JobSpec) -> list[FieldProblem]:
    parallel, seq_len = spec.parallel, spec.model.seq_len
    tp = parallel.tp if parallel.sequence_parallel else 1
    if parallel.context == "all_to_all" or parallel.cp == 1:
        return _split("model.seq_len", seq_len, tp=tp, cp=parallel.cp)
    # Each rank has two pieces of equal length, and tensor ranks divide both together.
    name = "2 x parallel.cp" if tp == 1 else "2 x parallel.tp x parallel.cp"
    return Divides(
        field="model.seq_len", value=seq_len, by_name=name, by=2 * tp * parallel.cp
    ).problems()


def _check_ring(spec: JobSpec) -> list[FieldProblem]:
    """What a ring cannot do, as it spells out no weights of attention."""
    if spec.parallel.context != "ring":
        return []
    if spec.parallel.cp == 1:
        return [only_with("parallel.context", "ring", "parallel.cp > 1", 1)]
    model = spec.model
    others = {
        "model.attention_dropout": (model.attention_dropout, 0.0),
        "model.attention_softcap": (model.attention_softcap, None),
        "model.positions": (model.positions if model.positions == "alibi" else None, None),
    }
    return [
        FieldProblem(
            field="parallel.context",
            message=f"is ring, which {field} = {value} does not work with; allowed: all_to_all",
        )
        for field, (value, plain) in others.items()
        if value != plain
    ]


def _tensor_split(spec: JobSpec, field: str, value: int) -> list[FieldProblem]:
    return _split(field, value, tp=spec.parallel.tp, cp=1)


def _split(field: str, value: int, *, tp: int, cp: int) -> list[FieldProblem]:
    """`tp` times `cp` ranks have equal parts."""
    name = "parallel.tp" if cp == 1 else "parallel.cp" if tp == 1 else "parallel.tp x parallel.cp"
    return Divides(field=field, value=value, by_name=name, by=tp * cp).problems()


def degrees_in_words(spec: JobSpec) -> str:
    """What the number of ranks is the product of."""
    return "tp x pp x dp" if spec.parallel.cp == 1 else "tp x cp x pp x dp"


def _check_stages(spec: JobSpec) -> list[FieldProblem]:
    layers, stages, chunks = spec.model.layers, spec.parallel.pp, spec.parallel.virtual_stages
    if layers < stages:
        return [
            FieldProblem(
                field="parallel.pp",
                message=f"is {stages}, more stages than model.layers = {layers}; "
                f"allowed: 1 to {layers}",
            )
        ]
    if spec.parallel.folds and layers < 2 * stages:
        fewer = f"2 to {layers // 2}, or " if layers >= 4 else ""
        return [
            FieldProblem(
                field="parallel.pp",
                message=f"is {stages}; with parallel.schedule = zb-v each stage has two chunks, "
                f"and {2 * stages} chunks are more than model.layers = {layers}; allowed: "
                f"{fewer}another schedule",
            )
        ]
    if layers < stages * chunks:
        return [
            FieldProblem(
                field="parallel.virtual_stages",
                message=f"is {chunks}; {stages} stages of {chunks} chunks are more than "
                f"model.layers = {layers}; allowed: 1 to {layers // stages}",
            )
        ]
    return []


def _check_schedule(spec: JobSpec) -> list[FieldProblem]:
    parallel = spec.parallel
    if parallel.schedule != "1f1b" and parallel.extra_warmup:
        needed, field = "parallel.schedule = 1f1b", "parallel.extra_warmup"
        return [only_with(field, parallel.extra_warmup, needed, parallel.schedule)]
    if parallel.pp == 1 and parallel.extra_warmup:
        field = "parallel.extra_warmup"
        return [only_with(field, parallel.extra_warmup, "parallel.pp > 1", 1)]
    problems = []
    if parallel.schedule == "zb-v" and parallel.virtual_stages != _CHUNKS_OF_V:
        problems.append(
            FieldProblem(
                field="parallel.virtual_stages",
                message=f"is {parallel.virtual_stages} with parallel.schedule = zb-v; allowed: "
                f"{_CHUNKS_OF_V}",
            )
        )
    if parallel.schedule not in ("interleaved", "zb-v") and parallel.virtual_stages > 1:
        chunks = parallel.virtual_stages
        needed = "parallel.schedule = interleaved" + " or zb-v" * (chunks == _CHUNKS_OF_V)
        problems.append(only_with("parallel.virtual_stages", chunks, needed, parallel.schedule))
    if parallel.schedule == "interleaved" and parallel.virtual_stages == 1:
        most = max(1, spec.model.layers // parallel.pp)
        allowed = f"parallel.virtual_stages in 2 to {most}, or " if most > 1 else ""
        problems.append(
            FieldProblem(
                field="parallel.schedule",
                message="is interleaved, which needs more than one chunk per rank; allowed: "
                f"{allowed}the schedule 1f1b",
            )
        )
    if parallel.pp == 1 and parallel.schedule in ("interleaved", "zb-h1", "zb-v"):
        problems.append(
            FieldProblem(
                field="parallel.schedule",
                message=f"is {parallel.schedule}, which needs parallel.pp > 1; allowed: 1f1b or "
                "gpipe",
            )
        )
    return problems


def _check_layer_split(spec: JobSpec) -> list[FieldProblem]:
    parallel, layers = spec.parallel, spec.model.layers
    problems = []
    split, chunks = parallel.layer_split, parallel.pp * parallel.virtual_stages
    if split is not None and (len(split) != chunks or sum(split) != layers or min(split) < 1):
        base, extra = divmod(layers, chunks)
        example = ""
        if chunks <= min(layers, _MAX_CHUNKS_SHOWN):
            even = [base + (1 if chunk < extra else 0) for chunk in range(chunks)]
            example = f", such as {even}"
        problems.append(
            FieldProblem(
                field="parallel.layer_split",
                message=f"is {shown(split)}, {sum(split)} layers in {len(split)} chunks; allowed: "
                f"pp x virtual_stages = {chunks} numbers of 1 or more that add up to "
                f"model.layers = {layers}{example}",
            )
        )
    return problems


def _check_recompute(spec: JobSpec) -> list[FieldProblem]:
    modes, layers = spec.parallel.recompute, spec.model.layers
    problems = []
    if not isinstance(modes, str) and len(modes) != layers:
        problems.append(
            FieldProblem(
                field="parallel.recompute",
                message=f"lists {len(modes)} layers; allowed: one mode for all, or one for each "
                f"of model.layers = {layers}",
            )
        )
    return problems


def _check_zero(spec: JobSpec) -> list[FieldProblem]:
    zero = spec.parallel.zero
    problems = []
    if zero.communication is not None and spec.layout.dp == 1:
        field = "parallel.zero.communication"
        problems.append(only_with(field, zero.communication, "parallel.dp > 1", 1))
    if zero.reshard_after is not None and zero.level < 3:
        needed, field = "parallel.zero.level = 3", "parallel.zero.reshard_after"
        problems.append(only_with(field, zero.reshard_after, needed, zero.level))
    if zero.reduce_after is not None and zero.level < 2:
        needed, field = "parallel.zero.level 2 or 3", "parallel.zero.reduce_after"
        problems.append(only_with(field, zero.reduce_after, needed, zero.level))
    schedule = spec.parallel.schedule
    if zero.reduce_after == "micro_batch" and schedule in ("zb-h1", "zb-v"):
        problems.append(
            FieldProblem(
                field="parallel.zero.reduce_after",
                message=f"is micro_batch, which saves no memory with parallel.schedule = "
                f"{schedule}: "
                "gradients of several micro-batches are being summed at a time; allowed: step, or "
                "the schedules 1f1b, gpipe and interleaved",
            )
        )
    return problems


def _check_batch(spec: JobSpec) -> list[FieldProblem]:
    return Divides(
        field="data.global_batch",
        value=spec.data.global_batch,
        by_name="parallel.dp x parallel.micro_batch",
        by=spec.parallel.dp * spec.parallel.micro_batch,
    ).problems()


def _check_resources(spec: JobSpec) -> list[FieldProblem]:
    world, product = spec.layout.world_size, degrees_in_words(spec)
    if world > MAX_RANKS:
        return [
            FieldProblem(
                field="parallel.dp",
                message=f"is {spec.parallel.dp}, which makes {product} = {world} ranks; "
                f"allowed: {MAX_RANKS} ranks in all",
            )
        ]
    per_node = spec.workers_per_node
    if world % per_node:
        allowed = ", ".join(str(n) for n in closest(divisors(world), per_node))
        return [
            FieldProblem(
                field="resources.workers_per_node",
                message=f"is {per_node}, which does not divide the world size "
                f"{product} = {world}; allowed: {allowed}",
            )
        ]
    needed = world // per_node
    if spec.resources.nodes is not None and spec.resources.nodes != needed:
        return [
            FieldProblem(
                field="resources.nodes",
                message=f"is {spec.resources.nodes}; {product} = {world} ranks at "
                f"{per_node} per node need exactly {needed}",
            )
        ]
    return []


def _check_replicas(spec: JobSpec) -> list[FieldProblem]:
    """Copies lie on another node."""
    replicas = spec.checkpoint.replicas
    # A world that does not fill its nodes is a problem of its own.
    if not replicas:
        return []
    if spec.num_nodes == 1:
        return [only_with("checkpoint.replicas", replicas, "2 or more nodes", "1")]
    world = spec.layout.world_size
    if world <= MAX_RANKS_WITH_REPLICAS:
        return []
    return [
        FieldProblem(
            field="checkpoint.replicas",
            message=f"is {replicas}, in a job of {world} ranks; allowed: 0, or at most "
            f"{MAX_RANKS_WITH_REPLICAS} ranks",
        )
    ]


RULES = (
    *(_check_heads, _check_kv_heads, _check_context_heads, _check_mlp, _check_experts),
    *(_check_expert_parallel, _check_vocabulary, _check_sequence, _check_ring),
    *(_check_stages, _check_schedule, _check_layer_split, _check_recompute),
    *(_check_zero, _check_batch, _check_resources, _check_replicas),
)
