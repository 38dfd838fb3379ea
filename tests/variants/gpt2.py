"""Tiny configurations of GPT-2, one per variation of its maths, and its published sizes."""

import json
from typing import Any

TINY: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_pdrop": 0.0,  # transformers' default of 0.1 would apply in its training
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}

# transformers 5.24 masks padding alone in this one.
SEPARATE = {"openai_gpt packed": "documents see each other"}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    numbered = {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True, "n_layer": 3}
    return {
        "gpt2": TINY,
        "openai_gpt": {n: v for n, v in TINY.items() if n != "model_type"} | {"model_type": "openai-gpt"},
        "gpt2_untied_narrow": TINY | {"tie_word_embeddings": False, "n_inner": 44, "activation_function": "relu"},
        "gpt2_numbered": TINY | numbered,
        "gpt2_unscaled": TINY | {"scale_attn_weights": False, "activation_function": "gelu"},
        "gpt_sw3": TINY | {"model_type": "gpt-sw3"},
        "gpt2_unscaled_numbered": TINY | numbered | {"scale_attn_weights": False},
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    return {
        "gpt2_xl": {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": 50257,
            "n_embd": 1600,
            "n_layer": 48,
            "n_head": 25,
            "n_positions": 1024,
            "n_ctx": 1024,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "attn_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "resid_pdrop": 0.1,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its published number of parameters}."""
    return {"gpt2_xl": 1_557_611_200}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "openai-gpt": 116_534_784,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}

# The complete published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "gpt2": {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop":
    0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
    "summary_type": "cls_index", "summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample":
    true, "max_length": 50}}, "vocab_size": 50257
  },
  "openai-gpt": {
    "architectures": ["OpenAIGPTLMHeadModel"], "model_type": "openai-gpt", "afn": "gelu", "attn_pdrop": 0.1,
    "embd_pdrop": 0.1, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "n_ctx": 512, "n_embd": 768,
    "n_head": 12, "n_layer": 12, "n_positions": 512, "n_special": 0, "predict_special_tokens": true, "resid_pdrop":
    0.1, "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type":
    "cls_index", "summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample": true,
    "max_length": 50}}, "vocab_size": 40478
  }
}""")

# Fields refused at any changed value: alone they contradict other fields, or no published model has them.
REFUSED = {
    "gpt2": {"add_cross_attention"},
    "gpt-sw3": {"add_cross_attention"},
}

NO_FILE = {"gpt-sw3": "no copy is at hand; transformers writes it as a gpt2"}
