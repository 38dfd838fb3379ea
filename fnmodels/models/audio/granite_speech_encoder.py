"""The conformer (arXiv 2005.08100) of Granite Speech (arXiv 2505.08699): attention in blocks and convolutions.

A layer has an MLP of weight 1/2, attention within a block of frames whose scores have a term by distance, a depthwise
convolution over neighbours, and another MLP. In the middle the layer's CTC head is read back. The convolution's batch
norm has the moments that files hold, in training as well, so that clips do not depend on each other. Frames stay in
their order. `hidden` returns the hidden states [B, S, D] after the last layer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike, build_mask
from fnmodels.inputs.order import build_segments
from fnmodels.inputs.rules import Chunk
from fnmodels.inputs.values import constants
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import (
    Leaf,
    Normal,
    attention_leaves,
    bias,
    embedding,
    layer_norm_leaves,
    norm,
    plain_mlp_leaves,
    weight,
)
from fnmodels.models.common.storage import StoredNames, fuse
from fnmodels.models.common.vision import freqs_cis, kinds, weight_and_bias  # noqa: F401
from fnmodels.ops import layer_norm, plain_mlp, project_out, project_qkv
from fnmodels.ops.attention.disentangled import DisentangledBias
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.linear import linear
from fnmodels.ops.recurrent.neighbours import depthwise
from fnmodels.tree import Tree

TRAITS = Traits(heads=("none",), causal=False, biased=True, leftovers=(r"(.*\.)?batch_norm\.num_batches_tracked",))
EPS = 1e-5  # of all norms; no field of the file
_SIZES = {  # {ours: (name in files, default)}
    "hidden_size": ("hidden_dim", 1024),
    "num_hidden_layers": ("num_layers", 10),
    "num_attention_heads": ("num_heads", 8),
    "num_mel_bins": ("input_dim", 160),
    "output_dim": ("output_dim", 42),
    "block": ("context_size", 200),
    "max_distance": ("max_pos_emb", 512),
    "taps": ("conv_kernel_size", 15),
    "expansion": ("conv_expansion_factor", 2),
}
_LAYER = {"first_mlp_norm": "ff1.pre_norm", "first_mlp.up_proj": "ff1.up_proj", "first_mlp.down_proj": "ff1.down_proj"}
_LAYER |= {"input_layernorm": "attn.pre_norm", "attention.o_proj": "attn.to_out"}
_LAYER |= {"conv_norm": "conv.norm", "conv.up_proj": "conv.up_conv", "conv.down_proj": "conv.down_conv"}
_LAYER |= {"conv.batch_norm": "conv.batch_norm", "post_attention_layernorm": "ff2.pre_norm"}
_LAYER |= {"mlp.up_proj": "ff2.up_proj", "mlp.down_proj": "ff2.down_proj", "last_norm": "post_norm"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes. block: the frames that attend to each other; max_distance: of the table of distances.

    num_mel_bins: the elements of a frame. taps, expansion: of the convolution. joined: the layers, 0 for the input of
    the first, whose outputs are features before the last one's.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    num_mel_bins: int = 160
    output_dim: int = 42
    block: int = 200
    max_distance: int = 512
    taps: int = 15
    expansion: int = 2
    joined: tuple[int, ...] = ()
    vocab_size: int = 1
    max_position_embeddings: int = 2**31 - 1
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    head: str = "none"
    # kept for saving only
    model_type: str = field(default="granite_speech_encoder", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        decoder.check_sizes(self, "intermediate_size", "head_dim", *_SIZES)
        if self.num_hidden_layers < 2:
            raise ConfigError("num_layers is 1; the CTC head in the middle needs two layers or more.")
        if self.block > self.max_distance:
            raise ConfigError(f"context_size {self.block} is above max_pos_emb {self.max_distance}.")
        if any(not 0 <= layer < self.num_hidden_layers for layer in self.joined):
            raise ConfigError(
                f"cat_hidden_layers is {list(self.joined)}; each must be from 0 to {self.num_hidden_layers - 1}."
            )

    @property
    def features(self) -> int:
        """The width of what the projector reads."""
        return self.hidden_size * (1 + len(self.joined))

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From an `encoder_config`; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values, "config.json, encoder_config")
        known = ("granite_speech_encoder", "granite_speech_plus_encoder")
        model_type = fields.choice("model_type", known, known[0])
        fields.expect("is_encoder_decoder", False)
        for name in ("vocab_size", "tie_word_embeddings"):  # an encoder has no tokens
            fields.take(name, None)
        sizes: dict[str, Any] = {}
        for ours, (name, default) in _SIZES.items():
            sizes[ours] = fields.integer(name, default, high=LAYERS_LIMIT if name == "num_layers" else 1 << 20)
        head = fields.take("dim_head", None)
        joined = fields.take("cat_hidden_layers", None) or []
        if not isinstance(joined, list) or not all(type(one) is int for one in joined):
            raise ConfigError(f"{fields.where}: 'cat_hidden_layers' is {shown(joined)}; it must list layers.")
        config = Config(
            **sizes,
            intermediate_size=sizes["hidden_size"] * fields.integer("feedforward_mult", 4),
            head_dim=sizes["hidden_size"] // sizes["num_attention_heads"]
            if head is None
            else fields.integer("dim_head"),
            joined=tuple(sorted(set(joined))),
            initializer_range=fields.number("initializer_range", 0.02, above=-1e-9),
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish(("dropout",)))
        return config

    def to_hf(self) -> ConfigJson:
        """An `encoder_config`."""
        out: ConfigJson = {name: json.loads(value) for name, value in self.extra}
        out |= {name: getattr(self, ours) for ours, (name, _) in _SIZES.items()}
        out |= {"feedforward_mult": self.intermediate_size // self.hidden_size, "dim_head": self.head_dim}
        plus = {"cat_hidden_layers": list(self.joined)} if self.model_type.endswith("plus_encoder") else {}
        return out | {"model_type": self.model_type, "initializer_range": self.initializer_range} | plus


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of convolutions [out, in, taps]."""
    D, N, H, std = config.hidden_size, config.num_attention_heads, config.head_dim, config.initializer_range
    C, mlp = config.expansion * D, plain_mlp_leaves(D, config.intermediate_size, std=std)
    attention = attention_leaves(D, N, N, H, std=std, o_bias=True)
    attention["distances"] = embedding(2 * config.max_distance + 1, H, std, axis="distance", size_axis="head_dim")

    def conv(shape: tuple[int, ...], *axes: str) -> Leaf:
        return Leaf(shape, torch.float32, axes, Normal(std))

    convolution: Tree = {
        "up_proj": conv((2 * C, D, 1), "channel", "embed", "one"),
        "up_bias": bias(2 * C, "channel"),
        "depth": conv((C, 1, config.taps), "channel", "one", "kernel"),
        **layer_norm_leaves("batch_norm", C, "channel"),
        "mean": replace(norm(C, "channel", 0.0), trainable=False),
        "variance": replace(norm(C, "channel", 1.0), trainable=False),
        "down_proj": conv((D, C, 1), "embed", "channel", "one"),
        "down_bias": bias(D, "embed"),
    }
    layer: Tree = {"attention": attention, "conv": convolution, "first_mlp": mlp, "mlp": mlp}
    for name in ("first_mlp_norm", "input_layernorm", "conv_norm", "post_attention_layernorm", "last_norm"):
        layer |= layer_norm_leaves(name, D, "embed")
    ctc = {"out": weight((config.output_dim, D), ("label", "embed"), std), "out_bias": bias(config.output_dim, "label")}
    ctc |= {"back": weight((D, config.output_dim), ("embed", "label"), std), "back_bias": bias(D, "embed")}
    layers = [layer] * config.num_hidden_layers
    layers[config.num_hidden_layers // 2 - 1] = layer | {"ctc": ctc}
    first = {"frame_proj": weight((D, config.num_mel_bins), ("embed", "pixel"), std), "frame_bias": bias(D, "embed")}
    return first | {"layers": layers}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}, without the prefix of the model that it is part of."""
    names: dict[str, Any] = weight_and_bias("frame_proj", "input_linear")
    inner = config.num_attention_heads * config.head_dim
    for i in range(config.num_hidden_layers):
        for path, name in _LAYER.items():
            names |= weight_and_bias(f"layers.{i}.{path}", f"layers.{i}.{name}")
        at, ours = f"layers.{i}.attn", f"layers.{i}.attention"
        names |= {f"{ours}.q_proj": f"{at}.to_q.weight", f"{ours}.distances": f"{at}.rel_pos_emb.weight"}
        names |= fuse(f"{at}.to_kv.weight", {f"{ours}.k_proj": inner, f"{ours}.v_proj": inner})
        names[f"layers.{i}.conv.depth"] = f"layers.{i}.conv.depth_conv.conv.weight"
        names[f"layers.{i}.conv.mean"] = f"layers.{i}.conv.batch_norm.running_mean"
        names[f"layers.{i}.conv.variance"] = f"layers.{i}.conv.batch_norm.running_var"
    middle = f"layers.{config.num_hidden_layers // 2 - 1}.ctc"
    return names | weight_and_bias(f"{middle}.out", "out") | weight_and_bias(f"{middle}.back", "out_mid")


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{"full": {"attention": mask of blocks, "order": `Segments`}}; both arguments [B, S]."""
    mask = build_mask(Chunk(config.block), positions, segment_ids, create=create)
    return {"full": {"attention": mask, "order": build_segments(segment_ids, positions)}}


def example_inputs(config: Config, positions: Tensor, /) -> dict[str, Tensor]:
    """Inputs of rows [B, S]; see `family.function_of`."""
    frames = torch.zeros(*positions.shape, config.num_mel_bins, device=positions.device)
    return {"tokens": frames, "positions": positions}


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D] of frames [B, S, bins]."""
    if not isinstance(inputs, Mapping) or inputs["tokens"].shape[-1] != config.num_mel_bins:
        raise ValueError(
            f"This encoder needs the dict of inputs that prepare makes of frames [B, S, {config.num_mel_bins}]."
        )
    return linear(inputs["tokens"].to(params["frame_proj"].dtype), params["frame_proj"], params["frame_bias"])


def shared(params: Tree, inputs: Mapping[str, Any], /, *, config: Config) -> Tree:
    """{"rows": of each distance query - key in the part of the table that a block reads, "positions" [B, S]}."""
    rows = constants(list(range(2 * config.block + 1)), torch.int64, inputs["positions"].device)
    return {"rows": rows, "positions": inputs["positions"]}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, scale = layer["attention"], config.head_dim**-0.5
    x = x + 0.5 * ctx.tap(
        "first_mlp", plain_mlp(layer["first_mlp"], _norm(layer, x, "first_mlp_norm"), activation="silu")
    )
    q, k, v = project_qkv(weights, _norm(layer, x, "input_layernorm"), head_dim=config.head_dim)
    middle = config.max_distance
    near = weights["distances"][middle - config.block : middle + config.block + 1]
    at = ctx.shared("positions")
    by_query = torch.einsum("bqnh,rh->bqnr", q, near.to(q.dtype)) * scale
    bias = DisentangledBias(ctx.shared("rows"), (at, by_query), (at,))
    mixed = project_out(weights, ctx.attend(q, k, v, mask["attention"], scale=scale, bias=bias))
    x = ctx.tap("middle", x + ctx.tap("attention", mixed))
    x = x + ctx.tap("conv", _convolved(layer["conv"], _norm(layer, x, "conv_norm"), mask["order"].segment_ids))
    fed = plain_mlp(layer["mlp"], _norm(layer, x, "post_attention_layernorm"), activation="silu", tap=ctx.tap)
    x = _norm(layer, x + 0.5 * ctx.tap("mlp", fed), "last_norm")
    if "ctc" not in layer:
        return x
    head = layer["ctc"]
    labels = ctx.tap("ctc", linear(x, head["out"], head["out_bias"])).softmax(-1)
    return x + linear(labels, head["back"], head["back_bias"])


def _norm(params: Tree, x: Tensor, name: str) -> Tensor:
    return layer_norm(x, params[name], params[f"{name}_bias"], eps=EPS)


def _convolved(weights: Tree, x: Tensor, segment_ids: Tensor) -> Tensor:
    """The convolution of x [B, S, D] with the neighbours in the clip: [B, S, D]."""
    x = F.glu(linear(x, weights["up_proj"].flatten(1), weights["up_bias"]), -1)
    y = upcast(depthwise(x, weights["depth"].squeeze(1), segment_ids))
    y = (y - upcast(weights["mean"])) * (upcast(weights["variance"]) + EPS).rsqrt()
    y = (y * upcast(weights["batch_norm"]) + upcast(weights["batch_norm_bias"])).to(x.dtype)
    return linear(F.silu(y), weights["down_proj"].flatten(1), weights["down_bias"])


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The hidden states, unchanged."""
    return x
