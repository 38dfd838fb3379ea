"""Tiny configurations of BART and its relatives, and published totals. Both stacks differ in every size but one."""

from typing import Any

TINY: dict[str, Any] = {
    "architectures": ["BartForConditionalGeneration"],
    "model_type": "bart",
    "vocab_size": 61,
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 44,
    "decoder_layers": 3,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 36,
    "max_position_embeddings": 30,
    "decoder_start_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "scale_embedding": True,
    "forced_eos_token_id": None,
}
CLASSES = {
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "marian": "MarianMTModel",
    "m2m_100": "M2M100ForConditionalGeneration",
    "blenderbot": "BlenderbotForConditionalGeneration",
    "blenderbot-small": "BlenderbotSmallForConditionalGeneration",
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {
        name: TINY | {"model_type": name, "architectures": [architecture], "scale_embedding": name != "bart"}
        for name, architecture in CLASSES.items()
    }


# Parameter counts of the presets, which transformers' models of these configs have, with the bias of logits, which is a
# buffer there, and without tables of sines and cosines.
TOTALS: dict[str, int] = {
    "bart-base": 139_470_681,
    "bart-large": 406_341_721,
    "bart-large-cnn": 406_340_696,
    "mbart-large-50": 611_129_542,
    "pegasus-large": 568_796_007,
    "opus-mt-en-de": 73_944_309,
    "m2m100-418m": 483_905_536,
    "nllb-200-distilled-600m": 615_073_792,
    "nllb-200-1.3b": 1_370_638_336,
    "nllb-200-3.3b": 3_344_863_232,
    "blenderbot-400m-distill": 364_810_568,
    "blenderbot-small-90m": 87_563_936,
}
