"""How much host memory one checkpoint slot of a rank takes: what the stager allocates.

The one formula for it: the controller and agents, `outlast plan` and a worker that is about to
take its slots ask the same question and must not answer it differently. A test holds it against
the slots of real ranks: never less, and for a model of any size hardly more.

Source of what is split: ZeRO (arXiv 1910.02054).
"""

from __future__ import annotations

from outlast.sizing.parameters import PlanInput, layers_of, stage_units

# `checkpoint.stage.slotfile`: what lies before the tensors of a slot.
_HEADER_BYTES = 64 << 10
# `checkpoint.torch_format.frames`: what makes a tensor a file of torch's (1.6 KB), aligning it,
# and its lines in the table of shards beside the slots.
_FRAME_BYTES = 2 << 10
# `checkpoint.stage.slot_sums`: behind the tensors a word for each block of 4 MiB.
_SUMMED_BYTES, _SUM_BYTES = 4 << 20, 8
# The most parameters that a block has, and the ends of a model (`trainer.model`).
_BLOCK_TENSORS, _END_TENSORS = 18, 6
# Of these, the biases of an MLP, and that of attention's output.
_MLP_BIASES, _OUTPUT_BIASES = 2, 1
# What a block with experts has beside these, and how many more cuts their tensors take, which
# have one dimension more.
_EXPERT_TENSORS, _EXPERT_CUTS = 4, 2
# How many more rectangles a unit comes in when ZeRO cuts it: at each border through a tensor of
# at most three dimensions. A stage's ends are up to four units, and one more
# of two tensors where embeddings have a norm.
_CUTS, _END_UNITS, _NORM_TENSORS = 4, 4, 2
# A linear layer with a bias, and a norm.
_TRANSFORM_TENSORS = 4
# Two linear layers with biases.
_ORDER_TENSORS = 4
# Of each parameter the weight and two moments are saved.
_SAVED_OF_EACH = 3


def host_slot_bytes(facts: PlanInput, stage: int) -> int:
    """Tmpfs that is enough for one slot of a rank of `stage`."""
    saved = saved_bytes(facts, stage)
    # What a rank owns and what it only holds are summed apart.
    sums_bytes = _SUM_BYTES * (saved // _SUMMED_BYTES + 2)
    rectangles = _SAVED_OF_EACH * _num_tensors(facts, stage)
    return _HEADER_BYTES + saved + rectangles * _FRAME_BYTES + sums_bytes


def saved_bytes(facts: PlanInput, stage: int) -> int:
    """What a checkpoint holds of one rank: the weights that are trained, and both moments."""
    sizes, units = facts.sizes, stage_units(facts, stage)
    share = units.shard(facts.layout) if facts.zero.level >= 1 else units.total
    return share * ((sizes.master or sizes.weight) + 2 * sizes.moment)


def _num_tensors(facts: PlanInput, stage: int) -> int:
    """No fewer than the tensors, or parts of such, that a rank has of the weights."""
    cuts = _CUTS if facts.zero.level >= 1 else 0
    blocks = layers_of(facts.parts(stage))
    with_experts = sum(facts.model.shape.experts_of(layer) is not None for layer in blocks)
    more = with_experts * (_EXPERT_TENSORS + (_EXPERT_CUTS if cuts else 0))
    if any(part.is_first for part in facts.parts(stage)):
        more += facts.model.embedding_norm * (_NORM_TENSORS + cuts) + (facts.model.segments > 0)
    if any(part.is_last for part in facts.parts(stage)):
        more += facts.model.head_transform * _TRANSFORM_TENSORS
        more += facts.model.sentence_order * _ORDER_TENSORS
    absent = 0 if facts.model.mlp_bias else _MLP_BIASES
    absent += 0 if facts.model.attention_bias else _OUTPUT_BIASES
    each = _BLOCK_TENSORS - absent + cuts
    return len(blocks) * each + more + _END_TENSORS + _END_UNITS * cuts
