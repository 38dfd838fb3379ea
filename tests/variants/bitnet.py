"""A tiny configuration of BitNet and its published size."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "bitnet",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"bitnet": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model."""
    own = {"architectures": ["BitNetForCausalLM"], "bos_token_id": 128000, "eos_token_id": 128001}
    own |= {"auto_map": {"AutoConfig": "configuration_bitnet.BitNetConfig"}, "hidden_act": "relu2", "hidden_size": 2560}
    own |= {"initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 4096}
    own |= {"num_attention_heads": 20, "num_hidden_layers": 30, "num_key_value_heads": 5, "rms_norm_eps": 1e-05}
    own |= {"rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True}
    return {"bitnet_2b": {"model_type": "bitnet", "vocab_size": 128256} | own}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"bitnet_2b": TOTALS["bitnet-b1.58-2b-4t"]}


# Parameter counts of the presets.
TOTALS: dict[str, int] = {"bitnet-b1.58-2b-4t": 2_412_820_480}
