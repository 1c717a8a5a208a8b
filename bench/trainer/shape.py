"""What is trained in a comparison: the model, the batch and the layout, for both sides alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A GPT without biases in its linear layers, untied, fp32, AdamW, on one layout."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    seq_len: int = 512
    vocab_size: int = 8192
    batch: int = 8
    micro_batches: int = 1
    """Per replica and step."""
    tp: int = 1
    pp: int = 1
    dp: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    zero: int = 0
    tp_chunks: int = 4
    block: str = "serial"
    experts: int = 0
    """Of each layer, as wide as its MLP would be; two for each token."""
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.seq_len

    @property
    def name(self) -> str:
        """The layout in words, such as tp2·pp2."""
        parts = [
            f"{axis}{size}"
            for axis in ("tp", "pp", "dp", "ep")
            if (size := getattr(self, axis)) > 1
        ]
        suffix = f" zero{self.zero}" if self.zero else ""
        return ("·".join(parts) or "single") + suffix

    def smaller(self) -> Shape:
        """The same layout at a size that takes seconds: for tests of the benchmark itself."""
        return replace(self, layers=4, hidden=64, heads=4, seq_len=32, vocab_size=256)

    def spec(self, *, steps: int) -> JobSpec:
        """The same job in Outlast's words."""
        document: dict[str, Any] = {
            "name": "bench-trainer",
            "steps": steps,
            "model": {
                "layers": self.layers,
                "hidden": self.hidden,
                "heads": self.heads,
                "seq_len": self.seq_len,
                "vocab_size": self.vocab_size,
                "tied_embeddings": False,
                "activation": "gelu",
                "attention_bias": False,
                "mlp_bias": False,
                "block": self.block,
                "moe": {"num_experts": self.experts},
            },
            "parallel": {
                "tp": self.tp,
                "pp": self.pp,
                "dp": self.dp,
                "ep": self.ep,
                "tp_chunks": self.tp_chunks,
                "virtual_stages": self.virtual_stages,
                "schedule": self.schedule,
                "zero": {"level": self.zero},
                "micro_batch": self.batch // (self.dp * self.micro_batches),
            },
            "data": {"global_batch": self.batch, "max_bytes": 2**20},
            "optimizer": {"clip_grad_norm": None},
            "eval": {"interval_steps": None},
        }
        return parse_spec(document)

    def document(self) -> dict[str, Any]:
        """For the command line of a rank."""
        return asdict(self)
