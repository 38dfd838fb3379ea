"""Tiny configurations of GPT-J and CodeGen and their published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "gptj",
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 44,
    "rotary_dim": 6,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"gptj": TINY, "codegen": TINY | {"model_type": "codegen", "rotary_dim": 4}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models, in the published dialect."""
    own = {"activation_function": "gelu_new", "attn_pdrop": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0}
    own |= {"eos_token_id": 50256, "gradient_checkpointing": False, "initializer_range": 0.02, "n_ctx": 2048}
    own |= {"layer_norm_epsilon": 1e-5, "n_inner": None, "n_positions": 2048, "resid_pdrop": 0.0, "rotary_dim": 64}
    own |= {"scale_attn_weights": True, "summary_activation": None, "summary_first_dropout": 0.1, "use_cache": True}
    own |= {"summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True}
    j = {"model_type": "gptj", "architectures": ["GPTJForCausalLM"], "vocab_size": 50400, "rotary": True}
    gen = {"model_type": "codegen", "architectures": ["CodeGenForCausalLM"], "vocab_size": 51200, "n_ctx": 2048}
    return {
        "gptj_6b": own | j | {"n_embd": 4096, "n_layer": 28, "n_head": 16, "tie_word_embeddings": False},
        "codegen_16b": own | gen | {"n_embd": 6144, "n_layer": 34, "n_head": 24, "tie_word_embeddings": False},
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"gptj_6b": 6_050_882_784, "codegen_16b": 16_032_155_648}


# Parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "gpt-j-6b": 6_050_882_784,
    "codegen-350m": 356_712_448,
    "codegen-2b": 2_779_356_160,
    "codegen-6b": 7_064_213_504,
    "codegen-16b": 16_032_155_648,
}
