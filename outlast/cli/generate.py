"""`outlast generate`: what a checkpoint's model makes of a prompt."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import output
from outlast.cli.errors import CliError, ExitCode
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.hugging_face import SpecIn, Step, as_messages, chosen_step, spec_for
from outlast.cli.job_folder import Folder, url_of
from outlast.cli.options import Controller, Json, StateDir

if TYPE_CHECKING:
    from checkpoint.storage.storage import Storage
    from outlast.spec import JobSpec

_Prompt = Annotated[str, typer.Option("--prompt", metavar="WORDS", help="What to go on with.")]
_MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        min=1,
        help="At most so many more; 32 unless given, or what model.seq_len leaves.",
    ),
]
_USUAL = 32
_Temperature = Annotated[
    float,
    typer.Option(metavar="T", min=0, help="0: always the likeliest token; 1: as they are likely."),
]
_Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of what is drawn.")]
TokenizerName = Annotated[
    str,
    typer.Option(
        metavar="byte|FILE",
        help="byte, or a tokenizer.json; by default that of the job's data or of the imported "
        "folder.",
    ),
]
_Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=1, help="After that it is an error.")
]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command("generate")(generate)


def generate(
    job: Folder,
    prompt: _Prompt,
    spec: SpecIn = None,
    step: Step = None,
    max_tokens: _MaxTokens = None,
    temperature: _Temperature = 0.0,
    seed: _Seed = 0,
    tokenizer: TokenizerName = "",
    timeout_s: _Timeout = 600.0,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Go on with a text as a checkpoint's model would, to see what it has learnt.

    It runs on this machine's CPU, in one process, and ends at the tokenizer's end of a
    document.
    """
    from checkpoint.storage.storage import Storage
    from trainer.data.corpus import tokenizer as tokenizers
    from trainer.generation import Model, Sampling

    until_s = time.monotonic() + timeout_s
    found = spec_for(job, spec, controller, state_dir)
    url = url_of(job, controller, state_dir)
    with as_messages():
        storage = Storage(url)
        chosen = chosen_step(storage, step)
        used = tokenizers.load(tokenizer or tokenizer_of(found, storage, chosen))
        model = Model(found)
        model.load(storage, chosen)
        given = used.encode(prompt).tolist()
        how = Sampling(
            max_tokens=max_tokens or min(_USUAL, max(1, found.model.seq_len - len(given))),
            temperature=temperature,
            seed=seed,
            stop=used.end_of_document,
        )
        try:
            tokens = list(model.go_on(given, how, until_s=until_s))
        except TimeoutError as error:
            raise CliError(f"--timeout {timeout_s:g}: {error}", ExitCode.JOB_FAILED) from error
    text = used.decode([*given, *tokens])
    if json:
        facts = {"step": chosen, "tokenizer": used.name, "prompt": prompt, "text": text}
        output.print_json({**facts, "tokens": tokens})
        return
    print(text)


def tokenizer_of(spec: JobSpec, storage: Storage, step: int) -> str:
    """The tokenizer of what a job trains on, else of the folder that was imported."""
    import json

    from outlast.tokens.manifest import read_manifest

    for name in spec.data.weights:
        if Path(name).is_dir():
            return read_manifest(Path(name)).tokenizer
    _, manifest = storage.read_commit(step)
    source = json.loads(manifest.parts[0].extra).get("converted_from")
    if source is not None and (Path(source) / "tokenizer.json").is_file():
        return str(source)
    if spec.data.tokens is None and source is None:
        return "byte"
    raise CliError("which tokenizer the model has is not known; give --tokenizer")
