"""transformers' models on sequences of several documents, by masks and positions that are given.

Run as a program (`python -m tests.trainer.oracles_documents FOLDER`) it writes a folder for each of
`KINDS`, in the form of `tests.trainer.oracles`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.trainer.hf_models import logits_of
from tests.trainer.oracles import SAMPLES, SEQ_LEN, VOCAB, WINDOW, arrays_of, build

# What the data section says, by the name of the file.
KINDS: dict[str, dict[str, Any]] = {
    "apart": {"document_mask": True},
    "through": {"document_mask": True, "reset_positions": False},
    "across": {"reset_positions": True},
}
# Learned positions, also where all is seen; RoPE plain, with each scaling, with another base in
# layers of a window, and in some layers only.
NAMES = (
    *("gpt2", "llama", "llama-of-rules", "llama-dynamic", "mistral-yarn", "gemma3-of-rules"),
    *("smollm3", "bert"),
)


def main(folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, VOCAB, (2, SAMPLES, SEQ_LEN))
    starts = _starts()
    given = {"tokens": tokens.numpy(), "targets": targets.numpy(), "starts": starts.numpy()}
    for kind in KINDS:
        Path(folder, kind).mkdir()
    for name in NAMES:
        model = build(name)
        for kind, data in KINDS.items():
            model.zero_grad()
            options = _options(model, starts, data)
            logits = logits_of(model(tokens, **options))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            found = {"logits": logits.detach().numpy(), "loss": loss.item()}
            found |= given | arrays_of(name, model)
            np.savez(Path(folder, kind) / f"{name}.npz", **found)


def _starts() -> Any:
    """Of tokens; the first sequence is all one document, so that its positions go to the end."""
    import torch

    starts = torch.zeros(SAMPLES, SEQ_LEN, dtype=torch.int64)
    for sample in range(1, SAMPLES):
        for cut in (7 * sample, 7 * sample + 1, 60 + sample):
            starts[sample, cut:] = cut
    return starts


def _options(model: Any, starts: Any, data: dict[str, Any]) -> dict[str, Any]:
    import torch

    apart = data.get("document_mask", False)
    index = torch.arange(SEQ_LEN)
    positions = (
        index - starts if data.get("reset_positions", apart) else index.expand(len(starts), -1)
    )
    is_bert = model.config.model_type == "bert"
    ahead = index[:, None] - index
    allowed = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool) if is_bert else ahead >= 0
    allowed = allowed.expand(len(starts), -1, -1)
    if apart:
        allowed = allowed & (starts[:, :, None] == starts[:, None])
    masks = {"full_attention": allowed, "sliding_attention": allowed & (ahead < WINDOW)}
    hidden = torch.finfo(torch.float64).min
    masks = {
        kind: torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, hidden)[:, None]
        for kind, mask in masks.items()
    }
    given: Any = masks
    # One mask for all layers, or one for each kind of them.
    if model.config.model_type not in ("gemma3_text", "smollm3"):
        has_window = getattr(model.config, "sliding_window", None) is not None
        given = masks["sliding_attention" if has_window else "full_attention"]
    # Given by hand: without a mask `transformers` takes positions that begin anew for documents
    # that are apart.
    options = {"attention_mask": given, "position_ids": positions}
    return options if is_bert else {**options, "use_cache": False}


if __name__ == "__main__":
    main(sys.argv[1])
