"""Tiny configurations of the Gemma family, one per way in which its maths can differ, and its published sizes."""

from typing import Any

# In the published dialect: which layer type `rope_theta` and `rope_scaling` speak of, and the other thetas' own fields.
OLDER_ROPES = ("full_attention", {"sliding_attention": "rope_local_base_freq"})

# EmbeddingGemma: tokens see later ones.
BIDIRECTIONAL = {"gemma3_text_bidirectional"}

# A model of one kind of layer reads one table.
BLIND = {name: {"local_rope.theta", "local_rope.partial"} for name in ("gemma", "gemma_bias_untied")}

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": True,
}


def _gemma(model_type: str, **changes: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    return {"model_type": model_type, **TINY, "rope_parameters": rope, **changes}


def _third(**changes: Any) -> dict[str, Any]:
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return _gemma(
        "gemma3_text",
        **{"rope_parameters": ropes, "num_hidden_layers": 3, "layer_types": types, "sliding_window": 6} | changes,
    )


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {
        "gemma": _gemma("gemma"),
        "gemma_bias_untied": _gemma("gemma", attention_bias=True, tie_word_embeddings=False, hidden_act="gelu"),
        "gemma2": _gemma(
            "gemma2",
            sliding_window=5,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=2.5,
        ),
        "gemma2_uncapped": _gemma(
            "gemma2",
            sliding_window=5,
            num_hidden_layers=3,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
        ),
        "gemma3_text": _third(query_pre_attn_scalar=20, final_logit_softcapping=3.0),
        "gemma3_text_plain": _third(query_pre_attn_scalar=12, attention_bias=True),
        "gemma3_text_bidirectional": _third(query_pre_attn_scalar=12, use_bidirectional_attention=True),
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published members, in the published dialect."""
    return {
        "gemma2_27b": {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "vocab_size": 256000,
            "hidden_size": 4608,
            "intermediate_size": 36864,
            "num_hidden_layers": 46,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 144,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has, as published}."""
    return {"gemma2_27b": 27_227_128_320}
