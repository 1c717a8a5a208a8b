"""How often a checkpoint's model knows how a text goes on: cloze tests and multiple choice.

Contexts and continuations become tokens as in EleutherAI's evaluation harness (Gao et al., "A
framework for few-shot language model evaluation"), so that accuracies are comparable: both are
tokenised together, spaces at the end of a context belong to what follows, and a context that is
too long loses its beginning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.data.corpus.tokenizer_type import Tokenizer
from trainer.generation import Likelihood

_KINDS = "text, or context and target, or context, choices and answer"


class Model(Protocol):
    """What is asked: a `trainer.generation.Model`."""

    seq_len: int

    def likelihood(self, tokens: Sequence[int], num_last: int) -> Likelihood: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A context, and ways in which it may go on; a cloze test has one, the right one."""

    where: str
    context: str
    choices: tuple[str, ...]
    answer: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model makes of a question."""

    is_right: bool
    is_right_by_length: bool
    """With log-likelihoods per byte of the choice, which does not favour short ones."""
    right: Likelihood
    """Of the right choice."""
    is_truncated: bool


def read_questions(path: Path) -> Iterator[Question]:
    """The questions of a file of JSON lines, in its order.

    A line has `text`, whose last word is asked for (LAMBADA: Paperno et al., 2016); or `context`
    and `target`; or `context`, `choices` and the number of the right one, from 0, as `answer`.

    Raises:
        ValueError: naming the line, and what is wrong with it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _question(f"{path}: line {number:,}", line)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text of UTF-8: {error}") from error


def _question(where: str, line: str) -> Question:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}; give one object a line") from error
    match found:
        case {"choices": [_, _, *_] as choices, "context": str(context), "answer": int(answer)}:
            if not all(isinstance(each, str) and each.strip() for each in choices):
                raise ValueError(f"{where}: each of choices must be a text that is not empty")
            if isinstance(answer, bool) or not 0 <= answer < len(choices):
                raise ValueError(
                    f"{where}: answer is {answer}; allowed: 0 to {len(choices) - 1}, the number "
                    "of a choice"
                )
            return Question(where=where, context=context, choices=tuple(choices), answer=answer)
        case {"context": str(context), "target": str(target)} if target.strip():
            return Question(where=where, context=context, choices=(target,))
        case {"text": str(text)} if len(text.split()) > 1:
            text = text.rstrip()
            place = text.rindex(text.split()[-1])
            return Question(where=where, context=text[:place], choices=(text[place:],))
        case {"text": str()}:
            raise ValueError(f"{where}: text has no word before its last one")
        case dict():
            raise ValueError(f"{where} has {_names(found)}; allowed: {_KINDS}")
        case _:
            raise ValueError(f"{where} is no JSON object, but {type(found).__name__}")


def _names(found: dict[str, Any]) -> str:
    shown = ", ".join(f"{name} ({type(value).__name__})" for name, value in found.items())
    return shown or "nothing"


def answered(model: Model, tokenizer: Tokenizer, question: Question) -> Answer:
    """What the model makes of a question.

    Raises:
        ValueError: a choice is longer than a sequence of the model, or there is nothing to
            predict it from.
    """
    found = [_likelihood(model, tokenizer, question, choice) for choice in question.choices]
    likelihoods = tuple(each for each, _ in found)
    lengths = [len(choice.encode()) for choice in question.choices]
    if len(found) == 1:
        is_right = is_right_by_length = likelihoods[0].is_likeliest
    else:
        is_right = _best(likelihoods, [1] * len(found)) == question.answer
        is_right_by_length = _best(likelihoods, lengths) == question.answer
    return Answer(
        is_right=is_right,
        is_right_by_length=is_right_by_length,
        right=likelihoods[question.answer],
        is_truncated=any(is_truncated for _, is_truncated in found),
    )


def _best(likelihoods: Sequence[Likelihood], lengths: Sequence[int]) -> int:
    scores = [each.log_likelihood / n for each, n in zip(likelihoods, lengths, strict=True)]
    return scores.index(max(scores))


def _likelihood(
    model: Model, tokenizer: Tokenizer, question: Question, choice: str
) -> tuple[Likelihood, bool]:
    stripped = question.context.rstrip()
    choice = question.context[len(stripped) :] + choice
    context = tokenizer.encode(stripped).tolist() if stripped else []
    tokens = tokenizer.encode(stripped + choice).tolist()
    num_targets = len(tokens) - len(context)
    if not context:
        if tokenizer.end_of_document is None:
            raise ValueError(
                f"{question.where} has no context, and the tokenizer no end of a document that "
                "could stand before it"
            )
        tokens = [tokenizer.end_of_document, *tokens]
    if not 1 <= num_targets <= model.seq_len:
        raise ValueError(
            f"{question.where}: {num_targets} tokens are to be predicted; allowed: 1 to "
            f"{model.seq_len}, as model.seq_len has it"
        )
    # The last token is predicted only, so one more than a sequence fits.
    kept = tokens[-(model.seq_len + 1) :]
    try:
        return model.likelihood(kept, num_targets), len(kept) < len(tokens)
    except ValueError as error:
        raise ValueError(f"{question.where}: {error}") from error


@dataclass(slots=True)
class Totals:
    """Sums over questions."""

    questions: int = 0
    choices: int = 0
    right: int = 0
    right_by_length: int = 0
    log_likelihood: float = 0.0
    tokens: int = 0
    truncated: int = 0

    def add(self, question: Question, answer: Answer) -> None:
        self.questions += 1
        self.choices += len(question.choices) > 1
        self.right += answer.is_right
        self.right_by_length += answer.is_right_by_length
        self.log_likelihood += answer.right.log_likelihood
        self.tokens += answer.right.num_tokens
        self.truncated += answer.is_truncated

    def as_facts(self) -> dict[str, Any]:
        """Accuracies with their standard errors, and perplexities of what is right."""
        accuracy = self.right / self.questions
        facts: dict[str, Any] = {
            "questions": self.questions,
            "accuracy": accuracy,
            "accuracy_error": math.sqrt(accuracy * (1 - accuracy) / self.questions),
        }
        if self.choices:
            facts["accuracy_by_length"] = self.right_by_length / self.questions
        return {
            **facts,
            # Per text that is to be predicted, as published for LAMBADA.
            "perplexity": _exp(-self.log_likelihood / self.questions),
            "perplexity_per_token": _exp(-self.log_likelihood / self.tokens),
            "truncated": self.truncated,
        }


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def evaluate(
    model: Model,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    done: Callable[[], None],
) -> Totals:
    """The model's answers to all of them; `done` is called after each."""
    totals = Totals()
    for question in questions:
        totals.add(question, answered(model, tokenizer, question))
        done()
    return totals
