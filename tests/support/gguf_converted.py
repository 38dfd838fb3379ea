"""Tiny models of the architectures of GGUF files that llama.cpp's converter alone writes in tests."""

from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# without the fields that encoders and older decoders have not
_ENCODER = {name: value for name, value in _BASE.items() if name.endswith(("size", "layers", "embeddings", "heads"))}
del _ENCODER["num_key_value_heads"], _ENCODER["tie_word_embeddings"]
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
_GPT = {
    "vocab_size": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 256,
    "n_positions": 48,
    "layer_norm_epsilon": 1e-4,
}
_FALCON: dict[str, Any] = {
    "model_type": "falcon",
    "vocab_size": 64,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "layer_norm_epsilon": 1e-4,
}
# {name: (architecture, config.json)}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"model_type": "gpt2", **_GPT}),
    "gpt2-untied": ("gpt2", {"model_type": "gpt2", **_GPT, "tie_word_embeddings": False}),
    "starcoder": ("starcoder", {"model_type": "gpt_bigcode", **_GPT}),
    "gptneox": (
        "gptneox",
        {
            "model_type": "gpt_neox",
            **_ENCODER,
            "tie_word_embeddings": False,
            "layer_norm_eps": 1e-4,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
        },
    ),
    "falcon": ("falcon", _FALCON),
    "falcon-40b": ("falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "falcon",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "bloom": (
        "bloom",
        {"model_type": "bloom", "vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 4}
        | {"layer_norm_epsilon": 1e-4},
    ),
    "mpt": (
        "mpt",
        {"model_type": "mpt", "vocab_size": 64, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 48}
        | {"attn_config": {"clip_qkv": 1.5}},
    ),
    "exaone": ("exaone", {"model_type": "exaone", **_BASE, **_ROPE}),
}
_MAMBA = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-4, "state_size": 12}
_NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h",
    **_BASE,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    "layer_norm_epsilon": 1e-4,
}
del _NEMOTRON_H["rms_norm_eps"]
_FALCON_H1: dict[str, Any] = {
    "model_type": "falcon_h1",
    **_BASE,
    **_ROPE,
    "head_dim": 16,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
}
_MULTIPLIERS = {
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [1.4, 0.8, 1.1, 0.9, 0.6],
    "mlp_multipliers": [1.5, 0.7],
}
MODELS |= {
    "mamba": ("mamba", {"model_type": "mamba", **_MAMBA, "time_step_rank": 5}),
    "falcon-mamba": ("mamba", {"model_type": "falcon_mamba", **_MAMBA, "tie_word_embeddings": False}),
    "mamba2": ("mamba2", {"model_type": "mamba2", **_MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 2}),
    "jamba": (
        "jamba",
        {
            "model_type": "jamba",
            **_BASE,
            "num_hidden_layers": 6,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 4,
            "attn_layer_offset": 1,
            "mamba_d_state": 6,
            "mamba_dt_rank": 5,
        },
    ),
    "nemotron_h": ("nemotron_h", _NEMOTRON_H | {"hybrid_override_pattern": "M-*-"}),
    "nemotron_h_moe": (
        "nemotron_h_moe",
        _NEMOTRON_H
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
        | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 1.5, "n_group": 3, "topk_group": 1},
    ),
    "falcon-h1": ("falcon-h1", _FALCON_H1),
    "falcon-h1-multiplied": ("falcon-h1", _FALCON_H1 | _MULTIPLIERS),
    "hunyuan-dense": ("hunyuan-dense", {"model_type": "hunyuan_v1_dense", **_BASE, **_ROPE, "head_dim": 32}),
    "hunyuan-moe": (
        "hunyuan-moe",
        {"model_type": "hunyuan_v1_moe", **_BASE, **_ROPE, "head_dim": 16, "num_experts": 4, "moe_topk": 2},
    ),
    "phimoe": (
        "phimoe",
        {"model_type": "phimoe", **_BASE, **_ROPE, "num_local_experts": 4, "attention_bias": True}
        | {"lm_head_bias": True, "original_max_position_embeddings": 48},
    ),
}
_BERT = {**_ENCODER, "layer_norm_eps": 1e-6, "type_vocab_size": 2}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
_VISION |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
_SECTIONS = {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [4, 2, 2]}
_VISUAL = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
_QWEN3_VL = {**_BASE, "head_dim": 16, "rope_parameters": _SECTIONS | {"mrope_interleaved": True}}
_QWEN3_VISION = _VISION | {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
MODELS |= {
    "bert": ("bert", {"model_type": "bert", "architectures": ["BertModel"], **_BERT}),
    "xlm-roberta": (
        "bert",
        {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], **_BERT}
        | {"max_position_embeddings": 50, "pad_token_id": 1, "type_vocab_size": 1},
    ),
    "distilbert": (
        "bert",
        {"model_type": "distilbert", "architectures": ["DistilBertModel"], "vocab_size": 64, "dim": 64}
        | {"hidden_dim": 96, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 48},
    ),
    "nomic-bert": ("nomic-bert", {"model_type": "nomic_bert", "architectures": ["NomicBertModel"], **_BERT}),
    "modern-bert": (
        "modern-bert",
        {"model_type": "modernbert", "architectures": ["ModernBertModel"], **_ENCODER}
        | {"num_hidden_layers": 4, "norm_eps": 1e-6, "local_attention": 12, "global_attn_every_n_layers": 3}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 3, "sep_token_id": 4},
    ),
    "eurobert": (
        "eurobert",
        {"model_type": "eurobert", "architectures": ["EuroBertModel"], **_BASE, **_ROPE, "pad_token_id": 0},
    ),
    "qwen2vl": (
        "qwen2vl",
        {
            "model_type": "qwen2_vl",
            "text_config": {"model_type": "qwen2_vl_text", **_BASE, "rope_parameters": _SECTIONS},
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
            **_VISUAL,
        },
    ),
    "qwen3vl": (
        "qwen3vl",
        {
            "model_type": "qwen3_vl",
            "text_config": {"model_type": "qwen3_vl_text", **_QWEN3_VL},
            "vision_config": _QWEN3_VISION,
            **_VISUAL,
        },
    ),
    "qwen3vlmoe": (
        "qwen3vlmoe",
        {
            "model_type": "qwen3_vl_moe",
            "text_config": {"model_type": "qwen3_vl_moe_text", **_QWEN3_VL}
            | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
            "vision_config": _QWEN3_VISION,
            **_VISUAL,
        },
    ),
}
_NEAR = ["sliding_attention", "full_attention"]
_GEMMA3N: dict[str, Any] = {
    "model_type": "gemma3n_text",
    **_BASE,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 6,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "altup_num_inputs": 4,
    "laurel_rank": 5,
    "num_kv_shared_layers": 1,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    "layer_types": _NEAR * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    **_BASE,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": _NEAR * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 3e5, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    },
}
_GEMMA4_SMALL = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8}
_GEMMA4_SMALL |= {"vocab_size_per_layer_input": 64}
_GEMMA4_SPARSE = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
_GEMMA4_SAME = {"attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
MODELS |= {
    "gemma3n": ("gemma3n", _GEMMA3N),
    "gemma4-e": ("gemma4", _GEMMA4 | _GEMMA4_SMALL | {"final_logit_softcapping": 30.0}),
    "gemma4": ("gemma4", _GEMMA4 | _GEMMA4_SAME),
    "gemma4-sparse": ("gemma4", _GEMMA4 | _GEMMA4_SAME | _GEMMA4_SPARSE),
    "gemma-embedding": (
        "gemma-embedding",
        {"model_type": "gemma3_text", "architectures": ["Gemma3TextModel"], **_BASE, "head_dim": 32}
        | {"num_hidden_layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
        | {"use_bidirectional_attention": True, "pad_token_id": 0}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
}
_T5: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "layer_norm_epsilon": 1e-5,
    "decoder_start_token_id": 0,
}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
MODELS |= {
    "t5": ("t5", {**_T5, "architectures": ["T5ForConditionalGeneration"]}),
    "t5-v1.1": ("t5", {**_T5, **_GATED, "architectures": ["T5ForConditionalGeneration"]}),
    "umt5": ("t5", {**_T5, **_GATED, "architectures": ["UMT5ForConditionalGeneration"], "model_type": "umt5"}),
    "t5encoder": (
        "t5encoder",
        {**_T5, "architectures": ["T5EncoderModel"], "feed_forward_proj": "gated-gelu"},
    ),
}
# transformers has it not: its folder is written here
MODELS |= {
    "bailingmoe2": (
        "bailingmoe2",
        {"model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"], **_BASE}
        | {"head_dim": 16, "rope_theta": 5e4, "partial_rotary_factor": 0.5, "moe_intermediate_size": 32}
        | {"num_experts": 6, "num_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2}
        | {"norm_topk_prob": True, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "use_qk_norm": True}
        | {"num_nextn_predict_layers": 0, "score_function": "sigmoid"},
    ),
}
# Fields that published configurations have, and the converter wants.
_GEMMA4_HEADS: dict[str, Any] = {
    "global_head_dim": 32,
    "num_global_key_value_heads": None,
    "moe_intermediate_size": None,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {"n_ctx": 48},
    "gpt2-untied": {"n_ctx": 48},
    "gptneox": {"rotary_pct": 0.25},
    "falcon": {"num_kv_heads": 1},
    "mpt": {"architectures": ["MPTForCausalLM"]},
    "nemotron_h": {"num_hidden_layers": 4, "hybrid_override_pattern": "M-*-"},
    "nemotron_h_moe": {"num_hidden_layers": 4, "hybrid_override_pattern": "ME*E", "n_shared_experts": 1},
    "nomic-bert": {"n_positions": 8192, "max_trained_positions": 2048, "activation_function": "swiglu", "n_inner": 96}
    | {"causal": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False}
    | {"rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None},
    "modern-bert": {"layer_norm_eps": 1e-6},
    "exaone": {"architectures": ["ExaoneForCausalLM"], "activation_function": "silu"},
    "hunyuan-moe": {"moe_intermediate_size": [96, 96], "num_shared_expert": [1, 1], "moe_topk": [2, 2]},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "gemma4-e": _GEMMA4_HEADS,
    "gemma4": _GEMMA4_HEADS | {"num_global_key_value_heads": 2, "num_key_value_heads": 4},
    "gemma4-sparse": _GEMMA4_HEADS
    | {"num_global_key_value_heads": 2, "num_key_value_heads": 4, "moe_intermediate_size": 32},
}
# Fields that the installed transformers adds, and published files lack.
ABSENT = {"nemotron_h": ("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group")}
