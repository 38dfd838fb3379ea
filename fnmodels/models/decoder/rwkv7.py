"""RWKV-7 "Goose" (arXiv 2503.14456): recurrent layers without attention, with files as flash-linear-attention has them.

A layer is a time mix and a channel mix, and both read each token beside the one before it. The time mix keeps a matrix
for each head, which a token reads along one key and writes along two others (`ops.recurrent.two_keys`); its values are
mixed with those of the first layer. The channel mix is an MLP without a gate.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.mask import check_one_axis
from fnmodels.inputs.order import Segments, build_segments, last_segment
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import older
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.spec import (
    Leaf,
    Uniform,
    decoder_leaves,
    layer_leaves,
    layer_norm_leaves,
    norm,
    plain_mlp_leaves,
    weight,
)
from fnmodels.models.common.storage import Stored, TensorSlice
from fnmodels.ops import embed_tokens, layer_norm, no_rotation, plain_mlp, split_heads, upcast
from fnmodels.ops.invariant.rows import elementwise, pairwise_sum, rows_are_invariant
from fnmodels.ops.linear import linear
from fnmodels.ops.recurrent.conv_reads import reads_of
from fnmodels.ops.recurrent.token_shift import token_shift
from fnmodels.ops.recurrent.two_keys import two_key_rule
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("rwkv7",)
TRAITS = Traits(kinds=("linear",), left_axis="linear_heads")
_FASTEST = -0.6065306597126334  # -exp(-1/2), the least log decay
_RANKS = ("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim")
_ACTIVATIONS = {"sqrelu": "relu2", "relu": "relu", "silu": "silu"}  # {name in files: its name here}
# Ways to compute; the number of heads follows from their width, also where files say otherwise.
_IGNORED = ("attn_mode", "fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy", "num_heads", "hidden_ratio")


@dataclass(frozen=True, kw_only=True)
class Config(older.PlacedConfig):
    """Sizes and switches.

    The ranks are the widths between the two matrices of the decay, the output gate, the rate of removal and the
    mixture of values. norm_first: the embedding is normed.
    """

    num_key_value_heads: int = field(init=False)
    hidden_act: str = "relu2"
    decay_low_rank_dim: int
    gate_low_rank_dim: int
    a_low_rank_dim: int
    v_low_rank_dim: int
    norm_first: bool = True
    norm_bias: bool = True

    def __post_init__(self) -> None:
        decoder.check_sizes(self, "num_hidden_layers", "num_attention_heads", *_RANKS)
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        super().__post_init__()

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type, width = fields.choice("model_type", MODEL_TYPES), fields.integer("hidden_size")
        layers, heads = fields.integer("num_hidden_layers", high=LAYERS_LIMIT), fields.integer("num_heads", 1)
        by_number = "head_dim" in values and values["head_dim"] is None and width % heads == 0
        head_dim = width // heads if by_number else fields.integer("head_dim", 64)
        inner = -(-int(width * fields.number("hidden_ratio", 4.0, high=1e4)) // 32) * 32
        fields.expect("attn", None)  # layers of attention
        fields.expect("value_dim", None, width, [width] * layers)
        fields.expect("use_l2warp", False)  # another loss
        fields.expect("is_encoder_decoder", False)
        ranks: Any = {name: fields.integer(name) for name in _RANKS}
        config = Config(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=width,
            intermediate_size=fields.integer("intermediate_size", inner),
            num_hidden_layers=layers,
            num_attention_heads=max(width // head_dim, 1),
            head_dim=head_dim,
            max_position_embeddings=fields.integer("max_position_embeddings", 2048),
            hidden_act=_ACTIVATIONS[fields.choice("hidden_act", tuple(_ACTIVATIONS), "sqrelu")],
            layer_norm_eps=fields.number("norm_eps", 1e-5),
            initializer_range=fields.number("initializer_range", 0.02, above=-1e-9),
            **fields.plain(norm_first=True, norm_bias=True, tie_word_embeddings=False),
            **ranks,
            model_type=model_type,
        )
        return decoder.finished(config, fields, _IGNORED)

    def to_hf(self) -> ConfigJson:
        """A config.json under the names of published files."""
        acts = {ours: name for name, ours in _ACTIVATIONS.items()}
        names = {"norm_eps": "layer_norm_eps", "num_heads": "num_attention_heads"}
        own = {name: getattr(self, name) for name in ("head_dim", "norm_first", "norm_bias", *_RANKS)}
        return older.older_to_hf(self, "RWKV7ForCausalLM", names, hidden_act=acts.get(self.hidden_act), **own)


def kinds(config: Config) -> tuple[str, ...]:
    """One per layer: those after the first read the values that it leaves."""
    return ("linear", *("linear_joins",) * (config.num_hidden_layers - 1))


def attention_masks(config: Config, positions: Tensor, segment_ids: Tensor, **options: Any) -> dict[str, Segments]:
    """{kind: `fnmodels.inputs.Segments`}."""
    check_one_axis(positions)
    return dict.fromkeys(sorted(set(kinds(config))), build_segments(segment_ids, positions))


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """Nothing rotates."""
    return dict.fromkeys(sorted(set(kinds(config))), no_rotation(positions))


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, biased = config.hidden_size, config.initializer_range, config.norm_bias
    mlp = {"k_mix": _mix(D)} | plain_mlp_leaves(D, config.intermediate_size, std=std, biases=False)

    def layer(kind: LayerKind) -> Tree:
        return layer_leaves(D, _time_mix_leaves(config, kind.joins), mlp, norm_bias=biased)

    tree = decoder_leaves(config, [layer(kind) for kind in parsed(kinds(config))], norm_bias=biased)
    first = layer_norm_leaves("embed_norm", D, "embed") if biased else {"embed_norm": norm(D, "embed")}
    return {"embed_tokens": tree["embed_tokens"], **(first if config.norm_first else {})} | tree


def _mix(width: int) -> Leaf:
    """The share of the token before in each channel of what a projection reads."""
    return Leaf((width,), torch.float32, ("shifted",), Uniform(0.0, 1.0), decay=False)


def _time_mix_leaves(config: Config, joins: bool) -> dict[str, Leaf]:
    """Projections, and matrices of low rank with what is added to their results; joins: it reads the first values."""
    D, d, std, axis = config.hidden_size, config.head_dim, config.initializer_range, "linear_heads"
    rows: Any = {"unit": d}
    leaves = {f"{name}_mix": _mix(D) for name in "rwkvag"}
    leaves |= {f"{name}_proj": weight((D, D), (axis, "embed"), std, **rows) for name in "rkv"}
    ranks = {"decay": config.decay_low_rank_dim, "rate": config.a_low_rank_dim, "gate": config.gate_low_rank_dim}
    for name, rank in (ranks | ({"value": config.v_low_rank_dim} if joins else {})).items():
        leaves[f"{name}_a_proj"] = weight((rank, D), ("linear_latent", "embed"), std)
        leaves[f"{name}_b_proj"] = weight((D, rank), (axis, "linear_latent"), std, **rows)
    leaves["decay_base"] = Leaf((D,), torch.float32, (axis,), Uniform(-6.0, 1.0), decay=False, **rows)
    constants = {"rate_base": -0.25, "removal_scale": 0.75, "rate_scale": 1.0, "head_scale": 1.0, "head_shift": 0.0}
    constants |= {"value_base": 0.75} if joins else {}
    leaves |= {name: norm(D, axis, value, **rows) for name, value in constants.items()}
    leaves["bonus"] = Leaf((D // d, d), torch.float32, (axis, "linear_head_dim"), Uniform(-0.08, 0.0), decay=False)
    return leaves | {"o_proj": weight((D, D), ("embed", axis), std, **rows)}


_ENDS = {"embed_tokens": "model.embeddings.weight", "embed_norm": "model.layers.0.pre_norm.weight"}
_ENDS |= {"embed_norm_bias": "model.layers.0.pre_norm.bias"}
_AROUND = {".input_layernorm": ".attn_norm", ".post_attention_layernorm": ".ffn_norm", ".attention.": ".attn."}
_AROUND |= {".mlp.up_proj": ".ffn.key", ".mlp.down_proj": ".ffn.value", ".mlp.k_mix": ".ffn.x_k"}
_VECTORS = {"removal_scale": "k_k", "rate_scale": "k_a", "bonus": "r_k"}
_VECTORS |= {"head_scale": "g_norm.weight", "head_shift": "g_norm.bias"}
_LOW_RANK = {"decay": "w_lora", "rate": "a_lora", "value": "v_lora", "gate": "g_lora"}
_PARTS = {"a_proj": "lora.0.weight", "b_proj": "lora.2.weight", "base": "lora.2.bias"}


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}; the mixing vectors of time mixes are [1, 1, D] there."""
    names: dict[str, Stored] = {}
    for path in flatten(spec(config)):
        where, _, leaf = path.rpartition(".")
        name = f"model.{where}."
        for ours, theirs in _AROUND.items():
            name = name.replace(ours, theirs)
        word, _, part = leaf.partition("_")
        if not where.endswith(".attention"):
            plain = decoder.decoder_name(path)
            for ours, theirs in _AROUND.items():
                plain = plain.replace(ours, theirs)
            names[path] = _ENDS.get(path) or (plain.removesuffix(".weight") if leaf == "k_mix" else plain)
        elif part == "mix":
            D = config.hidden_size
            names[path] = TensorSlice(f"{name}x_{word}", 0, D, D, ones=(2, 0))
        elif leaf in _VECTORS:
            names[path] = name + _VECTORS[leaf]
        else:
            names[path] = f"{name}{_LOW_RANK[word]}.{_PARTS[part]}" if word in _LOW_RANK else f"{name}{leaf}.weight"
    return names


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: token (or given) embeddings, or their norm, which is of zeros for padding."""
    x = embed_tokens(params["embed_tokens"], inputs)
    if not config.norm_first:
        return x
    x = decoder.without_padding(x, inputs)
    return layer_norm(x, params["embed_norm"], params.get("embed_norm_bias"), eps=config.layer_norm_eps)


@with_context
def block(
    layer: Tree, x: Tensor, mask: Segments, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context
) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    state, ids, eps, kernel = ctx.state() or {}, mask.segment_ids, config.layer_norm_eps, ctx.options.kernel
    last = state.get("segment")
    reads = reads_of(ids, 2, x.shape[0], last, kernel) if ids.shape[1] > 1 else None
    shift = functools.partial(token_shift, segment_ids=ids, last=last, reads=reads, kernel=kernel)
    normed = layer_norm(x, layer["input_layernorm"], layer.get("input_layernorm_bias"), eps=eps)
    before, tail = shift(normed, tail=state.get("shift"))
    first = ctx.left() if LayerKind.parse(kind).joins else None
    mixed = time_mix(layer["attention"], normed, before, mask, first, config, ctx)
    x = ctx.tap("middle", x + ctx.tap("attention", mixed))
    normed = layer_norm(x, layer["post_attention_layernorm"], layer.get("post_attention_layernorm_bias"), eps=eps)
    before, mlp_tail = shift(normed, tail=state.get("mlp_shift"))
    ctx.keep(shift=tail, mlp_shift=mlp_tail)
    mixed = normed + (before - normed) * layer["mlp"]["k_mix"]
    return x + ctx.tap("mlp", plain_mlp(layer["mlp"], mixed, activation=config.hidden_act, tap=ctx.tap))


def time_mix(
    weights: Tree, x: Tensor, before: Tensor, mask: Segments, first: Tensor | None, config: Config, ctx: Context
) -> Tensor:
    """The time mix of x [B, S, D], of which `before` is the token before each: [B, S, D].

    first: the values [B, S, D] of the first layer; None in that layer, which leaves its own.
    """
    d, difference, sigmoid = config.head_dim, before - x, functools.partial(elementwise, torch.sigmoid)
    read = {name: x + difference * weights[f"{name}_mix"] for name in "rwkvag"}
    r, k, v = (linear(read[name], weights[f"{name}_proj"]) for name in "rkv")
    narrow = elementwise(torch.tanh, linear(read["w"], weights["decay_a_proj"]))
    decay = linear(narrow, weights["decay_b_proj"]) + weights["decay_base"]
    rate = sigmoid(_low_rank(weights, read["a"], "rate") + weights["rate_base"])
    gate = linear(sigmoid(linear(read["g"], weights["gate_a_proj"])), weights["gate_b_proj"])
    if first is not None:
        v = v + (first - v) * sigmoid(_low_rank(weights, read["v"], "value") + weights["value_base"])
    # a view, since remat does not allow a block to return what it was given
    ctx.leave(v if first is None else first.view_as(first))
    kappa = split_heads(k * weights["removal_scale"], d)
    kappa = (upcast(kappa) * _sum(upcast(kappa).square()).clamp(min=1e-24).rsqrt()).to(k.dtype)
    k = k * (1 + (rate - 1) * weights["rate_scale"])
    r, k, v, decay, rate = (split_heads(t, d) for t in (r, k, v, decay, rate))
    state, ids = ctx.state() or {}, mask.segment_ids
    last, g = state.get("segment"), _FASTEST * sigmoid(upcast(decay))
    given = ids, state.get("state"), last
    o, S = two_key_rule(r, k, v, g, -kappa, kappa * rate, *given, kernel=ctx.options.kernel)
    ctx.keep(state=S, segment=last_segment(ids, last).expand(x.shape[0]))
    o = layer_norm(o, None, None, eps=d * config.layer_norm_eps).flatten(-2)
    o = o * weights["head_scale"] + weights["head_shift"]
    o = o + (_sum(r * k * weights["bonus"]) * v).flatten(-2)
    return linear(o * gate, weights["o_proj"])


def _low_rank(weights: Tree, x: Tensor, name: str) -> Tensor:
    return linear(linear(x, weights[f"{name}_a_proj"]), weights[f"{name}_b_proj"])


def _sum(x: Tensor) -> Tensor:
    """The sum over the last dimension, which is kept."""
    return pairwise_sum(x, -1)[..., None] if rows_are_invariant() else x.sum(-1, keepdim=True)


unembed = decoder.unembed_layer_norm

_PRESET: ConfigJson = {"model_type": "rwkv7", "vocab_size": 65536, "head_dim": 64}
_SIZES = ("num_hidden_layers", "hidden_size", *_RANKS)
PRESETS: dict[str, ConfigJson] = {
    name: _PRESET | dict(zip(_SIZES, sizes, strict=True))
    for name, *sizes in (
        ("rwkv7-world-0.1b", 12, 768, 64, 128, 64, 32),
        ("rwkv7-world-0.4b", 24, 1024, 64, 128, 64, 32),
        ("rwkv7-world-1.5b", 24, 2048, 96, 256, 96, 64),
        ("rwkv7-world-2.9b", 32, 2560, 96, 320, 96, 64),
    )
}
