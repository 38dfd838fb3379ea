"""Tiny configurations of T5Gemma, one per way in which its maths can differ, and published totals.

Stacks differ in every size but the vocabulary's.
"""

from typing import Any

_STACK: dict[str, Any] = {
    "model_type": "t5_gemma_module",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-2,
    "query_pre_attn_scalar": 9,
    "sliding_window": 4,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "pad_token_id": -1,  # transformers takes every token of this id for padding
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_BELOW = _STACK | {
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "query_pre_attn_scalar": 5,
    "sliding_window": 5,
    "final_logit_softcapping": 5.0,
}
TINY: dict[str, Any] = {
    "architectures": ["T5GemmaForConditionalGeneration"],
    "model_type": "t5gemma",
    "encoder": _STACK,
    "decoder": _BELOW,
    "is_encoder_decoder": True,
    "vocab_size": 61,
    "dropout_rate": 0.0,
}
# Scores without a cap are small, since large ones make fp32 itself differ by more than the tolerance.
_PLAIN = {
    "query_pre_attn_scalar": 50,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_bias": True,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    untied = {"encoder": _STACK | _PLAIN, "decoder": _BELOW | _PLAIN, "tie_word_embeddings": False}
    encoder = {"architectures": ["T5GemmaEncoderModel"], "is_encoder_decoder": False}
    return {"t5gemma": TINY, "t5gemma_uncapped": TINY | untied, "t5gemma_encoder": TINY | encoder}


# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int] = {
    "t5gemma-2b-2b": 5_596_853_760,
    "t5gemma-9b-2b": 12_292_375_296,
    "t5gemma-9b-9b": 20_333_401_088,
}
