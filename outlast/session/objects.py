"""The objects of a script whose states a checkpoint holds, taken apart and brought back."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader

from outlast.session.shards import Sharding, sharding_of
from outlast.session.tree import Flat, Leaves, TensorOf, flatten, rebuild

# What the session adds by itself.
_RANDOM = "random"


class Stateful(Protocol):
    """What a checkpoint can hold, as torch's modules, optimizers and schedulers are."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class RandomStates:
    """The generators of random numbers of this process: Python's, numpy's and torch's."""

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        # One tensor, and not 625 numbers that are looked at one by one at each save.
        numbers = torch.frombuffer(array("q", words), dtype=torch.int64)
        python = {"version": version, "words": numbers, "gauss": gauss}
        found: dict[str, Any] = {"python": python, "torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            found["cuda"] = torch.cuda.get_rng_state()
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            found["numpy"] = numpy.get_state()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        python = state_dict["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state_dict["torch"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])
        if "numpy" in state_dict:
            import numpy as np

            np.random.set_state(state_dict["numpy"])


class Objects:
    """The objects of one checkpoint, by the names that the script gives them."""

    def __init__(self, given: Mapping[str, Stateful]) -> None:
        """Raises TypeError: one has no state that could be saved."""
        for name, each in given.items():
            missing = [
                method for method in ("state_dict", "load_state_dict") if not hasattr(each, method)
            ]
            if missing:
                raise TypeError(
                    f"session.checkpoint({name}=...) is a {type(each).__qualname__}, which has no "
                    f"{' and no '.join(missing)}; a loader that has them is torchdata's "
                    "StatefulDataLoader"
                )
        if _RANDOM in given:
            raise TypeError(f"session.checkpoint({_RANDOM}=...): the session saves it by itself")
        self._objects = dict(given)
        self._leaves: Leaves = {}
        self._random = RandomStates()

    def flatten(self) -> Flat:
        """The present states, taken apart."""
        flat = self._flatten(self._objects)
        self._leaves = flat.leaves
        return flat

    def _flatten(self, objects: Mapping[str, Stateful]) -> Flat:
        states = {name: each.state_dict() for name, each in objects.items()}
        own = [name for name in (*states, _RANDOM) if self._is_own(name)]
        return flatten({**states, _RANDOM: self._random.state_dict()}, own, self._leaves)

    def _is_own(self, name: str) -> bool:
        """Whether each rank has its own of an object's tensors that are not sharded."""
        owner = self._objects.get(name)
        return not isinstance(owner, nn.Module | torch.optim.Optimizer)

    def shardings(self) -> Callable[[str, tuple[int, ...]], Sharding | None]:
        """How the tensor of a path and a shape is spread, as far as the objects say.

        An optimizer that has done no step has no state yet: that of a parameter is spread as the
        parameter is.
        """
        # To say its state a loader may fork workers, which would have the connections that ranks
        # hold while they restore, and gloo aborts a process that closes one of those.
        others = {
            name: each for name, each in self._objects.items() if not isinstance(each, DataLoader)
        }
        known = {
            path: sharding
            for path, tensor in self._flatten(others).tensors.items()
            if (sharding := sharding_of(tensor)) is not None
        }
        parameters = {
            f"{name}.state.{index}.": parameter
            for name, each in self._objects.items()
            if isinstance(each, torch.optim.Optimizer)
            for index, parameter in enumerate(
                parameter for group in each.param_groups for parameter in group["params"]
            )
        }

        def found(path: str, shape: tuple[int, ...]) -> Sharding | None:
            if path in known:
                return known[path]
            parameter = parameters.get(path.rpartition(".")[0] + ".")
            if parameter is None or tuple(parameter.shape) != shape:
                return None
            return sharding_of(parameter)

        return found

    def load(self, text: str, inline: bytes, tensor_of: TensorOf) -> None:
        """Bring the states back that `flatten` took apart.

        Raises:
            ValueError: there is none for an object of the script.
        """
        states = rebuild(text, inline, tensor_of)
        missing = sorted(self._objects.keys() - states.keys())
        if missing:
            raise ValueError(
                f"the checkpoint has no state of {', '.join(missing)}; it was saved of "
                f"{', '.join(sorted(states.keys() - {_RANDOM}))}"
            )
        for name, each in self._objects.items():
            each.load_state_dict(states[name])
            if isinstance(each, DataLoader):
                self._keep_random_states(each)
        self._random.load_state_dict(states[_RANDOM])

    def _keep_random_states(self, loader: Any) -> None:
        """Have a loader's next iterator, which goes on in the midst of an epoch, draw nothing.

        A new iterator draws a seed for its workers; without the fault there would be no new one.
        """
        # That of accelerate has the one that iterates inside.
        loader = getattr(loader, "base_dataloader", loader)
        make = loader._get_iterator

        def make_one() -> Any:
            vars(loader).pop("_get_iterator", None)
            before = self._random.state_dict()
            iterator = make()
            self._random.load_state_dict(before)
            return iterator

        loader._get_iterator = make_one
