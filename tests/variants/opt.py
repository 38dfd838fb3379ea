"""Tiny configurations of OPT and its published sizes."""

import json
from typing import Any

TINY: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 61,
    "hidden_size": 32,
    "ffn_dim": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SHARED = {name: TINY[name] for name in ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")}
_SHARED |= {"pad_token_id": 0, "dropout": 0.0, "attention_dropout": 0.0}
REFUSED = {"xglm": {"add_cross_attention"}}
# transformers 5.24 makes its mask without positions, so that packed documents see each other.
SEPARATE = {"packed": "documents see each other"}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    narrow = {"do_layer_norm_before": False, "word_embed_proj_dim": 20}
    bare = {"enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False}
    xglm = {"model_type": "xglm", "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 44} | _SHARED
    bio = {"model_type": "biogpt", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    bio |= {name: value for name, value in _SHARED.items() if "dropout" not in name}
    bio |= {"intermediate_size": 44, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {"opt": TINY, "opt_narrow": TINY | narrow, "opt_bare": TINY | bare, "xglm": xglm, "biogpt": bio}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, in the published dialect."""
    own = {"_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu"}
    own |= {"architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2, "dropout": 0.1}
    own |= {"do_layer_norm_before": True, "eos_token_id": 2, "ffn_dim": 36864, "hidden_size": 9216, "init_std": 0.02}
    own |= {"layerdrop": 0.0, "max_position_embeddings": 2048, "num_attention_heads": 72, "num_hidden_layers": 64}
    own |= {"pad_token_id": 1, "prefix": "</s>", "use_cache": True, "vocab_size": 50272, "word_embed_proj_dim": 9216}
    return {"opt_66b": {"model_type": "opt"} | own}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"opt_66b": 65_719_701_504}


# Parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "xglm-564m": 564_463_616,
    "xglm-1.7b": 1_732_907_008,
    "xglm-2.9b": 2_941_505_536,
    "xglm-7.5b": 7_492_771_840,
    "biogpt": 346_763_264,
}

# The published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "xglm-1.7b": {
    "architectures": ["XGLMForCausalLM"], "model_type": "xglm", "activation_dropout": 0.0, "activation_function":
    "gelu", "attention_dropout": 0.1, "attention_heads": 16, "bos_token_id": 0, "d_model": 2048,
    "decoder_start_token_id": 2, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 8192, "init_std": 0.02, "layerdrop":
    0.0, "max_position_embeddings": 2048, "num_layers": 24, "pad_token_id": 1, "scale_embedding": true,
    "transformers_version": "4.26.1", "use_cache": true, "vocab_size": 256008
  },
  "biogpt": {
    "architectures": ["BioGptForCausalLM"], "model_type": "biogpt", "activation_dropout": 0.0,
    "attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "eos_token_id": 2, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 4096,
    "layer_norm_eps": 1e-12, "layerdrop": 0.0, "max_position_embeddings": 1024, "num_attention_heads": 16,
    "num_hidden_layers": 24, "pad_token_id": 1, "scale_embedding": true, "use_cache": true, "vocab_size": 42384
  }
}""")
