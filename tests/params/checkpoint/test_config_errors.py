"""What a user reads who names a checkpoint that cannot be loaded."""

import json
from pathlib import Path

import pytest

import fnmodels
import params as P
from fnmodels.errors import ConfigError, UnsupportedError
from tests.support.cases import cases, generic_params


def test_the_file_of_a_wrong_value_is_named_once(tmp_path: Path) -> None:
    values = {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    values |= sizes | {"num_hidden_layers": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="'layer_types' has sliding layers, but 'sliding_window' is off") as caught:
        P.load_config(tmp_path)
    assert str(caught.value).count("config.json") == 1


LLAMA = next(case for case in cases() if case.name == "llama").config


@pytest.mark.parametrize("dtype", ["auto", "torch.bfloat16", "bfloat16", "float8_e4m3fn"])
def test_a_dtype_that_files_name_in_other_ways(dtype: str, tmp_path: Path) -> None:
    values = {**LLAMA.to_hf(), "torch_dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert P.load_config(tmp_path) == LLAMA
    (tmp_path / "config.json").write_text(json.dumps(values | {"dtype": "float16"}))
    if dtype == "auto":
        assert P.load_config(tmp_path) == LLAMA
    else:
        with pytest.raises(ConfigError, match="they disagree"):
            P.load_config(tmp_path)


def test_the_classes_that_are_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA.to_hf(), "architectures": ["LlamaForMultipleChoice"]}))
    classes = "LlamaForCausalLM, LlamaModel, LlamaForSequenceClassification, LlamaForTokenClassification"
    with pytest.raises(UnsupportedError, match=f"of 'llama' supported are {classes}") as caught:
        P.load_config(tmp_path)
    named = str(caught.value).rstrip(".").split("supported are ")[1].split(", ")
    for name in (*named, "LLaMAForCausalLM"):  # as the first files of it spell it
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA.to_hf(), "architectures": [name]}))
        P.load_config(tmp_path)


@pytest.mark.parametrize("projection", [0, 8])
def test_a_text_tower_has_no_head(projection: int, tmp_path: Path) -> None:
    """CLIP's text model with and without its projection, whose config has no field for labels."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 16}
    family = fnmodels.family_for("clip_text_model")
    config = family.Config(**sizes, projection=projection, model_type="clip_text_model")
    P.save_pretrained(tmp_path, config, generic_params(config))
    assert P.load_pretrained(tmp_path)[0] == config == P.load_pretrained(tmp_path, head="none")[0]
