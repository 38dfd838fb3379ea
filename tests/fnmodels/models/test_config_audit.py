"""Fields of config.json by kinds: bookkeeping, restated, off, repeated by a wrapper; and those that stay an error."""

from typing import Any

import pytest
import transformers

import fnmodels
from fnmodels.models.common import bookkeeping
from fnmodels.models.common.registry import family_reading
from fnmodels.models.presets import published
from tests.support.release_configs import written_by

LLAMA = {"model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "rms_norm_eps": 1e-5}
CLIP, LLAVA, MISTRAL = (
    published()[name] for name in ("clip-vit-base-patch32", "llava-1.5-7b", "mistral-small-3.1-24b")
)
QWEN3, DEEPSEEK, BERT = (published()[name] for name in ("qwen3-0.6b", "deepseek-v3", "bert-base-uncased"))
MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA = published()["gemma-2-2b"]
SLIDING = {**LLAMA, "model_type": "mistral", "sliding_window": 8, "num_key_value_heads": 2}
HUNYUAN = {**LLAMA, "model_type": "hunyuan_v1_dense"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_FIVE = written_by("5.24.0")["tiny/qwen3_5_images"]["minimal"]
FIVE_MOE = written_by("5.24.0")["tiny/qwen3_5_moe_images"]["minimal"]
VL = published()["qwen2.5-vl-7b"]
IDEFICS = written_by("5.24.0")["tiny/pixel_shuffle_idefics3_images"]["minimal"]
_RESAMPLER = {"perceiver_config": {"resampler_depth": 6}, "use_resampler": False, "qk_layer_norms": False}
_RESAMPLER |= {"pixel_shuffle_factor": 2, "neftune_noise_alpha": 0.0}
YARN: dict[str, Any] = LLAMA | {
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "max_position_embeddings": 64,
}


def read(values: dict[str, Any], part: str | None = None) -> Any:
    return family_reading(values, part).Config.from_hf(values)


def inside(values: dict[str, Any], part: str, **more: Any) -> dict[str, Any]:
    """The file with more fields in its object `part`."""
    return values | {part: {**values.get(part, {}), **more}}


_TEXT_OF_FIVE = {"output_gate_type": "swish", "mlp_only_layers": [], "partial_rotary_factor": 0.5}
_TEXT_OF_FIVE |= {"mtp_use_dedicated_embeddings": False, "mamba_ssm_dtype": "float32"}


CHANGES_NOTHING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {"transformers.js_config": {"kv_cache_dtype": {}}, "_attn_implementation": "eager"}),
    (LLAMA, {"unsloth_fixed": True, "trl_version": "1.0", "axolotl_config": "a.yml", "use_flash_attn": False}),
    (LLAMA, {"mask_token_id": 3, "im_start_id": 4, "seq_length": 8, "router_z_loss_coef": 0.1, "init_std": 0.1}),
    (LLAMA, {"ignore_index": -100, "generation_config": {"top_p": 0.9}, "attention_dropout_prob": 0.1}),
    (LLAMA, {"n_layer": 2, "n_embd": 32, "n_inner": 44, "layer_norm_eps": 1e-5, "kv_channels": 8}),
    (LLAMA, {"use_cla": False, "cla_share_factor": 2, "language_model_only": False, "use_mla": False}),
    (LLAMA, {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}),
    (BERT, {"sentence_transformers": {"version": "4.1.0"}, "total_flos": 10**15, "gradient_checkpointing": True}),
    (published()["bamba-9b"], {"time_step_min": 0.001, "time_step_max": 0.1}),
    (DEEPSEEK, {"num_experts": 256, "num_local_experts": 256, "moe_router_dtype": "float32"}),
    (HUNYUAN, {"attention_head_dim": 8, "norm_type": "rms", "mlp_bias": False, "use_rotary_pos_emb": True}),
    (CLIP, {"tie_word_embeddings": True}),
    (CLIP, inside(CLIP, "text_config", tie_word_embeddings=True)),
    (CLIP, inside(CLIP, "vision_config", tie_word_embeddings=True)),
    (LLAVA, inside(LLAVA, "vision_config", vocab_size=32000) | {"ignore_index": -100, "vocab_size": 32064}),
    (LLAVA, {"tie_word_embeddings": True}),
    (_FIVE, inside(_FIVE, "text_config", **_TEXT_OF_FIVE) | {"language_model_only": False}),
    (FIVE_MOE, inside(FIVE_MOE, "text_config", **_TEXT_OF_FIVE) | {"language_model_only": False}),
    (_FIVE, inside(_FIVE, "text_config", output_gate_type="silu") | {"quantization_config": FP8}),
    (MISTRAL, {"quantization_config": FP8}),
    (BERT, {"num_labels": 2, "_num_labels": 3}),
    (QWEN3, {"num_labels": 2}),
    (QWEN3, {"use_bias": False, "bias": False, "qkv_bias": False, "layer_types": ["full_attention"] * 28}),
    (LLAMA, {"use_qk_norm": False, "parallel_residual": False, "layer_types": ["full_attention"] * 2}),
    (SLIDING | {"sliding_window": None}, {"use_sliding_window": False}),
    (LLAMA | {"hidden_act": "silu"}, {"activation_function": "swish"}),
    (LLAMA | {"hidden_act": "silu"}, {"activation_function": "swiglu", "is_causal": True, "causal": True}),
    (BERT, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}),
    (YARN, {"rope_scaling": {**YARN["rope_scaling"], "finetuned": True}}),
    (MOE, {"top_k": 50, "num_experts_per_token": 2, "initializer_factor": 1.0, "router_loss_factor": 0.1}),
    (MOE, {"top_k": 20, "top_p": 0.9, "train_batch_size": 8, "loss_scaling_factor": 2.0, "boi_token": 3}),
    (LLAVA, {"tokenizer_model_max_length": 2048, "mm_use_im_patch_token": False, "optimizer_eps": 1e-8}),
    (LLAMA, {"num_train_epochs": 3, "fused_linear_cross_entropy_chunk_size": 64, "use_pretrained_weights": False}),
    (LLAVA, {"image_token_id": 32000, "vocab_size": 32000}),
    (LLAMA, {"use_flash_attention_2": True, "flash_attn": True, "use_xformers": True, "use_fused_rms_norm": True}),
    (LLAMA, {"fused_mlp": True, "use_fused_cross_entropy": True, "deterministic_flash_attn": False, "fused": True}),
    (LLAMA, {"attention_implementation": "sdpa", "use_attention_dropout": True, "tf_legacy_loss": True}),
    (LLAMA, {"initializer": "normal", "init_method": "xavier", "use_gradient_checkpointing": True, "loss_type": "ce"}),
    (LLAMA, {"deepspeed": {"stage": 3}, "megatron_version": "core", "wandb_run_id": "x", "embd_init_std": 0.02}),
    (IDEFICS, inside(IDEFICS, "text_config", **_RESAMPLER)),
    (VL, {"hidden_size": 3584, "num_attention_heads": 28, "sliding_window": 32768, "vocab_size": 152064}),
]


@pytest.mark.parametrize(("plain", "more"), CHANGES_NOTHING)
def test_what_changes_nothing_is_read(plain: dict[str, Any], more: dict[str, Any]) -> None:
    for part in (None, "text"):
        assert read(plain | more, part) == read(plain, part)


@pytest.mark.parametrize(
    ("plain", "more"),
    [
        (LLAMA, {"use_cla": True}),
        (LLAMA, {"use_qk_norm": True}),
        (LLAMA, {"use_rope": False}),  # off, of what every model here has
        (LLAMA, {"is_causal": False}),
        (LLAMA, {"causal": False}),
        (LLAMA, {"final_norm": False}),
        (LLAMA, {"scale_attention": False}),
        (LLAMA, {"bidirectional": False}),  # as is every decoder, and by the same rule refused
        (LLAMA, {"attn_logit_softcapping": 30.0}),
        (LLAMA, {"residual_multiplier": 0.5}),
        (LLAMA, {"logit_scale": 0.25}),
        (LLAMA, {"num_experts": 8}),
        (LLAMA, {"n_layer": 3}),  # disagrees with num_hidden_layers
        (LLAMA, {"kv_channels": 16}),
        (LLAMA, {"ignore_index": 0}),
        (QWEN3, {"use_qk_norm": False}),
        (QWEN3, {"attention_sinks": 4}),
        (SLIDING, {"use_sliding_window": False}),
        (DEEPSEEK, {"num_experts": 128}),
        (DEEPSEEK, {"moe_router_dtype": "bfloat16"}),
        (BERT, {"use_causal_mask": False}),
        (MOE, {"num_experts_per_token": 4}),
        (MOE, {"top_k": 4}),
        (MOE, {"num_active_experts_per_token": 4}),
        (MOE, {"moe_top_k_per_token": 4}),
        ({n: value for n, value in MOE.items() if n != "num_experts_per_tok"}, {"num_experts_per_token": 4}),
        (LLAMA, {"init_residual_scale": 3.0}),
        (LLAMA, {"loss_logit_scale": 3.0}),
        (LLAMA, {"flash_scale": 3.0}),
        (LLAMA, {"flash_scale": True}),
        (LLAMA, {"tf_legacy_scale": 3}),
        (LLAMA, {"tf_legacy_scale": "text"}),
        (BERT, {"use_fused_rms_norm": True}),  # its norms are others
        (LLAMA, {"train_scales": [1.0, 2.0]}),
        (LLAMA, {"loss_softcap": 3.0}),
        (LLAMA, {"init_temperature": 3.0}),
        (LLAMA, {"attn.scale": 3.0}),
        (LLAMA, {"scale_attention_by_token": True}),
        (LLAMA, {"use_cls_token": True}),
        (LLAMA, {"nope_layer_id": [1]}),
        (LLAMA, {"shared_kv_layer_id": 1}),
        (LLAVA, {"image_token_id": 31999}),
        (LLAVA, {"vocab_size": 99}),
        (GEMMA, {"zero_centered": False}),
        (GEMMA, {"use_sandwich": False}),
        (GEMMA, {"use_softcap": False}),
        (GEMMA, {"use_qk_norm": True}),
        (published()["qwen2.5-0.5b"], {"qkv_bias": False}),
        (published()["qwen2.5-0.5b"], {"use_bias": False}),
        (LLAMA, {"parallel_residual": True}),
        (published()["embeddinggemma-300m"], {"is_causal": True}),
        (LLAMA | {"hidden_act": "silu"}, {"activation_function": "gelu"}),
        # words of kernels, libraries and training beside others
        (LLAMA, {"use_flash_alibi": True}),
        (LLAMA, {"flash_alibi_bias_max": 8}),
        (LLAMA, {"use_flash_linear_attention": True}),
        (LLAMA, {"use_fused_linear_attention": True}),
        (LLAMA, {"fused_activation": "gelu"}),
        (LLAMA, {"fused_swiglu_limit": 7.0}),
        (LLAMA, {"fused_attention_bias": True}),
        (LLAMA, {"fused_norm": "layer"}),
        (LLAMA, {"fused_mlp": "gelu"}),
        (LLAMA, {"flash_attention": {"window": 4}}),
        (LLAMA, {"sdpa_is_causal": False}),
        (LLAMA, {"xla_rope": True}),
        (LLAMA, {"megatron_alibi": True}),
        (LLAMA, {"nemo_rope_scaling": {"type": "linear", "factor": 2.0}}),
        (LLAMA, {"tf_activation": "gelu"}),
        (LLAMA, {"transformers_attention_bias": True}),
        (LLAMA, {"tokenizer_position_embedding": "alibi"}),
        (LLAMA, {"training_attention": "bidirectional"}),
        (LLAMA, {"trained_without_rope": True}),
        (LLAMA, {"init_rope": "yarn"}),
        (LLAMA, {"initializer_gate": True}),
        (LLAMA, {"loss_logits_bias": True}),
        (LLAMA, {"gradient_attention_type": "alibi"}),
        (LLAMA, {"apply_residual_connection_post_dropout": True}),
        (LLAMA, {"dropout_activation": "relu"}),
        (LLAMA, {"attention_dropout": "rotary"}),
        (HUNYUAN, {"use_cla": True}),
        (HUNYUAN, {"norm_type": "layer"}),
    ],
)
def test_what_may_change_the_maths_is_refused(plain: dict[str, Any], more: dict[str, Any]) -> None:
    read(plain)
    with pytest.raises(fnmodels.errors.CheckpointError, match=next(iter(more))):
        read(plain | more)


def test_the_rope_says_which_fraction_turns() -> None:
    """transformers 5.0 writes its default beside it; another value is a contradiction."""
    phi = {**LLAMA, "model_type": "phi", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}
    assert read(phi | {"partial_rotary_factor": 0.5}) == read(phi)
    with pytest.raises(
        fnmodels.errors.CheckpointError, match=r"'partial_rotary_factor' is 0.75 at the top and 0.25 in the"
    ):
        read(phi | {"partial_rotary_factor": 0.75})


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_sizes_that_a_wrapper_leaves_out_are_those_of_the_texts_class(model_type: str) -> None:
    """As files of transformers 4 do: LLaVA-NeXT's with Mistral."""
    own = transformers.AutoConfig.for_model(model_type).to_dict()
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    text = {"model_type": model_type, "vocab_size": 61, "rms_norm_eps": 1e-5, "max_position_embeddings": 64}
    values = {**LLAVA, "model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"]}
    values |= {"vocab_size": 61, "text_config": text, "image_token_index": 60}
    found = read(values, None).text
    assert {name: getattr(found, name) for name in names} == {name: own[name] for name in names}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (inside(_FIVE, "text_config", output_gate_type="sigmoid"), "'output_gate_type' is \"sigmoid\""),
        (inside(_FIVE, "text_config", mlp_only_layers=[1]), "'mlp_only_layers' is"),
        (inside(_FIVE, "vision_config", use_window=True), "use_window = true"),
        (inside(IDEFICS, "text_config", use_resampler=True), "text_config: 'use_resampler' is true"),
        (inside(IDEFICS, "text_config", pixel_shuffle_factor=7), "text_config: 'pixel_shuffle_factor' is 7"),
        (VL | {"rms_norm_eps": 1e-5}, "has rms_norm_eps beside 'text_config', and they disagree"),
        (LLAVA | {"projection": "linear"}, "projection = "),
        (LLAMA | {"n_layer": 3}, r"n_layer = 3 \(beside num_hidden_layers = 2\)"),
        (LLAMA | {"b": 1, "a": 2}, r'a = 2, b = 1. If they do not, ignore_fields=\("a", "b",\) reads'),
    ],
)
def test_the_reason_is_said(values: dict[str, Any], said: str) -> None:
    with pytest.raises(fnmodels.errors.CheckpointError, match=said):
        read(values)


@pytest.mark.parametrize("value", [True, "text", 3, {"type": "a"}, ["a"]], ids=str)
@pytest.mark.parametrize("part", ["alibi", "rope", "activation", "bias", "gate", "mask", "softmax", "causal", "pre_ln"])
def test_no_word_makes_a_field_about_a_part_of_the_model_bookkeeping(part: str, value: Any) -> None:
    """But of training, of which any number is a setting."""
    for word in sorted(bookkeeping._TRAINING | bookkeeping._TOOLS | {"flash", "fused", "sdpa", "xformers"}):
        for name in (f"{word}_{part}", f"use_{word}_{part}", f"{part}_{word}", f"{word}_attention_{part}"):
            of_training = value == 3 and value is not True and word in bookkeeping._TRAINING
            assert bookkeeping.is_bookkeeping(name, value) == of_training, name


def test_settings_of_heads_of_other_classes_and_rows_without_a_gradient_are_bookkeeping() -> None:
    """As in files of deepset's DeBERTa and of Microsoft's."""
    deberta = published()["deberta-v3-large"]
    other = {
        "summary_activation": "tanh",
        "summary_type": "first",
        "summary_use_proj": False,
        "summary_last_dropout": 0,
    }
    assert read(deberta | other | {"padding_idx": 0}) == read(deberta)
