"""Bad data of issue 24's list: each is one error of `outlast plan`, with its field and a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import yaml

from outlast.cli.errors import CliError, ExitCode
from outlast.cli.places import Nodes, look
from outlast.cli.specfile import load_spec
from outlast.spec.parse import parse_spec
from outlast.tokens.fit import TokenSources
from tests.tokens.corpora import counted, prepared, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's folder, with one of each."""
    root = tmp_path_factory.mktemp("user")
    for name in ("good", "no_index", "cut", "cut_header", "cut_tokens"):
        write(root / name, [counted(100_000)])
    (root / "no_index.idx").unlink()
    for name, size in (("cut.idx", -9), ("cut_header.idx", 20), ("cut_tokens.bin", -2)):
        path = root / name
        path.write_bytes(path.read_bytes()[:size])
    write(root / "beyond", [[*counted(100_000), 999]])
    write(root / "short", [counted(17)])
    splits = {"train": [counted(9000)], "validation": [counted(900)]}
    prepared(root / "of_gpt2", splits, vocab_size=50_257)
    write(root / "of_letters", [[1]] * 9000)
    arrays = {
        "negative": np.tile([1, 2, -3], 50_000),
        "plain": np.zeros(100_000, np.uint8),
        "empty": np.zeros(0, np.uint16),
        "table": np.zeros((300, 400), np.int64),
        "floats": np.zeros(100_000),
    }
    for name, array in arrays.items():
        np.save(root / f"{name}.npy", array)
    (root / "cut.npy").write_bytes((root / "negative.npy").read_bytes()[:-1000])
    for name in ("web_pages", "not_done/parts"):
        (root / name).mkdir(parents=True)
    (root / "web_pages" / "page.html").write_text("text " * 9000)
    (root / "web_pages" / "LICENSE").write_text("text " * 9000)
    (root / "picture.txt").write_bytes(bytes(range(256)) * 100)
    (root / "note.txt").write_text("short")
    (root / "late.txt").write_bytes(b"text " * 500_000 + b"\0" + b"text " * 9000)
    return root


CASES: list[tuple[Mapping[str, object], str, str]] = [
    # Missing and truncated files.
    ({"tokens": "no_index"}, "data.tokens", "has no_index.bin and no no_index.idx beside it; copy"),
    ({"tokens": "cut"}, "data.tokens", "cut.idx is truncated: .*; copy it again"),
    ({"tokens": "cut_header"}, "data.tokens", "cut_header.idx is truncated"),
    ({"tokens": "cut_tokens"}, "data.tokens", "is truncated or of another corpus; copy both again"),
    ({"tokens": "cut.npy"}, "data.tokens", "is no array that can be read"),
    (
        {"tokens": "nowhere"},
        "data.tokens",
        "is 'nowhere', taken as '/.*/nowhere', which is neither",
    ),
    ({"tokens": "good", "validation_tokens": "nowhere"}, "data.validation_tokens", "is 'nowhere'"),
    (
        {"tokens": "good", "validation_tokens": {"a": "good", "b": "nowhere"}},
        "data.validation_tokens",
        "is .*/nowhere', which is neither",
    ),
    (
        {"tokens": "good", "validation_tokens": {"a": "good", "b": "beyond"}},
        "model.vocab_size",
        r"ids in data.validation_tokens = /.*/beyond \(999 is token 100000, counted from 0\) "
        "are of a vocabulary of 1000; allowed: 1000",
    ),
    (
        {"tokens": "good", "validation_tokens": {"a/b": "good"}},
        "data.validation_tokens",
        "has the name 'a/b'; allowed: letters, digits, '-', '_' and '.', at most 48 of them",
    ),
    (
        {"tokens": "good", "validation_tokens": {}},
        "data.validation_tokens",
        "has 0 sets; allowed: 1 to 16",
    ),
    (
        {"tokens": "good", "validation_tokens": {f"s{number}": "good" for number in range(17)}},
        "data.validation_tokens",
        "has 17 sets; allowed: 1 to 16",
    ),
    (
        {"tokens": "good", "validation_tokens": {"a": 3}},
        "data.validation_tokens",
        "allowed: text, or a section of",
    ),
    (
        {"validation_tokens": {"a": "good"}},
        "data.validation_tokens",
        "is given without data.tokens, which it needs",
    ),
    ({"tokens": "not_done"}, "data.tokens", "is not done: give the same `outlast data prepare`"),
    # Ids.
    ({"tokens": "beyond"}, "model.vocab_size", "of a vocabulary of 1000; allowed: 1000 or more"),
    ({"tokens": "of_gpt2"}, "model.vocab_size", "vocabulary of 50257; allowed: 50257 or more"),
    ({"tokens": "negative.npy"}, "data.tokens", "which has the id -3; allowed: 0 or more"),
    ({"tokens": "table.npy"}, "data.tokens", "in 2 dimension.*allowed: whole numbers in one"),
    ({"tokens": "floats.npy"}, "data.tokens", "an array of float64 .*allowed: whole numbers"),
    ({"tokens": "empty.npy"}, "data.tokens", "is an array of no tokens; give one with some"),
    (
        {"tokens": "plain.npy", "document_mask": True},
        "data.document_mask",
        "does not say where documents end; allowed: a folder of",
    ),
    ({"document_mask": True}, "data.document_mask", "is given without data.tokens, which it needs"),
    (
        {"tokens": "plain.npy", "reset_positions": True},
        "data.reset_positions",
        "is true; data.tokens = .* does not say where documents end; allowed: a folder of",
    ),
    (
        {"tokens": "plain.npy", "document_mask": True, "reset_positions": False},
        "data.document_mask",
        "is true; data.tokens = .* does not say where documents end",
    ),
    ({"reset_positions": True}, "data.reset_positions", "is given without data.tokens, which"),
    (
        {"tokens": "good", "reset_positions": "each"},
        "data.reset_positions",
        "is 'each'; allowed: true or false, or null",
    ),
    (
        {"tokens": "plain.npy", "packing": "whole"},
        "data.packing",
        "is whole; data.tokens = .* does not say where documents end; allowed: a folder of",
    ),
    (
        {"tokens": "good", "packing": "whole", "validation_tokens": "plain.npy"},
        "data.packing",
        "is whole; data.validation_tokens = .* does not say where documents end",
    ),
    ({"packing": "whole"}, "data.packing", "is given without data.tokens, which it needs"),
    ({"tokens": "good", "packing": "best"}, "data.packing", "is 'best'; allowed: stream or whole"),
    (
        {"tokens": "good", "packing": "whole"},
        "data.validation_fraction",
        "of 1 sequences in .* holds out 0; give data.packing: stream or data.validation_tokens",
    ),
    (
        {"tokens": "of_letters", "packing": "whole"},
        "model.seq_len",
        "in none of the 9,000 documents of .*, packed whole, a token is predicted",
    ),
    # Text where tokens belong, and the other way round.
    (
        {"tokens": "web_pages"},
        "data.tokens",
        "no folder of `outlast data prepare`, which makes one",
    ),
    ({"source": "web_pages"}, "data.source", "no .py, .txt, .rst, .md among its 2 files; give"),
    ({"source": "picture.txt"}, "data.source", "is not text but a binary file.*; give a text file"),
    (
        {"source": "late.txt"},
        "data.source",
        "and .*late.txt is not text but .*byte 2,500,000 is zero; leave it out, or take",
    ),
    ({"source": "cut.idx"}, "data.source", "an index of tokens; give it as data.tokens"),
    ({"source": "texts"}, "data.source", "is 'texts', taken as '/.*/texts', which is neither"),
    # Blends.
    ({"tokens": {"good": 0}}, "data.tokens", "has weights that sum to nothing; allowed: one more"),
    ({"tokens": {}}, "data.tokens", "has weights that sum to nothing; allowed: one more"),
    ({"tokens": {"good": float("nan")}}, "data.tokens", "weight .nan for /.*/good; allowed: a num"),
    ({"tokens": {"good": float("inf")}}, "data.tokens", "weight .inf for /.*/good; allowed: a num"),
    ({"tokens": {"good": True}}, "data.tokens", "allowed: text, or a section of paths and their"),
    # Too little.
    ({"tokens": "short"}, "model.seq_len", "has 17 tokens, fewer than one sequence.* 1 to 16"),
    (
        {"tokens": "good", "validation_fraction": 0.001},
        "data.validation_fraction",
        "of 781 sequences in .* holds out 0; allowed: 0.0013 or more",
    ),
    ({"source": "note.txt"}, "model.seq_len", "fewer than one sequence and its next token; give"),
]


@pytest.mark.parametrize(("data", "field", "message"), CASES)
def test_bad_data_is_refused_by_field_before_anything_starts(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: Mapping[str, object],
    field: str,
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    spec = folder / "job.yaml"
    spec.write_text(yaml.safe_dump({"name": "a", "data": data}))
    with pytest.raises(
        CliError, match=rf"job.yaml has a problem:\n  {field}: .*{message}"
    ) as error:
        load_spec(spec, [], Nodes.HERE)
    assert error.value.code == ExitCode.BAD_INPUT


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("optimizer", {"lr": float("inf")}, "optimizer.lr: is .inf; allowed: a number, more than"),
        ("parallel", {"tp": True}, "parallel.tp: is true; allowed: a whole number, 1 or more"),
    ],
)
def test_numbers_that_are_none_are_refused(
    folder: Path, section: str, value: object, message: str
) -> None:
    spec = folder / "job.yaml"
    spec.write_text(yaml.safe_dump({"name": "a", section: value}))
    with pytest.raises(CliError, match=message):
        load_spec(spec, [], Nodes.HERE)


def test_the_fraction_that_is_proposed_holds_something_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    spec = folder / "job.yaml"
    data = {"tokens": "good", "validation_fraction": 0.0013}
    spec.write_text(yaml.safe_dump({"name": "a", "data": data}))
    assert load_spec(spec, [], Nodes.HERE).spec.data.validation_fraction == 0.0013


def test_the_order_in_which_a_blend_is_written_says_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    texts = ("{good: 1, beyond: 2}", "{beyond: 2, good: 1}")
    found = []
    for text in texts:
        (folder / "job.yaml").write_text(
            f"name: a\ndata: {{tokens: {text}}}\nmodel: {{vocab_size: 1000}}\n"
        )
        found.append(list(load_spec(folder / "job.yaml", [], Nodes.HERE).spec.data.weights))
    assert found[0] == found[1]


REMOTE_CASES: list[tuple[Mapping[str, object], str, str]] = [
    ({"tokens": "{url}/nowhere"}, "data.tokens", "which is neither .*; check the bucket and the"),
    ({"tokens": "memory://no-such-bucket/web"}, "data.tokens", "which is neither .*; check the"),
    ({"tokens": "{url}/nowhere.npy"}, "data.tokens", "which is not there; check the bucket"),
    ({"tokens": "{url}/no_index"}, "data.tokens", "has no_index.bin and no no_index.idx beside"),
    ({"tokens": "{url}/cut"}, "data.tokens", "cut.idx is truncated: .*; copy it again"),
    ({"tokens": "{url}/cut_header"}, "data.tokens", "cut_header.idx is truncated"),
    ({"tokens": "{url}/cut_tokens"}, "data.tokens", "is truncated or of another corpus; copy both"),
    ({"tokens": "{url}/cut.npy"}, "data.tokens", "is no array that can be read.*copy it again"),
    ({"tokens": "{url}/table.npy"}, "data.tokens", "in 2 dimension.*allowed: whole numbers in one"),
    ({"tokens": "{url}/floats.npy"}, "data.tokens", "an array of float64 .*allowed: whole numbers"),
    ({"tokens": "{url}/empty.npy"}, "data.tokens", "is an array of no tokens; give one with some"),
    ({"tokens": "{url}/note.npy"}, "data.tokens", "is no array that can be read"),
    ({"tokens": "{url}/good", "validation_tokens": "{url}/no"}, "data.validation_tokens", "is 'me"),
    ({"tokens": "{url}/beyond"}, "model.vocab_size", "vocabulary of 1000; allowed: 1000 or more"),
    ({"tokens": "{url}/of_gpt2"}, "model.vocab_size", "vocabulary of 50257; allowed: 50257 or"),
    ({"tokens": "{url}/negative.npy"}, "data.tokens", "which has the id -3; allowed: 0 or more"),
    (
        {"tokens": "{url}/plain.npy", "document_mask": True},
        "data.document_mask",
        "does not say where documents end; allowed: a folder of",
    ),
    (
        {"tokens": "{url}/of_letters", "packing": "whole"},
        "model.seq_len",
        "in none of the 9,000 documents of .*, packed whole, a token is predicted",
    ),
    ({"tokens": "{url}/short"}, "model.seq_len", "short.bin of data.tokens has 17 tokens, fewer"),
    ({"tokens": "gopher://a/b"}, "data.tokens", "there is no store 'gopher'.*; allowed: an abs"),
    ({"tokens": "file://a/b"}, "data.tokens", "a file URL has three slashes, as in file:///corpus"),
]


@pytest.mark.parametrize(("data", "field", "message"), REMOTE_CASES)
def test_bad_data_at_a_url_is_refused_alike(
    folder: Path, tmp_path: Path, data: Mapping[str, object], field: str, message: str
) -> None:
    """Before anything starts, and without a copy of it."""
    fs = fsspec.filesystem("memory")
    bucket = f"/{tmp_path.name}"
    for path in folder.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"{bucket}/{path.relative_to(folder)}", path.read_bytes())
    fs.pipe_file(f"{bucket}/note.npy", b"no array")
    given = {
        name: value.replace("{url}", f"memory:/{bucket}") if isinstance(value, str) else value
        for name, value in data.items()
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"name": "a", "data": given}))
    with pytest.raises(CliError, match=rf"a problem:\n  {field}: .*{message}") as error:
        load_spec(tmp_path / "job.yaml", [], Nodes.HERE)
    assert error.value.code == ExitCode.BAD_INPUT


def test_packed_tokens_at_a_url_are_looked_at_and_nothing_is_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tokens = f"file://{folder}/of_letters"
    data = {"tokens": tokens, "packing": "whole", "validation_fraction": 0.1}
    spec = parse_spec({"name": "a", "data": data, "model": {"seq_len": 16}})
    seen = look(spec, {}, Nodes.HERE)
    assert isinstance(seen.source, TokenSources)
    # 17 tokens of 9,000 documents of one.
    (packing,) = seen.source.packings.values()
    assert packing.num_sequences == 530
    assert list(tmp_path.iterdir()) == []


def test_a_shorter_sequence_is_recommended_where_documents_share_one(folder: Path) -> None:
    tokens = str(folder / "of_letters")
    data = {"tokens": tokens, "packing": "whole", "validation_fraction": 0.001}
    spec = parse_spec({"name": "a", "data": data, "model": {"seq_len": 4096}})
    assert any(
        "holds out 0; " in each.message and "give a shorter model.seq_len or " in each.message
        for each in look(spec, {}, Nodes.HERE).problems
    )


def test_a_full_disk_of_this_machine_is_no_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_bavail=4, f_blocks=100, f_frsize=1000)
    monkeypatch.setattr("outlast.remote.disk.os.statvfs", lambda path: disk)
    data = {"tokens": f"file://{folder}/good", "packing": "whole"}
    (problem,) = look(parse_spec({"name": "a", "data": data}), {}, Nodes.HERE).problems
    assert problem.field == "data.tokens"
    assert "cannot be looked at now: no room for 62 bytes of good.idx" in problem.message


def test_a_store_that_does_not_answer_is_no_fault_of_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is named where the nodes are this machine; elsewhere it is a warning."""

    def info(*given: object, **options: object) -> object:
        raise ConnectionResetError("reset by peer")

    monkeypatch.setattr("outlast.cli.places._PATIENCE_S", 0.1)
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", info)
    spec = parse_spec({"name": "a", "data": {"tokens": "memory://bucket/web"}})
    seen = look(spec, {}, Nodes.HERE)
    (problem,) = seen.problems
    assert problem.field == "data.tokens"
    assert problem.message.startswith("cannot be looked at now: storage memory://bucket/web: ")
    assert "reset by peer" in problem.message
    assert look(spec, {}, Nodes.ELSEWHERE).problems == ()
