"""Tiny configurations of ModernBERT as a decoder and its published sizes."""

from typing import Any

OLDER_ROPES = ("full_attention", {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"})

TINY: dict[str, Any] = {
    "model_type": "modernbert-decoder",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "norm_eps": 1e-2,
    "local_attention": 10,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e3},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    },
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    biased = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
    untied = {"tie_word_embeddings": False, "decoder_bias": False, "classifier_activation": "silu"}
    return {"modernbert_decoder": TINY, "modernbert_decoder_biased": TINY | biased | untied}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, in the published dialect."""
    own = {"architectures": ["ModernBertDecoderForCausalLM"], "attention_bias": False, "attention_dropout": 0.0}
    own |= {"bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0}
    own |= {"cls_token_id": 50281, "decoder_bias": True, "embedding_dropout": 0.0, "eos_token_id": 50282}
    own |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "hidden_activation": "gelu"}
    own |= {"hidden_size": 1792, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "intermediate_size": 3840}
    own |= {"local_attention": 128, "local_rope_theta": 160000.0, "max_position_embeddings": 7999, "mlp_bias": False}
    own |= {
        "norm_bias": False,
        "norm_eps": 1e-5,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "vocab_size": 50368,
    }
    own |= {"pad_token_id": 50283, "sep_token_id": 50282, "tie_word_embeddings": True, "mlp_dropout": 0.0}
    return {"ettin_decoder_1b": {"model_type": "modernbert-decoder"} | own}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"ettin_decoder_1b": 1_031_314_112}


# Parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "ettin-decoder-17m": 16_913_600,
    "ettin-decoder-150m": 149_655_232,
    "ettin-decoder-400m": 395_881_664,
    "ettin-decoder-1b": 1_031_314_112,
}
