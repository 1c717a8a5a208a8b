"""A folder as `save_pretrained` writes it: a config, and weights in one file or several."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.core.checked_json import canonical, sha256
from checkpoint.hf.errors import DamagedFolderError
from checkpoint.hf.family import Family
from checkpoint.hf.rules import Rule
from checkpoint.hf.tensor_files import TensorFile

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What a tokenizer may consist of, and how text is generated.
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja"),
    *("generation_config.json", "vocab.txt", "spiece.model"),
)
# Those of them in which ids are.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
# Constants that older versions of `transformers` have saved beside weights.
_CONSTANTS = (
    *(".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"),
    *(".attention.bias", ".attention.masked_bias"),
)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`.

    Raises:
        DamagedFolderError: there is none, or it is not JSON.
    """
    return _read_json(folder / CONFIG)


def special_tokens(folder: Path) -> dict[str, int]:
    """Ids of the tokenizer's special tokens; none where the folder has no `tokenizer.json`."""
    path = folder / "tokenizer.json"
    added = _read_json(path).get("added_tokens", []) if path.exists() else []
    return {each["content"]: each["id"] for each in added if each.get("special")}


def fingerprint(folder: Path) -> str:
    """The same for as long as its configuration and its files of weights are the same."""
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.glob("*.safetensors"))
    ]
    return sha256(canonical({"config": read_config(folder), "files": files}))


class Weights(Mapping[str, Tensor]):
    """Tensors of a folder by name, each read when it is asked for."""

    def __init__(
        self, files: Mapping[str, TensorFile], family: Family, *, outlines: bool = False
    ) -> None:
        self._files, self._family, self._outlines = files, family, outlines

    def __getitem__(self, name: str) -> Tensor:
        for stored in self._names(name):
            if stored in self._files:
                file = self._files[stored]
                return file.outline(stored) if self._outlines else file.read(stored)
        raise DamagedFolderError(f"no file of weights has {name}")

    @property
    def outlines(self) -> Mapping[str, Tensor]:
        """The same tensors without their values."""
        return Weights(self._files, self._family, outlines=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def check_used(self, rules: tuple[Rule, ...], *, is_tied: bool) -> None:
        """Raise DamagedFolderError where a tensor is there that no rule reads.

        Copies of what is tied may be there, and the same.
        """
        used = {stored for rule in rules for name in rule.theirs for stored in self._names(name)}
        unused = [
            name
            for name in self
            if name not in used and not name.endswith(_CONSTANTS) and not self._is_of_others(name)
        ]
        for copy, original in self._copies(is_tied).items():
            if copy not in unused:
                continue
            if not torch.equal(self[original], self[copy]):
                raise DamagedFolderError(
                    f"{copy} differs from {original}, though config.json says that they are tied"
                )
            unused.remove(copy)
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise DamagedFolderError(
                f"the model that config.json describes has no {', '.join(unused[:3])}{more}"
            )

    def _names(self, name: str) -> Iterator[str]:
        """What it may be called in files."""
        older = (name.replace(*each) for each in self._family.older_names.items())
        for each in (name, *older):
            yield from (each, each.removeprefix(self._family.prefix))

    def _copies(self, is_tied: bool) -> dict[str, str]:
        table, copy = self._family.tables
        return {**self._family.copies, **({copy: table} if is_tied else {})}

    def _is_of_others(self, name: str) -> bool:
        """Whether it belongs to a head that the model is without."""
        prefix = self._family.prefix
        return any(
            name.startswith((each, each.removeprefix(prefix))) for each in self._family.unused
        )


@contextmanager
def opened(folder: Path, family: Family) -> Iterator[Weights]:
    """The weights of a folder; names may lack the prefix of the family, as those of a model
    without a head do.

    Raises:
        DamagedFolderError: a file is missing or damaged.
    """
    paths = [folder / WEIGHTS]
    if (folder / INDEX).exists():
        named = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(named, dict) or not all(map(_is_file_name, named.values())):
            raise DamagedFolderError(f"{folder / INDEX} has no weight_map of names of files")
        paths = [folder / name for name in dict.fromkeys(named.values())]
    elif not paths[0].exists():
        raise DamagedFolderError(
            f"{folder} has no {WEIGHTS}; weights in another format are saved as such by "
            "`save_pretrained` of transformers"
        )
    files = []
    try:
        for path in paths:
            files.append(TensorFile(path))
        yield Weights({name: file for file in files for name in file.names}, family)
    finally:
        for file in files:
            file.close()


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DamagedFolderError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise DamagedFolderError(f"{path}: not a mapping")
    return found
