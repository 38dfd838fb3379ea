"""Tiny configurations of the Cohere family, one per variation of its maths, and its published sizes."""

import json
from typing import Any

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # the defaults are outside of this vocabulary
    first = TINY | {"model_type": "cohere", "layer_norm_eps": 1e-2, "logit_scale": 0.8, **ids}
    first |= {"tie_word_embeddings": True}
    second = first | {"model_type": "cohere2", "num_hidden_layers": 3, "layer_types": types, "sliding_window": 6}
    biased = {"attention_bias": True, "tie_word_embeddings": False}
    return {
        "cohere_qk_norm_bias_untied": first | biased | {"use_qk_norm": True, "head_dim": 12},
        "cohere": first,
        "cohere2": second,
        "cohere2_bias_untied": second | biased,
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models, in the published dialect."""
    return {
        "command_a": {
            "architectures": ["Cohere2ForCausalLM"],
            "model_type": "cohere2",
            "vocab_size": 256000,
            "hidden_size": 12288,
            "intermediate_size": 36864,
            "num_hidden_layers": 64,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "layer_norm_eps": 1e-5,
            "rope_theta": 50000,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
        },
        "command_r_plus": {
            "architectures": ["CohereForCausalLM"],
            "model_type": "cohere",
            "vocab_size": 256000,
            "hidden_size": 12288,
            "intermediate_size": 33792,
            "num_hidden_layers": 64,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "model_max_length": 131072,
            "layer_norm_eps": 1e-5,
            "rope_theta": 75000000.0,
            "rope_scaling": None,
            "logit_scale": 0.8333333333333334,
            "use_qk_norm": True,
            "tie_word_embeddings": True,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its published number of parameters}."""
    return {"command_a": 111_057_580_032, "command_r_plus": 103_810_674_688}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "command-r-v01": 34_980_831_232,
    "command-r-08-2024": 32_296_476_672,
    "command-r-plus": 103_810_674_688,
    "aya-23-8b": 8_028_033_024,
    "aya-expanse-8b": 8_028_033_024,
    "command-r7b": 8_028_033_024,
    "command-a-111b": 111_057_580_032,
}

# The complete published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "command-r7b": {
    "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "attention_bias": false, "attention_dropout":
    0.0, "bos_token_id": 5, "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128, "hidden_act":
    "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "layer_norm_eps": 1e-05,
    "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 132096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first",
    "pad_token_id": 0, "position_embedding_type": "rope_gptj", "rope_scaling": null, "rope_theta": 50000,
    "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4, "torch_dtype": "bfloat16",
    "transformers_version": "4.48.0.dev0", "use_cache": true, "use_embedding_sharing": true, "use_gated_activation":
    true, "use_parallel_block": true, "use_parallel_embedding": false, "use_qk_norm": false, "vocab_size": 256000
  }
}""")

# (file, change, error): duplicate fields in FILES with a contradicting value.
CONTRADICTIONS = [
    ("command-r7b", {"layer_switch": 2}, "'layer_switch' is 2; only 4"),
    ("command-r7b", {"order_of_interleaved_layers": "global_attn_first"}, "'order_of_interleaved_layers'"),
    ("command-r7b", {"position_embedding_type": "rope_neox"}, "'position_embedding_type'"),
    ("command-r7b", {"rotary_pct": 0.5}, "'rotary_pct' is 0.5; only 1.0"),
    ("command-r7b", {"use_embedding_sharing": False}, "'use_embedding_sharing' is false"),
    ("command-r7b", {"use_gated_activation": False}, "'use_gated_activation' is false"),
]
