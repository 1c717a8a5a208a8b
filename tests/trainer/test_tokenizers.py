"""SentencePiece models and files of tiktoken's: the ids of the libraries themselves."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import unicodedata
from pathlib import Path

import pytest

from outlast.cli.errors import ExitCode
from outlast.tokens.files import open_source
from tests.cli.running import outlast, outlast_json, outlast_process
from trainer.data.corpus import extras
from trainer.data.corpus.tokenizer import absolute, load
from trainer.data.corpus.tokenizer_type import Tokenizer

sentencepiece = pytest.importorskip("sentencepiece", reason="test_corpus.py takes bytes")
tiktoken = pytest.importorskip("tiktoken", reason="test_corpus.py takes bytes")

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "it's", "12345"]
WORDS += ["years'", "naïve", "été"]
TEXTS = [" ".join(WORDS[at:] + WORDS[:at]) + f"\n\n  {at}.\n" for at in range(len(WORDS))]
CONTROL = "a </s> <s> <unk> <|endoftext|> <|end_of_text|> <|begin_of_text|> <|im_start|> b"
# Published by OpenAI for cl100k_base; any other than those of the models below will do.
PATTERN = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
PATTERN += r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def model_file(path: Path, **options: object) -> Path:
    """A model with bytes for what it has not seen, which changes nothing in a text."""
    made = io.BytesIO()
    given = {"vocab_size": 310, "byte_fallback": True, "normalization_rule_name": "identity"}
    given |= {"hard_vocab_limit": False, "remove_extra_whitespaces": False}
    given |= {"model_type": "bpe", "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20), model_writer=made, **(given | options)
    )
    path.write_bytes(made.getvalue())
    return path


def ranks() -> dict[bytes, int]:
    """All bytes, and what the words begin with."""
    found = {bytes([byte]): byte for byte in range(256)}
    for word in [*WORDS, " the", " 12", "\n\n", "  "]:
        for end in range(2, len(word.encode()) + 1):
            found.setdefault(word.encode()[:end], len(found))
    return found


def ranks_file(path: Path, found: dict[bytes, int] | None = None) -> Path:
    lines = (
        base64.b64encode(token) + b" %d\n" % rank for token, rank in (found or ranks()).items()
    )
    path.write_bytes(b"".join(lines))
    return path


def agrees(tokenizer: Tokenizer, texts: list[str]) -> None:
    """Texts together have the ids of each by itself, and come back from them."""
    together = [ids.tolist() for ids in tokenizer.encode_all(texts)]
    assert together == [tokenizer.encode(text).tolist() for text in texts]
    assert [tokenizer.decode(ids) for ids in together] == texts
    assert max(max(ids) for ids in together if ids) < tokenizer.vocab_size


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_has_the_ids_of_its_library(tmp_path: Path, kind: str) -> None:
    path = model_file(tmp_path / "a.model", model_type=kind)
    tokenizer = load(str(path), 2)
    agrees(tokenizer, [*TEXTS, CONTROL, "\N{SNOWMAN}\n文字", " two  blanks ", "\t\x01"])
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert [ids.tolist() for ids in tokenizer.encode_all([*TEXTS, ""])] == [
        library.encode(text) for text in [*TEXTS, ""]
    ]
    assert tokenizer.vocab_size == library.vocab_size()
    assert tokenizer.end_of_document == library.eos_id()
    assert tokenizer.name == str(path)


def test_a_sentencepiece_model_normalises_as_it_was_trained_to(tmp_path: Path) -> None:
    path = model_file(tmp_path / "a.model", normalization_rule_name="nmt_nfkc")
    tokenizer = load(str(path))
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert tokenizer.encode("ﬁne ①").tolist() == library.encode("ﬁne ①")
    assert tokenizer.decode(tokenizer.encode("ﬁne ①").tolist()) == "fine 1"


def test_a_sentencepiece_model_without_an_end_puts_nothing_behind_documents(
    tmp_path: Path,
) -> None:
    assert load(str(model_file(tmp_path / "a.model", eos_id=-1))).end_of_document is None


def test_control_tokens_in_a_text_are_text(tmp_path: Path) -> None:
    llama2 = load(str(model_file(tmp_path / "a.model")))
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "a.model"))
    assert not any(library.is_control(id) for id in llama2.encode(CONTROL).tolist())
    path = ranks_file(tmp_path / "tokenizer.model")
    for name in (f"llama3:{path}", f"qwen:{path}"):
        tokenizer = load(name)
        assert max(tokenizer.encode(CONTROL)) < len(ranks())
        # Those of special tokens are none of the text, and neither are those of a padded model.
        ids = tokenizer.encode("end").tolist()
        assert tokenizer.decode([*ids, tokenizer.end_of_document, 10**6]) == "end"
    assert llama2.decode([*llama2.encode("end").tolist(), 2, 10**6]) == "end"


@pytest.mark.parametrize(
    ("scheme", "digits", "num_special", "end"), [("llama3", 3, 256, 1), ("qwen", 1, 208, 0)]
)
def test_a_file_of_ranks_is_split_as_its_model_does(
    tmp_path: Path, scheme: str, digits: int, num_special: int, end: int
) -> None:
    path = ranks_file(tmp_path / "tokenizer.model")
    tokenizer = load(f"{scheme}:{tmp_path}", 2)
    assert tokenizer.name == f"{scheme}:{path}"
    assert tokenizer.vocab_size == len(ranks()) + num_special
    assert tokenizer.end_of_document == len(ranks()) + end
    agrees(tokenizer, [*TEXTS, CONTROL, "", "\N{SNOWMAN}\n文字", " \u00a0 \t\r\n x"])
    # The two differ in how many digits stay together: 12 is one token, 123 is none.
    assert len(tokenizer.encode("12")) == (1 if digits > 1 else 2)
    regex = pytest.importorskip("regex")
    from trainer.data.corpus.tiktoken_file import SCHEMES

    pieces = regex.findall(SCHEMES[scheme].pattern, "It's 1234 words.\n\nx  y")
    numbers = ["123", "4"] if digits == 3 else ["1", "2", "3", "4"]
    assert pieces == ["It", "'s", " ", *numbers, " words", ".\n\n", "x", " ", " y"]


def test_qwen_has_composed_characters(tmp_path: Path) -> None:
    path = ranks_file(tmp_path / "qwen.tiktoken")
    apart = unicodedata.normalize("NFD", "été")
    qwen, llama3 = load(f"qwen:{path}"), load(f"llama3:{path}")
    assert qwen.encode(apart).tolist() == qwen.encode("été").tolist()
    assert llama3.decode(llama3.encode(apart).tolist()) == apart


def test_a_file_of_ranks_may_have_its_pattern_beside_it(tmp_path: Path) -> None:
    path = ranks_file(tmp_path / "my.tiktoken")
    special = {"<|endoftext|>": 1000, "<|other|>": 998}
    beside = {"pattern": PATTERN, "special_tokens": special}
    (tmp_path / "my.tiktoken.json").write_text(json.dumps(beside))
    tokenizer = load(str(path), 2)
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (1001, 1000)
    agrees(tokenizer, [*TEXTS, CONTROL, ""])
    library = tiktoken.Encoding(
        "mine", pat_str=PATTERN, mergeable_ranks=ranks(), special_tokens=special
    )
    for text in [*TEXTS, CONTROL]:
        expected = library.encode(text, disallowed_special=())
        assert tokenizer.encode(text).tolist() == expected
    assert tokenizer.decode([1000, 998, 999, 97]) == "a"


def refused(name: str) -> str:
    with pytest.raises(ValueError, match=r"[a-z]") as raised:
        load(name)
    return str(raised.value)


def test_how_text_is_split_is_asked_for(tmp_path: Path) -> None:
    path = ranks_file(tmp_path / "tokenizer.model")
    for name in (str(path), str(tmp_path)):
        message = refused(name)
        assert "is in tiktoken's format, which does not say how text is split" in message
        assert f"allowed: llama3:{path} or qwen:{path} for these models, or {path}.json" in message
    assert f"llama3:{path}" == absolute(f"llama3:{os.path.relpath(tmp_path)}")
    assert "no such file; allowed: byte, the path of a tokenizer.json" in refused(f"gpt9:{path}")


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    path = model_file(tmp_path / "a.model")
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-1], b"text\n" * 100, bytes(1000)):
        path.write_bytes(content)
        assert f"tokenizer {path} is no SentencePiece model, or it is truncated" in refused(
            str(path)
        )
    path.write_bytes(whole)
    assert "line 2: is b'" in refused(f"llama3:{path}")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "has no token of the byte 0x00"),
        ("{all}YWI=\n", "line 257: is b'YWI='; allowed: a token in base64"),
        ("{all}YWI 300\n", "line 257: Incorrect padding"),
        ("{all}YWI= -1\n", "line 257: is b'YWI= -1'; allowed"),
        ("{all}YWI= 7\n", "has a rank twice"),
        ("{all}YWI= 5000000000\n", "has a rank twice, or one beyond 2,147,483,647"),
        ("{all}YWI= 300\n", "has 257 ranks that are not 0 to 256, as llama3 has them"),
    ],
)
def test_a_damaged_file_of_ranks_is_named(tmp_path: Path, content: str, why: str) -> None:
    all_bytes = {bytes([byte]): byte for byte in range(256)}
    path = ranks_file(tmp_path / "a.tiktoken", all_bytes)
    path.write_text(content.replace("{all}", path.read_text()))
    message = refused(f"llama3:{path}")
    assert message.startswith(f"tokenizer {path}")
    assert why in message


@pytest.mark.parametrize(
    ("beside", "why"),
    [
        ("{", "is no JSON"),
        ("[]", "has another content; allowed: {"),
        ('{"pattern": "."}', "has another content"),
        ('{"pattern": "(", "special_tokens": {}}', "pattern: Parsing error at position 1"),
        (r'{"pattern": "\\w+|\\s+", "special_tokens": {}}', "pattern: it leaves out characters"),
        (r'{"pattern": ".", "special_tokens": {"<x>": 7}}', "'<x>' is 7; allowed: an integer"),
        (r'{"pattern": ".", "special_tokens": {"<x>": "a"}}', "'<x>' is 'a'; allowed"),
        (r'{"pattern": ".", "special_tokens": {"<x>": 999, "<y>": 999}}', "'<y>' is 999"),
    ],
)
def test_a_wrong_pattern_is_named(tmp_path: Path, beside: str, why: str) -> None:
    path = ranks_file(tmp_path / "a.tiktoken")
    (tmp_path / "a.tiktoken.json").write_text(beside)
    message = refused(str(path))
    assert message.startswith(f"{path}.json")
    assert why in message


def test_a_text_that_the_library_cannot_split_is_named(tmp_path: Path) -> None:
    tokenizer = load(f"llama3:{ranks_file(tmp_path / 'a.tiktoken')}")
    with pytest.raises(ValueError, match="cannot split a text of up to 1,000,001 characters"):
        tokenizer.encode_all(["a", "x" + " " * 1_000_000])


@pytest.mark.parametrize("package", ["sentencepiece", "tiktoken"])
def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    def missing(module: str) -> None:
        raise ImportError(module)

    is_tiktoken = package == "tiktoken"
    path = ranks_file(tmp_path / "a.tiktoken") if is_tiktoken else tmp_path / "a.model"
    if not is_tiktoken:
        model_file(path)
    monkeypatch.setattr(extras.importlib, "import_module", missing)
    message = refused(f"llama3:{path}" if is_tiktoken else str(path))
    assert message == f"{path} needs the package {package}; pip install 'outlast[corpora]'"


def test_an_encoding_of_the_library_is_taken_from_its_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    message = refused("tiktoken:cl100k_base")
    assert "tiktoken's cache has no https://" in message
    assert "/cl100k_base.tiktoken, and nothing is downloaded" in message
    assert re.search("no such encoding; allowed: gpt2, .*, o200k_base", refused("tiktoken:gpt9"))


# A plug-in, as the library has its own encodings: what it names is in the cache already, or here.
URL = "https://example.invalid/tiny.tiktoken"
PLUGIN = r"""
from tiktoken.load import load_tiktoken_bpe
def tiny():
    ranks, special = load_tiktoken_bpe("URL"), {"<|endoftext|>": 500}
    return dict(name="tiny", pat_str=r"\s+|\S+", mergeable_ranks=ranks, special_tokens=special)
ENCODING_CONSTRUCTORS = {"tiny": tiny}
"""


@pytest.mark.parametrize("is_cached", [True, False])
def test_the_command_takes_an_encoding_in_the_cache_or_of_a_file(
    tmp_path: Path, is_cached: bool
) -> None:
    url = URL if is_cached else str(tmp_path / "tiny.tiktoken")
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "tiny.py").write_text(PLUGIN.replace("URL", url))
    ranks_file(tmp_path / hashlib.sha1(URL.encode()).hexdigest() if is_cached else Path(url))
    (tmp_path / "a.txt").write_text("the fox <|endoftext|>")
    # In a process of its own: the library looks for plug-ins once.
    done = outlast_process(
        *("data", "prepare", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out")),
        *("--tokenizer", "tiktoken:tiny", "--processes", "1", "--json"),
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        TIKTOKEN_CACHE_DIR=str(tmp_path),
    )
    assert done.returncode == ExitCode.OK, done.stderr
    made = json.loads(done.stdout)
    assert (made["tokenizer"], made["vocab_size"]) == ("tiktoken:tiny", 501)
    ids = open_source(str(tmp_path / "out")).train.tokens().tolist()
    assert ids[-1] == 500
    assert 500 not in ids[:-1]


@pytest.mark.parametrize("kind", ["sentencepiece", "llama3"])
def test_the_command_prepares_with_either(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokenizer.model"
    name = f"llama3:{ranks_file(path)}" if kind == "llama3" else str(model_file(path))
    tokenizer = load(name)
    corpus = tmp_path / "a.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    given = ["data", "prepare", str(corpus), "--validation-fraction", "0", "--processes", "2"]
    made = outlast_json(*given, "--output", str(tmp_path / "out"), "--tokenizer", name)
    assert (made["tokenizer"], made["vocab_size"]) == (name, tokenizer.vocab_size)
    expected = [[*tokenizer.encode(text).tolist(), tokenizer.end_of_document] for text in TEXTS]
    source = open_source(str(tmp_path / "out"))
    assert source.train.tokens().tolist() == [id for ids in expected for id in ids]
    spec = tmp_path / "job.yaml"
    spec.write_text(
        f"name: a\nsteps: 5\nmodel: {{seq_len: 8, vocab_size: 300}}\n"
        f"data: {{tokens: {tmp_path / 'out'}, validation_fraction: 0.2}}\n"
    )
    small = outlast("data", "show", str(spec))
    assert small.returncode == ExitCode.BAD_INPUT
    assert f"has a vocabulary of {tokenizer.vocab_size}" in small.stderr
