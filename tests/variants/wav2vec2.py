"""Published totals of wav2vec 2.0, HuBERT and WavLM: parameters of transformers' classes that their files name."""

TOTALS: dict[str, int | str] = {
    "wav2vec2-base": 94_371_712,
    "wav2vec2-base-960h": 94_396_320,
    "wav2vec2-large-xlsr-53": 315_438_720,
    "hubert-base-ls960": 94_371_712,
    "hubert-large-ls960-ft": 315_471_520,
    "wavlm-base": 94_381_936,
    "wavlm-large": 315_453_120,
}
