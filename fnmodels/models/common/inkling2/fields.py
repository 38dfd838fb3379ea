"""Inkling 2's config.json, read and written; loops have model types of their own."""

from collections.abc import Sequence
from typing import Any

from fnmodels.errors import ConfigError, UnsupportedError

from .. import decoder
from .. import moe as mixture
from ..config_json import LAYERS_LIMIT, ConfigJson, Fields

_TYPES = {"hybrid_sliding": "sliding_moe", "hybrid": "full_moe"}
# {name in files: name here} of fields that both model types have
_NAMES = {
    "swa_num_attention_heads": "sliding_attention_heads",
    "swa_num_key_value_heads": "sliding_key_value_heads",
    "swa_head_dim": "sliding_head_dim",
    "sliding_window_size": "sliding_window",
    "d_rel": "relative_dim",
    "rel_extent": "relative_extent",
    "log_scaling_n_floor": "log_floor",
    "log_scaling_alpha": "log_alpha",
    "conv_kernel_size": "conv_kernel",
    "moe_intermediate_size": "moe_intermediate_size",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "route_scale": "routed_scaling_factor",
    "qk_l2_clip_threshold": "qk_clip",
    "rel_l2_clip_threshold": "relative_clip",
    "n_layers_per_attn_res_block": "layers_per_block",
    "mlp_gate_softcap": "gate_softcap",
    "mlp_up_softcap": "up_softcap",
    "final_logit_softcapping": "final_softcap",
}
_LOOP = {"loop_layer_index_start": "loop_start", "loop_layer_index_end": "loop_end"}
_LOOP |= {"loop_num_passes": "loop_passes", "loop_gate_rank": "loop_gate_rank"}
# {name in other files: name in these}
_ALIASES = {"sliding_window": "sliding_window_size", "num_local_experts": "n_routed_experts"}
_ALIASES |= {"sconv_kernel_size": "conv_kernel_size", "model_max_length": "max_position_embeddings"}
_ALIASES |= {"intermediate_size": "moe_intermediate_size", "routed_scaling_factor": "route_scale"}
_DEFAULTS: dict[str, Any] = {"vocab_size": 201024, "unpadded_vocab_size": 200058, "num_key_value_heads": 8}
_DEFAULTS |= {"head_dim": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 128, "sliding_window_size": 1024}
_DEFAULTS |= {"d_rel": 16, "rel_extent": 1024, "log_scaling_alpha": 0.1, "max_position_embeddings": 1 << 20}
_DEFAULTS |= {"conv_kernel_size": 4, "num_experts_per_tok": 8, "route_scale": 8.0, "rms_norm_eps": 1e-6}
_DEFAULTS |= {"qk_l2_clip_threshold": 22.627416997969522, "rel_l2_clip_threshold": 8.0, "mlp_gate_softcap": 4.0}
_DEFAULTS |= {"n_layers_per_attn_res_block": 6, "mlp_up_softcap": 25.0, "final_logit_softcapping": 30.0}
_SIZES: tuple[str, ...] = ("hidden_size", "num_hidden_layers", "num_attention_heads", "swa_num_attention_heads")
_SIZES += ("log_scaling_n_floor", "moe_intermediate_size", "n_routed_experts")
_OF_TEXT = dict(zip(_SIZES, (4608, 48, 48, 48, 128000, 2304, 384), strict=True))
_OF_LOOP = dict(zip(_SIZES, (2304, 24, 24, 24, 8192, 1152, 128), strict=True))
_OF_LOOP |= dict(zip(_LOOP, (6, 18, 3, 64), strict=True))
_NO_LOOP = dict(zip(_LOOP.values(), (0, 0, 1, 0), strict=True))
IGNORED = ("number_of_conv_states", "intermediate_size", "loop_config")


def fields_from_hf(fields: Fields, model_types: Sequence[str]) -> tuple[Fields, dict[str, Any]]:
    """(the fields of the text, the keywords of a Config)."""
    model_type = fields.choice("model_type", model_types)
    if not model_type.endswith("_text"):
        fields = decoder.text_part(fields, f"{model_type}_text", ignored=("vision_config", "image_token_id"))
    looped = model_type.startswith("inkling2_loop")
    given = dict(fields.values)
    for theirs, ours in _ALIASES.items():
        if (value := given.pop(theirs, None)) is not None and given.setdefault(ours, value) != value:
            raise ConfigError(f"{fields.where}: {theirs!r} is {value} and {ours!r} is {given[ours]}.")
    defaults = {**_DEFAULTS, **(_OF_LOOP if looped else _OF_TEXT), "intermediate_size": 1}
    fields = Fields(defaults | {name: value for name, value in given.items() if value is not None}, fields.where)
    sizes = decoder.decoder_sizes(fields, max_positions=1 << 20, tied=False)
    if sizes["tie_word_embeddings"]:
        raise UnsupportedError(f"{fields.where}: 'tie_word_embeddings' is true; Inkling 2 has a head of its own.")
    for name in ("intermediate_size", "tie_word_embeddings"):
        del sizes[name]
    stored = sizes["num_hidden_layers"]
    fields.expect("scoring_func", "sigmoid")
    fields.expect("hidden_act", "silu")
    own: dict[str, Any] = {
        ours: (fields.number if isinstance(defaults[name], float) else fields.integer)(name)
        for name, ours in _NAMES.items()
    }
    own |= {ours: fields.integer(name) for name, ours in _LOOP.items()} if looped else _NO_LOOP
    own["num_experts"], own["num_experts_per_tok"] = mixture.experts_from_hf(fields, 1, 1, stored)
    default = tuple("sliding_moe" if (i + 1) % 6 else "full_moe" for i in range(stored))
    kinds = decoder.listed_kinds(fields, ("layer_types",), _TYPES) or default
    start, end, passes, n = own["loop_start"], own["loop_end"], own["loop_passes"], own["layers_per_block"]
    if looped and (passes < 2 or not start < end <= stored or start % n or end % n):
        raise UnsupportedError(
            f"{fields.where}: layers from 'loop_layer_index_start' {start} to 'loop_layer_index_end' {end} run "
            f"'loop_num_passes' {passes} times; both are multiples of {n} up to {stored}, and passes at least 2."
        )
    sizes["num_hidden_layers"] = stored + (passes - 1) * (end - start)
    if sizes["num_hidden_layers"] > LAYERS_LIMIT:
        raise ConfigError(f"{fields.where}: layers run {sizes['num_hidden_layers']} times; {LAYERS_LIMIT} is most.")
    return fields, {
        **sizes | own | {"vocab_size": fields.integer("unpadded_vocab_size")},
        "embedding_rows": sizes["vocab_size"],
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "layer_kinds": kinds[:start] + kinds[start:end] * passes + kinds[end:],
        "model_type": model_type,
    }


def fields_to_hf(config: Any) -> ConfigJson:
    """The fields that `fields_from_hf` reads back; None for those of other decoders."""
    looped, theirs = config.loop_passes > 1, {kind: name for name, kind in _TYPES.items()}
    own: ConfigJson = {name: getattr(config, ours) for name, ours in (_NAMES | (_LOOP if looped else {})).items()}
    own |= {"vocab_size": config.embedding_rows, "unpadded_vocab_size": config.vocab_size}
    own["num_hidden_layers"] = config.stored_layers
    own["layer_types"] = [theirs[config.layer_kinds[config.order.index(i)]] for i in range(config.stored_layers)]
    own |= {"rms_norm_eps": config.rms_norm_eps, "hidden_act": config.hidden_act}
    return own | {"rope_parameters": None, "intermediate_size": None}
