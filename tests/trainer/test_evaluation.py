"""`outlast evaluate` finds as likely what `transformers` finds, and reads what is asked."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from checkpoint.hf.convert import import_folder
from checkpoint.storage.storage import Storage
from outlast.cli.errors import ExitCode
from tests.checkpoint import hf_folders
from tests.cli.running import outlast, outlast_json
from tests.trainer.hf_models import CAUSAL
from tests.trainer.test_generation import model_of
from trainer import evaluation
from trainer.data.corpus.tokenizer import load
from trainer.data.corpus.tokenizer_type import Tokenizer
from trainer.evaluation import Question, answered, read_questions
from trainer.generation import Likelihood, Model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folders.saved(tmp_path_factory)


def test_texts_are_as_likely_as_transformers_finds_them(saved: Path, tmp_path: Path) -> None:
    expected = json.loads((saved / hf_folders.LIKELIHOODS).read_text())
    for name in CAUSAL:
        model = model_of(saved / name, Storage(str(tmp_path / name)))
        found = model.likelihood(hf_folders.PROMPT, hf_folders.NUM_LAST)
        assert found.log_likelihood == pytest.approx(expected[name][0], rel=1e-4), name
        assert found.is_likeliest == expected[name][1], name


class Table:
    """A model that likes what follows in "abcdefg" best, then longer texts less."""

    seq_len = 8

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, int]] = []

    def likelihood(self, tokens: Sequence[int], num_last: int) -> Likelihood:
        self.asked.append((bytes(tokens), num_last))
        pairs = zip(tokens[-num_last - 1 : -1], tokens[-num_last:], strict=True)
        hits = [after == before + 1 for before, after in pairs]
        return Likelihood(
            log_likelihood=-sum(0.1 if hit else 1.0 for hit in hits),
            num_tokens=num_last,
            is_likeliest=all(hits),
        )


def ask(question: Question) -> tuple[evaluation.Answer, Table]:
    table = Table()
    return answered(table, load("byte"), question), table


def question(context: str, *choices: str, answer: int = 0) -> Question:
    return Question(where="f: line 1", context=context, choices=choices, answer=answer)


def test_a_cloze_test_is_right_if_each_token_is_the_likeliest() -> None:
    answer, table = ask(question("ab", "cd"))
    assert (answer.is_right, answer.is_truncated) == (True, False)
    assert table.asked == [(b"abcd", 2)]
    assert not ask(question("ab", "cx"))[0].is_right


def test_spaces_behind_a_context_belong_to_what_follows() -> None:
    _, table = ask(question("ab  ", "cd"))
    assert table.asked == [(b"ab  cd", 4)]


def test_a_long_context_loses_its_beginning() -> None:
    answer, table = ask(question("0123456789ab", "cd"))
    assert answer.is_truncated
    assert table.asked == [(b"56789abcd", 2)]
    with pytest.raises(ValueError, match="9 tokens are to be predicted; allowed: 1 to 8"):
        ask(question("a", "123456789"))


def test_of_choices_the_likeliest_is_taken_in_all_and_per_byte() -> None:
    """ "x" costs 1 nat in all; "bcx" 1.2, which is 0.4 per byte."""
    short, _ = ask(question("a", "x", "bcx", answer=0))
    assert (short.is_right, short.is_right_by_length) == (True, False)
    long, _ = ask(question("a", "x", "bcx", answer=1))
    assert (long.is_right, long.is_right_by_length) == (False, True)
    assert long.right.log_likelihood == pytest.approx(-1.2)


def test_without_a_context_there_is_the_end_of_a_document() -> None:
    with pytest.raises(ValueError, match="line 1 has no context, and the tokenizer no end"):
        ask(question("", "ab"))
    tokenizer = load("byte")
    with_end = Tokenizer(
        name="t",
        vocab_size=256,
        end_of_document=96,
        encode=tokenizer.encode,
        encode_all=lambda texts: [tokenizer.encode(text) for text in texts],
        decode=str,
    )
    table = Table()
    answer = answered(table, with_end, question("", "ab"))
    assert answer.is_right
    assert table.asked == [(b"`ab", 2)]


def test_accuracies_and_perplexities_are_means_over_questions() -> None:
    asked = [question("ab", "cd"), question("ab", "xx"), question("a", "x", "b", answer=1)]
    counted: list[int] = []
    table, tokenizer = Table(), load("byte")
    totals = evaluation.evaluate(table, tokenizer, asked, lambda: counted.append(1))
    facts = totals.as_facts()
    assert (facts["questions"], len(counted)) == (3, 3)
    assert facts["accuracy"] == pytest.approx(2 / 3)
    assert facts["accuracy_error"] == pytest.approx(math.sqrt(2 / 27))
    # "cd" 0.2 nats, "xx" 2.0, "b" 0.1.
    assert facts["perplexity"] == pytest.approx(math.exp(2.3 / 3))
    assert facts["perplexity_per_token"] == pytest.approx(math.exp(2.3 / 5))


def test_lines_are_read_in_their_three_forms(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(
        '{"text": "she said\\n to him. "}\n\n'
        '{"context": "a b", "target": " c", "id": 7}\n'
        '{"context": "a", "choices": ["b", "c"], "answer": 1}\n'
    )
    first, second, third = read_questions(path)
    assert (first.context, first.choices) == ("she said\n to ", ("him.",))
    assert (second.context, second.choices) == ("a b", (" c",))
    assert (third.choices, third.answer) == (("b", "c"), 1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1 is no JSON"),
        ("[]", "line 1 is no JSON object, but list"),
        ('{"text": "word"}', "text has no word before its last one"),
        ('{"context": "a"}', r"has context \(str\); allowed: text, or context and target"),
        ('{"context": "a", "target": " "}', r"allowed: text, or context and target"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "answer is 2; allowed: 0 to 1"),
        ('{"context": "a", "choices": ["b", ""], "answer": 0}', "each of choices must be a text"),
        ('{"context": "a", "choices": ["b", "c"], "answer": "b"}', r"answer \(str\)"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=words):
        list(read_questions(path))


def test_the_command_prints_what_came_out(saved: Path, tmp_path: Path) -> None:
    root, spec, asked = tmp_path / "root", tmp_path / "job.yaml", tmp_path / "q.jsonl"
    done = import_folder(saved / "qwen2", Storage(str(root)))
    document = {"name": "a", "model": done.section, "data": {"tokens": "/a"}}
    spec.write_text(yaml.safe_dump(document))
    asked.write_text('{"context": "0 1", "target": " 2"}\n' * 3)
    given = ("evaluate", str(root), str(asked), "--spec", str(spec), "--tokenizer", "byte")
    found = outlast_json(*given)
    assert (found["step"], found["questions"], found["truncated"]) == (0, 3, 0)
    assert found["accuracy"] in (0.0, 1.0)
    assert found["perplexity"] == pytest.approx(found["perplexity_per_token"] ** 2)
    assert "accuracy" in outlast(*given, "--limit", "1").stdout
    asked.write_text('{"context": "é", "target": " 2"}\n')
    beyond = outlast(*given)
    assert beyond.returncode == ExitCode.BAD_INPUT
    assert "line 1: the tokenizer gives the id 195, beyond model.vocab_size" in beyond.stderr


def test_the_model_has_the_length_that_is_said(saved: Path, tmp_path: Path) -> None:
    model = model_of(saved / "qwen2", Storage(str(tmp_path / "r")))
    assert isinstance(model, Model)
    assert model.likelihood([1] * (model.seq_len + 1), 1).num_tokens == 1
