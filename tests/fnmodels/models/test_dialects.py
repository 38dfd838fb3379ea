"""Older and newer forms of config.json that say the same: indexers of GLM-5, heads of Gemma 4, windows."""

from typing import Any

import pytest

import fnmodels
from fnmodels.errors import UnsupportedError
from fnmodels.models.decoder import deepseek_v32, gemma4
from fnmodels.models.decoder import modernbert_decoder as modernbert
from tests.variants import deepseek_v32 as deepseek_variants
from tests.variants import gemma4 as gemma_variants
from tests.variants import modernbert_decoder

GLM = deepseek_variants.variants()["glm_moe_dsa"]
V32 = deepseek_variants.variants()["deepseek_v32"]


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def test_which_layers_of_glm_have_an_indexer() -> None:
    """A list, a pattern of letters, or every so many layers: GLM-5.2's own fields say the same twice."""
    read = deepseek_v32.Config.from_hf
    assert read(without(GLM, "indexer_types") | {"index_topk_pattern": "FSFS"}) == read(GLM)
    newer = deepseek_variants.published()["glm_5_2"]
    assert "indexer_types" in newer and read(without(newer, "indexer_types")) == read(newer)
    every = read(without(newer, "indexer_types", "index_topk_freq", "index_skip_topk_offset"))
    assert not any("shared" in kind for kind in every.layer_kinds)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (without(GLM, "indexer_types") | {"index_topk_pattern": "FSF"}, r"_pattern' is .FSF., but must be 4"),
        (without(GLM, "indexer_types") | {"index_topk_pattern": "FSFX"}, '"FSFX", but must be 4 of F and S'),
        (GLM | {"indexer_types": ["full", "shared"]}, "must be a list of 4 entries, each 'full' or 'shared'"),
        (GLM | {"indexer_types": ["shared", "full", "full", "full"]}, "The first layer must have an indexer"),
        (V32 | {"layer_types": ["full_attention"] * 2}, "each 'indexed_attention' or 'deepseek_sparse_attention'"),
    ],
)
def test_wrong_indexers_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(fnmodels.errors.CheckpointError, match=said):
        deepseek_v32.Config.from_hf(values)


def test_both_names_of_attention_that_chooses_its_keys_are_read() -> None:
    read = deepseek_v32.Config.from_hf
    for name in ("indexed_attention", "deepseek_sparse_attention"):
        assert read(V32 | {"layer_types": [name] * 2}) == read(V32)


def test_the_heads_of_gemmas_full_layers_layer_by_layer() -> None:
    """As transformers saves them: one entry for each full layer, under its number in any form."""
    values = gemma_variants.TINY | {"attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
    own = {"head_dim": 16, "num_key_value_heads": 2}
    newer = without(values, "global_head_dim", "num_global_key_value_heads")
    for number in ("1", "01", "0001"):
        assert gemma4.Config.from_hf(newer | {"per_layer_config": {number: own}}) == gemma4.Config.from_hf(values)
    four = {"num_hidden_layers": 4, "layer_types": values["layer_types"] * 2}
    wrong: dict[str, dict[str, Any]] = {
        "an object for each of the layers": {"0": own},
        "must say the same of all full layers": {"1": own, "3": own | {"head_dim": 12}},
    }
    for said, given in wrong.items():
        with pytest.raises(fnmodels.errors.CheckpointError, match=said):
            gemma4.Config.from_hf(newer | four | {"per_layer_config": given})


def test_the_window_of_modernberts_decoder_may_stand_for_what_it_follows_from() -> None:
    """transformers 4.57 writes half of local_attention, as the window, and not local_attention itself."""
    values = {name: value for name, value in modernbert_decoder.TINY.items() if name != "local_attention"}
    assert modernbert.Config.from_hf(values | {"sliding_window": 5}).sliding_window == 5
    assert modernbert.Config.from_hf(values).sliding_window == 64
    with pytest.raises(UnsupportedError, match="'sliding_window' is 5; only 64 is supported here"):
        modernbert.Config.from_hf(values | {"sliding_window": 5, "local_attention": 128})
