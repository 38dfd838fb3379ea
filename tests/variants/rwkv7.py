"""Tiny configurations of RWKV-7, one per way in which its maths can differ, and its published sizes.

transformers has no code of it: tests/fnmodels/models/test_rwkv7.py compares with a written-out reference.
"""

from typing import Any

from fnmodels.models.decoder import rwkv7

NO_FILE = {"rwkv7": "no published file is at hand; the sizes of presets are those of the paper's table"}

TINY: dict[str, Any] = {
    "architectures": ["RWKV7ForCausalLM"],
    "model_type": "rwkv7",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "decay_low_rank_dim": 6,
    "gate_low_rank_dim": 10,
    "a_low_rank_dim": 7,
    "v_low_rank_dim": 5,
    "max_position_embeddings": 64,
    "norm_eps": 1e-2,
}


def variants() -> dict[str, Any]:
    """{name: Config}: transformers does not read these files."""
    other = {"norm_first": False, "norm_bias": False, "tie_word_embeddings": True, "hidden_act": "silu"}
    other |= {"num_hidden_layers": 2, "head_dim": 16, "intermediate_size": None, "hidden_ratio": 1.5}
    files = {"rwkv7": TINY, "rwkv7_tied": TINY | other}
    return {name: rwkv7.Config.from_hf(values) for name, values in files.items()}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member of the paper, with every field that its files have."""
    own = {"architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "vocab_size": 65536, "hidden_size": 2560}
    own |= {"intermediate_size": 10240, "num_hidden_layers": 32, "head_dim": 64, "num_heads": 40, "hidden_ratio": 4.0}
    own |= {"decay_low_rank_dim": 96, "gate_low_rank_dim": 320, "a_low_rank_dim": 96, "v_low_rank_dim": 64}
    own |= {"attn": None, "attn_mode": "chunk", "value_dim": [2560] * 32, "hidden_act": "sqrelu", "fuse_norm": False}
    own |= {"norm_first": True, "norm_bias": True, "norm_eps": 1e-5, "max_position_embeddings": 2048}
    own |= {"initializer_range": 0.006, "tie_word_embeddings": False, "use_cache": True, "fuse_cross_entropy": True}
    own |= {"bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32", "transformers_version": "4.48.0"}
    own |= {"fuse_linear_cross_entropy": False, "use_l2warp": False}
    maps = {"AutoConfig": "modeling_rwkv7.RWKV7Config", "AutoModelForCausalLM": "modeling_rwkv7.RWKV7ForCausalLM"}
    return {"rwkv7_3b": own | {"auto_map": maps}}


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has, as published}."""
    return {"rwkv7_3b": 2_947_735_040}


TOTALS: dict[str, int | str] = {
    "rwkv7-world-0.1b": 191_034_624,
    "rwkv7-world-0.4b": 450_767_872,
    "rwkv7-world-1.5b": 1_527_404_544,
    "rwkv7-world-2.9b": 2_947_735_040,
}
