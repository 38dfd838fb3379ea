"""Tiny configurations of StarCoder 2, one per variation of its maths, and its published sizes."""

import json
from typing import Any

TINY: dict[str, Any] = {
    "model_type": "starcoder2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "norm_epsilon": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
    return {
        "starcoder2": TINY | {"sliding_window": 6},
        "starcoder2_full_untied": TINY | {"tie_word_embeddings": False, "hidden_act": "relu"},
        "starcoder2_no_bias": TINY | {"use_bias": False, "head_dim": 10, "rope_parameters": linear},
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, in the published dialect."""
    return {
        "starcoder2_15b": {
            "architectures": ["Starcoder2ForCausalLM"],
            "model_type": "starcoder2",
            "vocab_size": 49152,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 40,
            "num_attention_heads": 48,
            "num_key_value_heads": 4,
            "max_position_embeddings": 16384,
            "norm_epsilon": 1e-5,
            "rope_theta": 100000,
            "sliding_window": 4096,
            "use_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "attention_dropout": 0.1,
            "residual_dropout": 0.1,
            "embedding_dropout": 0.1,
            "initializer_range": 0.01275,
            "tie_word_embeddings": False,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its published number of parameters}."""
    return {"starcoder2_15b": 15_957_889_024}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
}

# The complete published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "starcoder2-3b": {
    "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "activation_function": "gelu",
    "attention_dropout": 0.1, "attention_softmax_in_fp32": true, "bos_token_id": 0, "embedding_dropout": 0.1,
    "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "initializer_range": 0.018042,
    "intermediate_size": 12288, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384, "mlp_type":
    "default", "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 24, "num_hidden_layers": 30,
    "num_key_value_heads": 2, "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
    "scale_attention_softmax_in_fp32": true, "scale_attn_weights": true, "sliding_window": 4096, "torch_dtype":
    "bfloat16", "transformers_version": "4.37.0.dev0", "use_bias": true, "use_cache": true, "vocab_size": 49152
  }
}""")

# (file, change, error): duplicate fields in FILES with a contradicting value.
CONTRADICTIONS = [
    ("starcoder2-3b", {"layer_norm_epsilon": 1e-3}, "'layer_norm_epsilon' is 0.001; only 1e-05"),
    ("starcoder2-3b", {"activation_function": "relu"}, "'activation_function'"),
    ("starcoder2-3b", {"scale_attn_weights": False}, "'scale_attn_weights' is false"),
    ("starcoder2-3b", {"attention_softmax_in_fp32": False}, "'attention_softmax_in_fp32' is false"),
]
