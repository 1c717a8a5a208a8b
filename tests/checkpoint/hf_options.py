"""What options change in `transformers`: a program, as it takes long to import.

It prints, by name of a config, what our reader of configs takes for another value of an option
without a change to our model, and where that changes what `transformers` computes.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from checkpoint.hf.errors import UnsupportedModelError
from checkpoint.hf.options import IGNORED
from checkpoint.hf.sections import section_of
from tests.trainer.hf_models import CONFIGS, VOCAB, logits_of

_ROOT = Path(__file__).parents[2]
# What models have in common reads these, too.
_SHARED = ("is_causal", "is_decoder", "add_cross_attention", "tie_word_embeddings")
_READ = re.compile(r"config\.(\w+)|getattr\(\s*(?:self\.)?config,\s*[\"'](\w+)")
# How `transformers` computes, and what it returns beside. (With `output_attentions` its Falcon
# computes without a causal mask, whatever the model.)
_NOT_OF_MODELS = ("_attn_implementation", "_experts_implementation", "output_attentions")
# What every config has is tried with these.
_REPRESENTATIVE = ("llama-linear", "gpt2-of-rules", "bert", "mixtral")


def run() -> dict[str, list[str]]:
    """What the program prints."""
    command = [sys.executable, "-m", "tests.checkpoint.hf_options"]
    done = subprocess.run(
        command, check=True, cwd=_ROOT, timeout=500, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def options_of(name: str, model_class: Any, config: Any) -> list[str]:
    """What the code of a model reads of its config, and what the config says."""
    from transformers import PretrainedConfig

    source = inspect.getsource(sys.modules[model_class.__module__])
    read = {one or other for one, other in _READ.findall(source)}
    named = {*read, *config.to_dict()} - {*_NOT_OF_MODELS, *config.attribute_map}
    if name not in _REPRESENTATIVE:
        named -= {*IGNORED, *PretrainedConfig().to_dict()}
    named.update(_SHARED)
    return sorted(name for name in named if not callable(getattr(config, name, None)))


def others(value: Any) -> Iterator[Any]:
    """Values that an option might have instead."""
    match value:
        case bool():
            yield not value
        case int() | float():
            yield from (value + 1, value * 0.5, 0)
        case None:
            yield from (True, 1, 0.5, False)
        case str():
            yield from ("relu", "gelu")
        case dict():
            for name, inner in value.items():
                yield from ({**value, name: other} for other in others(inner))
        case list():
            yield value[::-1]
            for other in others(value[0]) if value else ():
                yield [other, *value[1:]]


def section_or_none(config: Mapping[str, Any]) -> Any:
    try:
        return section_of(config)
    except UnsupportedModelError:
        return None


def unread(name: str) -> list[str]:
    """What of a config may be set to another value without a change to what we make of it,
    though it changes what `transformers` computes."""
    import transformers

    class_name, config_class, given = CONFIGS[name]
    model_class = getattr(transformers, class_name)
    config = getattr(transformers, config_class)(**given)
    said = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [class_name]}
    section, expected = section_of(said), outputs_of(model_class, config)
    found = []
    for option in options_of(name, model_class, config):
        for other in others(said.get(option)):
            if section_or_none({**said, option: other}) != section:
                continue
            try:
                outputs = outputs_of(model_class, type(config).from_dict({**said, option: other}))
            except Exception:  # noqa: BLE001  # it is no config of `transformers`
                continue
            if not is_alike(outputs, expected):
                found.append(f"{option} = {other!r}")
    return found


def is_alike(one: Any, other: Any) -> bool:
    """Whether both are the same but for the order of sums."""
    return one.shape == other.shape and (one - other).abs().max() <= 1e-4 * other.abs().max()


def outputs_of(model_class: Any, config: Any) -> Any:
    """What a model of a config computes in training, of the same random numbers."""
    import torch

    torch.manual_seed(0)
    model = model_class(config).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(2, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return logits_of(model(tokens, use_cache=False))


def main() -> None:
    import torch

    torch.set_num_threads(1)
    names = sys.argv[1:] or CONFIGS
    print(json.dumps({name: found for name in names if (found := unread(name))}))


if __name__ == "__main__":
    main()
