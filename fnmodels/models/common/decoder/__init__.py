"""Default parts of a decoder family: Config fields, masks, rotary tables, embedding, head, and tensor names.

A family imports a function by its name (`from fnmodels.models.common.decoder import kinds`) or writes its own.

config            Config fields and their checks; config_json: the same in config.json
layer_kinds       the kind of each layer, from lists and patterns in config.json
masks_and_tables  masks and rotary tables by kind
embed_and_head    embeddings, the final norm and output heads
parameters        the parameters of usual layers and their names on disk
"""

from .config import BaseConfig, SizesConfig, check_decoder, check_sizes, check_width
from .config_json import base_fields, decoder_sizes, decoder_to_hf, expressible, finished, softcap, text_part
from .embed_and_head import (
    classify,
    embed,
    embed_by_width,
    head,
    is_lm,
    ngram_inputs,
    project,
    scores,
    unembed,
    unembed_fp32_weight,
    unembed_layer_norm,
    unembed_zero_centered,
    without_padding,
)
from .layer_kinds import (
    by_window,
    kinds,
    layer_overrides,
    layer_types,
    listed_kinds,
    one_window,
    patterned_layers,
    rotating_layers,
    sliding_layers,
    sliding_pattern,
)
from .masks_and_tables import attention_masks, freqs_cis, freqs_cis_by_window, freqs_cis_with_temperature
from .parameters import decoder_name, fused, hf_names, spec

__all__ = ["SizesConfig", "BaseConfig", "check_decoder", "check_sizes", "check_width"]
__all__ += ["base_fields", "finished", "decoder_sizes", "text_part", "decoder_to_hf", "expressible", "softcap"]
__all__ += ["kinds", "sliding_layers", "one_window", "sliding_pattern", "patterned_layers"]
__all__ += ["listed_kinds", "layer_types", "rotating_layers", "by_window", "layer_overrides"]
__all__ += ["attention_masks", "freqs_cis", "freqs_cis_by_window", "freqs_cis_with_temperature"]
__all__ += ["embed", "embed_by_width", "head", "project", "is_lm", "scores", "classify", "without_padding"]
__all__ += ["ngram_inputs"]
__all__ += [
    "unembed",
    "unembed_fp32_weight",
    "unembed_layer_norm",
    "unembed_zero_centered",
    "spec",
    "hf_names",
    "decoder_name",
    "fused",
]
