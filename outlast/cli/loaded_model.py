"""A checkpoint's model with its tokenizer, for commands that use it on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli.errors import CliError
from outlast.cli.hugging_face import chosen_step, spec_for
from outlast.cli.job_folder import url_of

if TYPE_CHECKING:
    from checkpoint.storage.storage import Storage
    from outlast.spec import JobSpec
    from trainer.data.corpus.tokenizer_type import Tokenizer
    from trainer.generation import Model

TokenizerName = Annotated[
    str,
    typer.Option(
        metavar="byte|FILE",
        help="byte, or another that `outlast data prepare` takes; by default that of the job's "
        "data or of the imported folder.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model whose weights are those of a checkpoint."""

    spec: JobSpec
    step: int
    model: Model
    tokenizer: Tokenizer


def load_model(
    job: str, spec: Path | None, step: int | None, tokenizer: str, controller: str, state_dir: Path
) -> LoadedModel:
    """The model of a job's checkpoint, or of one at a URL with its spec.

    Raises:
        CliError: there is no such job, spec, checkpoint or tokenizer.
        OutlastError, ValueError: the checkpoint or the tokenizer cannot be read.
    """
    from checkpoint.storage.storage import Storage
    from trainer.data.corpus import tokenizer as tokenizers
    from trainer.generation import Model

    found = spec_for(job, spec, step, controller, state_dir)
    if found.model.attention == "bidirectional":
        raise CliError(
            f"{job} has a model that predicts hidden tokens (model.attention: bidirectional), and "
            "not what comes next; allowed: jobs with a causal model"
        )
    storage = Storage(url_of(job, controller, state_dir))
    chosen = chosen_step(storage, step)
    used = tokenizers.load(tokenizer or _tokenizer_of(found, storage, chosen))
    model = Model(found)
    model.load(storage, chosen)
    return LoadedModel(spec=found, step=chosen, model=model, tokenizer=used)


def _tokenizer_of(spec: JobSpec, storage: Storage, step: int) -> str:
    """The tokenizer of what a job trained on, else of the folder that was imported."""
    from contextlib import closing, suppress

    from checkpoint.hf.origin import converted_from, imported_folder
    from outlast.errors import OutlastError
    from outlast.remote.files import RemoteFiles
    from outlast.tokens.files import open_source
    from outlast.tokens.manifest import read_manifest
    from outlast.tokens.remote_file import is_remote
    from trainer.data.corpus.tokenizer import file_in

    for name in spec.data.weights:
        if is_remote(name):
            # One that is out of reach says nothing; --tokenizer does.
            with suppress(ValueError, OutlastError), closing(RemoteFiles(patience_s=10.0)) as files:
                tokenizer = open_source(name, files.open).tokenizer
                if tokenizer is not None:
                    return tokenizer
        if Path(name).is_dir():
            return read_manifest(Path(name)).tokenizer
    if spec.data.tokens is None and converted_from(storage, step) is None:
        return "byte"
    source = imported_folder(storage, step, spec)
    if source is not None and file_in(source) is not None:
        return str(source)
    raise CliError("which tokenizer the model has is not known; give --tokenizer")
