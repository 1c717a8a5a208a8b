"""Sequences of whole documents: what is trained on, on every layout, and what is held out."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outlast import local_socket
from outlast.spec.parse import parse_spec
from outlast.tokens.writer import TokenWriter
from tests.cli.running import outlast, outlast_json
from tests.tokens.corpora import prepared, write
from tests.trainer import resuming
from tests.trainer.jobs import train
from tests.trainer.places import place_of
from tests.trainer.ranks import RankPool
from trainer.data.node import NodeLoader, SplitId
from trainer.data.serving import Server
from trainer.data.tokens import NO_TARGET
from trainer.parallel.pipeline import MicroBatch
from trainer.worker.feeding import Feeding, open_data, open_splits

SEQ_LEN = 16


def documents(seed: int, number: int, longest: int) -> list[list[int]]:
    """Ids of 1 and more, so that padding is known by its 0."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest + 1, number)
    return [generator.integers(1, 256, length).tolist() for length in lengths]


def spec_of(data: dict[str, Any], *, dp: int = 1) -> dict[str, Any]:
    return {
        "name": "a",
        "model": {"seq_len": SEQ_LEN, "vocab_size": 256},
        "data": {"global_batch": 4, "validation_fraction": 0.1, "packing": "whole", **data},
        "parallel": {"dp": dp},
    }


def opened(
    data: dict[str, Any], *, dp: int = 1, replica: int = 0, node: NodeLoader | None = None
) -> Feeding:
    mesh = place_of(replica)
    return open_data(parse_spec(spec_of(data, dp=dp)), mesh, Path("unused"), node)


def boxes(found: list[list[int]]) -> list[list[list[int]]]:
    """The documents of each sequence, one box filled after the other."""
    held: list[list[list[int]]] = [[]]
    for document in found:
        kept = document[: SEQ_LEN + 1]
        if sum(map(len, held[-1])) + len(kept) > SEQ_LEN + 1:
            held.append([])
        held[-1].append(kept)
    return held


def expected(box: list[list[int]]) -> tuple[list[int], list[int], list[int]]:
    """Tokens, targets and starts of a sequence, spelled out token by token."""
    tokens: list[int] = []
    targets: list[int] = []
    starts: list[int] = []
    for document in box:
        starts += [len(tokens)] * len(document)
        targets += [*document[1:], NO_TARGET]
        tokens += document
    padding = SEQ_LEN + 1 - len(tokens)
    starts += [len(tokens)] * padding
    tokens += [0] * padding
    targets += [NO_TARGET] * padding
    return tokens[:SEQ_LEN], targets[:SEQ_LEN], starts[:SEQ_LEN]


def columns(batches: list[MicroBatch]) -> list[tuple[list[int], list[int], list[int]]]:
    found = []
    for batch in batches:
        assert batch.starts is not None
        assert batch.num_predicted == int((batch.targets >= 0).sum())
        parts = (batch.tokens, batch.targets, batch.starts)
        found += list(zip(*(part.t().tolist() for part in parts), strict=True))
    return found


@pytest.mark.parametrize("longest", [1, 5, 17, 40])
def test_each_pass_has_all_documents_whole_and_padding_without_a_loss(
    tmp_path: Path, longest: int
) -> None:
    found = documents(longest, 150, longest)
    held = write(tmp_path / "held", [[9] * 30])
    data = {"tokens": str(write(tmp_path / "a", found)), "validation_tokens": str(held)}
    wanted = list(map(expected, boxes(found)))
    feeding = opened({**data, "global_batch": 1})
    assert feeding.has_unpredicted
    for begin in (1, 1 + len(wanted)):
        steps = range(begin, begin + len(wanted))
        read = [columns(feeding.train.micro_batches(step))[0] for step in steps]
        assert sorted(read) == sorted(wanted)
    assert columns(feeding.evaluations[""].micro_batches(1)) == [expected([[9] * 17])]


def test_what_is_held_out_is_never_trained_on(tmp_path: Path) -> None:
    found = documents(2, 400, 30)
    data = {"tokens": str(write(tmp_path / "a", found))}
    wanted = list(map(expected, boxes(found)))
    feeding = opened(data)
    steps = range(1, len(wanted))
    trained, held = (
        {str(each) for step in steps for each in columns(loader.micro_batches(step))}
        for loader in (feeding.train, feeding.evaluations[""])
    )
    assert not trained & held
    assert trained | held == set(map(str, wanted))
    assert 0.05 < len(held) / len(wanted) < 0.15


@pytest.fixture
def blend(tmp_path: Path) -> dict[str, Any]:
    one = write(tmp_path / "one", documents(3, 200, 30))
    splits = {"train": documents(4, 100, 9), "validation": documents(5, 40, 25)}
    two = prepared(tmp_path / "two", splits)
    change = {"from_step": 6, "tokens": {str(two): 1}}
    return {"tokens": {str(one): 3, str(two): 1}, "blend_changes": [change]}


def test_every_layout_and_restart_sees_the_same_batches(blend: dict[str, Any]) -> None:
    whole = opened(blend)
    through = {step: columns(whole.train.micro_batches(step)) for step in range(1, 10)}
    for dp in (2, 4):
        parts = [opened(blend, dp=dp, replica=replica) for replica in range(dp)]
        for step in (9, 1, 6):
            cut = [each for part in parts for each in columns(part.train.micro_batches(step))]
            assert cut == through[step]


def test_the_loader_of_a_node_reads_the_same(tmp_path: Path, blend: dict[str, Any]) -> None:
    splits = open_splits(parse_spec(spec_of(blend)), tmp_path)
    path = tmp_path / "socket"
    with local_socket.listen(path) as listening:
        server = Server(
            listening,
            {SplitId.TRAIN: splits.train, SplitId.EVALUATION: splits.evaluations[""]},
            steps_ahead=2,
            last_steps={SplitId.TRAIN: 9, SplitId.EVALUATION: 9},
        )
        thread = threading.Thread(target=server.serve)
        thread.start()
        alone, shared = opened(blend), opened(blend, node=NodeLoader(path, start_s=30))
        for one, other in (
            (alone.train, shared.train),
            (alone.evaluations[""], shared.evaluations[""]),
        ):
            for step in range(1, 6):
                read = [columns(each.micro_batches(step)) for each in (one, other)]
                assert read[0] == read[1]
        assert server.num_reads > 0
        for each in (alone, shared):
            each.train.close()
            each.evaluations[""].close()
        server.end()
        thread.join()
        server.close()


def test_a_completion_never_comes_without_its_prompt(tmp_path: Path) -> None:
    generator = np.random.default_rng(6)
    path = tmp_path / "a.jsonl"
    sizes = generator.integers(1, 12, (120, 2)).tolist()
    # Prompts are of p and completions of c, each with a letter of its own in front.
    pairs = [
        (chr(97 + number % 26) + "p" * prompt, chr(65 + number % 26) + "c" * completion)
        for number, (prompt, completion) in enumerate(sizes)
    ]
    path.write_text("".join(f"{json.dumps({'q': q, 'a': a})}\n" for q, a in pairs))
    folder = tmp_path / "out"
    asked = ["--prompt-field", "q", "--completion-field", "a", "--validation-fraction", "0.1"]
    outlast_json("data", "prepare", str(path), "--output", str(folder), "--processes", "1", *asked)
    feeding = opened({"tokens": str(folder)})
    seen = 0
    for step in range(1, 40):
        for tokens, targets, starts in columns(feeding.train.micro_batches(step)):
            for place, target in enumerate(targets):
                if target == NO_TARGET:
                    continue
                document = bytes(tokens[starts[place] : place + 1]).decode()
                assert document[0].islower()
                assert chr(target) == "c" or chr(target) == document[0].upper()
                seen += 1
    assert seen > 1000


def test_a_job_goes_on_with_the_same_sequences_and_with_no_others(
    ranks: RankPool, tmp_path: Path
) -> None:
    found = documents(7, 200, 20)
    data = {
        "tokens": str(write(tmp_path / "a", found)),
        "packing": "whole",
        "global_batch": 4,
        "validation_fraction": 0.1,
    }
    (tmp_path / "whole").mkdir()
    sections: dict[str, Any] = {"steps": 6, "precision": "fp64", "parallel": {"dp": 2}}
    sections |= {"eval": {"interval_steps": 3, "batches": 2}}
    spec = resuming.spec_of(tmp_path, data=data, **sections)
    ranks.run(train, 2, tmp_path / "whole", spec, 1, 0)
    resuming.train_and_upload(ranks, tmp_path, spec, attempt=1, stop_after=3)
    ranks.run(train, 2, tmp_path, spec, 2, 0)
    through = resuming.curve(resuming.steps_of(tmp_path / "whole", 1, 0))
    assert [step for step, *_ in through] == [1, 2, 3, 4, 5, 6]
    parts = [resuming.curve(resuming.steps_of(tmp_path, attempt, 0)) for attempt in (1, 2)]
    assert parts[0] + parts[1] == through
    other = resuming.spec_of(tmp_path, data={**data, "packing": "stream"}, **sections)
    ranks.run(train, 2, tmp_path, other, 3, 0)
    error = json.loads((tmp_path / "a3-rank-0.error.json").read_text())
    assert "was trained on other samples" in error["message"]
    assert "'packing': 'whole'" in error["message"]


SHOWN = ((20, 5), (40, 0), (10, 0), (10, 0), (1, 0))


def test_padding_and_cut_documents_are_shown(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "a", "uint16")
    for length, more in SHOWN:
        writer.add(np.ones(length, dtype=int), np.ones(more, dtype=int))
    writer.close()
    held = write(tmp_path / "held", [[9] * 30])
    spec = tmp_path / "job.yaml"
    data = {"tokens": str(tmp_path / "a"), "validation_tokens": str(held)}
    spec.write_text(json.dumps(spec_of(data)))
    (row,) = outlast_json("data", "show", str(spec))["sources"]
    assert row["sequences"] == 4
    # Rows of 17: 17 of 25, 17 of 40, 10, and 10 with 1.
    assert row["padding_share"] == pytest.approx(1 - (17 + 17 + 10 + 11) / (4 * 17))
    assert (row["documents_cut"], row["tokens_cut"]) == (2, 8 + 23)
    assert row["documents_without_loss"] == 1
    at_urls = {name: f"file://{path}" for name, path in data.items()}
    remote = tmp_path / "remote.yaml"
    remote.write_text(json.dumps(spec_of(at_urls)))
    (same,) = outlast_json("data", "show", str(remote))["sources"]
    assert {**same, "source": row["source"]} == row
    # The path takes a line of its own.
    _, header, _, cells = outlast("data", "show", str(spec)).stdout.splitlines()
    assert header.endswith("PADDING  CUT  NO LOSS")
    assert cells.split()[-3:] == ["19.1%", "2", "1"]
    spec.write_text(json.dumps(spec_of({**data, "packing": "stream"})))
    (row,) = outlast_json("data", "show", str(spec))["sources"]
    assert "padding_share" not in row
