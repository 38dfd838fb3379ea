"""Tiny configurations of AFM and Apertus, one per variation of their maths, and their published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "arcee",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# hidden_act is not used with xIELU.
BLIND = {name: {"hidden_act"} for name in ("apertus", "apertus_bias_tied")}
# No Apertus without xIELU was published.
REFUSED = {"apertus": {"hidden_act"}}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5}
    yarn |= {"original_max_position_embeddings": 16}
    llama3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}  # unscaled, its files default to llama3
    apertus = TINY | {"model_type": "apertus"}
    biased = {"attention_bias": True, "tie_word_embeddings": True}
    return {
        "arcee": TINY | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "arcee_biases_tied_yarn": TINY | biased | {"mlp_bias": True, "head_dim": 16, "rope_parameters": yarn},
        "apertus": apertus | {"rope_parameters": llama3},
        "apertus_bias_tied": apertus | biased | {"head_dim": 10, "rope_parameters": linear},
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models, in the published dialect."""
    common = {"attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "mlp_bias": False}
    common |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True}
    yarn = {"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    return {
        "afm_4_5b": common
        | {
            "architectures": ["ArceeForCausalLM"],
            "model_type": "arcee",
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "head_dim": 128,
            "hidden_act": "relu2",
            "hidden_size": 2560,
            "intermediate_size": 18432,
            "max_position_embeddings": 65536,
            "num_attention_heads": 20,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "rope_scaling": yarn | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0},
            "rope_theta": 10000.0,
            "vocab_size": 128004,
        },
        "apertus_70b": common
        | {
            "architectures": ["ApertusForCausalLM"],
            "model_type": "apertus",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "xielu",
            "hidden_dropout": 0.0,
            "hidden_size": 8192,
            "intermediate_size": 43008,
            "max_position_embeddings": 65536,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
            "num_key_value_heads": 8,
            "pad_token_id": 3,
            "post_norm": False,
            "qk_norm": True,
            "rope_scaling": llama3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "rope_theta": 12000000,
            "vocab_size": 131072,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published model: number of parameters}, including two constants per layer of
    Apertus that are not trainable."""
    return {"afm_4_5b": 4_619_184_640, "apertus_70b": 70_599_864_480 + 2 * 80}


TOTALS: dict[str, int | str] = {
    "afm-4.5b": 4_619_184_640,
    "apertus-8b": 8_053_338_176 + 2 * 32,
    "apertus-70b": 70_599_864_480 + 2 * 80,
}
