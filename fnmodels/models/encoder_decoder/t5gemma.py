"""T5Gemma (arXiv 2504.06225): an encoder and a decoder of Gemma 2 layers, the decoder's with cross attention.

The encoder sees both sides, in sliding layers `sliding_window` tokens on either. Each stack has sizes and an embedding
of its own, so that `config` is the encoder's with the decoder's in `config.below`. Cross attention has Gemma 2's
soft-capped scores and norms around it, and no rotary embedding.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import BidirectionalWindow, Everything
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed_by_width as embed  # noqa: F401
from fnmodels.models.common.decoder import freqs_cis  # noqa: F401
from fnmodels.models.common.decoder import unembed_zero_centered as unembed  # noqa: F401
from fnmodels.models.common.dropout import with_dropout
from fnmodels.models.common.family import Traits
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import decoder_leaves, norm, usual_attention, usual_mlp, weight
from fnmodels.models.encoder_decoder.classes import declared_class
from fnmodels.models.encoder_decoder.cross_attention import attend_to_memory, memory_of
from fnmodels.models.encoder_decoder.stacks import check_stack, stacks
from fnmodels.ops import ACTIVATIONS, apply_rotary, gated_mlp, project_out, project_qkv
from fnmodels.ops.norm import rms_norm_zero_centered
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("t5gemma",)
TRAITS = Traits(
    kinds=("full", "sliding"),
    heads=("lm", "none"),
    causal=False,
    dropout={
        "dropout_rate": ("attention", "mlp", "embedding", "neurons", "final"),
        "attention_dropout": ("weights",),
    },
)
# {class: the stack, and the head of the decoder}, the class without a head last.
_CLASSES = {
    "T5GemmaForConditionalGeneration": ("both", "lm"),
    "T5GemmaEncoderModel": ("encoder", "none"),
    "T5GemmaModel": ("both", "none"),
}
_NAMES = {
    "attention": "self_attn",
    "cross_attention": "cross_attn",
    "pre_attention_layernorm": "pre_self_attn_layernorm",
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_cross_attention_layernorm": "pre_cross_attn_layernorm",
    "post_cross_attention_layernorm": "post_cross_attn_layernorm",
}
_PART = "t5_gemma_module"
# Defaults of a stack, which saved files leave out.
_STACK: ConfigJson = {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_STACK |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
# Fields that a stack has under the same name.
_SAME = (*_STACK, "max_position_embeddings", "initializer_range", "rms_norm_eps", "attention_bias", "sliding_window")
_RATES = (*TRAITS.dropout, "classifier_dropout_rate")  # those of the file around the stacks count


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches of a stack. Of "both" they are the encoder's, and `below` is the Config of the decoder.

    memory_size: of a decoder, the width of what its encoder returns.
    """

    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    hidden_act: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    query_scalar: float = 256.0  # scores are divided by its square root
    attention_softcap: float | None = None
    final_softcap: float | None = None
    sliding_window: int | None = None
    stack: str = "both"
    memory_size: int = 0
    below: "Config | None" = None
    decoder_start_token_id: int = 2
    file: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)  # kept of the file around stacks

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stack(self)
        if (self.stack == "both") != (self.below is not None):
            raise ConfigError(f"below is {self.below!r}; it must be the decoder's Config where stack is both, or None.")
        if self.below is not None:  # both read the same tokens, and the head is the decoder's
            same = {name: getattr(self, name) for name in ("vocab_size", "tie_word_embeddings")}
            same |= {"stack": "decoder", "memory_size": self.hidden_size, "head": self.head, "dropout": self.dropout}
            object.__setattr__(self, "below", replace(self.below, **same))

    @property
    def encoder(self) -> "Config":
        """The encoder of both stacks, for its own `prepare` and `forward`."""
        return replace(self, stack="encoder", below=None, head="none", tie_word_embeddings=True)

    @property
    def decoder(self) -> "Config | None":
        """The decoder of both stacks."""
        return self.below

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        fields.choice("model_type", MODEL_TYPES)
        *others, _ = _CLASSES
        stack, head = _CLASSES[declared_class(fields, *others)]
        fields.expect("is_encoder_decoder", stack == "both")
        tied = fields.boolean("tie_word_embeddings", True)
        first = _read_stack(fields, "encoder", tied or stack == "encoder")
        second = _read_stack(fields, "decoder", tied, width=first["hidden_size"])
        if second["vocab_size"] != first["vocab_size"]:
            raise ConfigError(
                f"{fields.where}: the encoder has {first['vocab_size']} tokens and the decoder "
                f"{second['vocab_size']}; both read one vocabulary."
            )
        start = fields.integer("decoder_start_token_id", _first_token(second["extra"]), low=0)
        usual: dict[str, Any] = {"decoder_start_token_id": start, "model_type": "t5gemma"}
        below = Config(**second, **usual, stack="decoder") if stack == "both" else None
        config = with_dropout(Config(**first, **usual, stack=stack, below=below, head=head), fields)
        config = replace(config)  # which gives the decoder its rates
        rates = tuple((name, json.dumps(values[name])) for name in _RATES if values.get(name) is not None)
        # The vocabulary is that of the stacks.
        kept = dict(fields.finish(("vocab_size", *_RATES))) | dict(rates)
        object.__setattr__(config, "file", tuple(kept.items()))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json under T5Gemma's names; ConfigError for the decoder alone, which no class reads."""
        if self.stack == "decoder":
            raise ConfigError("The decoder is saved with its encoder: save the params of the config with both stacks.")
        out: ConfigJson = {name: json.loads(value) for name, value in self.file}
        out |= {"encoder": _written(self), "decoder": _written(self.below or self), "model_type": "t5gemma"}
        written = (self.stack, self.head)
        out["architectures"] = [name for name, stack_and_head in _CLASSES.items() if stack_and_head == written]
        out |= {"is_encoder_decoder": self.stack == "both", "tie_word_embeddings": self.tie_word_embeddings}
        if self.decoder_start_token_id != _first_token((self.below or self).extra):
            out["decoder_start_token_id"] = self.decoder_start_token_id
        return decoder.expressible(self, out)


def _read_stack(outer: Fields, name: str, tied: bool, width: int | None = None) -> dict[str, Any]:
    """The Config fields of one stack of a file. width: of the memory that a decoder reads."""
    values = outer.take(name, {})
    if not isinstance(values, Mapping):
        raise ConfigError(f"{outer.where}: {name!r} is {shown(values)}, but must be an object.")
    fields = Fields(_STACK | dict(values), f"{outer.where}, {name}")
    fields.expect("model_type", _PART)
    fields.expect("cross_attention_hidden_size", None, width)
    for switch in (*_RATES, "tie_word_embeddings"):  # those of the whole file count
        fields.take(switch, None)
    sizes = decoder.decoder_sizes(fields, max_positions=8192, tied=tied)
    layers = sizes["num_hidden_layers"]
    slides = decoder.sliding_layers(fields, [i % 2 == 0 for i in range(layers)])
    where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
    own = {
        "rope": rope_from_hf(fields, theta=1e4, **where),
        "hidden_act": fields.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh"),
        **fields.plain(rms_norm_eps=1e-6, attention_bias=False),
        "query_scalar": fields.number("query_pre_attn_scalar", 256),
        "attention_softcap": decoder.softcap(fields, "attn_logit_softcapping", 50.0),
        "final_softcap": decoder.softcap(fields, "final_logit_softcapping", 30.0),
        "sliding_window": fields.integer("sliding_window", 4096),
        "layer_kinds": tuple("sliding" if s else "full" for s in slides),
        "tie_word_embeddings": tied,
    }
    return sizes | own | {"extra": fields.finish()}


def _written(config: Config) -> ConfigJson:
    """A stack as an object of the file."""
    out: ConfigJson = {name: json.loads(value) for name, value in config.extra}
    out |= {name: getattr(config, name) for name in _SAME} | {"model_type": _PART}
    out |= {"hidden_activation": config.hidden_act, "rope_parameters": rope_to_hf(config.rope)}
    scalar = config.query_scalar
    out["query_pre_attn_scalar"] = int(scalar) if scalar.is_integer() else scalar  # transformers wants an integer
    out |= {"attn_logit_softcapping": config.attention_softcap, "final_logit_softcapping": config.final_softcap}
    return out | {"layer_types": decoder.layer_types([kind == "sliding" for kind in config.layer_kinds])}


def _first_token(extra: tuple[tuple[str, str], ...]) -> int:
    """The token with which a decoder begins: the first one of texts, unless the file says otherwise."""
    found = json.loads(dict(extra).get("bos_token_id", "2"))
    return found if isinstance(found, int) else 2


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. {"encoder", "decoder"} hold the stacks of a model of both."""
    if config.stack == "both":
        return {name: spec(inner) for name, inner in stacks(config).items()}
    biased = config.attention_bias
    layer: Tree = {name: norm(config.hidden_size, "embed", 0.0) for name in _norms("attention", "feedforward")}
    layer |= {"attention": usual_attention(config, qkv_bias=biased, o_bias=biased), "mlp": usual_mlp(config)}
    layer |= _cross(config) if config.stack == "decoder" else {}
    tree = decoder_leaves(config, [layer for _ in config.layer_kinds])
    return tree | {"norm": norm(config.hidden_size, "embed", 0.0)}


def _norms(*sublayers: str) -> list[str]:
    """Before and after each."""
    return [f"{place}_{name}_layernorm" for name in sublayers for place in ("pre", "post")]


def _cross(config: Config) -> Tree:
    """Cross attention, whose keys and values are of the encoder's width, and the norms around it."""
    attention = usual_attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
    for name in ("k_proj", "v_proj"):
        rows, unit = attention[name].shape[0], attention[name].unit
        attention[name] = weight((rows, config.memory_size), ("kv_heads", "embed"), config.initializer_range, unit=unit)
    norms = {name: norm(config.hidden_size, "embed", 0.0) for name in _norms("cross_attention")}
    return {"cross_attention": attention} | norms


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    return {path: _name(path, config) for path in flatten(spec(config))}


def _name(path: str, config: Config) -> str:
    if path.endswith("lm_head"):
        return "lm_head.out_proj.weight"
    prefix = "model." if config.stack == "both" else f"{config.stack}."
    parts = [_NAMES.get(part, part) for part in path.split(".")]
    last = parts.pop()
    parts.append(last.replace("_bias", "_proj.bias") if last.endswith("_bias") else f"{last}.weight")
    return prefix + ".".join(parts)


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer, of both stacks one after the other."""
    return config.layer_kinds + (config.below.layer_kinds if config.below is not None else ())


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask} of one stack; positions and segment_ids [B, S]."""
    if config.stack == "decoder":
        return decoder.attention_masks(config, positions, segment_ids, create=create)
    rules = {"full": Everything(), "sliding": BidirectionalWindow(config.sliding_window or 0)}
    return masks_of({kind: rules[kind] for kind in config.layer_kinds}, positions, segment_ids, create=create)


def shared(params: Tree, inputs: Mapping[str, Any], /, *, config: Config) -> Tree:
    """Tensors that every layer reads: in a decoder {"memory", "memory_mask"}, which `inputs` must hold."""
    return memory_of(inputs) if config.stack == "decoder" else {}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    scale = config.query_scalar**-0.5

    def normed(x: Tensor, name: str) -> Tensor:
        return rms_norm_zero_centered(x, layer[f"{name}_layernorm"], eps=config.rms_norm_eps)

    weights = layer["attention"]
    q, k, v = project_qkv(weights, normed(x, "pre_attention"), head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = project_out(weights, ctx.attend(q, k, v, mask, scale=scale, softcap=config.attention_softcap))
    x = x + ctx.tap("attention", normed(mixed, "post_attention"))
    if "cross_attention" in layer:
        weights, query = layer["cross_attention"], normed(x, "pre_cross_attention")
        how = {"head_dim": config.head_dim, "scale": scale, "softcap": config.attention_softcap}
        read = attend_to_memory(weights, query, ctx, **how)
        x = x + ctx.tap("cross_attention", normed(read, "post_cross_attention"))
    x = ctx.tap("middle", x)
    fed = gated_mlp(layer["mlp"], normed(x, "pre_feedforward"), activation=config.hidden_act, tap=ctx.tap)
    return x + ctx.tap("mlp", normed(fed, "post_feedforward"))


_9B = {"hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42}
_9B |= {"num_attention_heads": 16, "num_key_value_heads": 8}


def _preset(encoder: ConfigJson, below: ConfigJson) -> ConfigJson:
    return {"model_type": "t5gemma", "encoder": _STACK | encoder, "decoder": _STACK | below}


PRESETS = {
    "t5gemma-2b-2b": _preset({}, {}),
    "t5gemma-9b-2b": _preset(_9B, {}),
    "t5gemma-9b-9b": _preset(_9B, _9B),
}
