"""What the configurations of decoders share: their sizes on disk, the usual names, the kinds of their layers.

Functions that a family calls where it is usual; a family that differs writes its own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .disk import Part, Stack, Stored, fuse
from .errors import ConfigError
from .hf import LAYERS_LIMIT, Fields, quantization
from .leaf import Leaf

HEADS_LIMIT = 16  # heads for further tokens: published models have one to three


def check_decoder(config: Any, known_kinds: Sequence[str]) -> None:
    """For `Config.__post_init__`: fills what was left empty (head_dim 0, layer_kinds ()) and refuses what cannot be."""
    for name in (*_DECODER_FIELDS[:6], "max_position_embeddings"):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1.")
    window = getattr(config, "sliding_window", None)
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ConfigError(f"sliding_window is {window!r}; it must be an integer of at least 1, or None.")
    object.__setattr__(config, "layer_kinds", tuple(config.layer_kinds))  # hashable
    if not config.head_dim:
        if config.hidden_size % config.num_attention_heads:
            raise ConfigError(
                f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads "
                f"{config.num_attention_heads}, so head_dim must be given."
            )
        object.__setattr__(config, "head_dim", config.hidden_size // config.num_attention_heads)
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}."
        )
    if not config.layer_kinds:
        object.__setattr__(config, "layer_kinds", (known_kinds[0],) * config.num_hidden_layers)
    if len(config.layer_kinds) != config.num_hidden_layers or not set(config.layer_kinds) <= set(known_kinds):
        raise ConfigError(
            f"layer_kinds must name {config.num_hidden_layers} layers, each one of {', '.join(known_kinds)}; "
            f"it is {config.layer_kinds}."
        )
    if window is None and any(kind.startswith("sliding") for kind in config.layer_kinds):
        raise ConfigError("layer_kinds has sliding layers, but sliding_window is None.")


def decoder_sizes(
    fields: Fields, *, max_positions: int, tied: bool, kv_heads: int = 0, head_dim: int = 0
) -> dict[str, Any]:
    """The fields that every decoder has, under Hugging Face's names; the arguments are the family's defaults.

    kv_heads 0: as many as query heads, which is also what an explicit null means. head_dim 0: hidden_size / heads.
    """
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if "num_key_value_heads" in fields.values:
        kv_heads = 0
    if not head_dim and fields.take("head_dim", None) is None and hidden % heads:
        raise ConfigError(
            f"{fields.where}: 'hidden_size' {hidden} is not a multiple of 'num_attention_heads' {heads}, "
            "so 'head_dim' must be given."
        )
    fields.expect("rope_interleaved", False)
    fields.expect("use_mrope", False)
    fields.expect("is_encoder_decoder", False)
    quantization(fields)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_hidden_layers": fields.integer("num_hidden_layers", high=LAYERS_LIMIT),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("num_key_value_heads", kv_heads or heads),
        "head_dim": fields.integer("head_dim", head_dim or hidden // heads, high=1 << 16),
        "max_position_embeddings": fields.integer("max_position_embeddings", max_positions),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", tied),
        "initializer_range": fields.number("initializer_range", 0.02, above=-1e-9),
    }


_DECODER_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "initializer_range"),
)


def decoder_to_hf(config: Any, architecture: str, **rest: Any) -> dict[str, Any]:
    """A config.json in the current dialect: what `decoder_sizes` reads, what `finish` kept, and the family's own.

    Raises ConfigError where `config.model_type` has no word for something: it would not be read back as it is.
    """
    kept = {name: json.loads(value) for name, value in config.extra}
    sizes = {name: getattr(config, name) for name in _DECODER_FIELDS}
    out = kept | {"architectures": [architecture], "model_type": config.model_type} | sizes | rest
    again = type(config).from_hf(out)
    if again != config:
        fields = [f.name for f in dataclasses.fields(config) if f.compare]
        lost = [name for name in fields if getattr(again, name) != getattr(config, name)]
        raise ConfigError(f"The model type {config.model_type!r} cannot express this model's {', '.join(lost)}.")
    return out


def check_experts(experts: int, chosen: int) -> None:
    """For `Config.__post_init__`: how many experts a layer has, and how many of them a token goes to."""
    for value in (experts, chosen):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= experts:
            raise ConfigError(f"{chosen!r} of {experts!r} experts are to be chosen; both must be integers, at least 1.")


def experts_limit(layers: int) -> int:
    """How many experts a layer may have in a model of so many layers, since their tensors are listed one by one.

    Twice as many as the largest published ones: 512 in a layer, 23,424 in all.
    """
    return max(1, min(1024, 50_000 // layers))


def experts_from_hf(fields: Fields, experts: int, chosen: int, layers: int) -> tuple[int, int]:
    """(number of experts, how many a token goes to) in a model of so many layers; `experts` and `chosen` are defaults.

    The first has another name in each family, and in transformers more than one.
    """
    high = experts_limit(layers)
    names = [n for n in ("num_experts", "num_local_experts", "n_routed_experts") if fields.take(n, None) is not None]
    found = {fields.integer(name, experts, high=high) for name in names or ["num_experts"]}
    if len(found) > 1:
        raise ConfigError(f"{fields.where}: {' and '.join(map(repr, names))} disagree.")
    return found.pop(), fields.integer("num_experts_per_tok", chosen, high=high)


def sliding_layers(fields: Fields, default: Sequence[bool]) -> list[bool]:
    """Which layers look back a window only: `layer_types` where it is given, else the family's rule."""
    types = fields.take("layer_types", None)
    if types is None:
        return list(default)
    known = {"full_attention": False, "sliding_attention": True}
    if not isinstance(types, list) or len(types) != len(default) or any(t not in list(known) for t in types):
        raise ConfigError(
            f"{fields.where}: 'layer_types' must name {len(default)} layers, each {' or '.join(map(repr, known))}."
        )
    return [known[t] for t in types]


def sliding_pattern(fields: Fields, default: int) -> int:
    """n, where all layers but every nth look back a window only; under the field's old name, or its new one."""
    names = [n for n in ("sliding_window_pattern", "_sliding_window_pattern") if fields.take(n, None) is not None]
    found = [fields.integer(name) for name in names] or [default]
    if len(set(found)) > 1:
        raise ConfigError(f"{fields.where}: {' and '.join(map(repr, names))} disagree: {found[0]} and {found[1]}.")
    return found[0]


def patterned_layers(fields: Fields, pattern: int, layers: int) -> list[bool]:
    """Which layers look back a window only: by `sliding_pattern`, or as `layer_types` says."""
    rule = [(i + 1) % pattern != 0 for i in range(layers)]
    slides = sliding_layers(fields, rule)
    # The new name may disagree: transformers writes its default beside any list, and reads the list.
    if slides != rule and fields.values.get("sliding_window_pattern") is not None:
        raise ConfigError(f"{fields.where}: 'layer_types' is not what 'sliding_window_pattern' {pattern} makes.")
    return slides


def sparse_layers(fields: Fields, layers: int) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`th one, but for those in `mlp_only_layers`."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.take("mlp_only_layers", [])
    chosen = numbers_of_layers(fields, "mlp_only_layers", dense, layers)
    return [i not in chosen and (i + 1) % step == 0 for i in range(layers)]


def numbers_of_layers(fields: Fields, name: str, value: Any, layers: int) -> set[int]:
    """A list of some of the layers by their numbers, checked."""
    if isinstance(value, list) and len(value) <= layers and all(type(i) is int and 0 <= i < layers for i in value):
        return set(value)
    raise ConfigError(f"{fields.where}: {name!r} must be a list of at most {layers} numbers of layers, below {layers}.")


def layer_types(slides: Sequence[bool]) -> list[str]:
    """The list that `sliding_layers` reads back."""
    return ["sliding_attention" if s else "full_attention" for s in slides]


def decoder_name(path: str) -> str:
    """The usual name on disk of the parameter at `path`: model.layers.0.self_attn.q_proj.weight."""
    if path == "lm_head":
        return "lm_head.weight"
    path = path.replace(".attention.", ".self_attn.")
    head, _, last = path.rpartition("_")
    if last != "bias":
        return f"model.{path}.weight"
    return f"model.{head}.bias" if head.endswith("norm") else f"model.{head}_proj.bias"


def fused(flat: Mapping[str, Leaf], where: str, name: str, leaves: Sequence[str]) -> dict[str, Part]:
    """{path: Part} of the `leaves` at `where` that lie one after the other in one tensor `name` on disk."""
    return fuse(
        decoder_name(f"{where}.{name}"), {f"{where}.{leaf}": flat[f"{where}.{leaf}"].shape[0] for leaf in leaves}
    )


def expert_names(prefix: str, experts: int, name: str) -> Stack:
    """A leaf [E, ...] that is a tensor of each expert on disk: model.layers.3.mlp.experts.0.gate_proj.weight and so on.

    prefix: "model.layers.3.mlp.experts". name: what follows the expert's number, "gate_proj.weight".
    """
    return Stack(tuple(f"{prefix}.{index}.{name}" for index in range(experts)))


def moe_name(path: str, experts: int) -> Stored:
    """`decoder_name` where experts are tensors of their own: mlp.gate, mlp.experts.7.up_proj and the rest."""
    head, _, last = path.rpartition(".")
    if head.endswith("mlp.experts"):
        return expert_names(f"model.{head}", experts, f"{last}.weight")
    if path.endswith("mlp.selection_bias"):
        return f"model.{head}.gate.e_score_correction_bias"
    return decoder_name(path.replace(".mlp.router", ".mlp.gate"))


def dense_first(fields: Fields, layers: int, default: int) -> tuple[str, ...]:
    """The kind of each layer, of which the first `first_k_dense_replace` are dense."""
    dense = min(fields.integer("first_k_dense_replace", default, low=0), layers)
    return ("full",) * dense + ("full_moe",) * (layers - dense)


def check_groups(config: Any) -> None:
    """For `Config.__post_init__`: ConfigError where as many experts cannot be chosen from as many groups of them."""
    experts, chosen = config.n_routed_experts, config.num_experts_per_tok
    check_experts(experts, chosen)
    groups, kept = config.n_group, config.topk_group
    for name in ("n_group", "topk_group", "moe_intermediate_size", "n_shared_experts"):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1.")
    if experts % groups or kept > groups or chosen > experts // groups * kept:
        raise ConfigError(
            f"num_experts_per_tok {chosen} of n_routed_experts {experts} cannot be chosen from topk_group {kept} of "
            f"n_group {groups} equal groups."
        )
