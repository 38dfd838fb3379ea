"""Tiny configurations of Falcon, one per variation of its maths, and its published sizes."""

import json
from typing import Any

# transformers builds its masks without positions, so that packed documents attend to each other.
SEPARATE = {"packed": "its masks do not tell documents apart"}

TINY: dict[str, Any] = {
    "model_type": "falcon",
    "vocab_size": 61,
    "hidden_size": 32,
    "ffn_hidden_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "layer_norm_epsilon": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e2},
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    new = TINY | {"new_decoder_architecture": True, "num_kv_heads": 2}
    untied = {"tie_word_embeddings": False, "activation": "gelu_pytorch_tanh"}
    return {
        "falcon": TINY,
        "falcon_new": new,
        "falcon_new_one_norm": new | untied | {"num_ln_in_parallel_attn": 1},
        "falcon_alibi": TINY | {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
        "falcon_in_turn_bias": TINY | {"multi_query": False, "parallel_attn": False, "bias": True},
    }


# The complete published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "falcon-7b": {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "_name_or_path": "tiiuae/falcon-7b-instruct",
    "alibi": false, "apply_residual_connection_post_layernorm": false, "attention_dropout": 0.0, "auto_map":
    {"AutoConfig": "configuration_falcon.FalconConfig", "AutoModel": "modeling_falcon.FalconModel",
    "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM", "AutoModelForQuestionAnswering":
    "modeling_falcon.FalconForQuestionAnswering", "AutoModelForSequenceClassification":
    "modeling_falcon.FalconForSequenceClassification", "AutoModelForTokenClassification":
    "modeling_falcon.FalconForTokenClassification"}, "bias": false, "bos_token_id": 11, "eos_token_id": 11,
    "hidden_dropout": 0.0, "hidden_size": 4544, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "multi_query":
    true, "new_decoder_architecture": false, "num_attention_heads": 71, "num_hidden_layers": 32, "num_kv_heads": 71,
    "parallel_attn": true, "torch_dtype": "bfloat16", "transformers_version": "4.28.1", "use_cache": true,
    "vocab_size": 65024
  }
}""")

# (file, change, error): values that change the maths, or with which transformers fails.
CONTRADICTIONS = [
    ("falcon-7b", {"ff_factor": 3}, "'ff_factor' is 3; only 4"),
    ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "'num_ln_in_parallel_attn' is 2; only 1"),
    ("falcon-7b", {"new_decoder_architecture": True, "parallel_attn": False}, "'parallel_attn' is false; only true"),
    ("falcon-7b", {"multi_query": False, "num_kv_heads": 8}, "'num_kv_heads' is 8; only 71"),
]


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models, in the published dialect."""
    sizes = {"hidden_size": 14848, "num_hidden_layers": 80, "num_attention_heads": 232, "num_kv_heads": 8}
    return {"falcon_180b": FILES["falcon-7b"] | sizes | {"new_decoder_architecture": True}}


def sizes() -> dict[str, int]:
    """{name: number of parameters}; the published 179.5B count the tied head twice."""
    return {"falcon_180b": 178_557_088_768}


# Published parameter counts of the presets. Files of the 7B and 40B repeat the tied head: 7.22B and 41.8B with it.
TOTALS: dict[str, int | str] = {
    "falcon-7b": 7_217_189_760 - 65024 * 4544,
    "falcon-40b": 41_835_970_560 - 65024 * 8192,
    "falcon-180b": 178_557_088_768,
    "falcon-11b": "11.1B",
    "falcon-rw-1b": 1_311_625_216,
    "falcon-rw-7b": 7_516_020_736,
}

BLIND = {
    "falcon_in_turn_bias": {"num_ln_in_parallel_attn"},  # not parallel
    "falcon_alibi": {"num_ln_in_parallel_attn", "rope.partial", "rope.theta"},  # which rotates nothing
}

# In the older architecture transformers fails at 2 and ignores all else.
REFUSED = {"falcon": {"num_ln_in_parallel_attn"}}
