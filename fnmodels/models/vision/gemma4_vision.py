"""The vision tower of Gemma 4 (Google, 2026): RMSNorms before and after, a gated MLP, axial rotary positions.

`forward` returns the hidden states [B, S, D] of the last layer, which have no norm. Images may have any size whose rows
and columns of patches are multiples of `pooled`; pixels are from 0 to 1. In some checkpoints linear maps clip what they
read and return to limits of their own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import Constant, Leaf, Normal, attention_leaves, gated_mlp_leaves, norm, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import attention_masks, kinds  # noqa: F401
from fnmodels.ops import apply_rotary, look_up, split_heads
from fnmodels.ops.dtypes import in_fp64
from fnmodels.ops.linear import linear, linears
from fnmodels.ops.mlp import glu
from fnmodels.ops.norm import rms_norm, rms_norm_fp32_weight
from fnmodels.ops.rotary import Rope, Rotation, frequencies, table_of
from fnmodels.tree import Tree

MODEL_TYPES = ("gemma4_vision",)
TRAITS = Traits(inputs="patches", causal=False)

_LIMITS = {f"{end}_{side}": sign * math.inf for end in ("input", "output") for side, sign in (("min", -1), ("max", 1))}
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_LINEAR = {f"attention.{name}_proj": f"self_attn.{name}_proj.linear" for name in "qkvo"}
_LINEAR |= {f"mlp.{name}_proj": f"mlp.{name}_proj.linear" for name in ("gate", "up", "down")}
_LAYER = _LINEAR | {f"attention.{name}_norm": f"self_attn.{name}_norm" for name in "qk"} | {n: n for n in _NORMS}


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes and switches. pooled: the side of the square of patches whose mean is a feature.

    positions: the rows and columns of which the position table has one entry each. layer_norm_eps: of the RMSNorms.
    standardize: features are shifted and scaled by vectors of the checkpoint. clipped: each linear map has limits that
    are not trained.
    """

    hidden_act: str = "gelu_pytorch_tanh"
    rope_theta: float = 100.0
    pooled: int = 3
    positions: int = 10240
    standardize: bool = False
    clipped: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 4:
            raise ConfigError(f"The heads are {self.head_dim} wide, but must be a multiple of 4, for rows and columns.")

    @property
    def channels_last(self) -> bool:
        """The pixels of a patch are [p, p, C]."""
        return True

    @property
    def special_tokens(self) -> int:
        """0: every token of an image is a patch."""
        return 0

    @property
    def feature_scale(self) -> float:
        """The factor of means of hidden states before the norm of features."""
        return float(self.hidden_size**0.5)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        named = {"hidden_act": "hidden_activation", "layer_norm_eps": "rms_norm_eps"}
        fields = Fields({n: v for n, v in values.items() if n not in named.values()} | _given(values, named))
        usual = vision.vision_fields(
            fields, MODEL_TYPES, eps=1e-6, activation="gelu_pytorch_tanh", sizes=(768, 3072, 16, 12)
        )
        heads = usual["num_attention_heads"]
        fields.expect("num_key_value_heads", heads)
        fields.expect("head_dim", usual["hidden_size"] // heads)
        fields.expect("attention_bias", False)
        rope = Fields(fields.take("rope_parameters", {}), "rope_parameters")
        rope.expect("rope_type", "axial", "default")
        config = Config(
            **usual,
            rope_theta=rope.number("rope_theta", 100.0),
            pooled=fields.integer("pooling_kernel_size", 3),
            positions=fields.integer("position_embedding_size", 10240),
            standardize=fields.boolean("standardize", False),
            clipped=fields.boolean("use_clipped_linears", False),
        )
        ignored = ("max_position_embeddings", "default_output_length")
        object.__setattr__(config, "extra", fields.finish(ignored))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        rest: dict[str, Any] = dict.fromkeys(("hidden_act", "layer_norm_eps", "image_size", "num_channels"))
        rest |= {"hidden_activation": self.hidden_act, "rms_norm_eps": self.layer_norm_eps, "head_dim": self.head_dim}
        rest |= {"num_key_value_heads": self.num_attention_heads, "pooling_kernel_size": self.pooled}
        rest |= {"position_embedding_size": self.positions, "use_clipped_linears": self.clipped}
        rest |= {"rope_parameters": {"rope_type": "axial", "rope_theta": self.rope_theta}}
        return vision.vision_to_hf(self, "Gemma4Vision", "standardize", **rest)


def _given(values: ConfigJson, named: dict[str, str]) -> dict[str, Any]:
    return {ours: values[theirs] for ours, theirs in named.items() if theirs in values}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, p p C]; the entries of columns, then of rows of patches."""
    D, heads, std = config.hidden_size, config.num_attention_heads, config.initializer_range
    attention = attention_leaves(D, heads, heads, config.head_dim, std=std)
    attention |= {f"{name}_norm": norm(config.head_dim, "head_dim") for name in "qk"}
    layer: Tree = {name: norm(D, "embed") for name in _NORMS}
    layer |= {"attention": attention, "mlp": gated_mlp_leaves(D, config.intermediate_size, std=std)}
    if config.clipped:
        limits = {n: Leaf((), torch.float32, (), Constant(v), decay=False, trainable=False) for n, v in _LIMITS.items()}
        for path in _LINEAR:
            part, name = path.removesuffix("_proj").split(".")
            layer[part] = layer[part] | {f"{name}_limits": limits}
    axes = ("axis", "position", "embed")
    tree: Tree = {"patch_proj": weight((D, config.num_channels * config.patch_size**2), ("embed", "pixel"), std)}
    tree["embed_positions"] = Leaf((2, config.positions, D), torch.float32, axes, Normal(std), decay=False)
    return tree | {"layers": [layer for _ in range(config.num_hidden_layers)]}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = {"patch_proj": "patch_embedder.input_proj.weight"}
    names |= {"embed_positions": "patch_embedder.position_embedding_table"}
    names |= vision.layer_names(config, "encoder.layers.", _LAYER)
    for i in range(config.num_hidden_layers):
        for path, name in _LINEAR.items():
            at, there = f"layers.{i}.{path.removesuffix('_proj')}_limits", f"encoder.layers.{i}"
            names |= {f"{at}.{limit}": f"{there}.{name.removesuffix('linear')}{limit}" for limit in _LIMITS}
    return vision.of_spec(spec(config), names)


@in_fp64
def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{"full": fp32 [B, S, H/2, 2]}: of the first half of each head by the column, then of the second by the row."""
    freqs = frequencies(Rope(theta=config.rope_theta), config.head_dim // 2, device=positions.device)
    angles = torch.cat([positions[..., axis, None].double() * freqs for axis in (1, 0)], -1)
    return {"full": torch.stack((angles.cos(), angles.sin()), -1).float()}


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches, whose pixels are shifted to -1 to 1, and the positions of their columns and rows."""
    x = vision.embed_patches(params, {**inputs, "tokens": 2 * (inputs["tokens"] - 0.5)}, config=config)
    row, column = inputs["positions"][..., :2].unbind(-1)
    columns, rows = params["embed_positions"]
    return x + look_up(columns, column, "columns of patches") + look_up(rows, row, "rows of patches")


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, eps = layer["attention"], config.layer_norm_eps

    def normed(x: Tensor, name: str) -> Tensor:
        return rms_norm_fp32_weight(x, layer[name], eps=eps)

    x_in = normed(x, "input_layernorm")
    q, k, v = (split_heads(t, config.head_dim) for t in _linears(weights, "qkv", x_in))
    q = _rotated(rms_norm_fp32_weight(q, weights["q_norm"], eps=eps), freqs)
    k = _rotated(rms_norm_fp32_weight(k, weights["k_norm"], eps=eps), freqs)
    mixed = ctx.attend(q, k, rms_norm(v, None, eps=eps), mask, scale=1.0)
    mixed = normed(_linear(weights, "o", mixed.flatten(-2)), "post_attention_layernorm")
    x = ctx.tap("middle", x + ctx.tap("attention", mixed))
    fed = _mlp(layer["mlp"], normed(x, "pre_feedforward_layernorm"), config.hidden_act, ctx)
    return x + ctx.tap("mlp", normed(fed, "post_feedforward_layernorm"))


def _mlp(weights: Tree, x: Tensor, activation: str, ctx: Context) -> Tensor:
    gate, up = _linears(weights, ("gate", "up"), x)
    neurons = ctx.tap("mlp.neurons", glu(ctx.tap("mlp.pre", gate), up, activation=activation))
    return _linear(weights, "down", neurons)


def _linears(weights: Mapping[str, Any], names: Sequence[str], x: Tensor) -> tuple[Tensor, ...]:
    if any(f"{name}_limits" in weights for name in names):
        return tuple(_linear(weights, name, x) for name in names)
    return linears(x, weights, names)


def _linear(weights: Mapping[str, Any], name: str, x: Tensor) -> Tensor:
    """The product with `name`_proj; x and the result are clipped where it has limits."""
    limits = weights.get(f"{name}_limits")
    if limits is None:
        return linear(x, weights[f"{name}_proj"])
    y = linear(x.clamp(limits["input_min"], limits["input_max"]), weights[f"{name}_proj"])
    return y.clamp(limits["output_min"], limits["output_max"])


def _rotated(x: Tensor, freqs: Tensor | Rotation) -> Tensor:
    """Each half of the heads of x [B, S, N, H] by its half of the table."""
    halves = zip(x.chunk(2, -1), table_of(freqs).chunk(2, -2), strict=True)
    return torch.cat([apply_rotary(half, table) for half, table in halves], -1)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The hidden states, unchanged."""
    return x
