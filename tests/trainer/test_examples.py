"""The examples are valid specs, and their two models are the same one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec

EXAMPLES = Path(__file__).parents[2] / "examples"


def _spec(name: str) -> JobSpec:
    return parse_spec(yaml.safe_load((EXAMPLES / name).read_text()))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_an_example_is_a_valid_spec_named_after_its_file(path: Path) -> None:
    assert _spec(path.name).name == path.stem


def test_the_tiny_example_uses_every_dimension_and_the_dense_one_none() -> None:
    tiny, dense = _spec("gpt-tiny.yaml"), _spec("gpt-dense.yaml")
    assert (tiny.parallel.tp, tiny.parallel.pp, tiny.parallel.dp) == (2, 2, 2)
    assert tiny.parallel.sequence_parallel
    assert dense.layout.world_size == 1
    assert (tiny.model, tiny.optimizer, tiny.seed) == (dense.model, dense.optimizer, dense.seed)
    assert tiny.data == dense.data
