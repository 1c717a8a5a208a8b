"""Several held-out sets: each has the loss that it has alone, and the job's is their mean."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from outlast import local_socket
from outlast.spec.parse import parse_spec
from tests.tokens.corpora import counted, write
from tests.trainer.jobs_numbers import evaluations
from tests.trainer.places import place_of
from tests.trainer.ranks import RankPool
from trainer.data.node import NodeLoader
from trainer.data.serving import Server
from trainer.worker.feeding import numbered, open_data, open_splits

MODEL = {"layers": 2, "hidden": 8, "heads": 2, "ffn_hidden": 8, "seq_len": 16, "vocab_size": 256}


def document(held_out: object, tokens: Path, **parallel: int) -> dict[str, Any]:
    return {
        "name": "a",
        "steps": 4,
        "model": MODEL,
        "parallel": parallel,
        "data": {"tokens": str(tokens), "validation_tokens": held_out, "global_batch": 4},
        "eval": {"interval_steps": 2, "batches": 2},
        "optimizer": {"lr": 0.01},
    }


@pytest.mark.parametrize("parallel", [{"dp": 2}, {"pp": 2}, {"tp": 2}])
def test_each_set_has_the_loss_that_it_has_alone(
    ranks: RankPool, tmp_path: Path, parallel: dict[str, int]
) -> None:
    tokens = write(tmp_path / "tokens", [counted(3000, vocab_size=200)])
    sets = {
        "web": str(write(tmp_path / "web", [counted(900, vocab_size=200)])),
        "code-2": str(write(tmp_path / "code", [[7] * 900])),
    }
    alone = {
        name: ranks.run(evaluations, 1, document(path, tokens), tmp_path / f"run-{name}")[0]
        for name, path in sets.items()
    }
    (one,) = ranks.run(evaluations, 1, document(sets, tokens), tmp_path / "one")
    for step in range(4):
        (whole, named) = one[step]
        if step % 2 == 0:
            assert (whole, named) == (None, {})
            continue
        # The same weights and sequences in the same order of arithmetic: the same bits.
        assert named == {name: alone[name][step][0] for name in sets}
        assert whole == (named["web"] + named["code-2"]) / 2
        assert all(each[step][1] == {} for each in alone.values())
    assert one[1][1]["web"] != one[1][1]["code-2"]
    for own in ranks.run(evaluations, 2, document(sets, tokens, **parallel), tmp_path / "two"):
        # Sums of float32 in another order.
        assert own[3][1] == pytest.approx(one[3][1], rel=1e-5)


def test_ranks_and_the_loader_of_their_node_mean_the_same_sets(tmp_path: Path) -> None:
    tokens = write(tmp_path / "tokens", [counted(900, vocab_size=200)])
    sets = {name: str(write(tmp_path / name, [[id_] * 100])) for name, id_ in (("b", 2), ("a", 1))}
    spec = parse_spec(document(sets, tokens))
    splits = open_splits(spec, tmp_path)
    read = numbered(splits)
    path = tmp_path / "socket"
    with local_socket.listen(path) as listening:
        server = Server(listening, read, steps_ahead=1, last_steps=dict.fromkeys(read, 2))
        thread = threading.Thread(target=server.serve)
        thread.start()
        node = NodeLoader(path, start_s=30)
        feeding = open_data(spec, place_of(), tmp_path, node)
        for name, id_ in (("a", 1), ("b", 2)):
            for batch in feeding.evaluations[name].micro_batches(1):
                assert batch.tokens.unique().tolist() == [id_]
        assert server.num_reads >= 2
        for loader in (feeding.train, *feeding.evaluations.values()):
            loader.close()
        server.end()
        thread.join()
        server.close()
