"""Tiny configurations of Llama-Nemotron, one per way in which its maths can differ, and its published sizes.

transformers has no code of it: tests/fnmodels/models/test_nemotron_nas.py compares with a written-out reference.
"""

from typing import Any

from fnmodels.models.decoder import nemotron_nas

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Sublayers beside each other, an MLP alone, neither, attention alone; widths of 256 and 512.
LAYERS = ((2, 1.0), (0, 13.0), (0, 0.0), (4, 0.0), (1, 13.0))


def blocks(*layers: tuple[int, float]) -> list[dict[str, Any]]:
    """`block_configs` with every field of published files: (query heads of a key head, ratio of the MLP) of each."""
    sinks = {"num_sink_tokens": None, "unshifted_sink": False, "use_prefill_window_in_sink_attention": False}
    rest = {"replace_with_linear": False, "sparsify": None}
    return [
        {
            "attention": {"n_heads_in_group": group or None, "no_op": not group, "window_length": None} | sinks | rest,
            "ffn": {"ffn_mult": ratio or None, "no_op": not ratio} | rest,
        }
        for group, ratio in layers
    ]


TINY: dict[str, Any] = {
    "architectures": ["DeciLMForCausalLM"],
    "model_type": "nemotron-nas",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "block_configs": blocks(*LAYERS),
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_theta": 50.0,
}


def variants() -> dict[str, Any]:
    """{name: Config}: transformers does not read these files."""
    other = {"num_hidden_layers": 2, "block_configs": blocks((2, 1.0), (4, 1.0)), "tie_word_embeddings": True}
    other |= {"attention_bias": True, "mlp_bias": True}
    other |= {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}}
    files = {"nemotron-nas": TINY, "nemotron-nas_bias_tied": TINY | other}
    return {name: nemotron_nas.Config.from_hf(values) for name, values in files.items()}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of a published member."""
    return {"super_49b": FILES["llama-3.3-nemotron-super-49b-v1"]}


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has}, counted from the shapes; published as 49B."""
    return {"super_49b": 49_867_145_216}


TOTALS: dict[str, int | str] = {"llama-3.3-nemotron-super-49b-v1": 49_867_145_216}
_RUNS = nemotron_nas._SUPER
FILES: dict[str, dict[str, Any]] = {
    "llama-3.3-nemotron-super-49b-v1": {
        "_name_or_path": "llama_nemotron_super",
        "architectures": ["DeciLMForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_decilm.DeciLMConfig",
            "AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM",
        },
        "block_configs": blocks(*((group, ratio) for count, group, ratio in _RUNS for _ in range(count))),
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 8192,
        "initializer_range": 0.02,
        "intermediate_size": None,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "nemotron-nas",
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": None,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.48.3",
        "use_cache": True,
        "vocab_size": 128256,
    }
}
