"""Fields of a decoder's config.json that say what is so anyway, as its parameters and kinds of layers show."""

from typing import Any

from fnmodels import tree

from ..config_json import Fields
from ..family import field_of, parsed, traits_of
from ..registry import family_of

_BIASES = ("add_bias_linear", "bias", "linear_bias", "use_bias")
_ATTENTION_BIASES = ("add_qkv_bias", "attention_bias", "qkv_bias", "use_attention_bias", "use_qkv_bias")
_CAUSAL = ("causal", "is_causal", "use_causal_mask")
_QUERY_NORMS = ("qk_layer_norms", "qk_layernorm", "qk_norm", "use_qk_layernorm", "use_qk_norm")


def stated(config: Any, fields: Fields) -> tuple[str, ...]:
    """The names of such fields: switches of what the model lacks or always is, and layers that are all full."""
    found = _without_parameters(
        config, [n for n, value in fields.values.items() if value is False and n not in fields.read]
    )
    full = all(kind.name == "full" for kind in parsed(config.layer_kinds))
    if full and fields.values.get("layer_types") == ["full_attention"] * config.num_hidden_layers:
        found.append("layer_types")
    if full and field_of(config, "sliding_window") is None and fields.values.get("use_sliding_window") is False:
        found.append("use_sliding_window")
    if traits_of(family_of(config)).causal and not getattr(config, "bidirectional", False):
        found += [name for name in _CAUSAL if fields.values.get(name) is True]
    return tuple(found)


def _without_parameters(config: Any, off: list[str]) -> list[str]:
    """The names in `off` that are about biases or norms which no layer has."""
    if not {*_BIASES, *_ATTENTION_BIASES, *_QUERY_NORMS} & set(off):
        return []
    paths = [path.split(".") for path in tree.flatten(family_of(config).spec(config)["layers"])]
    biased = [path for path in paths if path[-1].endswith("bias") and "norm" not in path[-1]]
    lacks = dict.fromkeys(_BIASES, not biased)
    lacks |= dict.fromkeys(_ATTENTION_BIASES, not any("mlp" not in path for path in biased))
    lacks |= dict.fromkeys(_QUERY_NORMS, not any("q_" in p[-1] and "norm" in p[-1] for p in paths))
    return [name for name in off if lacks.get(name)]
