"""GLM 5.3 Flash's config.json, read; published files and transformers name the sizes of delta layers differently."""

from collections.abc import Sequence
from typing import Any

from fnmodels.errors import UnsupportedError
from fnmodels.ops.mlp import ACTIVATIONS

from .. import decoder
from .. import moe as mixture
from ..config_json import ConfigJson, Fields, merged
from ..family import parsed
from ..layers import indexed

_TYPES = {"linear_attention": "linear", **dict.fromkeys((*indexed.ATTENTION, "full_attention"), "indexed")}
_BOUND = "linear_lower_bound"
# {name in the published linear_attn_config: that of transformers}
_LINEAR = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "gate_lower_bound": _BOUND}
_LINEAR |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}
_NULL = (_BOUND, "num_key_value_heads")  # fields in which null is another value than the default
_VISION = (
    *("vision_config", "image_token_id", "video_token_id", "image_start_token_id", "image_end_token_id"),
    *("video_start_token_id", "video_end_token_id"),
)
_DEFAULTS: dict[str, Any] = {"vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288}
_DEFAULTS |= {"moe_intermediate_size": 2048, "num_hidden_layers": 45, "num_attention_heads": 64, "n_shared_experts": 1}
_DEFAULTS |= {"n_routed_experts": 288, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
# {field: its default}
_SIZES = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "v_head_dim": 256, "index_n_heads": 32}
_SIZES |= {"index_head_dim": 128, "index_topk": 2048, "index_kpool": 16, "linear_num_heads": 64}
_SIZES |= {"linear_head_dim": 128, "linear_conv_kernel_dim": 4, "hc_mult": 4, "hc_sinkhorn_iters": 20}
# {its name in files: that of a Config's}
_RENAMED = {"index_topk": "indexer_budget", "index_kpool": "indexer_compress_ratio", "hc_mult": "residual_streams"}
_RENAMED |= {"hc_sinkhorn_iters": "sinkhorn_iterations"}
SIZES = {name: _RENAMED.get(name, name) for name in _SIZES}
# Switches of Z.ai's code, which transformers has at these values alone.
_FIXED = {"qk_rope_head_dim": 0, "mhc": True, "mla_use_nope": True, "index_kpool_compress": True}
_FIXED |= {"index_kpool_always_select_tail": True}
# without effect: nothing rotates, every draft of an MTP head chooses its keys, and the rest may stand beside lists
IGNORED = (
    *("head_dim", "rope_parameters", "rope_theta", "rope_scaling", "rope_interleave", "indexer_rope_interleave"),
    *("index_share_for_mtp_iteration", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"),
)


def fields_from_hf(values: ConfigJson, model_types: Sequence[str]) -> tuple[Fields, dict[str, Any]]:
    """(the fields of the text, the keywords of a Config)."""
    outer = Fields(values)
    model_type = outer.choice("model_type", model_types)
    if values.get("text_config") is not None:
        outer = decoder.text_part(outer, "glm5_next_text", ignored=_VISION)
    elif model_type == "glm5_next":  # the fields of its text stand beside the others
        outer = Fields({name: value for name, value in values.items() if name not in _VISION})
    fields, inner = _flat(outer)
    sizes = decoder.decoder_sizes(fields, max_positions=1048576, tied=False, kv_heads=64, head_dim=1)
    del sizes["head_dim"]
    if sizes.pop("num_key_value_heads") != (heads := sizes["num_attention_heads"]):
        raise UnsupportedError(f"{fields.where}: 'num_key_value_heads' must be {heads} in this family.")
    layers = sizes["num_hidden_layers"]
    for name, value in _FIXED.items():
        fields.expect(name, value)
    own = {SIZES[name]: fields.integer(name, size, high=1 << 16) for name, size in _SIZES.items()}
    fields.expect("qk_head_dim", own["qk_nope_head_dim"])
    experts = mixture.grouped_from_hf(fields, layers, dense=3, scale=2.5)
    experts["layer_kinds"] = _layer_kinds(fields, layers)
    ordered = [kind.ordered for kind in parsed(experts["layer_kinds"])]
    if all(ordered) and "num_nextn_predict_layers" not in fields.values:
        experts["num_nextn_predict_layers"] = 0  # whose block is one of attention
    for name, wanted in (("kda_layers", True), ("full_attn_layers", False)):
        inner.expect(name, [i for i, is_linear in enumerate(ordered) if is_linear is wanted])
    inner.finish()
    bound: float | None = fields.number(_BOUND, -5.0, above=-1e9, high=0.0)
    return fields, {
        **sizes | own | experts,
        **fields.plain(rms_norm_eps=1e-5, swiglu_limit=10.0, attention_bias=False),
        "hyper_eps": fields.number("hc_eps", 1e-6),
        "hidden_act": fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        _BOUND: None if fields.values.get(_BOUND, bound) is None else bound,
        "model_type": model_type,
    }


def _flat(outer: Fields) -> tuple[Fields, Fields]:
    """(the fields with those of `linear_attn_config` under the names of transformers, the rest of that object)."""
    given = {name: value for name, value in outer.values.items() if value is not None or name in _NULL}
    given.pop("head_dim", None)  # no code reads it
    own = given.pop("linear_attn_config", None) or {}
    inner = Fields(own, f"{outer.where}, linear_attn_config")
    found = [(published, name, inner.take(published, None)) for published, name in _LINEAR.items()]
    values = dict(merged(Fields(_DEFAULTS | given, outer.where), found).values)
    if own.get("gate_lower_bound", 0) is None:
        values[_BOUND] = None
    if inner.boolean("safe_gate", True) and own and values.get(_BOUND, 0) is None:
        del values[_BOUND]
    return Fields(values, outer.where), inner


def _layer_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    default = ["indexed_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    types = indexed.per_layer(fields, "layer_types", _TYPES, default)
    choices = indexed.per_layer(fields, "indexer_types", indexed.INDEXERS, indexed.indexer_types(fields, layers))
    routed = mixture.routed_layers(fields, layers, 3)
    return tuple(
        (kind if kind == "linear" else choice) + "_moe" * one
        for kind, choice, one in zip(types, choices, routed, strict=True)
    )
