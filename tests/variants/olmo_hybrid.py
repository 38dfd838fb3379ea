"""Tiny configurations of OLMo Hybrid, one per way in which its maths can differ, and its published sizes."""

from typing import Any

import torch
from torch import Tensor

TINY: dict[str, Any] = {
    "model_type": "olmo_hybrid",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    # the defaults are outside of this vocabulary
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    types = ["full_attention", "linear_attention", "linear_attention"]
    still = {
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
        "layer_types": types,
        "num_hidden_layers": 3,
        "linear_num_key_heads": 4,
    }
    own = {"linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 3, "attention_bias": True}
    return {"olmo_hybrid": TINY, "olmo_hybrid_nope": TINY | still | own | {"tie_word_embeddings": True}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member, whose fields are the defaults of transformers."""
    widths = {"vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "max_position_embeddings": 65536}
    heads = {"num_attention_heads": 30, "num_key_value_heads": 30, "num_hidden_layers": 32}
    linear = {"linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_allow_neg_eigval": True}
    linear |= {"linear_key_head_dim": 96, "linear_value_head_dim": 192, "linear_conv_kernel_dim": 4}
    rest = {
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": None},
        "attention_bias": False,
        "attention_dropout": 0.0,
    }
    rest |= {"bos_token_id": None, "eos_token_id": 100257, "pad_token_id": 100277, "tie_word_embeddings": False}
    rest |= {"hidden_act": "silu", "initializer_range": 0.02, "use_cache": True, "dtype": "bfloat16"}
    types = [*["linear_attention"] * 3, "full_attention"] * 8
    what = {"architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", "layer_types": types}
    return {"olmo_hybrid_7b": what | widths | heads | linear | rest}


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has}."""
    return {"olmo_hybrid_7b": 7_430_870_688}


def as_published(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Convolutions by their own widths, and full layers' first norm under its own name."""
    found = {}
    for name, tensor in tensors.items():
        layer = name.partition(".layers.")[2].partition(".")[0]
        if layer and config.layer_types[int(layer)] == "full_attention":
            name = name.replace("feedforward_layer_norm", "post_attention_layernorm")
        found[name] = tensor
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    for name in [name for name in found if "q_conv1d" in name]:
        names = [name.replace("q_conv1d", f"{which}_conv1d") for which in "qkv"]
        rows = torch.cat([found[one] for one in names]).split([keys, keys, values])
        found |= {one: part.clone() for one, part in zip(names, rows, strict=True)}
    return found


SEPARATE = {"packed": "the convolution and the state run on from one document into the next"}
BLIND = {"olmo_hybrid_nope": {"rope.theta", "rope.partial"}}
TOTALS: dict[str, int | str] = {"olmo-hybrid-7b": 7_430_870_688}
