"""FLUX.1 (Black Forest Labs, 2024; MM-DiT, arXiv 2403.03206): the velocity of rectified flow, given a text.

A row holds the tokens of its texts, then those of its images; tokens of one segment id are one image and its text, and
see each other. Double layers have one stream of weights for texts and one for images, single layers one for both. All
norms are modulated (adaLN, arXiv 2212.09748) by the condition of the token's image: time, guidance, pooled text.
The VAE and the text encoders are models of their own; the larger encoder is `t5`, of the smaller CLIP's only the pooled
output is read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike, build_mask
from fnmodels.inputs.rules import Everything
from fnmodels.inputs.segments import text_order
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import Constant, Leaf, attention_leaves, bias, norm, plain_mlp_leaves, weight
from fnmodels.models.common.storage import Stored, TensorSlice
from fnmodels.ops import (
    ACTIVATIONS,
    apply_rotary_interleaved,
    layer_norm,
    plain_mlp,
    project_out,
    project_qkv,
    rms_norm,
)
from fnmodels.ops.dtypes import in_fp64
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.rotary import Rope, frequencies
from fnmodels.tree import Tree, flatten

CLASS = "FluxTransformer2DModel"
MODEL_TYPES = (CLASS,)
KINDS = ("double", "single")
TRAITS = Traits(kinds=KINDS, inputs="latents", causal=False, weights="diffusion_pytorch_model")
PRESETS: dict[str, ConfigJson] = {
    "flux.1-dev": {"_class_name": CLASS, "guidance_embeds": True},
    "flux.1-schnell": {"_class_name": CLASS},
}
_EPS = 1e-6  # of all norms; no field of the file
_FREQUENCIES, _STD = 128, 0.02  # of time and guidance; of a fresh model
_SIZES = {"in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128}
_SIZES |= {"num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768}
_STREAMS = {
    "image": {
        "modulation": "norm1.linear",
        **{f"attention.{name}": f"attn.to_{name}" for name in "qkv"},
        "attention.o": "attn.to_out.0",
        "attention.q_norm": "attn.norm_q",
        "attention.k_norm": "attn.norm_k",
        "mlp.up": "ff.net.0.proj",
        "mlp.down": "ff.net.2",
    },
    "text": {
        "modulation": "norm1_context.linear",
        **{f"attention.{name}": f"attn.add_{name}_proj" for name in "qkv"},
        "attention.o": "attn.to_add_out",
        "attention.q_norm": "attn.norm_added_q",
        "attention.k_norm": "attn.norm_added_k",
        "mlp.up": "ff_context.net.0.proj",
        "mlp.down": "ff_context.net.2",
    },
}
_SINGLE = {"modulation": "norm.linear", "mlp.up": "proj_mlp", "mlp.down": "proj_out", "attention.o": "proj_out"}
_SINGLE |= {name: _STREAMS["image"][name] for name in _STREAMS["image"] if name[-1] in "qkv" or "norm" in name}
_ENDS = {"image": "x_embedder", "text": "context_embedder", "modulation": "norm_out.linear", "out": "proj_out"}
_ENDS |= {
    f"{name}.{side}": f"time_text_embed.{module}.linear_{number}"
    for name, module in (("time", "timestep_embedder"), ("guidance", "guidance_embedder"), ("pooled", "text_embedder"))
    for side, number in (("up", 1), ("down", 2))
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches, under the names of diffusers.

    in_channels, out_channels: of a token of the latents, 2 x 2 cells of a VAE's. joint_attention_dim: the width of the
    text's vectors. guidance_embeds: the strength of guidance is an input. axes_dims_rope: rotated dimensions of a head
    per axis of a position.
    """

    in_channels: int = 64
    out_channels: int = 64
    num_layers: int = 19
    num_single_layers: int = 38
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 4096
    pooled_projection_dim: int = 768
    guidance_embeds: bool = False
    axes_dims_rope: tuple[int, ...] = (16, 56, 56)
    # kept for saving only
    model_type: str = field(default=CLASS, compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        decoder.check_sizes(self, *_SIZES, "out_channels")
        axes = self.axes_dims_rope
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 2 or n % 2 for n in axes):
            raise ConfigError(f"axes_dims_rope is {list(axes)}; it must be even numbers of dimensions, at least 2.")
        if len(axes) != 3 or sum(axes) != self.attention_head_dim:
            raise ConfigError(
                f"axes_dims_rope is {list(axes)}; it must be 3 numbers with the sum {self.attention_head_dim}, which "
                "is attention_head_dim."
            )

    @property
    def hidden_size(self) -> int:
        """The width of both streams."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def head_dim(self) -> int:
        """The width of a head of queries, keys and values."""
        return self.attention_head_dim

    @property
    def intermediate_size(self) -> int:
        """The width inside of the MLPs."""
        return 4 * self.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        """Double and single layers."""
        return self.num_layers + self.num_single_layers

    @property
    def conditions(self) -> dict[str, tuple[int, ...]]:
        """{name: shape behind [B, M]} of the conditions of an image."""
        guidance: dict[str, tuple[int, ...]] = {"guidance": ()} if self.guidance_embeds else {}
        return {"time": (), **guidance, "pooled": (self.pooled_projection_dim,)}

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json of diffusers; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        fields.choice("_class_name", MODEL_TYPES)
        fields.expect("patch_size", 1)
        sizes: dict[str, Any] = {}
        for name, default in _SIZES.items():
            deep = {"high": LAYERS_LIMIT} if name.endswith("_layers") else {}
            sizes[name] = fields.integer(name, default, **deep)
        axes = fields.take("axes_dims_rope", [16, 56, 56])
        if not isinstance(axes, list | tuple):
            raise ConfigError(f"{fields.where}: 'axes_dims_rope' is {shown(axes)}, but must be a list of 3 numbers.")
        config = Config(
            **sizes,
            out_channels=fields.integer("out_channels", sizes["in_channels"]),
            guidance_embeds=fields.boolean("guidance_embeds", False),
            axes_dims_rope=tuple(axes),
        )
        version = values.get("_diffusers_version")
        kept = () if version is None else (("_diffusers_version", json.dumps(version)),)
        object.__setattr__(config, "extra", fields.finish(("_diffusers_version",)) + kept)
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json of diffusers."""
        fields = {name: getattr(self, name) for name in (*_SIZES, "out_channels", "guidance_embeds")}
        fields |= {"_class_name": CLASS, "axes_dims_rope": list(self.axes_dims_rope), "patch_size": 1}
        return decoder.expressible(self, {name: json.loads(value) for name, value in self.extra} | fields)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. Fresh layers are the identity, and the output is 0 (adaLN-Zero)."""
    D = config.hidden_size
    tree: Tree = {}
    for name, width in (("image", config.in_channels), ("text", config.joint_attention_dim)):
        tree |= _affine(name, weight((D, width), ("embed", f"{name}_channel"), _STD))
    for name, shape in config.conditions.items():
        width = shape[0] if shape else 2 * _FREQUENCIES
        up = _affine("up", weight((D, width), ("condition", f"{name}_channel"), _STD))
        tree[name] = up | _affine("down", weight((D, D), ("embed", "condition"), _STD))
    double = {name: _stream(config) for name in _STREAMS}
    layers = [double] * config.num_layers + [_single(config)] * config.num_single_layers
    out = _affine("out", _zeros((config.out_channels, D), ("latent_channel", "embed")))
    return tree | {"layers": layers} | _modulation(D, 2) | out


def _affine(name: str, leaf: Leaf) -> dict[str, Leaf]:
    return {f"{name}_proj": leaf, f"{name}_bias": bias(leaf.shape[0], leaf.axes[0])}


def _zeros(shape: tuple[int, int], axes: tuple[str, str]) -> Leaf:
    return Leaf(shape, torch.float32, axes, Constant(0.0))


def _modulation(width: int, parts: int) -> dict[str, Leaf]:
    return _affine("modulation", _zeros((parts * width, width), ("modulation", "embed")))


def _attention(config: Config, *, bias_out: bool) -> dict[str, Leaf]:
    D, N, H = config.hidden_size, config.num_attention_heads, config.head_dim
    leaves = attention_leaves(D, N, N, H, std=_STD, qkv_bias=True, o_bias=bias_out)
    return leaves | {name: norm(H, "head_dim") for name in ("q_norm", "k_norm")}


def _stream(config: Config) -> Tree:
    mlp = plain_mlp_leaves(config.hidden_size, config.intermediate_size, std=_STD)
    return _modulation(config.hidden_size, 6) | {"attention": _attention(config, bias_out=True), "mlp": mlp}


def _single(config: Config) -> Tree:
    D, F = config.hidden_size, config.intermediate_size
    mlp = plain_mlp_leaves(D, F, std=_STD)  # the bias of its output is also that of attention's
    return _modulation(D, 3) | {"attention": _attention(config, bias_out=False), "mlp": mlp}


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}; the outputs of a single layer are columns of one tensor there."""
    names: dict[str, Stored] = {path: _name(path, config) for path in flatten(spec(config))}
    D, width = config.hidden_size, config.hidden_size + config.intermediate_size
    for i in range(config.num_layers, config.num_layers + config.num_single_layers):
        for path, start, stop in (("attention.o_proj", 0, D), ("mlp.down_proj", D, width)):
            parameter = f"layers.{i}.{path}"
            names[parameter] = TensorSlice(_name(parameter, config), start, stop, width, columns=True)
    return names


def _name(path: str, config: Config) -> str:
    kind = "bias" if path.endswith("_bias") else "weight"
    inner, prefix, names = path.removesuffix("_bias").removesuffix("_proj"), "", _ENDS
    if inner.startswith("layers."):
        _, number, inner = inner.split(".", 2)
        names, prefix = _SINGLE, f"single_transformer_blocks.{int(number) - config.num_layers}."
        if int(number) < config.num_layers:
            stream, inner = inner.split(".", 1)
            names, prefix = _STREAMS[stream], f"transformer_blocks.{number}."
    return f"{prefix}{names[inner]}.{kind}"


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer: "double" ones first."""
    return ("double",) * config.num_layers + ("single",) * config.num_single_layers


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}, one mask for both: an image and its text see each other. positions [B, S, 3]."""
    mask = build_mask(Everything(), text_order(positions, segment_ids), segment_ids, create=create)
    return dict.fromkeys(KINDS, mask)


@in_fp64
def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 [B, S, H/2, 2]} of positions [B, S, 3]; each axis has its own dimensions and frequencies."""
    if positions.ndim != 3 or positions.shape[-1] != 3:
        raise ValueError(f"Positions are [B, S, 3], with row and column last, not {list(positions.shape)}.")
    axes = [frequencies(Rope(), size, device=positions.device) for size in config.axes_dims_rope]
    angles = torch.cat([positions[..., i, None].double() * freqs for i, freqs in enumerate(axes)], -1)
    return dict.fromkeys(KINDS, torch.stack((angles.cos(), angles.sin()), -1).float())


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, T + I, D]: T tokens of texts, then I of images."""
    if not isinstance(inputs, Mapping):
        raise ValueError(
            "Flux needs the dict of inputs that fnmodels.diffusion.prepare_denoising makes, with latents and texts."
        )
    weights = {name: params[f"{name}_proj"] for name in ("text", "image")}
    vectors = {"text": inputs["text"], "image": inputs["tokens"]}
    return torch.cat(
        [linear(vectors[name].to(w.dtype), w, params[f"{name}_bias"]) for name, w in weights.items()], dim=1
    )


def shared(params: Tree, inputs: Mapping[str, Any], /, *, config: Config) -> Tree:
    """Tensors that every layer reads: "condition" [B, M, D] after silu, and the images of tokens, "text_image" [B, T]
    and "latent_image" [B, I].

    time and guidance: 128 cosines, then sines, of 1000 times the value; the angles are computed in fp64.
    """
    total: Any = 0
    for name, shape in config.conditions.items():
        value, dtype = inputs[name], params[name]["up_proj"].dtype
        value = value if shape else _waves(value, torch.promote_types(dtype, torch.float32))
        total = total + plain_mlp(params[name], value.to(dtype), activation="silu")
    images = {name: inputs[name] for name in ("text_image", "latent_image")}
    return {"condition": elementwise(ACTIVATIONS["silu"], total)} | images


def example_inputs(config: Config, positions: Tensor, /) -> dict[str, Tensor]:
    """Inputs of rows [B, S], half of whose tokens are texts; see `family.function_of`."""
    rows, tokens = positions.shape
    sizes = {"text": tokens // 2, "latent": tokens - tokens // 2}
    made = {f"{name}_image": positions.new_zeros(rows, size) for name, size in sizes.items()}
    made["text"] = torch.zeros(rows, sizes["text"], config.joint_attention_dim, device=positions.device)
    made["tokens"] = torch.zeros(rows, sizes["latent"], config.in_channels, device=positions.device)
    conditions = {
        name: torch.zeros(rows, 1, *tail, device=positions.device) for name, tail in config.conditions.items()
    }
    return made | conditions | {"positions": positions[..., None].expand(rows, tokens, 3)}


_ACTIVATION = "gelu_pytorch_tanh"


@in_fp64
def _waves(value: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, M, 256] in `dtype`, of values [B, M]."""
    steps = torch.arange(_FREQUENCIES, dtype=torch.float64, device=value.device)
    angles = 1000 * value.double()[..., None] * torch.exp(-math.log(10000) / _FREQUENCIES * steps)
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def _modulated_by(layer: Tree, condition: Tensor, images: Tensor, parts: int) -> tuple[Tensor, ...]:
    """`parts` tensors [B, S, D], or [B, 1, D] where a row holds one image. condition [B, M, D], images [B, S]."""
    made = linear(condition, layer["modulation_proj"], layer["modulation_bias"])
    if made.shape[1] > 1:
        made = torch.take_along_dim(made, images[..., None], 1)
    return made.chunk(parts, -1)


def _normed(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return layer_norm(x, None, None, eps=_EPS) * (1 + scale) + shift


def _heads(weights: Tree, x: Tensor, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = project_qkv(weights, x, head_dim=config.head_dim)
    return rms_norm(q, weights["q_norm"], eps=_EPS), rms_norm(k, weights["k_norm"], eps=_EPS), v


def _attend(heads: tuple[Tensor, ...], mask: Any, freqs: Tensor, ctx: Context) -> Tensor:
    q, k, v = heads
    q, k = apply_rotary_interleaved(q, freqs), apply_rotary_interleaved(k, freqs)
    return ctx.attend(q, k, v, mask, scale=q.shape[-1] ** -0.5)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, T + I, D] -> x."""
    condition, text, latent = (ctx.shared(name) for name in ("condition", "text_image", "latent_image"))
    if kind == "double":
        return _double(layer, x, mask, freqs, config, ctx)
    images = torch.cat((text, latent), 1)
    shift, scale, gate = _modulated_by(layer, condition, images, 3)
    normed = _normed(x, shift, scale)
    mixed = _attend(_heads(layer["attention"], normed, config), mask, freqs, ctx)
    added = project_out(layer["attention"], mixed) + plain_mlp(
        layer["mlp"], normed, activation=_ACTIVATION, tap=ctx.tap
    )
    return x + gate * added


def _double(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, config: Config, ctx: Context) -> Tensor:
    images = {"text": ctx.shared("text_image"), "image": ctx.shared("latent_image")}
    sizes = [ids.shape[1] for ids in images.values()]
    both = dict(zip(images, x.split(sizes, 1), strict=True))
    parts = {name: _modulated_by(layer[name], ctx.shared("condition"), images[name], 6) for name in images}
    heads = [_heads(layer[name]["attention"], _normed(both[name], *parts[name][:2]), config) for name in both]
    q, k, v = (torch.cat(pair, 1) for pair in zip(*heads, strict=True))
    mixed = dict(zip(both, _attend((q, k, v), mask, freqs, ctx).split(sizes, 1), strict=True))
    added = [parts[name][2] * project_out(layer[name]["attention"], mixed[name]) for name in both]
    x = ctx.tap("middle", x + ctx.tap("attention", torch.cat(added, 1)))
    fed = []
    for name, stream in zip(both, x.split(sizes, 1), strict=True):
        shift, scale, gate = parts[name][3:]
        fed.append(gate * plain_mlp(layer[name]["mlp"], _normed(stream, shift, scale), activation=_ACTIVATION))
    return x + ctx.tap("mlp", torch.cat(fed, 1))


def outputs(params: Tree, x: Tensor, inputs: Mapping[str, Any], /, *, config: Config) -> Tensor:
    """The velocity of each token of the latents, [B, I, out_channels], of hidden states x [B, T + I, D]."""
    modulation = shared(params, inputs, config=config)
    scale, shift = _modulated_by(params, modulation["condition"], modulation["latent_image"], 2)
    x = x[:, modulation["text_image"].shape[1] :]
    return linear(_normed(x, shift, scale), params["out_proj"], params["out_bias"])
