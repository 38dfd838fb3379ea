"""A tiny configuration of Nomic BERT with its masked-LM head, and published sizes."""

from typing import Any

SEPARATE = {"packed": "its masks do not tell documents apart"}

TINY: dict[str, Any] = {
    "architectures": ["NomicBertForMaskedLM"],
    "model_type": "nomic_bert",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 44,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"nomic_bert": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member with a head, as transformers writes it."""
    return {
        "nomic_bert": {
            "architectures": ["NomicBertForMaskedLM"],
            "attention_probs_dropout_prob": 0.0,
            "classifier_dropout": None,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_dropout_prob": 0.0,
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-12,
            "max_position_embeddings": 2048,
            "model_type": "nomic_bert",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "pad_token_id": 0,
            "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
            "type_vocab_size": 2,
            "vocab_size": 30528,
        }
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"nomic_bert": TOTALS["nomic-bert-2048"]}


# Fields refused at any changed value: no published encoder has them.
REFUSED = {"nomic_bert": {"head_dim"}}

# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int] = {"nomic-bert-2048": 137_354_304, "nomic-embed-text-v1.5": 136_731_648}

FILES: dict[str, dict[str, Any]] = {
    "nomic-embed-text-v1.5": {
        "activation_function": "swiglu",
        "architectures": ["NomicBertModel"],
        "attn_pdrop": 0.0,
        "auto_map": {"AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig"},
        "bos_token_id": None,
        "causal": False,
        "dense_seq_output": True,
        "embd_pdrop": 0.0,
        "eos_token_id": None,
        "fused_bias_fc": True,
        "fused_dropout_add_ln": True,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-12,
        "max_trained_positions": 2048,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "model_type": "nomic_bert",
        "n_embd": 768,
        "n_head": 12,
        "n_inner": 3072,
        "n_layer": 12,
        "n_positions": 8192,
        "pad_vocab_size_multiple": 64,
        "parallel_block": False,
        "parallel_block_tied_norm": False,
        "prenorm": False,
        "qkv_proj_bias": False,
        "reorder_and_upcast_attn": False,
        "resid_pdrop": 0.0,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "summary_activation": None,
        "summary_first_dropout": 0.0,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "torch_dtype": "float32",
        "transformers_version": "4.37.2",
        "type_vocab_size": 2,
        "use_cache": True,
        "use_flash_attn": True,
        "use_rms_norm": False,
        "use_xentropy": True,
        "vocab_size": 30528,
    }
}
