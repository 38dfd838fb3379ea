"""Tiny configurations of SantaCoder and StarCoder and their published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "gpt_bigcode",
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 44,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-2,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    apart = {"multi_query": False, "scale_attn_weights": False, "tie_word_embeddings": False}
    return {"gpt_bigcode": TINY, "gpt_bigcode_heads": TINY | apart}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, in the published dialect."""
    own = {"activation_function": "gelu_pytorch_tanh", "architectures": ["GPTBigCodeForCausalLM"], "attn_pdrop": 0.1}
    own |= {"attention_softmax_in_fp32": True, "bos_token_id": 0, "embd_pdrop": 0.1, "eos_token_id": 0}
    own |= {"inference_runner": 0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "max_batch_size": None}
    own |= {"max_sequence_length": None, "multi_query": True, "n_embd": 6144, "n_head": 48, "n_inner": 24576}
    own |= {"n_layer": 40, "n_positions": 8192, "pad_key_length": True, "pre_allocate_kv_cache": False}
    own |= {"resid_pdrop": 0.1, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "use_cache": True}
    own |= {"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True}
    own |= {"summary_type": "cls_index", "summary_use_proj": True, "validate_runner_input": True, "vocab_size": 49152}
    return {"starcoder": {"model_type": "gpt_bigcode"} | own}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"starcoder": 15_517_456_384}


# Parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "santacoder": 1_124_886_528,
    "starcoderbase-1b": 1_137_207_296,
    "starcoder": 15_517_456_384,
}
