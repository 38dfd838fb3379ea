"""Tiny configurations of LLaDA, Dream and SDAR, one per way in which their maths can differ, and published sizes.

transformers has none of them: tests/fnmodels/models/test_llada.py compares with its Llama, Qwen 2 and Qwen 3 under
masks that are not causal.
"""

import json
from typing import Any

from fnmodels.models.encoder import llada

LLADA: dict[str, Any] = {
    "model_type": "llada",
    "vocab_size": 61,
    "d_model": 32,
    "mlp_hidden_size": 44,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "max_sequence_length": 64,
    "rms_norm_eps": 1e-2,
    "rope_theta": 50.0,
    "mask_token_id": 60,
}
_QWEN: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_theta": 50.0,
    "mask_token_id": 60,
}
FILES_TINY: dict[str, dict[str, Any]] = {
    "llada": LLADA,
    "dream": _QWEN | {"model_type": "Dream"},
    "sdar": _QWEN | {"model_type": "sdar", "head_dim": 12, "block_size": 5, "tie_word_embeddings": True},
}


def variants() -> dict[str, Any]:
    """{name: Config}: transformers reads none of the files."""
    return {name: llada.Config.from_hf(values) for name, values in FILES_TINY.items()}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of published members."""
    return {name.replace("-", "_"): values for name, values in FILES.items()}


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has}."""
    return {"llada_8b": 8_015_581_184, "dream_7b": 7_615_616_512}


BLIND = {name: {"block_size"} for name in ("llada", "dream")}  # which have no blocks

# Counted from the shapes; published as 8B, 7B (7.6B on the Hub) and 8B.
TOTALS: dict[str, int | str] = {"llada-8b": 8_015_581_184, "dream-7b": 7_615_616_512, "sdar-8b": 8_190_735_360}

FILES: dict[str, dict[str, Any]] = json.loads("""{
  "llada-8b": {
    "activation_type": "silu", "alibi": false, "alibi_bias_max": 8.0, "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0, "attention_layer_norm": false, "attention_layer_norm_with_affine": true,
    "bias_for_layer_norm": false, "block_group_size": 1, "block_type": "llama", "d_model": 4096,
    "embedding_dropout": 0.0, "embedding_size": 126464, "eos_token_id": 126081, "flash_attention": false,
    "include_bias": false, "include_qkv_bias": false, "init_cutoff_factor": null, "init_device": "meta",
    "init_fn": "mitchell", "init_std": 0.02, "input_emb_norm": false, "layer_norm_type": "rms",
    "layer_norm_with_affine": true, "mask_token_id": 126336, "max_sequence_length": 4096, "mlp_hidden_size": 12288,
    "mlp_ratio": 4, "model_type": "llada", "multi_query_attention": null, "n_heads": 32, "n_kv_heads": 32,
    "n_layers": 32, "pad_token_id": 126081, "precision": "amp_bf16", "residual_dropout": 0.0, "rms_norm_eps": 1e-05,
    "rope": true, "rope_full_precision": true, "rope_theta": 500000.0, "scale_logits": false,
    "transformers_version": "4.46.3", "use_cache": false, "vocab_size": 126464, "weight_tying": false
  },
  "dream-7b": {
    "architectures": ["DreamModel"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "mask_token_id": 151666, "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "Dream",
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "pad_token_id": 151643,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.46.2", "use_cache": true,
    "use_mrope": false, "use_sliding_window": false, "vocab_size": 152064
  }
}""")

NO_FILE = {"sdar": "no copy is at hand; its preset has the published sizes"}
