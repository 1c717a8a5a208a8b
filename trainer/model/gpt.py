"""A GPT or BERT, cut into pipeline chunks and tensor-parallel shards.

A chunk holds consecutive blocks; the first also embeds, the last also projects
and computes the loss. The residual stream is [S, B, D], so that sequence
parallelism splits it along its first dimension. What a block is made of is in
`trainer.model.block`.

With tied embeddings and more than one chunk, the last one holds a copy of
the embedding; the sum of both gradients keeps the copies equal. Where a rank holds
both ends of a pipeline, there is one table for both.
"""

# S sequence, B micro-batch, D model width. Capitals are logical sizes; a rank's shard
# may be smaller.
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outlast.sizing.partition import ModelPart
from trainer.model.block import build_block
from trainer.model.carried import apart, joined
from trainer.model.config import GptConfig
from trainer.model.documents import Documents
from trainer.model.dropout import DropoutKey, stream_mask
from trainer.model.head import HeadTransform, OrderHead, VocabBias
from trainer.model.layers import Norm, PositionTable, SegmentTable, TokenTable, tensor_parallel
from trainer.model.router import no_terms, over_parts, router_loss
from trainer.parallel.mesh import Mesh
from trainer.parallel.pipeline import Sentences
from trainer.parallel.tensor import column_linear, vocab_embedding
from trainer.parallel.vocab import vocab_loss


class GptChunk(nn.Module):
    """Consecutive layers of the model: what one pipeline stage holds of one virtual stage.

    Module names count layers over the whole model, so a parameter has the same
    name on every layout.
    """

    def __init__(
        self, config: GptConfig, mesh: Mesh, part: ModelPart, *, table: TokenTable | None = None
    ) -> None:
        """`table` is the first chunk's, where the same rank holds that."""
        super().__init__()
        self.part = part
        self._config = config
        self._tp = tensor_parallel(config, mesh)
        self._cp = mesh.cp
        self._key: DropoutKey | None = None
        self._no_terms = no_terms(config, mesh.device)
        if part.is_first or (part.is_last and config.tied_embeddings):
            tied = config.tied_embeddings and mesh.embedding.size > 1
            self.tokens = table or TokenTable(config, mesh, tied=tied, counted=part.is_first)
        if part.is_first and config.learned_positions:
            self.positions = PositionTable(config, mesh)
        if part.is_first and config.segments:
            self.segments = SegmentTable(config, mesh)
        if part.is_first and config.embedding_norm:
            self.embedding_norm = Norm(config, mesh)
        self.blocks = nn.ModuleDict(
            {str(layer): build_block(config, mesh, layer) for layer in part.layers}
        )
        if part.is_last:
            normed = config.norm_place == "sum"
            self.norm = nn.Identity() if normed else Norm(config, mesh)
            self.head_transform = HeadTransform(config, mesh) if config.head_transform else None
            own = not config.tied_embeddings
            self.head = TokenTable(config, mesh, bias=config.head_bias) if own else None
            biased = config.tied_embeddings and config.head_bias
            self.head_bias = VocabBias(config, mesh) if biased else None
            self.sentence_order = OrderHead(config, mesh) if config.sentence_order else None

    def begin(self, step: int, micro_batch: int) -> None:
        """Say which forward comes next: `micro_batch` counts over all replicas of the step.

        Dropout masks depend on it; a model without dropout does not need it.
        """
        self._key = DropoutKey(
            seed=self._config.seed, step=step, micro_batch=micro_batch, part=self._cp.index
        )

    def forward(
        self,
        tokens_SB: Tensor,
        hidden: Tensor | None,
        targets_SB: Tensor,
        starts_SB: Tensor | None = None,
        sentences: Sentences | None = None,
    ) -> Tensor:
        """The hidden state for the next chunk, or the summed loss on the last one.

        Where ranks divide the sequence, tokens and targets are those of the own part, and all
        else is of the whole: the loss is then the own part of the sum. `starts_SB` has where the
        document of each token begins; None: it is all one. A model that predicts the order of
        `sentences` gives two sums, [2]: of tokens and of sequences.

        Without recording of gradients this is an evaluation: nothing is dropped, and the loss is
        the tokens' alone, without the router's.
        """
        drops = self._config.drops and torch.is_grad_enabled()
        assert self._key is not None or not drops, "begin says which masks a forward has"
        key = self._key if drops else None
        documents = None if starts_SB is None else self._documents(starts_SB)
        if hidden is None:
            x_SBD = self._embed(tokens_SB, key, documents, sentences)
            terms = self._no_terms
        else:
            x_SBD, terms = apart(hidden, self._config, self._tp)
        for block in self.blocks.values():
            x_SBD, *more = block(x_SBD, key, documents)
            if more and terms is not None:
                terms = terms + more[0]
        if not self.part.is_last:
            return joined(x_SBD, terms, self._tp)
        return self._losses(x_SBD, targets_SB, terms, sentences)

    def logits(self, tokens_SB: Tensor) -> Tensor:
        """What is predicted behind each token, [S, B, V], of a chunk that is the whole model."""
        x_SBD = self._embed(tokens_SB, None, None, None)
        for block in self.blocks.values():
            x_SBD, *_ = block(x_SBD, None, None)
        weight_VD, bias_V = self._output()
        logits = column_linear(self._transformed(self.norm(x_SBD)), weight_VD, bias_V, self._tp)
        logits = logits * self._config.logit_scale
        cap = self._config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _documents(self, starts_SB: Tensor) -> Documents:
        config = self._config
        return Documents(
            starts_SB,
            bidirectional=config.bidirectional,
            apart=config.documents_apart,
            resets_positions=config.resets_positions,
        )

    def _embed(
        self,
        tokens_SB: Tensor,
        key: DropoutKey | None,
        documents: Documents | None,
        sentences: Sentences | None,
    ) -> Tensor:
        x_SBD = vocab_embedding(tokens_SB, self.tokens.weight, self._tp)
        if self._config.embedding_scale != 1.0:
            x_SBD = x_SBD * self._config.embedding_scale
        if self._config.learned_positions:
            x_SBD = x_SBD + self.positions(x_SBD.shape[0], documents)
        if self._config.segments:
            segments_SB = None if sentences is None else sentences.segments
            x_SBD = x_SBD + self.segments(segments_SB, x_SBD.shape[0])
        if self._config.embedding_norm:
            x_SBD = self.embedding_norm(x_SBD)
        keep = stream_mask(x_SBD, "embedding", self._config.dropout, self._tp, key)
        return x_SBD if keep is None else x_SBD * keep

    def _losses(
        self,
        x_SBD: Tensor,
        targets_SB: Tensor,
        terms: Tensor | None,
        sentences: Sentences | None,
    ) -> Tensor:
        """The tokens' summed loss; in training also that of sequences, where they have one."""
        normed_SBD: Tensor = self.norm(x_SBD)
        loss = self._loss(self._transformed(normed_SBD), targets_SB)
        if not torch.is_grad_enabled():
            return loss
        if terms is not None:
            # As the loss is a sum over tokens, the router's, a mean over them, counts as often.
            often = over_parts((targets_SB >= 0).sum(), self._cp)
            loss = loss + router_loss(self._config, self._tp, terms) * often
        if self.sentence_order is None:
            return loss
        assert sentences is not None, "the data of a model that predicts their order has them"
        return torch.stack((loss, self.sentence_order(normed_SBD, sentences.swapped)))

    def _loss(self, x_SBD: Tensor, targets_SB: Tensor) -> Tensor:
        weight_VD, bias_V = self._output()
        return vocab_loss(
            x_SBD,
            weight_VD,
            targets_SB,
            self._tp,
            bias_V=bias_V,
            logit_scale=self._config.logit_scale,
            logit_softcap=self._config.logit_softcap,
            vocab_size=self._config.vocab_size,
        )

    def _transformed(self, normed_SBD: Tensor) -> Tensor:
        """What is projected to the vocabulary."""
        if self.head_transform is None:
            return normed_SBD
        transformed_SBD: Tensor = self.head_transform(normed_SBD)
        return transformed_SBD

    def _output(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the output projection."""
        if self.head is not None:
            return self.head.weight, self.head.bias
        return self.tokens.weight, None if self.head_bias is None else self.head_bias.weight


def chunks_of(config: GptConfig, mesh: Mesh, parts: Sequence[ModelPart]) -> list[GptChunk]:
    """A rank's parts of the model, in their order."""
    chunks: list[GptChunk] = []
    for part in parts:
        table = chunks[0].tokens if part.is_last and chunks and chunks[0].part.is_first else None
        chunks.append(GptChunk(config, mesh, part, table=table))
    return chunks
