"""Tiny configurations of T5, one per way in which its maths can differ, and published totals."""

from typing import Any

TINY: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 44,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "layer_norm_epsilon": 1e-2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}

_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {
        "t5": TINY,
        "t5_v1_1": TINY | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "t5_encoder": TINY | {"architectures": ["T5EncoderModel"], "feed_forward_proj": "gated-silu"},
        "mt5": TINY | _GATED | {"architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5"},
        "umt5": TINY | _GATED | {"architectures": ["UMT5ForConditionalGeneration"], "model_type": "umt5"},
        "umt5_encoder": TINY | {"architectures": ["UMT5EncoderModel"], "model_type": "umt5"},
    }


_NEWER = {"small": 76_961_152, "base": 247_577_856, "large": 783_150_080, "xl": 2_849_757_184, "xxl": 11_135_332_352}
# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int] = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1_1-xxl-encoder": 4_762_310_656,
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "mt5-large": 1_229_581_312,
    "mt5-xl": 3_742_619_648,
    "mt5-xxl": 12_921_057_280,
    "umt5-small": 306_601_984,
    "umt5-base": 592_043_520,
    "umt5-xl": 3_768_356_864,
    "umt5-xxl": 12_972_531_712,
    "umt5-xxl-encoder": 5_680_910_336,
    **{f"{line}-{size}": total for line in ("t5-v1_1", "flan-t5") for size, total in _NEWER.items()},
}
