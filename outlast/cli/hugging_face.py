"""`outlast import hf` and `outlast export hf`: weights of Hugging Face in, and out again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import output
from outlast.cli.connect import controller_of, find_job
from outlast.cli.errors import CliError
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.job_folder import Folder, is_url, nothing_there, url_of
from outlast.cli.options import Controller, Json, StateDir
from outlast.cli.progress import bytes_bar
from outlast.cli.usage import Commands

if TYPE_CHECKING:
    from checkpoint.hf.convert import Imported
    from checkpoint.hf.export import Exported
    from checkpoint.storage.storage import Storage
    from outlast.spec import JobSpec


class WeightType(StrEnum):
    """Types in which weights are exported."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


_Source = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="Folder with config.json and safetensors, as Hugging Face has them."
    ),
]
_Root = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="New checkpoint root, a path or an fsspec URL, for checkpoint.load."
    ),
]
_SpecOut = Annotated[
    Path | None,
    typer.Option("--spec", metavar="FILE", help="Write a job spec that begins with the weights."),
]
_Multiple = Annotated[
    int,
    typer.Option(
        "--vocab-multiple",
        metavar="N",
        min=1,
        help="Pad the vocabulary to a multiple of N rows, such as the tensor-parallel degree.",
    ),
]
SpecIn = Annotated[
    Path | None,
    typer.Option(
        "--spec",
        metavar="SPEC",
        help="The job's spec; not needed where a controller has the job, nor with the URL of a "
        "checkpoint that says what model it is of, as all but older ones do.",
    ),
]
_Target = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="New or empty folder, or one where the same export was cut off."
    ),
]
Step = Annotated[
    int | None, typer.Option("--step", metavar="STEP", min=0, help="The newest unless given.")
]
_Like = Annotated[
    Path | None,
    typer.Option(
        "--like",
        metavar="DIR",
        help="Folder of the same architecture; its tokenizer is copied, and what its config.json "
        "says besides the model.",
    ),
]
_Type = Annotated[
    WeightType | None,
    typer.Option(
        "--type",
        metavar="fp32|bf16|fp16",
        help="Of the weights; that of --like, or the one that the job computes in, unless given.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    into = Commands(no_args_is_help=True, help="Take over weights of other programs.")
    into.command("hf")(import_hf)
    app.add_typer(into, name="import")
    out_of = Commands(no_args_is_help=True, help="Write weights for other programs.")
    out_of.command("hf")(export_hf)
    app.add_typer(out_of, name="export")


def import_hf(
    source: _Source,
    url: _Root,
    spec: _SpecOut = None,
    vocab_multiple: _Multiple = 1,
    json: Json = False,
) -> None:
    """Make a folder of Hugging Face a checkpoint of step 0 that jobs begin with.

    It has weights only: `checkpoint.load: URL` in a spec with the same model section starts
    at step 0 with a fresh optimizer. A model that the trainer cannot compute exactly is
    refused, with the option that is lacking. An import that was cut off goes on where it was.
    """
    from checkpoint.hf.convert import import_bytes, import_folder
    from checkpoint.storage.storage import Storage

    if spec is not None and spec.exists():
        raise CliError(f"{spec} exists already; give another --spec")
    with as_messages():
        storage, size_bytes = Storage(url), import_bytes(source)
        with bytes_bar("importing", size_bytes, quiet=json) as on_bytes:
            done = import_folder(source, storage, vocab_multiple=vocab_multiple, on_bytes=on_bytes)
    document = _spec_of(done, url, source)
    if spec is not None:
        _write_yaml(spec, document)
    if json:
        output.print_json({**asdict(done), "url": url, "spec": document})
        return
    output.print_lines(
        [
            ("imported", f"{source}, a {done.family} of {done.parameters:,} parameters"),
            ("checkpoint", f"step 0 of {url}"),
            ("spec", f"{spec}" if spec else "model:"),
            *(() if spec else (("spec", f"  {key}: {_flow(v)}") for key, v in _shown(done))),
        ]
    )


def export_hf(
    job: Folder,
    target: _Target,
    spec: SpecIn = None,
    step: Step = None,
    like: _Like = None,
    weights: _Type = None,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Write the weights of a checkpoint as a folder that `transformers` loads.

    The architecture and the tokenizer are those of --like, by default of the folder that the
    weights were imported from; without one it is the first that has this model, and a model
    that no known architecture has is refused. Padding of the vocabulary is left out. An export
    that was cut off goes on where it was.
    """
    from checkpoint.hf.export import DTYPES, begun_step, export_bytes, export_folder, type_of
    from checkpoint.hf.origin import pattern_of_export
    from checkpoint.storage.storage import Storage

    # The job may have saved another one since an export was cut off.
    step = begun_step(target) if step is None else step
    trained = spec_for(job, spec, step, controller, state_dir)
    url = url_of(job, controller, state_dir)
    with as_messages():
        storage = Storage(url)
        chosen = chosen_step(storage, step)
        like = like or pattern_of_export(storage, chosen, trained)
        kind = type_of(like, trained.precision) if weights is None else weights.value
        with bytes_bar(f"step {chosen}", export_bytes(trained, kind), quiet=json) as on_bytes:
            done = export_folder(
                storage,
                chosen,
                trained.model,
                target,
                like=like,
                dtype=DTYPES[kind],
                on_bytes=on_bytes,
            )
    if json:
        output.print_json({**asdict(done), "folder": str(target)})
        return
    _print_exported(done, url, target, like)


def _print_exported(done: Exported, url: str, target: Path, like: Path | None) -> None:
    from outlast.cli.describe import size

    text = f"step {done.step} of {url} as {done.architecture}, {done.dtype}"
    output.print_lines(
        [
            ("exported", text),
            ("folder", f"{target}, {size(done.size_bytes)} of weights"),
            ("tokenizer", "none: give --like" if like is None else f"that of {like}"),
        ]
    )


def chosen_step(storage: Storage, step: int | None) -> int:
    """The step that is asked for, or the newest.

    Raises:
        CliError: there is no such checkpoint.
    """
    steps = sorted(storage.committed_steps())
    if not steps:
        raise nothing_there(storage, storage.url)
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        known = ", ".join(map(str, steps))
        raise CliError(f"{storage.url}: no checkpoint of step {chosen} (there: {known})")
    return chosen


def spec_for(
    job: str, spec: Path | None, step: int | None, controller: str, state_dir: Path
) -> JobSpec:
    """The spec that is given, what the checkpoint at a URL says of it, or that of the job that a
    controller has."""
    from outlast.problems import SpecError
    from outlast.spec.parse import accepted_spec
    from outlast.specfile import SpecFileError, read_document

    if spec is not None:
        # Whether the job could run here is no matter of its weights.
        try:
            return accepted_spec(read_document(spec).value)
        except (SpecFileError, SpecError) as error:
            raise CliError(f"{spec}: {error}") from error
    found = _saved_spec(job, step) if is_url(job) else None
    if found is not None:
        return found
    try:
        with controller_of(controller, state_dir) as client:
            name = job.rstrip("/").rpartition("/")[2]
            return accepted_spec(output.facts(find_job(client, name))["spec"])
    except CliError as error:
        raise CliError(f"what model {job} has is not known: {error}; give --spec") from error


def _saved_spec(url: str, step: int | None) -> JobSpec | None:
    from checkpoint.hf.origin import extra_of
    from checkpoint.storage.storage import Storage
    from outlast.spec.saved import saved_spec

    with as_messages():
        storage = Storage(url)
        return saved_spec(extra_of(storage, chosen_step(storage, step)))


def _spec_of(done: Imported, url: str, source: Path) -> dict[str, Any]:
    """A spec that begins with the weights."""
    letters = "".join(c if c.isalnum() else "-" for c in source.resolve().name.lower())
    name = letters.strip("-")[:53].strip("-") or done.family
    spec: dict[str, Any] = {"name": name, "model": dict(_shown(done)), "checkpoint": {"load": url}}
    if done.section.get("attention") == "bidirectional":
        order = _sentence_order(source) if done.section.get("sentence_order") else None
        spec["data"] = {"masked": _masked(source), **({"sentence_order": order} if order else {})}
    return spec


def _masked(source: Path) -> dict[str, Any]:
    """How BERT was trained, with the special tokens of the folder's tokenizer, if it has one."""
    from checkpoint.hf.folder import special_tokens

    special = special_tokens(source)
    found: dict[str, Any] = {"fraction": 0.15}
    mask = next((special.pop(each) for each in ("[MASK]", "<mask>") if each in special), None)
    if mask is not None:
        found["mask_token"] = mask
    return {**found, "never": sorted(special.values())} if special else found


def _sentence_order(source: Path) -> dict[str, Any]:
    from checkpoint.hf.folder import special_tokens

    special, names = special_tokens(source), {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    return {field: special[name] for field, name in names.items() if name in special}


def _shown(done: Imported) -> list[tuple[str, Any]]:
    """Fields that differ from their defaults."""
    from outlast.model import ModelSpec

    given = ModelSpec.model_validate(done.section).model_dump(mode="json", exclude_defaults=True)
    return list(given.items())


def _flow(value: object) -> str:
    import yaml

    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _write_yaml(path: Path, document: dict[str, Any]) -> None:
    import yaml

    path.write_text(yaml.safe_dump(document, sort_keys=False))


@contextmanager
def as_messages() -> Iterator[None]:
    from outlast.errors import OutlastError

    try:
        yield
    except (OutlastError, ValueError, OSError) as error:
        raise CliError(str(error)) from error
