"""What BERT predicts, as sections of a job's spec: hidden tokens, and the order of two parts."""

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


class SentenceOrderSpec(Section):
    """How a sequence becomes two parts, whose order is predicted (ALBERT, arXiv 1909.11942, 3.1).

    It is [CLS] first [SEP] second [SEP], with three tokens less than it would have; one in two has
    its parts swapped. Where it is cut, and whether they are, follows from seed, step and sequence.
    """

    cls_token: int | None = Field(
        None, ge=0, description="Id before the parts, such as 101 of BERT's [CLS]."
    )
    sep_token: int | None = Field(
        None, ge=0, description="Id behind each part, such as 102 of BERT's [SEP]."
    )
    ends: tuple[int, ...] = Field(
        (),
        description="Ids that end a sentence, such as that of a full stop: the cut is behind one "
        "of them, if there is any; anywhere unless given.",
    )
