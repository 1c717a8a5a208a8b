"""States taken apart and put together again, and what is refused."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlast.session.tree import INLINE_BYTES, Leaves, flatten, rebuild, tensor_paths

_plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
_states = st.recursive(
    _plain,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
    ),
    max_leaves=20,
)


def round_trip(state: Any, *, is_own: bool = True) -> Any:
    flat = flatten({"it": state}, ["it"] if is_own else [])
    return rebuild(flat.text, bytes(flat.inline), lambda path, *_: flat.tensors[path])["it"]


@pytest.mark.hypothesis
@given(_states)
def test_what_json_cannot_say_comes_back_as_it_was(state: Any) -> None:
    found = round_trip(state)
    assert repr(found) == repr(state)


_KEYS = st.sampled_from(["a", "b", "a.b", 1, True])
_TENSORS = st.builds(
    torch.zeros,
    st.sampled_from([(), (2,), (2, 3)]),
    dtype=st.sampled_from([torch.float32, torch.int64]),
    requires_grad=st.just(False),
)
_TREES = st.recursive(
    _TENSORS | st.integers(0, 1),
    lambda inner: st.dictionaries(_KEYS, inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)


@pytest.mark.hypothesis
@given(st.lists(_TREES, min_size=2, max_size=4))
def test_what_is_known_of_earlier_states_changes_nothing(trees: list[Any]) -> None:
    leaves: Leaves = {}
    for tree in trees:
        found, fresh = flatten({"it": tree}, (), leaves), flatten({"it": tree})
        leaves = found.leaves
        assert found.text == fresh.text
        assert list(found.tensors) == list(fresh.tensors)
        assert all(found.tensors[name].is_set_to(fresh.tensors[name]) for name in fresh.tensors)


def test_a_state_that_differs_in_values_only_is_not_described_anew() -> None:
    first = flatten({"it": {"a": torch.zeros(2), "b": torch.zeros(3)}})
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    second = flatten({"it": state}, (), first.leaves)
    assert second.leaves["it"] is first.leaves["it"]
    assert second.text == first.text
    assert second.tensors == {"it.a": state["a"], "it.b": state["b"]}
    # One that has gone is kept no longer.
    assert not flatten({"other": 1}, (), second.leaves).leaves


def test_kinds_that_are_not_json_come_back() -> None:
    state = {
        "inf": -math.inf,
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "ordered": OrderedDict(a=1),
        "set": {1, 2},
        "number": np.float64(2.5),
        "huge": 2**200,
    }
    found = round_trip(state)
    assert found == {**state, "number": 2.5}
    assert type(found["ordered"]) is OrderedDict
    assert math.isnan(round_trip(math.nan))


@pytest.mark.parametrize("dtype", ["uint32", "float16", "complex128", "bool", "<U3"])
def test_arrays_come_back_with_their_type_and_shape(dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    found = round_trip(array)
    assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())
    found[0] = found[1]
    assert round_trip(np.empty((0, 4))).shape == (0, 4)


def test_small_tensors_of_a_rank_stand_behind_the_text_and_others_do_not() -> None:
    small, large = torch.arange(5), torch.zeros(INLINE_BYTES + 1, dtype=torch.uint8)
    flat = flatten({"own": [small, large], "model": {"w": small}}, ["own"])
    assert sorted(flat.tensors) == ["model.w", "own.1"]
    assert sorted(tensor_paths(flat.text, bytes(flat.inline))) == ["model.w", "own.1"]
    assert round_trip([torch.empty(0, 3), small.t(), torch.tensor(7.0)])[1].tolist() == [*range(5)]


def test_keys_with_dots_do_not_meet() -> None:
    one, other = torch.ones(1), torch.zeros(1)
    found = round_trip({"a": {"b": one}, "a.b": other}, is_own=False)
    assert (float(found["a"]["b"]), float(found["a.b"])) == (1.0, 0.0)


class _Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": [object()]}, "it.a.0 is a builtins.object"),
        ({"colour": _Colour.RED}, "it.colour is a tests.session.test_tree._Colour"),
        ({(1, 2): 3}, r"it has the key \(1, 2\)"),
        ({"o": np.array([object()])}, "it.o is a numpy.ndarray"),
        ({"s": torch.eye(2).to_sparse()}, "it.s is a torch.sparse_coo tensor"),
    ],
    ids=["object", "enum", "key", "array", "sparse"],
)
def test_what_cannot_come_back_is_refused_with_its_path(state: Any, path: str) -> None:
    with pytest.raises(TypeError, match=path):
        flatten({"it": state})
