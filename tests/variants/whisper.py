"""A tiny configuration of Whisper and the published totals. The encoder and the decoder differ in every size."""

from typing import Any

TINY: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "vocab_size": 61,
    "num_mel_bins": 6,
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 44,
    "decoder_layers": 3,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 36,
    "max_source_positions": 10,
    "max_target_positions": 20,
    "decoder_start_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "begin_suppress_tokens": None,
}

# Parameter counts of the presets, positions included, which transformers' models of these configs have.
TOTALS: dict[str, int] = {
    "whisper-tiny": 37_760_640,
    "whisper-base": 72_593_920,
    "whisper-small": 241_734_912,
    "whisper-medium": 763_857_920,
    "whisper-tiny.en": 37_760_256,
    "whisper-base.en": 72_593_408,
    "whisper-small.en": 241_734_144,
    "whisper-medium.en": 763_856_896,
    "whisper-large": 1_543_304_960,
    "whisper-large-v2": 1_543_304_960,
    "whisper-large-v3": 1_543_490_560,
    "whisper-large-v3-turbo": 808_878_080,
}
