"""part="text" reads the text model of models that are not read as a whole: logits equal transformers' for all of them.

The models are tiny, with transformers' own towers, and saved by transformers' `save_pretrained`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto import modeling_auto

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.errors import ConfigError, MismatchError, UnsupportedError
from tests.support.cases import variants_of
from tests.support.oracle import assert_close

# {wrapper: the model type of the text in its default config}
WRAPPERS = {
    "fun_asr_nano": "qwen3",
    "fuyu": "persimmon",
    "hyperclovax_vision_v2": "hyperclovax",
    "lfm3_vl": "lfm3",
    "instructblip": "opt",
    "instructblipvideo": "opt",
    "got_ocr2": "qwen2",
    "idefics2": "mistral",
    "minicpm_ocr": "qwen3_5_text",
    "minicpmv4_6": "qwen3_5_text",
    "minicpmv4_7": "qwen3_5_text",
    "moss_transcribe_diarize": "qwen3",
    "muse_spark": "muse_spark_text",
    "musicflamingo": "qwen2",
    "nemotron_h_omni": "nemotron_h",
    "omniasr": "llama",
    "ovis2": "qwen2",
    "pp_chart2table": "qwen2",
    "shieldgemma2": "gemma3_text",
    "video_llama_3": "qwen2",
}
# Those whose text is read too, but of which this test makes no tiny model: why.
NOT_MADE = {
    "colmodernvbert": "a retriever around modernvbert, of no class that has logits",
    "colpali": "a retriever around paligemma, of no class that has logits",
    "gemma4_unified_assistant": "layers that draft for gemma4_unified and read its cache, no model by themselves",
    "grounding-dino": "a detector around an encoder",
    "mm-grounding-dino": "a detector around an encoder",
    "vision-text-dual-encoder": "two towers around an encoder",
    "jev": "of no class that has logits",
    "nemo_speechlm": "names of NeMo, llm.model.*.mixer._fp32_params.*, which the text's family does not have: not read",
    "deepseek_vl_hybrid": "its second tower, SAM's, has 7 million parameters at any size; the text is deepseek_vl's",
    "fast_vlm": "its tower is timm's, which is not installed",
    "janus": "its picture tokenizer has 70 million parameters at any size",
    "modernvbert": "an encoder, whose head is none of the text's",
    "perception_lm": "its tower is timm's, which is not installed",
    "vibevoice": "its tokenizers have a billion parameters at any size",
    "vibevoice_asr": "its tokenizers have a billion parameters at any size",
}
_TOWER = dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "depth", "num_layers"), 1)
_TOWER |= dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "encoder_ffn_dim", "d_model", "mlp_dim"), 32)
_TOWER |= dict.fromkeys(("hidden_dim", "output_dim", "out_channels", "projection_dim", "out_hidden_size"), 32)
_TOWER |= dict.fromkeys(("encoder_attention_heads", "num_attention_heads", "num_heads", "num_key_value_heads"), 2)
_TOWER |= {"image_size": 56, "patch_size": 14, "head_dim": 16, "num_position_embeddings": 16, "vocab_size": 61}
_MAPPINGS = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_LM", "SPEECH_SEQ_2_SEQ")


def _tiny_text(model_type: str) -> dict[str, Any]:
    """The first tiny variant of this type, without the soft-cap that transformers' wrapper of it leaves out."""
    family = fnmodels.families()[model_type].rpartition(".")[2]
    values = next(v for v in variants_of(family).variants().values() if v["model_type"] == model_type)
    return values | {"final_logit_softcapping": None} if model_type == "gemma3_text" else values


def _shrink(config: Any) -> None:
    """Tiny sizes for every object of a config."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _shrink(value)
        elif isinstance(value, int) and not isinstance(value, bool) and name in _TOWER:
            setattr(config, name, _TOWER[name])


def _class_of(model_type: str) -> Any:
    """The class with a head; audio models are in a mapping that transformers keeps for models without one too."""
    for mapping in _MAPPINGS:
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        if model_type in names:
            return getattr(transformers, names[model_type])
    name = modeling_auto.MODEL_MAPPING_NAMES[model_type]
    return getattr(transformers, name.removesuffix("Model") + "ForConditionalGeneration")


def _config(wrapper: str) -> Any:
    values = _tiny_text(WRAPPERS[wrapper])
    config = CONFIG_MAPPING[wrapper]()
    _shrink(config)
    config.text_config = AutoConfig.for_model(**values)
    if wrapper == "fun_asr_nano":
        config.adaptor_config.intermediate_size = values["hidden_size"] // 4
    if wrapper == "muse_spark":
        config.out_hidden_size = 4 * config.vision_config.hidden_size  # of a cell of 2 x 2 patches
        sizes: dict[str, Any] = {"patch_sizes": [4], "hidden_sizes": [16], "depths": [1], "num_hidden_layers": 1}
        config.audio_config = AutoConfig.for_model("muse_spark_audio", out_hidden_size=values["hidden_size"], **sizes)
    return config


def _saved(wrapper: str, folder: Path) -> Any:
    """transformers' model, every parameter generic, saved in the folder."""
    torch.manual_seed(0)
    model = _class_of(wrapper)(_config(wrapper)).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(0, 0.2) if tensor.ndim > 1 else tensor.normal_(0.5, 0.1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_text_of_a_wrapper_is_read_and_its_logits_are_transformers(wrapper: str, tmp_path: Path) -> None:
    model = _saved(wrapper, tmp_path)
    reports: list[P.LoadReport] = []
    config, params = P.load_pretrained(tmp_path, part="text", copy=True, report=reports.append)
    assert config.model_type == WRAPPERS[wrapper]
    assert P.load_config(tmp_path, part="text").model_type == config.model_type
    assert sum(reports[0].unread.values()) > 0
    tokens = torch.arange(3, 20)[None]
    inputs, masks, freqs_cis = fnmodels.prepare(config, tokens)
    ours = fnmodels.forward(params, inputs, masks, freqs_cis, config=config, kernel="math")
    with torch.no_grad():
        theirs = (model.language_model if "blip" in wrapper else model)(input_ids=tokens, use_cache=False).logits
    # these classes leave out the scale of the text's logits
    ours = ours / config.logit_scale if config.model_type == "cohere2" else ours
    assert_close(ours, theirs)


def test_every_wrapper_whose_text_is_read_is_tested_or_has_a_reason() -> None:
    known = fnmodels.families()
    missing = []
    for model_type in CONFIG_MAPPING:
        if model_type in fnmodels.models.common.registry.every_model():
            continue
        try:
            config = CONFIG_MAPPING[model_type]()
            text = config.get_text_config()
        except Exception:  # configurations that need arguments have no default text
            continue
        decodes = text.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if text is not config and text.model_type in known and decodes and hasattr(config, "text_config"):
            missing.append(model_type)
    untested = set(missing) - {*WRAPPERS, *NOT_MADE}
    print(f"\n{len(WRAPPERS)} wrappers tested, {len(NOT_MADE)} not made, {len(untested)} missing: {sorted(untested)}")
    assert not untested


def _small(folder: Path) -> dict[str, Any]:
    _saved("idefics2", folder)
    return json.loads((folder / "config.json").read_text())


def test_a_wrapper_as_a_whole_is_refused_with_the_way_to_its_text(tmp_path: Path) -> None:
    _small(tmp_path)
    with pytest.raises(UnsupportedError, match=r"as a whole; part=.text. reads its text model, 'mistral'"):
        P.load_pretrained(tmp_path)


def test_remote_names_of_the_object_and_a_missing_head_are_read(tmp_path: Path) -> None:
    values = _small(tmp_path)
    values["llm_config"] = values.pop("text_config")
    values |= {"model_type": "internvl_chat"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, params = P.load_pretrained(tmp_path, part="text", copy=True)
    assert not config.tie_word_embeddings and "lm_head" in params
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file)
    (tmp_path / "config.json").write_text(json.dumps({n: v for n, v in values.items() if n != "tie_word_embeddings"}))
    config, params = P.load_pretrained(tmp_path, part="text", copy=True)
    assert config.tie_word_embeddings and "lm_head" not in params
    (tmp_path / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": False}))
    with pytest.raises(MismatchError, match=r"lm_head.weight: missing"):
        P.load_pretrained(tmp_path, part="text")


def test_a_lost_tensor_of_the_text_and_two_texts_are_refused(tmp_path: Path) -> None:
    _small(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = {n: t for n, t in tensors.items() if n != "model.text_model.layers.1.mlp.up_proj.weight"}
    save_file(lost, file)
    with pytest.raises(MismatchError, match=r"layers.1.mlp.up_proj.weight: missing[\s\S]*begin with model.text_model"):
        P.load_pretrained(tmp_path, part="text")
    twice = {n.replace("model.text_model", "model.other_model"): t.clone() for n, t in tensors.items() if ".text" in n}
    save_file(tensors | twice, file)
    with pytest.raises(MismatchError, match=r"model.other_model.embed_tokens.weight and model.text_model.embed_tokens"):
        P.load_pretrained(tmp_path, part="text")


def test_sizes_that_are_left_out_are_those_of_transformers() -> None:
    from params.checkpoint.wrapped_text import DEFAULTS

    for model_type, sizes in DEFAULTS.items():
        reference = CONFIG_MAPPING[model_type]()
        assert {name: getattr(reference, name) for name in sizes} == sizes, model_type
        config = fnmodels.family_for(model_type).Config.from_hf({"model_type": model_type, **sizes})
        kv_heads = reference.num_key_value_heads or reference.num_attention_heads
        assert config.num_key_value_heads == kv_heads, model_type


def test_an_unread_text_is_named(tmp_path: Path) -> None:
    values = _small(tmp_path)
    values["text_config"]["model_type"] = "nobody"
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises((UnsupportedError, ConfigError), match=r"nobody|idefics2"):
        P.load_pretrained(tmp_path, part="text")


def test_a_loaded_text_saves_as_a_model_of_its_own(tmp_path: Path) -> None:
    _small(tmp_path)
    config, params = P.load_pretrained(tmp_path, part="text", copy=True)
    P.save_pretrained(tmp_path / "text", config, params)
    again, saved = P.load_pretrained(tmp_path / "text")
    assert again == config
    for path, leaf in tree.flatten(params).items():
        assert torch.equal(leaf, tree.flatten(saved)[path]), path
