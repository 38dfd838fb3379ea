"""The parts of DeepSeek V4's config.json that have two dialects: kinds of layers, lengths of windows, two ropes."""

from collections.abc import Mapping
from typing import Any

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.rope_config import parse_rope, rope_to_hf
from fnmodels.ops import Rope

ATTENTION = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "indexed",
    "heavily_compressed_attention": "compressed",
}
MLP = {"hash_moe": "_hash_moe", "moe": "_moe"}
INDEXED, COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"

# Fields of one value, which files of DeepSeek V3 may have others of, and sizes with Flash's values as defaults.
FIXED: dict[str, Any] = {
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "topk_method": "noaux_tc",
    "router_jitter_noise": 0.0,
}
SIZES = {
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
}


def ropes_to_hf(config: Any) -> ConfigJson:
    """The field `rope_parameters`, which `ropes_of` reads."""
    ropes = {"main": config.local_rope, "compress": config.rope}
    return {name: rope_to_hf(rope) | {"partial_rotary_factor": rope.partial} for name, rope in ropes.items()}


def ratios_of(fields: Fields) -> dict[str, int]:
    """{type of layer: tokens of its windows}, from `compress_rates` or a field of each."""
    rates = fields.take("compress_rates", None)
    inner = Fields({} if rates is None else rates, f"{fields.where}, compress_rates")
    ratios = {name: inner.integer(name, ratio) for name, ratio in ((INDEXED, 4), (COMPRESSED, 128))}
    inner.finish()
    for name, older in ((INDEXED, "compress_rate_csa"), (COMPRESSED, "compress_rate_hca")):
        ratios[name] = fields.integer(older, ratios[name])
    return ratios


def layer_kinds_of(fields: Fields, layers: int, heads: int, ratios: Mapping[str, int]) -> tuple[str, ...]:
    """The kinds of layers, from `layer_types` or, as published, the tokens of each layer's windows (0: none).

    heads: the number of MTP heads, whose windows are listed after those of layers. UnsupportedError if they have any.
    """
    types = ["heavily_compressed_attention" if i < 2 or i % 2 == 0 else INDEXED for i in range(layers)]
    listed = fields.take("compress_ratios", None)
    if listed is not None:
        known = {0: "sliding_attention", 4: INDEXED, 128: COMPRESSED}
        if not isinstance(listed, list) or len(listed) < layers or any(ratio not in known for ratio in listed):
            raise ConfigError(
                f"{fields.where}: 'compress_ratios' is {shown(listed)}, but must be a list of 0, 4 or 128 for each of "
                f"{layers} layers."
            )
        if any(listed[layers : layers + heads]):
            raise UnsupportedError(
                f"{fields.where}: 'compress_ratios' has {shown(listed[layers : layers + heads])} for MTP heads, whose "
                "layers read no windows here, as 0 says."
            )
        types = [known[ratio] for ratio in listed[:layers]]
    attention = _per_layer(fields, "layer_types", ATTENTION, types)
    hashed = fields.integer("num_hash_layers", 3, low=0)
    mlps = _per_layer(fields, "mlp_layer_types", MLP, ["hash_moe" if i < hashed else "moe" for i in range(layers)])
    return tuple(map("".join, zip(attention, mlps, strict=True)))


def _per_layer(fields: Fields, name: str, known: Mapping[str, str], default: list[str]) -> list[str]:
    """The value in `known` of each layer's entry in the list of field `name`; ConfigError if it is not such a list."""
    types = fields.take(name, default)
    types = default if types is None else types
    if not isinstance(types, list) or len(types) != len(default) or any(kind not in list(known) for kind in types):
        expected = f"a list of {len(default)} entries, each {' or '.join(map(repr, known))}"
        raise ConfigError(f"{fields.where}: {name!r} is {shown(types)}, but must be {expected}.")
    return [known[kind] for kind in types]


def ropes_of(fields: Fields, head_dim: int, max_positions: int) -> dict[str, Rope]:
    """{"main", "compress"}: from `rope_parameters` of both, or from one scaling, which is of compressed layers alone.

    cos and sin are not multiplied by the factor of YaRN.
    """
    rotary = fields.integer("qk_rope_head_dim", int(head_dim * fields.number("partial_rotary_factor", 0.125)))
    if fields.take("partial_rotary_factor", None) is not None:
        fields.expect("partial_rotary_factor", rotary / head_dim)
    thetas = {"main": fields.number("rope_theta", 1e4), "compress": fields.number("compress_rope_theta", 1.6e5)}
    new, old = fields.take("rope_parameters", None), fields.take("rope_scaling", None)
    rope = new if new is not None else old if old is not None else {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"{fields.where}: the rope is {shown(rope)}, but must be an object.")
    nested = rope if set(rope) & set(thetas) else {"main": {}, "compress": rope}
    if unknown := sorted(set(nested) - set(thetas)):
        raise ConfigError(f"{fields.where}: 'rope_parameters' has {', '.join(unknown)} beside main and compress.")
    ropes = {}
    for name, theta in thetas.items():
        values = {"partial_rotary_factor": rotary / head_dim, **(nested.get(name) or {})}
        if nested is not rope:
            values |= {"rope_theta": theta}
        if "yarn" in (values.get("rope_type"), values.get("type")) and nested is not rope:
            values.setdefault("attention_factor", 1.0)
        inner = Fields(values, f"{fields.where}, rope of {name}")
        ropes[name] = parse_rope(inner, head_dim=head_dim, max_positions=max_positions, theta=theta, partial=0.125)
    return ropes
