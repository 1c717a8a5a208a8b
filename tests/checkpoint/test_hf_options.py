"""No option of a `config.json` is passed over that changes what a model computes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.hf.convert import import_bytes
from checkpoint.hf.errors import DamagedFolderError, UnsupportedModelError
from checkpoint.hf.families import FAMILIES
from checkpoint.hf.sections import section_of
from tests.checkpoint import hf_options
from tests.checkpoint.test_hf_families import family_name
from tests.trainer.hf_models import CONFIGS

pytestmark = pytest.mark.hypothesis

# One of each family, as a file has it.
OF_FAMILIES = {
    family_name(config_class): {"model_type": family_name(config_class), **options}
    for _, config_class, options in CONFIGS.values()
    if "architectures" not in options
}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 10**13),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(0, 2), max_size=3),
    st.dictionaries(st.sampled_from(["factor", "rope_type", "full_attention"]), st.integers()),
)


def test_what_is_passed_over_changes_nothing_in_transformers() -> None:
    assert hf_options.run() == {}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_with_another_head_is_refused_by_its_architecture(name: str) -> None:
    config, family = OF_FAMILIES[name], FAMILIES[name]
    expected = section_of({**config, "architectures": [family.architecture]})
    assert section_of(config) == expected
    for other in ("Sequence", "Token"):
        head = family.architecture.partition("For")[0].removesuffix("LMHeadModel")
        architecture = f"{head}For{other}Classification"
        with pytest.raises(UnsupportedModelError, match=f"architectures .*{family.architecture}"):
            section_of({**config, "architectures": [architecture]})


@pytest.mark.parametrize("given", ["LlamaForCausalLM", ["LlamaForCausalLM", "Other"], [3], {}])
def test_architectures_are_a_list_of_known_classes(given: object) -> None:
    if given == {}:
        assert section_of({**OF_FAMILIES["llama"], "architectures": given})
        return
    with pytest.raises(UnsupportedModelError, match="architectures"):
        section_of({**OF_FAMILIES["llama"], "architectures": given})


@pytest.mark.parametrize("name", ["MPTForCausalLM", "MptForCausalLM", "MptModel"])
def test_an_architecture_may_be_the_one_of_a_models_own_code(name: str) -> None:
    config = OF_FAMILIES["mpt"]
    assert section_of({**config, "architectures": [name]}) == section_of(config)


@given(data=st.data())
def test_whatever_an_option_is_the_error_is_ours(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    family = FAMILIES[data.draw(st.sampled_from(sorted(FAMILIES)))]
    config: dict[str, Any] = dict(OF_FAMILIES[family.name])
    names = [option.theirs for option in family.options]
    names += [name for mixed in family.mixed for name in mixed.theirs]
    names += ["rope_parameters", "rope_scaling", "layer_types", "sliding_window", *config]
    for name in data.draw(st.lists(st.sampled_from(sorted(set(names))), min_size=1, max_size=2)):
        if data.draw(st.booleans()):
            config[name] = data.draw(VALUES)
        else:
            config.pop(name, None)
    folder: Path = tmp_path_factory.getbasetemp()
    (folder / "config.json").write_text(json.dumps(config))
    with suppress(UnsupportedModelError, DamagedFolderError):
        assert import_bytes(folder) > 0
