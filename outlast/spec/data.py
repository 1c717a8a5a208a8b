"""The part of a job's spec that says where its tokens come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from outlast.masked import MaskedSpec, SentenceOrderSpec
from outlast.section import Section

# Whatever number it is: a rule says for which path it is wrong.
Weight = Annotated[float, Field(allow_inf_nan=True)]


def _without_yes_or_no(value: Any) -> Any:
    """pydantic would read a weight of true as 1."""
    if isinstance(value, dict) and any(isinstance(each, bool) for each in value.values()):
        raise ValueError("not a weight")
    return value


class BlendChange(Section):
    """Other weights of the same sources from a step on."""

    from_step: int = Field(ge=2, description="The first step with these weights.")
    tokens: dict[str, Weight] = Field(description="Weights by path; a path left out has none.")

    _has_weights = field_validator("tokens", mode="before")(_without_yes_or_no)


class DataSpec(Section):
    """Where tokens come from."""

    tokens: str | dict[str, Weight] | None = Field(
        None,
        description="Tokens instead of text: a folder of `outlast data prepare`, a pair NAME.bin "
        "and NAME.idx of Megatron-LM, or a .npy array of ids; a path that every node has, or a URL "
        "such as s3://bucket/web. A blend is a section of these with their weights.",
    )
    blend_changes: tuple[BlendChange, ...] = Field(
        (), description="Weights of the paths in tokens that change at a step, in order of steps."
    )
    validation_tokens: str | dict[str, str] | None = Field(
        None,
        description="Tokens for evaluation alone; the validation split of tokens unless given, or "
        "validation_fraction of its sequences where it has none. A section of names and paths is "
        "several sets, each with a loss and a perplexity of its own; the held-out loss of the job "
        "is the mean of theirs then.",
    )
    document_mask: bool = Field(
        False,
        description="Each document of tokens apart: attention sees no other one, positions begin "
        "at 0 in each unless reset_positions is false, and no document's first token is predicted "
        "from the one before.",
    )
    reset_positions: bool | None = Field(
        None,
        description="true: positions begin at 0 in each document of tokens, also where attention "
        "sees those before it in the sequence; of ALiBi, which has distances only, just where it "
        "does not. false: they count through the sequence. null: as document_mask keeps documents "
        "apart or not.",
    )
    masked: MaskedSpec = MaskedSpec()
    sentence_order: SentenceOrderSpec = SentenceOrderSpec()
    packing: Literal["stream", "whole"] = Field(
        "stream",
        description="stream: sequences are cut out of the stream of all documents of tokens, "
        "wherever documents end. whole: each holds as many whole documents as fit, and padding, "
        "which has no loss; it implies document_mask, and a longer document loses its end.",
    )
    source: str = Field(
        "python-stdlib",
        min_length=1,
        description="'python-stdlib' (the text that ships with Python), a text file, "
        "or a folder whose text files are read. A relative path is below the submitter's folder; "
        "every node must have it.",
    )
    tokenizer: Literal["byte"] = Field("byte", description="Bytes are the tokens.")
    global_batch: int = Field(8, ge=1, description="Sequences in one optimizer step.")
    validation_fraction: float = Field(
        0.02, gt=0, lt=0.5, description="Share of the tokens held out for evaluation."
    )
    loader: Literal["node", "rank"] = Field(
        "node",
        description="node: where several ranks of a node need tokens, one process reads each "
        "step once for all of them, ahead of them, into shared memory. rank: each rank reads by "
        "itself, as it also does while that process is gone.",
    )
    steps_ahead: int = Field(
        2,
        ge=1,
        le=64,
        description="loader node: so many steps are read before ranks ask for them; that and two "
        "steps more are in memory, 8 bytes for each token of the replicas of the node.",
    )
    cache_bytes: int = Field(
        32 * 2**30,
        ge=10**8,
        description="Tokens at a URL: so much of what was read is kept on each node's disk, in "
        "its data folder; what was not read for longest makes room.",
    )
    check_ids: Literal["whole", "sampled"] = Field(
        "whole",
        description="Of tokens without a manifest. whole: every id is known to be of the "
        "vocabulary before anything starts; up to 1 GiB of all sources together, 64 MiB of those "
        "at URLs, they are read then, and `outlast data describe` reads more of them once. "
        "sampled: of more of them only samples are read, and an id beyond the vocabulary that they "
        "miss ends the job when it is read.",
    )
    max_bytes: int | None = Field(
        None,
        ge=2**12,
        description="Read at most this many bytes of the source; all of it unless given, and the "
        "first 16 MiB of python-stdlib.",
    )

    _has_weights = field_validator("tokens", mode="before")(_without_yes_or_no)

    @property
    def validation_sets(self) -> dict[str, str]:
        """Paths of tokens for evaluation alone by the name of their set; "" is that of one path."""
        given = self.validation_tokens
        if given is None:
            return {}
        return {"": given} if isinstance(given, str) else dict(sorted(given.items()))

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether attention sees its own document only, and none is predicted from another."""
        return self.document_mask or self.packing == "whole"

    @property
    def resets_positions(self) -> bool:
        """Whether positions begin at 0 in each document."""
        given = self.reset_positions
        return self.keeps_documents_apart if given is None else given

    @property
    def finds_documents(self) -> bool:
        """Whether it must be known where documents begin."""
        return self.keeps_documents_apart or self.resets_positions

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the first step by path; none where it trains on text."""
        if self.tokens is None:
            return {}
        # Sorted: a message on the wire keeps no order of a section's names, and which sequences
        # a step reads depends on the order of sources.
        tokens = {self.tokens: 1.0} if isinstance(self.tokens, str) else self.tokens
        return dict(sorted(tokens.items()))
