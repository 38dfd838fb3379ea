"""Default parts of a decoder family: Config fields, masks, rotary tables, embedding, head, and tensor names.

A family imports a function by its name (`from fnmodels.models.common.decoder import kinds`) or writes its own.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.documents import Documents, pool
from fnmodels.inputs.mask import Create, MaskLike, causal_masks, check_one_axis
from fnmodels.inputs.order import build_segments
from fnmodels.inputs.segments import text_order
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS
from fnmodels.ops.norm import layer_norm, rms_norm, rms_norm_fp32_weight
from fnmodels.ops.rotary import Rope, mrope_table, no_rotation, query_temperature, rotary_table
from fnmodels.tree import Tree, flatten

from .config_json import LAYERS_LIMIT, Fields, shown
from .heads import DECODER_HEADS, check_head, decoder_head_to_hf, with_head
from .quantization import quantization
from .registry import (
    FAMILY_DEFAULTS,
    DecoderConfig,
    LayerNormConfig,
    RMSNormConfig,
    TwoRopesConfig,
    UsualConfig,
    family_of,
    field_of,
    may_have,
)
from .rope_config import rope_from_hf, rope_to_hf
from .spec import Leaf, decoder_leaves, layer_leaves, usual_attention, usual_mlp
from .storage import TensorSlice, fuse

C = TypeVar("C")


@dataclass(frozen=True)
class SizesConfig:
    """The Config fields common to decoders, except `hidden_act`.

    layer_kinds: one of the family's KINDS per layer; empty: the first of them for every layer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope: Rope = Rope()  # noqa: RUF009 - frozen
    tie_word_embeddings: bool = False
    head: str = "lm"  # or "classification" or "tokens", see `heads`
    num_labels: int = 0
    problem_type: str = ""
    layer_kinds: tuple[str, ...] = ()
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    # kept for saving only
    model_type: str = field(default="", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        family = sys.modules[type(self).__module__]
        check_decoder(self, getattr(family, "KINDS", FAMILY_DEFAULTS["KINDS"]))
        if not self.model_type:
            object.__setattr__(self, "model_type", getattr(family, "MODEL_TYPES", ("",))[0])


@dataclass(frozen=True)
class BaseConfig(SizesConfig):
    """The Config fields common to decoders; a family adds its own: `class Config(BaseConfig)`."""

    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {self.hidden_act!r} is unknown; known are {', '.join(ACTIVATIONS)}.")


def base_fields(
    fields: Fields,
    model_types: Sequence[str],
    *,
    max_positions: int,
    tied: bool = False,
    kv_heads: int = 0,
    head_dim: int = 0,
    activation: str = "silu",
    rope: Callable[..., Rope] = rope_from_hf,
    **rope_defaults: Any,
) -> dict[str, Any]:
    """The fields of BaseConfig except layer_kinds and extra, from a config.json; keywords are the family's defaults.

    rope: a function of the fields, head_dim and max_positions, as `rope_from_hf`; rope_defaults: its further keywords,
    theta and partial. The rest as for `decoder_sizes`.
    """
    model_type = fields.choice("model_type", model_types)
    sizes = decoder_sizes(fields, max_positions=max_positions, tied=tied, kv_heads=kv_heads, head_dim=head_dim)
    where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
    return {
        **sizes,
        "rope": rope(fields, **where, **rope_defaults),
        "hidden_act": fields.choice("hidden_act", tuple(ACTIVATIONS), activation),
        "model_type": model_type,
    }


def finished(config: C, fields: Fields, ignored: Sequence[str] = ()) -> C:
    """The config with the fields kept for saving; ConfigError for fields that the family did not read, see `Fields`."""
    return with_head(config, fields, fields.finish(ignored))


# Beginnings of the kinds of layers that read tokens in their order: recurrent layers and convolutions.
ORDERED = ("linear", "conv")


def is_ordered(kind: str) -> bool:
    """Whether layers of this kind read tokens in their order and not by position."""
    return kind.startswith(ORDERED)


def kinds(config: UsualConfig) -> tuple[str, ...]:
    """The kind of each layer, the keys of masks and freqs_cis."""
    found: tuple[str, ...] = config.layer_kinds
    return found


def attention_masks(
    config: UsualConfig, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}: causal, and limited to `sliding_window` for kinds that begin with "sliding".

    Kinds of ORDERED layers have `fnmodels.Segments`. positions and segment_ids [B, S]; positions [B, S, 3 or 4] if the
    config has an `mrope_section`, see `freqs_cis`. create: see `fnmodels.inputs.mask.build_mask`.
    """
    window, ordered = field_of(config, "sliding_window"), sorted(filter(is_ordered, set(config.layer_kinds)))
    if field_of(config, "mrope_section") and positions.ndim == 3:
        counted = positions.shape[-1] == 4
        positions = positions[..., 0] if counted else text_order(positions, segment_ids)
    masks = causal_masks(set(config.layer_kinds) - set(ordered), window, positions, segment_ids, create=create)
    if ordered:
        check_one_axis(positions)
        masks |= dict.fromkeys(ordered, build_segments(segment_ids))
    return masks


def freqs_cis(config: UsualConfig, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]} of `config.rope`; R is 0 for ORDERED kinds and those that end in "_nope".

    positions: [B, S]; with an `mrope_section` also [B, S, 3], time, height and width, or [B, S, 4], `text_order` before
    them, for a piece of a row, which does not know it. length: an int or [B], the sequence length that length-dependent
    scalings read; see `fnmodels.ops.rotary`.
    """
    sections, none = field_of(config, "mrope_section"), no_rotation(positions)
    if sections and positions.ndim == 3:
        axes = positions[..., positions.shape[-1] == 4 :]
        interleaved = field_of(config, "mrope_interleaved")
        table = mrope_table(config.rope, config.head_dim, axes, sections, interleaved=interleaved, length=length)
    else:
        table = rotary_table(config.rope, config.head_dim, positions, length)
    still = {kind for kind in config.layer_kinds if kind.endswith("_nope") or is_ordered(kind)}
    return {kind: none if kind in still else table for kind in sorted(set(config.layer_kinds))}


def freqs_cis_by_window(
    config: TwoRopesConfig, positions: Tensor, *, length: int | Tensor | None = None
) -> dict[str, Tensor]:
    """As `freqs_cis`, with `config.local_rope` for "sliding" layers and `config.rope` for "full" ones."""
    ropes = {"full": config.rope, "sliding": config.local_rope}
    return {k: rotary_table(ropes[k], config.head_dim, positions, length) for k in sorted(set(config.layer_kinds))}


def freqs_cis_with_temperature(
    config: Any, positions: Tensor, *, length: int | Tensor | None = None
) -> dict[str, dict[str, Tensor]]:
    """{kind: {"table": that of `freqs_cis`, "temperature": `query_temperature`, fp32 [B, S]}}."""
    temperature = query_temperature(positions, beta=config.temperature_beta, period=config.temperature_length)
    tables = freqs_cis(config, positions, length=length)
    return {kind: {"table": table, "temperature": temperature} for kind, table in tables.items()}


def embed(params: Tree, inputs: Tree, /, *, config: UsualConfig) -> Tensor:
    """Token embeddings [B, S, D]; inputs that are embeddings already are returned unchanged, as in transformers."""
    return embed_tokens(params["embed_tokens"], inputs)


def embed_by_width(params: Tree, inputs: Tree, /, *, config: UsualConfig) -> Tensor:
    """x [B, S, D]: token embeddings scaled by sqrt(D) rounded to their dtype; given embeddings are not scaled."""
    tokens = inputs["tokens"] if isinstance(inputs, Mapping) else inputs
    x = embed_tokens(params["embed_tokens"], tokens)
    return x if tokens.is_floating_point() else x * torch.tensor(config.hidden_size**0.5, dtype=x.dtype)


def head(params: Tree, config: DecoderConfig) -> Tensor:
    """The output head's weight: [V, D], the embedding's if tied, or [labels, D] of a head with labels."""
    if field_of(config, "head") in DECODER_HEADS:
        return cast(Tensor, params["score"])
    return cast(Tensor, params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"])


def project(params: Tree, normed: Tensor, config: Any) -> Tensor:
    """The output head of hidden states [B, S, D] after the final norm: [B, S, V or labels], or they without a head."""
    if field_of(config, "head") == "none":
        return normed
    return linear(normed, head(params, config), params.get("lm_head_bias") if is_lm(config) else None)


def is_lm(config: Any) -> bool:
    """Whether the head gives logits of tokens, so that biases, factors and soft-caps of those apply."""
    return bool(field_of(config, "head") == "lm")


def scores(params: Tree, x: Tensor, /, *, config: Any) -> Tensor:
    """Logits [B, S, labels] of every token, after the final norm. x [B, S, D]: the hidden states."""
    found = family_of(config).unembed(params, x, config=config)
    return found + params["score_bias"] if "score_bias" in params else found


def classify(params: Tree, x: Tensor, documents: Documents, /, *, config: Any) -> Tensor:
    """Logits [N, labels] of each document's last token, after the final norm. x [B, S, D]: the hidden states."""
    last = pool(x, documents, how="last")[:, None]
    return family_of(config).unembed(params, last, config=config)[:, 0]


def unembed(params: Tree, x: Tensor, /, *, config: RMSNormConfig) -> Tensor:
    """Final RMSNorm and head: logits [B, S, V]."""
    return project(params, rms_norm(x, params["norm"], eps=config.rms_norm_eps), config)


def unembed_fp32_weight(params: Tree, x: Tensor, /, *, config: RMSNormConfig) -> Tensor:
    """Final RMSNorm with its weight multiplied in fp32, and head: logits [B, S, V]."""
    return project(params, rms_norm_fp32_weight(x, params["norm"], eps=config.rms_norm_eps), config)


def unembed_layer_norm(params: Tree, x: Tensor, /, *, config: LayerNormConfig) -> Tensor:
    """Final LayerNorm and head: logits [B, S, V]."""
    normed = layer_norm(x, params["norm"], params.get("norm_bias"), eps=config.layer_norm_eps)
    return project(params, normed, config)


def spec(config: UsualConfig) -> Tree:
    """The parameters of a pre-norm decoder with grouped-query attention, a gated MLP and no biases."""
    layer = layer_leaves(config.hidden_size, usual_attention(config), usual_mlp(config))
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: DecoderConfig) -> dict[str, Any]:
    """{path of a parameter: its name on disk}."""
    return {path: decoder_name(path) for path in flatten(family_of(config).spec(config))}


def check_decoder(config: Any, known_kinds: Sequence[str]) -> None:
    """For `Config.__post_init__`: fills head_dim 0 and layer_kinds (); ConfigError for inconsistent fields.

    intermediate_size 0 is a model without MLPs, whose layers are attention alone.
    """
    check_sizes(config, *(n for n in _DECODER_FIELDS[:6] if n != "intermediate_size"), "max_position_embeddings")
    if config.intermediate_size != 0:
        check_sizes(config, "intermediate_size")
    check_head(config)
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


def check_sizes(config: Any, *names: str) -> None:
    """For `Config.__post_init__`: ConfigError unless these fields are integers of at least 1."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1.")


def check_width(config: SizesConfig) -> None:
    """For `Config.__post_init__`: ConfigError unless the heads divide the width, as the reference computes them."""
    heads = config.num_attention_heads
    if config.head_dim * heads != config.hidden_size:
        raise ConfigError(
            f"This family divides hidden_size {config.hidden_size} among {heads} heads; "
            f"head_dim {config.head_dim} says otherwise."
        )


def decoder_sizes(
    fields: Fields, *, max_positions: int, tied: bool, kv_heads: int = 0, head_dim: int = 0
) -> dict[str, Any]:
    """The sizes that every decoder has, under Hugging Face's names; the arguments are the family's defaults.

    kv_heads 0: as many as query heads, as an explicit null in the file. head_dim 0: hidden_size / heads.
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
        "intermediate_size": fields.integer("intermediate_size", low=0),
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


def text_part(outer: Fields, text_type: str, ignored: Sequence[str] = ()) -> Fields:
    """`text_config` of a multimodal checkpoint; the fields outside of it are checked or listed in `ignored`.

    text_type: the model type of the text model. ignored: fields of the other towers, without effect on text.
    """
    text = outer.take("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"{outer.where}: 'text_config' is {shown(text)}, but must be an object.")
    quantization(outer)
    tied = outer.boolean("tie_word_embeddings", False)
    values = {"model_type": text_type, "tie_word_embeddings": tied, **text, "architectures": None}
    inner = Fields(values, f"{outer.where}, text_config")
    inner.expect("model_type", text_type)
    inner.expect("tie_word_embeddings", tied)  # duplicated in both objects
    outer.expect("is_encoder_decoder", False)
    outer.finish(ignored)
    return inner


def decoder_to_hf(config: Any, architecture: str, *names: str, **rest: Any) -> dict[str, Any]:
    """A config.json in the current dialect: the fields of `decoder_sizes`, those that `finish` kept, and the family's.

    names: fields that are written unchanged. rest: fields with another name or form in the file; by default the rope is
    written by `rope_to_hf`, and its partial factor even if it is 1 where the family has another default. Raises
    ConfigError if the result would not be read back as the same config, because `config.model_type` cannot express it.
    """
    kept = {name: json.loads(value) for name, value in config.extra}
    sizes = {name: getattr(config, name) for name in _DECODER_FIELDS}
    rope = rope_to_hf(config.rope)
    if getattr(type(config), "rope", config.rope).partial != 1:
        rope["partial_rotary_factor"] = config.rope.partial
    own = {"rope_parameters": rope} | {name: getattr(config, name) for name in names} | rest
    head = decoder_head_to_hf(config, architecture, kept)
    return expressible(config, kept | head | {"model_type": config.model_type} | sizes | own)


def expressible(config: Any, out: dict[str, Any]) -> dict[str, Any]:
    """`out`, a config.json; ConfigError if it is not read back as `config`.

    Parts that are found by their tensors may differ: those of OPTIONAL, and the head of a decoder without one, whose
    class, ...Model, is also that of older files with a head.
    """
    again = type(config).from_hf(out)
    parts = [name for name in may_have(family_of(config), "OPTIONAL").values() if not getattr(config, name)]
    found: dict[str, Any] = dict.fromkeys(parts, 0)
    if field_of(config, "head") == "none" and field_of(again, "head") == "lm":
        found["head"] = "none"
    again = dataclasses.replace(again, **found)
    if again != config:
        fields = [f.name for f in dataclasses.fields(config) if f.compare]
        lost = [name for name in fields if getattr(again, name) != getattr(config, name)]
        raise ConfigError(f"The model type {config.model_type!r} cannot express this model's {', '.join(lost)}.")
    return out


def sliding_layers(
    fields: Fields,
    default: Sequence[bool],
    near: str = "sliding_attention",
    far: str = "full_attention",
    *,
    name: str = "layer_types",
) -> list[bool]:
    """Which layers are local (sliding window): from `layer_types` if given, else `default`, the family's rule.

    near, far: the names of local and other layers in the list; in Llama 4 the first are "chunked_attention".
    name: that of the list.
    """
    types = fields.take(name, None)
    if types is None:
        return list(default)
    known = {far: False, near: True}
    if not isinstance(types, list) or len(types) != len(default) or any(t not in list(known) for t in types):
        raise ConfigError(
            f"{fields.where}: {name!r} must name {len(default)} layers, each {' or '.join(map(repr, known))}."
        )
    return [known[t] for t in types]


def one_window(fields: Fields, layers: int, suffix: str = "") -> dict[str, Any]:
    """The Config fields of a window that all layers have, or none; suffix: the end of their kind, such as "_moe"."""
    window = fields.integer("sliding_window", 0, low=0) or None
    return {"sliding_window": window, "layer_kinds": (("sliding" if window else "full") + suffix,) * layers}


def sliding_pattern(fields: Fields, default: int) -> int:
    """n, where every nth layer has full attention and the others a sliding window, under its old or new field name."""
    names = [n for n in ("sliding_window_pattern", "_sliding_window_pattern") if fields.take(n, None) is not None]
    found = [fields.integer(name) for name in names] or [default]
    if len(set(found)) > 1:
        raise ConfigError(f"{fields.where}: {' and '.join(map(repr, names))} disagree: {found[0]} and {found[1]}.")
    return found[0]


def patterned_layers(fields: Fields, pattern: int, layers: int) -> list[bool]:
    """Which layers have a sliding window: from `layer_types`, or by the pattern; ConfigError if the two disagree."""
    rule = [(i + 1) % pattern != 0 for i in range(layers)]
    slides = sliding_layers(fields, rule)
    # The new name may disagree: transformers writes its default beside any list and reads only the list.
    if slides != rule and fields.values.get("sliding_window_pattern") is not None:
        raise ConfigError(f"{fields.where}: 'layer_types' is not what 'sliding_window_pattern' {pattern} makes.")
    return slides


def listed_kinds(fields: Fields, names: Sequence[str], known: Mapping[str, str]) -> tuple[str, ...] | None:
    """The kind of each layer from the list under any of `names`, whose entries are keys of `known`; None without one.

    A string is a list of letters. ConfigError for other entries and for two lists that disagree.
    """
    found: list[tuple[str, ...]] = []
    given = [name for name in names if fields.take(name, None) is not None]
    for name in given:
        types = fields.values[name]
        if not isinstance(types, list | str) or not types or any(t not in list(known) for t in types):
            raise ConfigError(
                f"{fields.where}: {name!r} is {shown(types)}, but must name the layers, each one of {', '.join(known)}."
            )
        found.append(tuple(known[t] for t in types))
    if len(set(found)) > 1:
        raise ConfigError(f"{fields.where}: {' and '.join(map(repr, given))} disagree.")
    return found[0] if found else None


def layer_types(slides: Sequence[bool], near: str = "sliding_attention") -> list[str]:
    """The `layer_types` list for config.json, which `sliding_layers` reads back."""
    return [near if s else "full_attention" for s in slides]


def rotating_layers(fields: Fields, listed: Any, layers: int) -> list[int]:
    """1 for layers with rotary embedding, 0 for others: `listed`, or by `no_rope_layer_interval` if it is None.

    The interval is not compared with the list: transformers writes its default 4 beside any list and ignores it.
    """
    every = fields.integer("no_rope_layer_interval", 4)
    found = [int((i + 1) % every != 0) for i in range(layers)] if listed is None else listed
    if not isinstance(found, list) or len(found) != layers or any(one not in (0, 1) for one in found):
        raise ConfigError(
            f"{fields.where}: 'no_rope_layers' must be a list of {layers} zeros (no rope) and ones (rope)."
        )
    return found


def decoder_name(path: str) -> str:
    """The default Hugging Face name of the parameter at `path`, such as model.layers.0.self_attn.q_proj.weight."""
    if path in ("lm_head", "score"):
        return f"{path}.weight"
    if path == "score_bias":
        return "score.bias"
    path = path.replace(".attention.", ".self_attn.")
    head, _, last = path.rpartition("_")
    if last != "bias":
        return f"model.{path}.weight"
    return f"model.{head}.bias" if head.endswith("norm") else f"model.{head}_proj.bias"


def fused(flat: Mapping[str, Leaf], where: str, name: str, leaves: Sequence[str]) -> dict[str, TensorSlice]:
    """{path: TensorSlice} for the `leaves` at `where` that are concatenated along rows in one tensor `name` on disk."""
    return fuse(
        decoder_name(f"{where}.{name}"), {f"{where}.{leaf}": flat[f"{where}.{leaf}"].shape[0] for leaf in leaves}
    )
