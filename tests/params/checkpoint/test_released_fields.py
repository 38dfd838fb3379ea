"""Fields and classes of published config.json files: without effect on the maths, or refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
from fnmodels.models.common.bookkeeping import is_bookkeeping
from fnmodels.models.presets import published
from tests.support.release_configs import written_by

GEMMA3 = written_by("5.24.0")["tiny/gemma3_images"]["minimal"]
WRAPPERS = {
    name: written_by("5.24.0")[f"tiny/{name}"]["minimal"]
    for name in (
        "gemma3_images",
        "llava_llama_images",
        "qwen3_vl_images",
        "pixel_shuffle_idefics3_images",
        "qwen2_audio_sounds",
    )
}


def read(values: dict[str, Any], folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(values))
    return P.load_config(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pad_vocab_size_multiple", 8),
        ("make_vocab_size_divisible_by", 128),
        ("bias_dropout_fusion", True),
        ("bias_gelu_fusion", False),
        ("apply_rope_fusion", True),
        ("language", "english"),
        ("languages", ["en", "de"]),
        ("name", "Roberta"),
        ("license", "mit"),
        ("neuron", {"compiler_version": "2.15"}),
        ("processor_class", "LlavaProcessor"),
        ("custom_pipelines", {"text-generation": {"impl": "x.X"}}),
        ("max_new_tokens", 256),
        ("use_liger_kernel", True),
        ("learning_rate", 1e-5),
    ],
)
def test_names_of_checkpoints_fusions_and_multiples_of_vocabularies_are_bookkeeping(name: str, value: Any) -> None:
    assert is_bookkeeping(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size_multiple_of_experts", 8),
        ("bias_dropout_fusion", "late"),
        ("late_fusion", True),
        ("modality_fusion", True),
        ("language", 3),
        ("name", {"a": 1}),
        ("neuron_size", 4),
        ("max_new_layers", 4),
        ("liger_attention_size", 3),
        ("languages", [1, 2]),
        ("language_adapter", "english"),
    ],
)
def test_fields_like_them_are_none(name: str, value: Any) -> None:
    assert not is_bookkeeping(name, value)


def test_fields_of_roberta_base_squad2(tmp_path: Path) -> None:
    plain = published()["roberta-base"] | {"architectures": ["RobertaForQuestionAnswering"]}
    config = read(plain, tmp_path)
    assert read(plain | {"language": "english", "name": "Roberta"}, tmp_path) == config


def test_jamba_without_inner_norms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(P.UnsupportedError, match="'mamba_inner_layernorms' is false; only true is supported"):
        read(published()["jamba-v0.1"] | {"mamba_inner_layernorms": False}, tmp_path)


@pytest.mark.parametrize("model_type", ["idefics3", "smolvlm"])
def test_towers_with_the_name_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    values = written_by("5.24.0")[f"tiny/pixel_shuffle_{model_type}_images"]["minimal"]
    config = read(values, tmp_path)
    assert config.model_type == model_type
    again = read(values | {"vision_config": values["vision_config"] | {"model_type": model_type}}, tmp_path)
    assert again == config and again.to_hf() == config.to_hf()


@pytest.mark.parametrize(
    ("preset", "known"),
    [
        ("bart-base", "BartForConditionalGeneration"),
        ("mbart-large-50", "MBartForConditionalGeneration"),
        ("whisper-tiny", "WhisperForConditionalGeneration"),
        ("moonshine-tiny", "MoonshineForConditionalGeneration"),
        ("t5-small", "T5ForConditionalGeneration"),
        ("t5gemma-2b-2b", "T5GemmaForConditionalGeneration"),
        ("opus-mt-en-de", "MarianMTModel"),
    ],
)
def test_another_class_of_a_pair_of_stacks_is_refused(preset: str, known: str, tmp_path: Path) -> None:
    name = known.replace("ForConditionalGeneration", "").replace("MTModel", "") + "Model"
    assert read(published()[preset] | {"architectures": [name]}, tmp_path).head == "none"
    with pytest.raises(P.UnsupportedError, match=rf'has \["{name}Odd"\]; supported are {known}, .*{name}\.'):
        read(published()[preset] | {"architectures": [name + "Odd"]}, tmp_path)


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_class_that_an_object_names_of_itself_counts_nothing(name: str, tmp_path: Path) -> None:
    """As in transformers, where only that of the whole model does."""
    values = WRAPPERS[name]
    config = read(values, tmp_path)
    changed = dict(values)
    for part in ("text_config", "vision_config", "audio_config"):
        if part in values:
            for declared in (
                ["Gemma3TextModel"],
                ["LlamaForSequenceClassification"],
                ["CLIPVisionModelWithProjection"],
            ):
                changed[part] = {**values[part], "architectures": declared}
                assert read(changed, tmp_path) == config
    assert P.load_config(tmp_path, part="text") == config.text and config.text.head == "lm"


def test_a_head_that_a_wrapper_lacks_is_not_listed(tmp_path: Path) -> None:
    with pytest.raises(P.UnsupportedError, match=r"supported are Gemma3ForConditionalGeneration, Gemma3Model\.$"):
        read(GEMMA3 | {"architectures": ["Gemma3ForSequenceClassification"]}, tmp_path)


def test_a_state_dict_in_the_place_of_pairs_is_named() -> None:
    config, tensors = object(), {"model.norm.weight": torch.ones(3)}
    for arguments in ((config, tensors), (tensors, config), (tensors.items(), config)):
        with pytest.raises(ValueError, match=r"they must be a Config and pairs: state_dict\.items\(\)"):
            P.from_tensors(*arguments)
