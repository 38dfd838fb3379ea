"""T5 (arXiv 1910.10683) and T5 v1.1 (arXiv 2002.05202): relative position biases, RMSNorm, no biases, unscaled scores.

mT5 (arXiv 2010.11934) is T5 v1.1 in many languages, and umT5 (arXiv 2304.09151) has a table of biases in each layer.
One file has both stacks: `config.stack` is "both" for the whole model, "encoder" for a T5EncoderModel or the encoder of
both (`config.encoder`), "decoder" for `config.decoder`. The layers of a stack share one table of biases, but in umT5;
cross attention has none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.dropout import with_dropout
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import attention_leaves, embedding, gated_mlp_leaves, norm, plain_mlp_leaves, weight
from fnmodels.models.encoder_decoder.classes import declared_class
from fnmodels.models.encoder_decoder.cross_attention import attend_to_memory, memory_of
from fnmodels.models.encoder_decoder.stacks import attention_masks, check_stack, freqs_cis, kinds, stacks  # noqa: F401
from fnmodels.ops import (
    ACTIVATIONS,
    embed_tokens,
    gated_mlp,
    plain_mlp,
    project_out,
    project_qkv,
    rms_norm,
)
from fnmodels.ops.attention.relative_bias import RelativeBias, by_distance
from fnmodels.ops.dropout import Dropout
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("t5", "mt5", "umt5")
TRAITS = Traits(
    kinds=("full", "causal"),
    heads=("lm", "none"),
    causal=False,
    biased=True,
    dropout={"dropout_rate": ("weights", "attention", "mlp", "embedding", "neurons", "final")},
    dropout_defaults={"dropout_rate": 0.1},
    # Older files have a table that transformers' cross attention had and never read.
    leftovers=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)
# The ends of classes: the stack, and the head of the decoder.
_CLASSES = {"ForConditionalGeneration": ("both", "lm"), "EncoderModel": ("encoder", "none"), "Model": ("both", "none")}
_PROJECTIONS = {"relu": "relu", "gated-gelu": "gelu_new", "gated-silu": "silu", "gated-relu": "relu", "gelu": "gelu"}
_SIZES = {"d_model": "hidden_size", "d_kv": "head_dim", "d_ff": "intermediate_size", "num_heads": "num_attention_heads"}
_SIZES |= {"num_layers": "num_hidden_layers"}
_BUCKETS = ("relative_attention_num_buckets", "relative_attention_max_distance")
_DEFAULTS = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_heads": 8, "num_layers": 6, "vocab_size": 32128}
_MULTILINGUAL = {"d_ff": 1024, "num_heads": 6, "num_layers": 8, "vocab_size": 250112}  # defaults of mT5 and umT5


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches. num_hidden_layers: of the encoder; in `decoder`, of the decoder.

    gated: the MLP has a gate (v1.1). scale_outputs: the decoder's outputs are multiplied by hidden_size^-0.5 before the
    head (v1.0). bias_per_layer: each layer has a table of biases (umT5).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_decoder_layers: int = 0
    num_attention_heads: int = 8
    head_dim: int = 64
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    rms_norm_eps: float = 1e-6
    hidden_act: str = "relu"
    gated: bool = False
    scale_outputs: bool = True
    bias_per_layer: bool = False
    tie_word_embeddings: bool = True
    stack: str = "both"
    head: str = "lm"
    decoder_start_token_id: int = 0
    initializer_factor: float = 1.0
    dropout: Dropout = Dropout()  # noqa: RUF009 - frozen
    # kept for saving only
    model_type: str = field(default="t5", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        decoder.check_sizes(self, *sizes, "head_dim")
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {self.hidden_act!r} is unknown; known are {', '.join(ACTIVATIONS)}.")
        check_stack(self)
        if self.stack == "both" and self.num_decoder_layers < 1:
            raise ConfigError(
                f"num_decoder_layers is {self.num_decoder_layers}; a model of both stacks has at least 1."
            )
        count, most = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if count < 4 or count % 4 or most <= count // 2:
            raise ConfigError(
                f"relative_attention_num_buckets is {count} and relative_attention_max_distance {most}: the first must "
                "be a multiple of 4, and the second more than half of it."
            )

    @property
    def head_by_file(self) -> bool:
        """Whether files have a head of their own whatever their config.json says: those of mT5."""
        return self.model_type == "mt5" and self.stack == "both" and self.head == "lm"

    @property
    def initializer_range(self) -> float:
        """The standard deviation of embeddings; the other parameters have their own, see `spec`."""
        return self.initializer_factor

    @property
    def max_position_embeddings(self) -> int:
        """No limit: distances of max_distance and more share a bucket."""
        return 1 << 30

    @property
    def encoder(self) -> "Config":
        """The encoder of both stacks, for its own `prepare` and `forward`."""
        return replace(self, stack="encoder", num_decoder_layers=0, tie_word_embeddings=True, scale_outputs=True)

    @property
    def decoder(self) -> "Config":
        """The decoder of both stacks."""
        return replace(self, stack="decoder", num_hidden_layers=self.num_decoder_layers)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        default = _DEFAULTS | ({} if model_type == "t5" else _MULTILINGUAL)
        fields.expect("is_decoder", False)
        stack, head = _stack_and_head(fields, model_type.upper())
        both = stack == "both"
        form = fields.choice("feed_forward_proj", tuple(_PROJECTIONS), "relu" if model_type == "t5" else "gated-gelu")
        for name, derived in (("dense_act_fn", _PROJECTIONS[form]), ("is_gated_act", form.startswith("gated-"))):
            fields.expect(name, derived)
        tied = fields.boolean("tie_word_embeddings", True)
        # transformers rewrites the first where it keeps the second.
        scaled = model_type != "mt5" and fields.boolean("scale_decoder_outputs", tied)
        layers = fields.integer("num_layers", default["num_layers"], high=LAYERS_LIMIT)
        below = fields.integer("num_decoder_layers", layers, high=LAYERS_LIMIT)
        sizes: dict[str, Any] = {ours: fields.integer(name, default[name]) for name, ours in _SIZES.items()}
        config = Config(
            **sizes | {"num_hidden_layers": layers},
            **fields.plain(vocab_size=default["vocab_size"], initializer_factor=1.0),
            num_decoder_layers=below if both else 0,
            relative_attention_num_buckets=fields.integer(_BUCKETS[0], 32),
            relative_attention_max_distance=fields.integer(_BUCKETS[1], 128),
            rms_norm_eps=fields.number("layer_norm_epsilon", 1e-6),
            hidden_act=_PROJECTIONS[form],
            gated=form.startswith("gated-"),
            scale_outputs=scaled or not both,
            bias_per_layer=model_type == "umt5",
            # where outputs are not scaled, files of T5 and umT5 have a head
            tie_word_embeddings=(tied if model_type == "mt5" else scaled) or not both,
            stack=stack,
            head=head,
            decoder_start_token_id=fields.integer("decoder_start_token_id", 0, low=0),
            model_type=model_type,
        )
        config = with_dropout(config, fields)
        object.__setattr__(config, "extra", fields.finish(("n_positions", "output_past", "scalable_attention")))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json under T5's own names; ConfigError for the decoder alone, which no class reads."""
        if self.stack == "decoder":
            raise ConfigError("The decoder is saved with its encoder: save the params of the config with both stacks.")
        both, kept = self.stack == "both", {name: json.loads(value) for name, value in self.extra}
        forms = {(act, name.startswith("gated-")): name for name, act in _PROJECTIONS.items()}
        if (self.hidden_act, self.gated) not in forms:
            raise ConfigError(f"feed_forward_proj of T5 cannot express {self.hidden_act}, gated={self.gated}.")
        fields = {name: getattr(self, ours) for name, ours in _SIZES.items()} | {"vocab_size": self.vocab_size}
        fields |= {name: getattr(self, name) for name in (*_BUCKETS, "decoder_start_token_id", "initializer_factor")}
        fields |= {"layer_norm_epsilon": self.rms_norm_eps, "feed_forward_proj": forms[self.hidden_act, self.gated]}
        tied = self.tie_word_embeddings if self.model_type == "mt5" else self.scale_outputs
        fields |= {"tie_word_embeddings": tied, "is_encoder_decoder": both}
        fields |= {"num_decoder_layers": self.num_decoder_layers} if both else {}
        name = next(name for name, (stack, head) in _CLASSES.items() if (stack, head) == (self.stack, self.head))
        classes = {"architectures": [self.model_type.upper() + name], "model_type": self.model_type}
        return decoder.expressible(self, kept | classes | fields)


def _stack_and_head(fields: Fields, prefix: str) -> tuple[str, str]:
    known = {prefix + name: stack_and_head for name, stack_and_head in _CLASSES.items()}
    *others, _ = known  # the last is the class without a head
    name = declared_class(fields, *others, older={"T5WithLMHeadModel": "T5ForConditionalGeneration"})
    fields.expect("is_encoder_decoder", *((True,) if known[name][0] == "both" else (False, True)))
    return known[name]


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. {"encoder", "decoder"} hold the stacks of a model of both."""
    V, D, factor = config.vocab_size, config.hidden_size, config.initializer_factor
    tree: Tree = {"embed_tokens": embedding(V, D, factor)}
    parts = {name: _stack_spec(inner) for name, inner in stacks(config).items()}
    tree |= parts or _stack_spec(config)
    own_head = config.head == "lm" and not config.tie_word_embeddings
    return tree | ({"lm_head": weight((V, D), ("vocab", "embed"), factor)} if own_head else {})


def _stack_spec(config: Config) -> Tree:
    D, F, N, H = config.hidden_size, config.intermediate_size, config.num_attention_heads, config.head_dim
    factor = config.initializer_factor
    std = factor * D**-0.5
    attention = attention_leaves(D, N, N, H, std=std)
    attention["q_proj"] = weight((N * H, D), ("heads", "embed"), std * H**-0.5, unit=H)
    attention["o_proj"] = weight((D, N * H), ("embed", "heads"), factor * (N * H) ** -0.5, unit=H)
    mlp = gated_mlp_leaves(D, F, std=std) if config.gated else plain_mlp_leaves(D, F, std=std, biases=False)
    mlp["down_proj"] = weight((D, F), ("embed", "mlp"), factor * F**-0.5)
    layer: Tree = {"input_layernorm": norm(D, "embed"), "attention": attention}
    if config.stack == "decoder":
        layer |= {"cross_attention_layernorm": norm(D, "embed"), "cross_attention": attention}
    layer |= {"post_attention_layernorm": norm(D, "embed"), "mlp": mlp}
    table = {
        "relative_bias": embedding(config.relative_attention_num_buckets, N, std, axis="bucket", size_axis="heads")
    }
    layer |= table if config.bias_per_layer else {}
    tree = {} if config.bias_per_layer else table
    return {**tree, "layers": [layer] * config.num_hidden_layers, "norm": norm(D, "embed")}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    return {path: _name(path, config) for path in flatten(spec(config))}


def _name(path: str, config: Config) -> str:
    if path in ("embed_tokens", "lm_head"):
        return {"embed_tokens": "shared.weight", "lm_head": "lm_head.weight"}[path]
    stack, _, inner = path.partition(".") if config.stack == "both" else (config.stack, "", path)
    if not inner.startswith("layers."):
        ends = {"relative_bias": "block.0.layer.0.SelfAttention.relative_attention_bias", "norm": "final_layer_norm"}
        return f"{stack}.{ends[inner]}.weight"
    _, index, part, *rest = inner.split(".")
    if part == "relative_bias":
        return f"{stack}.block.{index}.layer.0.SelfAttention.relative_attention_bias.weight"
    last = 2 if stack == "decoder" else 1
    places = {"input_layernorm": 0, "attention": 0, "cross_attention_layernorm": 1, "cross_attention": 1}
    place, leaf = places.get(part, last), rest[0].removesuffix("_proj") if rest else ""
    mlp = {"gate": "wi_0", "up": "wi_1" if config.gated else "wi", "down": "wo"}
    module = {"attention": "SelfAttention", "cross_attention": "EncDecAttention", "mlp": "DenseReluDense"}
    end = f"{module[part]}.{mlp[leaf] if part == 'mlp' else leaf}" if rest else "layer_norm"
    return f"{stack}.block.{index}.layer.{place}.{end}.weight"


def hf_copies(config: Config) -> dict[str, str]:
    """{name on disk: path of the parameter that it repeats}, beside a tied head."""
    names = ["encoder.embed_tokens.weight"] + ["decoder.embed_tokens.weight"] * (config.stack == "both")
    return dict.fromkeys(names, "embed_tokens")


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: token embeddings, unscaled; inputs that are embeddings already are returned unchanged."""
    return embed_tokens(params["embed_tokens"], inputs)


def shared(params: Tree, inputs: Mapping[str, Any], /, *, config: Config) -> Tree:
    """Tensors that every layer reads: {"bias"}, and in a decoder {"memory", "memory_mask"}, which `inputs` must hold.

    Where each layer has a table, {"positions"} of queries and keys in place of "bias". On a cache
    inputs["key_positions"] [B, K] are those of the keys.
    ValueError for bare tokens, which have no positions.
    """
    if "positions" not in inputs:
        raise ValueError(
            "T5 has a bias for each distance of two tokens, so it needs the dict of inputs that `prepare` makes, with "
            "tokens and positions; bare token ids or vectors do not say where they stand."
        )
    positions = inputs["positions"], inputs.get("key_positions", inputs["positions"])
    per_layer = config.bias_per_layer
    tree: Tree = {"positions": positions} if per_layer else {"bias": _bias(params["relative_bias"], positions, config)}
    return tree | (memory_of(inputs) if config.stack == "decoder" else {})


def _bias(table: Tensor, positions: tuple[Tensor, Tensor], config: Config) -> RelativeBias:
    """The bias of the scores of queries and keys at these positions, from `table` [buckets, N]."""
    most, bidirectional = config.relative_attention_max_distance, config.stack == "encoder"
    return RelativeBias(by_distance(table, most, bidirectional=bidirectional), *positions)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    table = layer.get("relative_bias")
    bias = ctx.shared("bias") if table is None else _bias(table, ctx.shared("positions"), config)
    mixed = ctx.attend(q, k, v, mask, scale=1.0, bias=bias)
    x = x + ctx.tap("attention", project_out(weights, mixed))
    if kind == "causal":
        normed = rms_norm(x, layer["cross_attention_layernorm"], eps=eps)
        attended = attend_to_memory(layer["cross_attention"], normed, ctx, head_dim=config.head_dim, scale=1.0)
        x = x + ctx.tap("cross_attention", attended)
    x = ctx.tap("middle", x)
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    feed = gated_mlp if config.gated else plain_mlp
    return x + ctx.tap("mlp", feed(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The final norm, and of a decoder the head: logits [B, S, V]; without a head the hidden states [B, S, D]."""
    x = rms_norm(x, params["norm"], eps=config.rms_norm_eps)
    if config.head == "none":
        return x
    x = x * config.hidden_size**-0.5 if config.scale_outputs else x
    return linear(x, decoder.head(params, config))


_BASE: ConfigJson = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": 32128}
_V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_SHAPES: dict[str, dict[str, Any]] = {
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_heads": 8, "num_layers": 6},
    "t5-base": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "num_layers": 12},
    "t5-large": {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_heads": 16, "num_layers": 24},
    "t5-3b": {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_heads": 32, "num_layers": 24},
    "t5-11b": {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_heads": 128, "num_layers": 24},
}
_NEWER: dict[str, dict[str, Any]] = {
    "small": {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 6, "num_layers": 8},
    "base": {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_heads": 12, "num_layers": 12},
    "large": {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_heads": 16, "num_layers": 24},
    "xl": {"d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_heads": 32, "num_layers": 24},
    "xxl": {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64, "num_layers": 24},
}
PRESETS = {name: _BASE | shape for name, shape in _SHAPES.items()}
PRESETS |= {
    f"{line}-{size}": _BASE | _V1_1 | shape for line in ("t5-v1_1", "flan-t5") for size, shape in _NEWER.items()
}
_MT5 = {"architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5", "vocab_size": 250112}
_UMT5 = {"architectures": ["UMT5ForConditionalGeneration"], "model_type": "umt5", "vocab_size": 256384}
PRESETS |= {f"mt5-{size}": _MT5 | _V1_1 | shape for size, shape in _NEWER.items()}
PRESETS |= {f"umt5-{size}": _UMT5 | _V1_1 | shape for size, shape in _NEWER.items() if size != "large"}
PRESETS["umt5-xxl-encoder"] = PRESETS["umt5-xxl"] | {"architectures": ["UMT5EncoderModel"]}
PRESETS["t5-v1_1-xxl-encoder"] = _BASE | _V1_1 | _NEWER["xxl"] | {"architectures": ["T5EncoderModel"]}
