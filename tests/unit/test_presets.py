"""Published models by name: their sizes are those that were published."""

from __future__ import annotations

from typing import get_args

import pytest

from outlast.cli.errors import ExitCode
from outlast.flops import Convention, flops_per_token
from outlast.presets import PRESETS, PresetName
from outlast.problems import SpecError
from outlast.sizing.of_spec import num_parameters
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from tests.cli.running import outlast, outlast_json

# Counted from the weights that their authors have released.
RELEASED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
}
# In billions, as printed: arXiv 1909.08053 table 1, 2104.04473 table 1, 2402.15627 table 1.
PRINTED = {
    "megatron-1.2b": "1.2",
    "megatron-2.5b": "2.5",
    "megatron-4.2b": "4.2",
    "megatron-8.3b": "8.3",
    "bert-336m": "0.336",
    "bert-1.3b": "1.3",
    "bert-3.9b": "3.9",
    "ptd-1.7b": "1.7",
    "ptd-3.6b": "3.6",
    "ptd-7.5b": "7.5",
    "ptd-18.4b": "18.4",
    "ptd-39.1b": "39.1",
    "ptd-76.1b": "76.1",
    "ptd-145.6b": "145.6",
    "ptd-310.1b": "310.1",
    "ptd-529.6b": "529.6",
    "ptd-1t": "1008.0",
    "megascale-175b": "175",
    "megascale-530b": "530",
    # The models' cards.
    "qwen3-0.6b": "0.6",
    "qwen3-1.7b": "1.7",
    "qwen3-4b": "4.0",
    "qwen3-8b": "8.2",
    "qwen3-14b": "14.8",
    "qwen3-32b": "32.8",
}


def spec_of(**model: object) -> JobSpec:
    document: dict[str, object] = {"name": "preset", "model": model}
    if "bert" in str(model["preset"]):
        document["data"] = {
            "masked": {"fraction": 0.15, "mask_token": 103, "never": [101, 102]},
            "sentence_order": {"cls_token": 101, "sep_token": 102},
        }
    return parse_spec(document)


def test_every_name_has_a_model_and_a_published_size() -> None:
    assert set(get_args(PresetName)) == set(PRESETS) == {*RELEASED, *PRINTED}


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_are_those_of_the_released_weights(name: str) -> None:
    assert num_parameters(spec_of(preset=name)) == RELEASED[name]


@pytest.mark.parametrize("name", PRINTED)
def test_parameters_are_those_of_the_paper(name: str) -> None:
    billions = PRINTED[name]
    decimals = len(billions.partition(".")[2])
    assert f"{num_parameters(spec_of(preset=name)) / 1e9:.{decimals}f}" == billions


def test_fields_beside_a_preset_count_instead_of_its_own() -> None:
    model = spec_of(preset="llama3-8b", layers=4, kv_heads=None).model
    assert (model.layers, model.num_kv_heads) == (4, 32)
    assert (model.hidden, model.norm, model.rope_theta) == (4096, "rmsnorm", 500_000.0)


def test_layers_have_the_name_that_other_programs_give_them() -> None:
    assert spec_of(preset="llama3-8b", num_layers=4).model.layers == 4
    with pytest.raises(SpecError) as caught:
        spec_of(preset="llama3-8b", num_layers=0)
    assert [problem.field for problem in caught.value.problems] == ["model.layers"]
    with pytest.raises(SpecError) as caught:
        spec_of(preset="llama3-8b", layers=4, num_layers=8)
    assert [problem.field for problem in caught.value.problems] == ["model.num_layers"]


def test_a_spec_that_was_written_out_is_the_same_model() -> None:
    spec = spec_of(preset="mistral-7b", window=512)
    assert parse_spec(spec.model_dump(mode="json")) == spec


# Of Mixtral the paper's abstract, of Qwen 3 the model's card.
@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3)])
def test_flops_are_those_of_the_experts_that_a_token_goes_to(name: str, billions: float) -> None:
    shape = spec_of(preset=name, window=None, seq_len=16).model.shape
    weights = flops_per_token(shape, Convention.FULL) / 6
    # The token table is looked up, not multiplied with.
    active = weights + shape.vocab_size * shape.hidden
    assert active / 1e9 == pytest.approx(billions, abs=0.06)


def test_a_wrong_preset_is_one_problem() -> None:
    # Heads that do not fit the default model's width may well fit the one that was meant.
    with pytest.raises(SpecError) as caught:
        spec_of(preset="llama3-8", heads=48)
    (problem,) = caught.value.problems
    assert problem.field == "model.preset"
    assert problem.message.endswith("(did you mean llama3-8b?)")


def test_a_wrong_field_beside_a_preset_is_one_problem() -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(preset="llama3-8b", layers="many")
    assert [problem.field for problem in caught.value.problems] == ["model.layers"]


def test_models_are_listed_with_their_sizes_in_80_columns() -> None:
    done = outlast("models", COLUMNS="80")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", *PRESETS]
    assert max(map(len, lines)) <= 80
    # 18 bytes of state in bf16, 12 of which are saved.
    row = next(line for line in lines if line.startswith("gpt2-xl"))
    assert " ".join(row.split()) == "gpt2-xl 1.558B 9.8 GFLOP 26.1 GiB 17.4 GiB Radford 2019"


def test_a_model_is_shown_as_a_spec_has_it() -> None:
    (found,) = outlast_json("models", "llama3-8b")["models"]
    assert (found["parameters"], found["precision"]) == (RELEASED["llama3-8b"], "bf16")
    assert found["state_bytes"] == 18 * RELEASED["llama3-8b"]
    shown = outlast("models", "llama3-8b").stdout
    assert "8,030,261,248" in shown
    assert "ffn_hidden: 14336" in shown


def test_an_unknown_model_is_refused_with_those_there_are() -> None:
    done = outlast("models", "llama-8b")
    assert done.returncode == ExitCode.BAD_INPUT
    assert "did you mean llama3-8b?" in done.stderr
    assert "megascale-175b" in done.stderr
