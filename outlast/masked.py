"""The part of a job's spec that says which tokens are hidden and predicted."""

from __future__ import annotations

from pydantic import Field

from outlast.section import Section


class MaskedSpec(Section):
    """Some tokens are hidden, and these are predicted (BERT, arXiv 1810.04805, 3.1).

    Which ones follows from seed, step and sequence; in evaluation always the same ones.
    """

    fraction: float = Field(
        0.0, ge=0, lt=1, description="Share of the tokens that is predicted; BERT has 0.15."
    )
    mask_token: int | None = Field(
        None, ge=0, description="Id that stands for a hidden token, such as 103 of BERT's [MASK]."
    )
    random: float = Field(
        0.1, ge=0, le=1, description="Of the predicted tokens, the share that any token replaces."
    )
    kept: float = Field(
        0.1, ge=0, le=1, description="Of the predicted tokens, the share that stays as it is."
    )
    never: tuple[int, ...] = Field(
        (), description="Ids that are never predicted, such as those of [CLS] and [SEP]."
    )
