"""Kimi Linear's and Kimi K3's config.json: which layers have which attention and MLP, under two sets of names."""

from collections.abc import Mapping, Sequence
from typing import Any

from fnmodels.errors import ConfigError

from .. import decoder, mla
from ..config_json import ConfigJson, Fields, merged
from ..family import parsed

ALIASES = mla.ALIASES | {"num_local_experts": "n_routed_experts"}
LINEAR = {  # {name in the published linear_attn_config: that of transformers}
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def flat(fields: Fields, linear: Mapping[str, str] = LINEAR, **fixed: Any) -> Fields:
    """The fields with those of the published `linear_attn_config` under the names in `linear`.

    fixed: further fields of that object and the one value that each may have.
    """
    # no code reads head_dim, which is another number in published files than in those of transformers
    values = {name: value for name, value in fields.values.items() if name not in ("linear_attn_config", "head_dim")}
    own = fields.values.get("linear_attn_config")
    inner = Fields({} if own is None else own, f"{fields.where}, linear_attn_config")
    given = [(published, name, inner.take(published, None)) for published, name in linear.items()]
    numbers = [inner.take(name, None) for name in ("full_attn_layers", "kda_layers")]
    for name, value in fixed.items():
        inner.expect(name, value)
    inner.finish()
    types = None if numbers == [None, None] else _types(inner, *numbers)
    return merged(Fields(values, fields.where), [*given, ("linear_attn_config", "layer_types", types)])


def _types(inner: Fields, full: Any, linear: Any) -> list[str]:
    """`layer_types` from the numbers of layers, which count from 1; ConfigError unless each layer is in one list."""
    if all(isinstance(one, list) and all(type(i) is int for i in one) for one in (full, linear)):
        kinds = dict.fromkeys(full, "full_attention") | dict.fromkeys(linear, "linear_attention")
        if sorted(full + linear) == list(range(1, len(kinds) + 1)):
            return [kinds[i] for i in sorted(kinds)]
    raise ConfigError(
        f"{inner.where}: 'full_attn_layers' and 'kda_layers' must be lists that have each layer's number, from 1, once."
    )


def expect_usual(fields: Fields) -> None:
    """UnsupportedError where a switch has another value than in published files."""
    fields.expect("mla_use_nope", True)
    fields.expect("moe_router_activation_func", "sigmoid")
    fields.expect("use_grouped_topk", True)
    fields.expect("moe_layer_freq", 1)
    fields.expect("num_nextn_predict_layers", 0)


def layer_kinds(fields: Fields, linear: Sequence[bool], mlps: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of layers, from `layer_types` and `mlp_layer_types`.

    linear: whether a layer is one of delta attention where the first list is absent; mlps: see `_dense_layers`.
    """
    ordered = decoder.sliding_layers(fields, linear, "linear_attention")
    return tuple(
        ("linear" if near else "full") + ("" if dense else "_moe")
        for near, dense in zip(ordered, _dense_layers(fields, mlps), strict=True)
    )


def _dense_layers(fields: Fields, first: tuple[str, ...]) -> list[bool]:
    """Whether each layer is dense: from `mlp_layer_types`, or `first`, the kinds by `first_k_dense_replace`."""
    rule = [kind == "full" for kind in first]
    dense = decoder.sliding_layers(fields, rule, "dense", "sparse", name="mlp_layer_types")
    if dense != rule and fields.values.get("first_k_dense_replace") is not None:
        raise ConfigError(f"{fields.where}: 'mlp_layer_types' is not what 'first_k_dense_replace' makes.")
    return dense


def dense_to_hf(config: Any) -> ConfigJson:
    """The field that says which layers are dense."""
    dense = [not kind.routed for kind in parsed(config.layer_kinds)]
    if dense == sorted(dense, reverse=True):
        return {"first_k_dense_replace": sum(dense)}
    return {"mlp_layer_types": ["dense" if plain else "sparse" for plain in dense]}


def linear_to_hf(config: Any, linear: Mapping[str, str] = LINEAR) -> ConfigJson:
    """The published object `linear_attn_config`, whose layers count from 1."""
    ordered = [kind.ordered for kind in parsed(config.layer_kinds)]
    return {
        **{published: getattr(config, name) for published, name in linear.items()},
        "kda_layers": [i for i, near in enumerate(ordered, 1) if near],
        "full_attn_layers": [i for i, near in enumerate(ordered, 1) if not near],
    }
