"""Tiny configurations of DBRX and its published size."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "dbrx",
    "vocab_size": 61,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    # transformers 5.24 wants the theta of attn_config and rotates by the other one
    "attn_config": {"clip_qkv": 0.6, "kv_n_heads": 2, "rope_theta": 50.0},
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 6, "moe_top_k": 3},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEEDS = {"dbrx": 1}
# transformers 5.24 rounds the scores of a model of lower precision, of which the weights are.
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
REFUSED = {"dbrx": {"rope_parameters..rope_theta"}}  # which must be that of attn_config


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}; the second leaves the weights of its experts as they are."""
    free = {"attn_config": {"clip_qkv": 2, "kv_n_heads": 1, "rope_theta": 50.0}}
    free |= {"ffn_config": TINY["ffn_config"] | {"moe_normalize_expert_weights": None, "ffn_act_fn": {"name": "gelu"}}}
    return {"dbrx": TINY, "dbrx_free": TINY | free}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the one published size, in the published dialect."""
    own = {"architectures": ["DbrxForCausalLM"], "d_model": 6144, "emb_pdrop": 0.0, "resid_pdrop": 0.0, "n_heads": 48}
    own |= {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000}, "n_layers": 40}
    own |= {"ffn_config": {"ffn_hidden_size": 10752, "model_type": "", "moe_jitter_eps": 0.01, "moe_loss_weight": 0.05}}
    own["ffn_config"] |= {"moe_num_experts": 16, "moe_top_k": 4}
    own |= {"initializer_range": 0.02, "max_seq_len": 32768, "output_router_logits": False, "torch_dtype": "bfloat16"}
    own |= {"router_aux_loss_coef": 0.05, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 100352}
    return {"dbrx": {"model_type": "dbrx"} | own}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"dbrx": 131_596_523_520}


TOTALS: dict[str, int | str] = {"dbrx": 131_596_523_520}
