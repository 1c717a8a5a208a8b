"""What the backward pass keeps of the forward pass, tensor by tensor.

Each figure stands beside the code that keeps the tensor. A test holds the sums
within 10 % of what the allocator counts; what it found is written where a kept
tensor is easily overlooked.

Source: Korthikanti et al. (arXiv 2205.05198), whose 34 s b h a layer becomes less
without stored dropout masks and with attention that keeps no scores.
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.flops import Convention, mean_keys
from outlast.sizing.parameters import PlanInput, layer_kinds
from outlast.sizing.partition import ModelPart
from trainer.core.loss_chunks import loss_chunk_tokens
from trainer.core.schedule import ActionKind
from trainer.core.timing import peak_in_flight, steady_micro_batches, training_schedule

# Norm statistics and attention's sums of exponentials are at least fp32.
_STATISTIC_BYTES = 4
_INDEX_BYTES = 8
# The smallest block of queries in `trainer.model.window`.
_MIN_WINDOW_BLOCK = 64
# Sums over tokens and over the vocabulary are fp32 at least.
_NARROWEST_SUM_BYTES = 4
# Schedules of more actions are not built for a plan: chunks then count as the largest one.
_MAX_ACTIONS = 200_000


def activation_bytes(facts: PlanInput, stage: int) -> int:
    """Kept between forward and backward, by all micro-batches in flight on a rank of `stage`."""
    # Token ids and targets of the whole step are read before it, and of the next one ahead.
    ids = 4 * facts.num_micro_batches * facts.tokens * _INDEX_BYTES
    ids += _bias_bytes(facts)
    chunks = [_chunk_bytes(facts, part) for part in facts.parts(stage)]
    stages = facts.layout.pp
    steady = steady_micro_batches(stages, facts.num_micro_batches)
    num_actions = stages * facts.virtual_stages * steady
    is_plain = len(chunks) == 1 and not facts.splits_backward
    if is_plain or num_actions > _MAX_ACTIONS:
        return peak_in_flight(facts, stage) * max(chunks) + ids
    return _most_kept(facts, stage, chunks) + ids


def _bias_bytes(facts: PlanInput) -> int:
    """What ALiBi adds to scores, which all layers and micro-batches share."""
    shape = facts.model.shape
    if not facts.model.alibi or facts.on_gpu:
        return 0
    windows = {shape.window_of(layer) or shape.seq_len for layer in range(shape.layers)}
    # One for each size of a block of queries and of the keys beside it.
    numbers = sum(
        queries * keys for window in windows for queries, keys in set(_blocks(facts, window))
    )
    return shape.heads // (facts.layout.tp * facts.layout.cp) * numbers * facts.sizes.weight


def _blocks(facts: PlanInput, window: int) -> list[tuple[int, int]]:
    """`trainer.model.window`: how many queries a block has, and keys beside them."""
    block, seq_len = max(_MIN_WINDOW_BLOCK, window // 4), facts.model.shape.seq_len
    firsts = range(0, seq_len, block)
    sizes = [(first, min(block, seq_len - first)) for first in firsts]
    return [(own, min(window - 1, first) + own) for first, own in sizes]


def _most_kept(facts: PlanInput, stage: int, chunks: Sequence[int]) -> int:
    """The most that chunks of different sizes keep at once, over a step."""
    kept = most = 0
    put_off = [_put_off_bytes(facts, part) for part in facts.parts(stage)]
    for action in training_schedule(facts).actions[stage]:
        whole, rest = chunks[action.chunk], put_off[action.chunk]
        match action.kind:
            case ActionKind.FORWARD:
                kept += whole
            case ActionKind.BACKWARD:
                kept -= whole
            case ActionKind.BACKWARD_INPUT:
                kept += rest - whole
            case ActionKind.BACKWARD_WEIGHT:
                kept -= rest
        most = max(most, kept)
    return most


def _put_off_bytes(facts: PlanInput, part: ModelPart) -> int:
    """What a chunk keeps of one micro-batch for the gradients of its weights alone."""
    kinds = layer_kinds(facts, (part,))
    values = sum(count * _factor_values(facts, layer) for layer, count in kinds.items())
    return values * facts.sizes.weight


def _factor_values(facts: PlanInput, layer: int) -> int:
    """Inputs of a block's products with weights, and gradients of their outputs."""
    model, shape, tp = facts.model, facts.model.shape, facts.layout.tp
    qkv_width = shape.query_width + 2 * _kv_width(facts)
    # Inputs of the first products, which are of norms of the stream; gradients of the last ones.
    streams = model.norms_per_block + 1 if model.parallel_block else 4
    per_token = qkv_width + shape.query_width
    experts = shape.experts_of(layer)
    if experts is None:
        per_token += shape.mlp_in_width + shape.mlp_hidden
        return streams * facts.stream_values + facts.tokens // tp * per_token
    slots = facts.tokens * experts.per_token
    per_slot = 2 * shape.hidden + (3 if shape.gated else 2) * experts.hidden // tp
    return 2 * facts.stream_values + facts.tokens // tp * per_token + slots * per_slot


def _chunk_bytes(facts: PlanInput, part: ModelPart) -> int:
    """What a chunk keeps of one micro-batch."""
    kinds = layer_kinds(facts, (part,))
    found = sum(count * block_bytes(facts, layer) for layer, count in kinds.items())
    if part.is_first:
        found += _input_bytes(facts)
    if part.is_last:
        found += _output_bytes(facts)
    return found


def block_bytes(facts: PlanInput, layer: int, mode: str | None = None) -> int:
    """What one block keeps of one micro-batch, in its own mode or in another."""
    mode = mode or facts.recompute[layer]
    model, size, stream = facts.model, facts.sizes.weight, facts.stream_values
    if mode == "full":
        return 0 if layer in facts.offloaded else stream * size
    # A parallel block has one input to both of its norms.
    inputs = 1 if model.parallel_block else 2
    if model.norms_after:
        # What a norm after a branch reads, beside what the branch itself reads.
        inputs += 2
    outputs = model.norms_per_block
    if model.rms_norm:
        # On a CPU it is several operations, and the scaled input is kept between them.
        outputs *= 2
    values = (inputs + outputs) * stream + _projected_values(facts) + _shared_weights(facts)
    values += _mlp_values(facts, layer)
    statistics = 2 * model.norms_per_block * stream // model.shape.hidden
    if mode != "selective":
        values += _attention_values(facts, layer)
        statistics += facts.tokens // facts.layout.tp * model.shape.heads
    if model.dropout:
        # The mask of each sum that goes into the stream.
        values += stream * (1 if model.parallel_block else 2)
    return values * size + statistics * _STATISTIC_BYTES + _routing_bytes(facts, layer)


def offloaded_bytes(facts: PlanInput, stage: int) -> int:
    """Inputs of blocks in host memory, of all micro-batches in flight on a rank of `stage`."""
    layers = [sum(layer in facts.offloaded for layer in part.layers) for part in facts.parts(stage)]
    one = facts.stream_values * facts.sizes.weight
    if facts.on_gpu:
        # torch pins memory in powers of two.
        one = 1 << (one - 1).bit_length()
    return peak_in_flight(facts, stage) * max(layers) * one


def loss_bytes(facts: PlanInput) -> int:
    """The most that exists for a moment while the loss is computed chunk by chunk."""
    size, vocab = facts.sizes.weight, facts.model.shape.vocab_size // facts.layout.tp
    whole = facts.tokens * facts.model.shape.hidden
    logits = min(facts.tokens, loss_chunk_tokens(vocab, on_gpu=facts.on_gpu)) * vocab
    # Sums over the vocabulary are fp32 where weights are narrower, and come back beside them.
    sums = max(size, _NARROWEST_SUM_BYTES)
    beside = size if size < sums else 0
    gathered = whole * size if facts.sequence_parallel else 0
    forward = logits * (sums + beside) + gathered + whole * size + facts.stream_values * size
    # The kept gradient of the table is scaled into a new one.
    backward = _table_values(facts) * (sums + beside) + 2 * facts.stream_values * size
    return max(forward, backward)


def _projected_values(facts: PlanInput) -> int:
    """Around attention's linear layers: what comes out of the first and goes into the last."""
    model, shape = facts.model, facts.model.shape
    qkv_width = shape.query_width + 2 * _kv_width(facts)
    per_token = qkv_width + shape.query_width
    if model.parallel_block and model.norms_per_block == 1:
        # One projection is cut in two by group. A branch with a bias copies its part; the
        # projection itself lives as long as one part is looked at where it lies.
        whole = qkv_width + shape.mlp_in_width
        copied = model.qkv_bias * qkv_width + model.mlp_bias * shape.mlp_in_width
        per_token += copied if 0 < copied < whole else 0
    return facts.tokens // facts.layout.tp * per_token


def _mlp_values(facts: PlanInput, layer: int) -> int:
    """Around the linear layers of an MLP, or of the experts of a layer."""
    shape, tp = facts.model.shape, facts.layout.tp
    # The gate after its non-linearity, which the product with the other half needs.
    per_unit = 4 if shape.gated else 2
    experts = shape.experts_of(layer)
    if experts is None:
        return facts.tokens // tp * per_unit * shape.mlp_hidden
    slots = facts.tokens * experts.per_token
    # Each slot's token, all of its width on each rank, and what its expert has made of it.
    values = slots * (2 * shape.hidden + per_unit * experts.hidden // tp)
    if experts.shared_hidden:
        values += facts.tokens * per_unit * experts.shared_hidden // tp
        if facts.sequence_parallel:
            values += facts.tokens * shape.hidden
    if experts.shared_gate:
        values += facts.tokens * shape.hidden
    return values


def _routing_bytes(facts: PlanInput, layer: int) -> int:
    """Where each slot goes, and the router's numbers of all experts for each token."""
    experts = facts.model.shape.experts_of(layer)
    if experts is None:
        return 0
    own = facts.tokens // facts.layout.tp if facts.sequence_parallel else facts.tokens
    exact = max(_STATISTIC_BYTES, facts.sizes.weight)
    # A copy of the tokens in the router's type, where it is another.
    copied = own * facts.model.shape.hidden * exact if exact != facts.sizes.weight else 0
    # Slots that are moved there and back, and those that come from other ranks.
    moves = 2 if facts.layout.ep == 1 else 4
    places = moves * facts.tokens * experts.per_token * _INDEX_BYTES
    return places + own * experts.number * exact + copied


def _kv_width(facts: PlanInput) -> int:
    """Keys of a token on all tensor ranks: those that share a head have a copy each."""
    return facts.model.shape.kv_width * facts.ranks_of_kv_head


def _shared_weights(facts: PlanInput) -> int:
    """Weights put together for one use, where ranks share a key/value head."""
    if facts.ranks_of_kv_head == 1:
        return 0
    shape = facts.model.shape
    rows = shape.query_width + 2 * _kv_width(facts)
    if facts.model.parallel_block:
        # Both projections are cut by group; with a norm for each branch the MLP's is apart.
        rows += shape.query_width + shape.mlp_hidden
        rows += shape.mlp_in_width if facts.model.norms_per_block == 1 else 0
    return rows * shape.hidden // facts.layout.tp


def _attention_values(facts: PlanInput, layer: int) -> int:
    """Inside attention, between its rows and its mixture of values."""
    model, shape = facts.model, facts.model.shape
    window = shape.window_of(layer)
    if model.alibi and not facts.on_gpu:
        # One as long as the sequence, where there is none.
        window = window or shape.seq_len
    # Where ranks divide the sequence, all of it is here, of as much fewer heads.
    kv_width = _kv_width(facts) * facts.copies_of_kv_head
    per_token = 2 * (kv_width - _kv_width(facts))
    divides = facts.layout.cp > 1
    shares = shape.kv_heads < shape.heads and (facts.in_ring or not divides)
    if model.rotates(layer):
        per_token += shape.query_width + kv_width
    elif shares:
        # Query heads of several groups are not evenly spaced in the rows.
        per_token += shape.query_width
    if facts.micro_batch > 1 or model.parallel_block or window is not None or divides:
        # Its own output, which is in another order than the projection reads it, or of other heads.
        per_token += shape.query_width
    if window is not None and not facts.in_ring:
        # Each block of queries beside a copy of the keys and values that it reaches.
        reach = sum(keys for _, keys in _blocks(facts, window))
        per_token += shape.query_width + 2 * kv_width * reach // shape.seq_len
    if model.qk_norm != "none":
        # Queries and keys after their norm; as of other norms, the scaled input too.
        per_token += 2 * (shape.query_width + kv_width)
    if model.attention_softcap and not model.attention_dropout:
        # Weights are spelled out: the bounded scores and the weights themselves.
        keys = mean_keys(shape, window, Convention.WINDOWED if window else Convention.FULL)
        per_token += round(2 * shape.heads * keys)
    if model.attention_dropout:
        # Weights are spelled out: themselves, their mask and their product.
        keys = mean_keys(shape, window, Convention.WINDOWED if window else Convention.FULL)
        per_token += round(3 * shape.heads * keys)
    return facts.tokens // facts.layout.tp * per_token


def _input_bytes(facts: PlanInput) -> int:
    """Rows of the token table, whether they are this rank's, and a norm of the embeddings."""
    found = facts.tokens * (_INDEX_BYTES + 1)
    if facts.model.embedding_norm:
        # Their sum, and what the norm keeps beside it, as in a block.
        values = facts.stream_values * (2 if facts.model.rms_norm else 1)
        statistics = 2 * facts.stream_values // facts.model.shape.hidden
        found += values * facts.sizes.weight + statistics * _STATISTIC_BYTES
    return found


def _output_bytes(facts: PlanInput) -> int:
    """The last norm's input, and the gradients that are made with the loss."""
    size = facts.sizes.weight
    # A layer before the projection keeps its input, its activation's and its norm's.
    values = 5 if facts.model.head_transform else 2
    # The gradient of its first tokens is one of all tokens.
    values = (values + facts.model.sentence_order) * facts.stream_values
    return values * size + _table_values(facts) * max(size, _NARROWEST_SUM_BYTES)


def _table_values(facts: PlanInput) -> int:
    shape = facts.model.shape
    return shape.vocab_size * shape.hidden // facts.layout.tp
