"""Tiny configurations of GPT-NeoX, one per variation of its maths, and its published sizes."""

import json
from typing import Any

# The older names of top-level fields.
OLDER_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}

TINY: dict[str, Any] = {
    "model_type": "gpt_neox",
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e2, "partial_rotary_factor": 0.25},
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    linear = {"rope_type": "linear", "rope_theta": 1e3, "partial_rotary_factor": 0.5, "factor": 3.0}
    whole = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    return {
        "gpt_neox": TINY,
        "gpt_neox_in_turn_no_bias": TINY
        | {"use_parallel_residual": False, "attention_bias": False, "rope_parameters": linear},
        "gpt_neox_tied_tanh": TINY
        | {"tie_word_embeddings": True, "hidden_act": "gelu_fast", "rope_parameters": whole, "num_attention_heads": 4},
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models, in the published dialect."""
    common = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "max_position_embeddings": 2048}
    common |= {"rotary_pct": 0.25, "rotary_emb_base": 10000, "layer_norm_eps": 1e-5, "use_parallel_residual": True}
    common |= {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        "gpt_neox_20b": common
        | dict(zip(sizes, (50432, 6144, 24576, 44, 64), strict=True))
        | {"hidden_act": "gelu_fast", "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0},
        "pythia_12b": common | dict(zip(sizes, (50688, 5120, 20480, 36, 40), strict=True)) | {"hidden_act": "gelu"},
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its published number of parameters}."""
    return {"gpt_neox_20b": 20_554_567_680, "pythia_12b": 11_846_072_320}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "gpt-neox-20b": 20_554_567_680,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
}

# The complete published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "pythia-70m": {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "bos_token_id": 0, "eos_token_id": 0,
    "hidden_act": "gelu", "hidden_size": 512, "initializer_range": 0.02, "intermediate_size": 2048,
    "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_attention_heads": 8, "num_hidden_layers": 6,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false, "torch_dtype": "float16",
    "transformers_version": "4.24.0", "use_cache": true, "use_parallel_residual": true, "vocab_size": 50304
  },
  "gpt-neox-20b": {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "attention_probs_dropout_prob": 0,
    "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "hidden_size": 6144,
    "initializer_range": 0.02, "intermediate_size": 24576, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
    "num_attention_heads": 64, "num_hidden_layers": 44, "rotary_emb_base": 10000, "rotary_pct": 0.25,
    "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.19.0.dev0", "use_cache":
    true, "vocab_size": 50432
  }
}""")
