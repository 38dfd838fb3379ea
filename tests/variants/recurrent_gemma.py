"""Tiny configuration of RecurrentGemma, and its published size."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "recurrent_gemma",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "lru_width": 48,
    "attention_window_size": 6,
    "conv1d_width": 3,
    "logits_soft_cap": 5.0,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"recurrent_gemma": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} as published."""
    return {
        "recurrentgemma_2b": {
            "architectures": ["RecurrentGemmaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attention_window_size": 2048,
            "block_types": ["recurrent", "recurrent", "attention"],
            "bos_token_id": 2,
            "conv1d_width": 4,
            "embeddings_scale_by_sqrt_dim": True,
            "eos_token_id": 1,
            "final_w_init_variance_scale": 0.07692307692307693,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2560,
            "intermediate_size": 15360,
            "logits_soft_cap": 30.0,
            "lru_width": 2560,
            "model_type": "recurrent_gemma",
            "num_attention_heads": 10,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "pad_token_id": 0,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 256000,
            "w_init_variance_scale": 0.01,
        }
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"recurrentgemma_2b": 2_682_862_080}


SEPARATE = {
    "packed": "the convolution runs on from one document into the next",
    "left": "a bias of the projection before the convolution is seen in padding",
}
TOTALS: dict[str, int | str] = {"recurrentgemma-2b": 2_682_862_080, "recurrentgemma-9b": 8_579_977_216}
TRAINING_TOLERANCE = {"recurrent_gemma": 1e-4}  # the reference's recurrence is a loop, and its gradients differ by 3e-6
