"""What a checkpoint's model goes on with, or makes of a text: to look at what was learnt.

It is not for serving: each token takes a forward pass over all before it, on one process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from checkpoint.restore.peers import Alone
from checkpoint.restore.restore import load_storage
from checkpoint.stage.payload import NamedTensor
from checkpoint.storage.storage import Storage
from outlast.blackbox import Group
from outlast.layout import Coordinate, Layout
from outlast.sizing.partition import stage_parts
from outlast.spec import JobSpec
from trainer.model.gpt import GptChunk
from trainer.model.parameters import FlatParameters
from trainer.parallel.comm import Comm
from trainer.parallel.mesh import Mesh
from trainer.worker.configure import gpt_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen; `temperature` 0: always the likeliest. `stop` ends the text."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """How likely a model finds the end of a text: in nats, over all of its tokens."""

    log_likelihood: float
    num_tokens: int
    is_likeliest: bool
    """Whether each of its tokens is the likeliest one behind those before it."""


class Model:
    """The whole model of a job on one process, in fp32 (fp64 where it was trained so)."""

    def __init__(self, spec: JobSpec) -> None:
        precision = "fp64" if spec.precision == "fp64" else "fp32"
        config = gpt_config(spec.model_copy(update={"precision": precision}))
        # One process has no group to split a sequence over.
        config = replace(config, sequence_parallel=False, recompute="none")
        at, device = Coordinate(pp=0, dp=0, tp=0), torch.device("cpu")
        pipeline = _alone(Group.PP)
        mesh = Mesh(
            layout=Layout(),
            rank=0,
            at=at,
            device=device,
            tp=_alone(Group.TP),
            dp=_alone(Group.DP),
            pp=pipeline,
            pp_back=pipeline,
            embedding=_alone(Group.EMBEDDING),
            ep=_alone(Group.EP),
            expert_dp=_alone(Group.DP),
            cp=_alone(Group.CP),
        )
        (part,) = stage_parts(config.layers, stage=0, num_stages=1)
        self._vocab_size, self.seq_len = config.vocab_size, config.seq_len
        self._chunk = GptChunk(config, mesh, part)
        self._flat = FlatParameters([self._chunk], tp_size=1)

    def load(self, storage: Storage, step: int) -> None:
        """The weights of a checkpoint.

        Raises:
            LayoutMismatchError: it is of another model.
            CorruptCheckpointError, StorageUnavailableError: it cannot be read.
        """
        tensors = [
            NamedTensor(
                f"model.{facts.stored}",
                self._flat.view(self._flat.values, name),
                facts.global_shape,
                facts.offsets,
            )
            for name, facts in self._flat.facts.items()
        ]
        load_storage(storage, step, tensors, Alone(), weights_only=True)

    @torch.no_grad()
    def go_on(self, prompt: Sequence[int], how: Sampling, *, until_s: float) -> Iterator[int]:
        """Tokens behind `prompt`.

        Raises:
            ValueError: the prompt and what is asked for are longer than a sequence of the model.
            TimeoutError: it is later than `until_s` of the monotonic clock.
        """
        longest = len(prompt) + how.max_tokens
        if not prompt or longest > self.seq_len:
            raise ValueError(
                f"a prompt of {len(prompt)} and {how.max_tokens} more tokens; allowed: 1 to "
                f"{self.seq_len} in all, as model.seq_len has it, and a prompt of 1 at least"
            )
        self._check_ids(prompt)
        generator = torch.Generator().manual_seed(how.seed)
        tokens = list(prompt)
        while len(tokens) < longest:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{len(tokens) - len(prompt)} tokens in the time that there was")
            token = _chosen(self._next_logits(tokens), how.temperature, generator)
            if token == how.stop:
                return
            tokens.append(token)
            yield token

    @torch.no_grad()
    def likelihood(self, tokens: Sequence[int], num_last: int) -> Likelihood:
        """How likely the last `num_last` tokens are behind those before them, of which there is
        one at least; up to `seq_len` + 1 tokens in all.

        Raises:
            ValueError: an id is beyond the vocabulary.
        """
        self._check_ids(tokens)
        given, targets = torch.tensor(tokens[:-1]), torch.tensor(tokens[-num_last:])
        logits = self._chunk.logits(given.unsqueeze(1))[-num_last:, 0, : self._vocab_size]
        chosen = torch.log_softmax(logits.double(), dim=-1).gather(1, targets.unsqueeze(1))
        return Likelihood(
            log_likelihood=float(chosen.sum()),
            num_tokens=num_last,
            is_likeliest=torch.equal(logits.argmax(dim=-1), targets),
        )

    def _check_ids(self, tokens: Sequence[int]) -> None:
        beyond = [each for each in tokens if not 0 <= each < self._vocab_size]
        if beyond:
            raise ValueError(
                f"the tokenizer gives the id {beyond[0]}, beyond model.vocab_size = "
                f"{self._vocab_size}; give that of the model"
            )

    def _next_logits(self, tokens: Sequence[int]) -> Tensor:
        logits = self._chunk.logits(torch.tensor(tokens).unsqueeze(1))
        return logits[-1, 0, : self._vocab_size]


def _alone(group: Group) -> Comm:
    return Comm(group=group, ranks=(0,), index=0)


def _chosen(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    weights = torch.softmax(logits.double() / temperature, dim=0)
    return int(torch.multinomial(weights, 1, generator=generator))
