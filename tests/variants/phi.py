"""Tiny configurations of Phi-1 to Phi-2, one per variation of their maths, and their published sizes."""

import json
from typing import Any

TINY: dict[str, Any] = {
    "model_type": "phi",
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e2, "partial_rotary_factor": 0.5},
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    linear = {"rope_type": "linear", "rope_theta": 1e2, "factor": 3.0, "partial_rotary_factor": 0.4}
    grouped = {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "gelu"}
    normed = {"qk_layernorm": True, "tie_word_embeddings": True, "rope_parameters": linear}
    return {"phi": TINY, "phi_grouped_norms_tied": TINY | grouped | normed}


# The complete published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "phi-2": {
    "architectures": ["PhiForCausalLM"], "model_type": "phi", "_name_or_path": "microsoft/phi-2",
    "attention_dropout": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "hidden_act":
    "gelu_new", "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 10240, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "partial_rotary_factor": 0.4, "qk_layernorm": false, "resid_pdrop": 0.1, "rope_scaling": null, "rope_theta":
    10000.0, "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.37.0", "use_cache":
    true, "vocab_size": 51200
  }
}""")


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, in the published dialect."""
    return {"phi_2": FILES["phi-2"]}


def sizes() -> dict[str, int]:
    """{name of a published model: its published number of parameters}."""
    return {"phi_2": 2_779_683_840}


# What each preset has as published; the shapes of the first two add up to 1,418,270,720.
TOTALS: dict[str, int | str] = {"phi-1": 1_418_270_720, "phi-1.5": 1_418_270_720, "phi-2": 2_779_683_840}
