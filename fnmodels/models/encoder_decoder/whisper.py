"""Whisper (arXiv 2212.04356): convolutions over log-mel frames, a pre-norm encoder, a decoder that attends to it.

One file has both stacks, as `t5.py`: `config.stack` is "both", or "encoder" or "decoder" for `config.encoder` and
`config.decoder`. The encoder's tokens are those of `fnmodels.inputs.frame_rows`, [B, S, 5 bins].
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.inputs.audio import REACH
from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import Causal, Everything
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import (
    Leaf,
    Normal,
    Sinusoids,
    attention_leaves,
    bias,
    embedding,
    layer_norm_leaves,
    plain_mlp_leaves,
)
from fnmodels.models.encoder_decoder.cross_attention import attend_to_memory, memory_of
from fnmodels.ops import ACTIVATIONS, embed_tokens, layer_norm, no_rotation, plain_mlp, project_out, project_qkv
from fnmodels.ops.embedding import look_up
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("whisper",)
TRAITS = Traits(kinds=("full", "causal"), heads=("lm", "none"), causal=False)
_CLASS = "WhisperForConditionalGeneration"
_EPS = 1e-5  # of all norms; no field of the file
# Fields of SpecAugment in training, of other classes, and of timestamps: no forward pass of these reads them.
_IGNORED: tuple[str, ...] = (
    "apply_spec_augment",
    "classifier_proj_size",
    "mask_feature_length",
    "mask_feature_min_masks",
)
_IGNORED += ("mask_feature_prob", "mask_time_length", "mask_time_min_masks", "mask_time_prob", "median_filter_width")
_IGNORED += ("alignment_heads", "activation_dropout", "decoder_layerdrop", "encoder_layerdrop", "num_hidden_layers")
_SIZES = {"vocab_size": "vocab_size", "d_model": "hidden_size", "num_mel_bins": "num_mel_bins"}
_SIZES |= {"encoder_layers": "num_hidden_layers", "encoder_attention_heads": "num_attention_heads"}
_SIZES |= {"encoder_ffn_dim": "intermediate_size", "decoder_layers": "num_decoder_layers"}
_SIZES |= {"decoder_attention_heads": "decoder_attention_heads", "decoder_ffn_dim": "decoder_intermediate_size"}
_SIZES |= {"max_source_positions": "max_position_embeddings", "max_target_positions": "decoder_positions"}
_DEFAULTS = {"vocab_size": 51865, "d_model": 384, "num_mel_bins": 80, "encoder_layers": 4, "decoder_layers": 4}
_DEFAULTS |= {"encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 1536}
_DEFAULTS |= {"decoder_ffn_dim": 1536, "max_source_positions": 1500, "max_target_positions": 448}
_MODULES = {
    "input_layernorm": "self_attn_layer_norm",
    "attention": "self_attn",
    "cross_attention_layernorm": "encoder_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "post_attention_layernorm": "final_layer_norm",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches. The fields of the first lines are the encoder's; in `decoder`, the decoder's.

    max_position_embeddings: tokens of a clip at most, 20 ms each.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int = 1500
    num_mel_bins: int = 80
    num_decoder_layers: int = 0
    decoder_attention_heads: int = 0
    decoder_intermediate_size: int = 0
    decoder_positions: int = 0
    hidden_act: str = "gelu"
    stack: str = "both"
    decoder_start_token_id: int = 50257
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    # kept for saving only
    model_type: str = field(default="whisper", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.stack not in ("both", "encoder", "decoder"):
            raise ConfigError(f"stack is {self.stack!r}; it must be both, encoder or decoder.")
        both = ("decoder_attention_heads", "decoder_intermediate_size", "decoder_positions", "num_decoder_layers")
        decoder.check_sizes(self, *_OWN, *(both if self.stack == "both" else ()))
        for name in ("num_attention_heads", *(both[:1] if self.stack == "both" else ())):
            if self.hidden_size % getattr(self, name):
                raise ConfigError(f"hidden_size {self.hidden_size} is not a multiple of {name} {getattr(self, name)}.")
        if self.hidden_size % 2:
            raise ConfigError(f"hidden_size is {self.hidden_size}; it must be even: positions are sines and cosines.")
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {self.hidden_act!r} is unknown; known are {', '.join(ACTIVATIONS)}.")

    @property
    def head(self) -> str:
        """An encoder alone has no head."""
        return "none" if self.stack == "encoder" else "lm"

    @property
    def head_dim(self) -> int:
        """The width of a head of queries, keys and values."""
        return self.hidden_size // self.num_attention_heads

    @property
    def encoder(self) -> "Config":
        """The encoder of both stacks, for its own `prepare` and `forward`."""
        return replace(self, stack="encoder", **_NO_DECODER)

    @property
    def decoder(self) -> "Config":
        """The decoder of both stacks."""
        own = {
            "intermediate_size": self.decoder_intermediate_size,
            "num_hidden_layers": self.num_decoder_layers,
            "num_attention_heads": self.decoder_attention_heads,
            "max_position_embeddings": self.decoder_positions,
        }
        return replace(self, stack="decoder", **(_NO_DECODER | own))

    @staticmethod
    def from_hf(values: dict[str, Any]) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        fields.choice("model_type", MODEL_TYPES)
        declared = fields.take("architectures", [_CLASS])
        if declared != [_CLASS]:
            raise UnsupportedError(f"{fields.where}: 'architectures' has {shown(declared)}; supported is {_CLASS}.")
        for name, only in (("is_encoder_decoder", True), ("scale_embedding", False), ("tie_word_embeddings", True)):
            fields.expect(name, only)
        fields.expect("use_weighted_layer_sum", False)
        sizes: dict[str, Any] = {}
        for name, ours in _SIZES.items():
            deep = {"high": LAYERS_LIMIT} if name.endswith("_layers") else {}
            sizes[ours] = fields.integer(name, _DEFAULTS[name], **deep)
        config = Config(
            **sizes,
            hidden_act=fields.choice("activation_function", tuple(ACTIVATIONS), "gelu"),
            decoder_start_token_id=fields.integer("decoder_start_token_id", 50257, low=0),
            initializer_range=fields.number("init_std", 0.02, above=-1e-9),
        )
        more = ("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids")  # of generation
        kept = tuple((n, json.dumps(values[n])) for n in more if values.get(n) is not None)
        object.__setattr__(config, "extra", fields.finish((*_IGNORED, *more)) + kept)
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json under Whisper's own names; ConfigError for one of the stacks, which no class reads."""
        if self.stack != "both":
            raise ConfigError(f"The {self.stack} is saved with its other stack: save the params of the config of both.")
        own = {name: getattr(self, ours) for name, ours in _SIZES.items()}
        own |= {"activation_function": self.hidden_act, "init_std": self.initializer_range}
        own |= {"decoder_start_token_id": self.decoder_start_token_id, "is_encoder_decoder": True}
        kept = {name: json.loads(value) for name, value in self.extra}
        return decoder.expressible(self, kept | {"architectures": [_CLASS], "model_type": "whisper"} | own)


_OWN: tuple[str, ...] = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OWN += ("max_position_embeddings", "num_mel_bins")
_NO_DECODER: dict[str, Any] = {"num_decoder_layers": 0, "decoder_attention_heads": 0, "decoder_intermediate_size": 0}
_NO_DECODER |= {"decoder_positions": 0}


def stacks(config: Config) -> dict[str, Config]:
    """The configs of both stacks; {} for one of them."""
    return {"encoder": config.encoder, "decoder": config.decoder} if config.stack == "both" else {}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of convolutions [out, in, taps]. {"encoder", "decoder"} for both stacks."""
    if config.stack == "both":
        return {name: spec(inner) for name, inner in stacks(config).items()}
    D, std, places = config.hidden_size, config.initializer_range, config.max_position_embeddings
    tree: Tree = {"layers": [_layer(config)] * config.num_hidden_layers, **layer_norm_leaves("norm", D, "embed")}
    if config.stack == "decoder":
        placed = embedding(places, D, std, axis="position")
        return {"embed_tokens": embedding(config.vocab_size, D, std), "embed_positions": placed} | tree
    front: Tree = {}
    for name, width, axis in (("conv1", config.num_mel_bins, "channel"), ("conv2", D, "inner_channel")):
        front[f"{name}_proj"] = Leaf((D, width, 3), torch.float32, ("embed", axis, "kernel"), Normal(std))
        front[f"{name}_bias"] = bias(D, "embed")
    fixed = Leaf((places, D), torch.float32, ("position", "embed"), Sinusoids(), trainable=False, decay=False)
    return front | {"embed_positions": fixed} | tree


def _layer(config: Config) -> Tree:
    D, N, std = config.hidden_size, config.num_attention_heads, config.initializer_range
    attention = attention_leaves(D, N, N, config.head_dim, std=std, qkv_bias=True, o_bias=True)
    del attention["k_bias"]  # it would add the same to all scores of a query
    layer: Tree = {**layer_norm_leaves("input_layernorm", D, "embed"), "attention": attention}
    if config.stack == "decoder":
        layer |= layer_norm_leaves("cross_attention_layernorm", D, "embed") | {"cross_attention": attention}
    layer |= layer_norm_leaves("post_attention_layernorm", D, "embed")
    return layer | {"mlp": plain_mlp_leaves(D, config.intermediate_size, std=std)}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    return {path: _name(path, config) for path in flatten(spec(config))}


def _name(path: str, config: Config) -> str:
    stack, _, inner = path.partition(".") if config.stack == "both" else (config.stack, "", path)
    kind = "bias" if inner.endswith("_bias") else "weight"
    *above, last = inner.removesuffix("_bias").removesuffix("_proj").split(".")
    if above[-1:] == ["mlp"]:
        above[-1:], last = [], {"up": "fc1", "down": "fc2"}[last]
    elif above and above[-1] in _MODULES:
        above[-1], last = _MODULES[above[-1]], f"{'out' if last == 'o' else last}_proj"
    last = "layer_norm" if inner.startswith("norm") else _MODULES.get(last, last)
    return ".".join(("model", stack, *above, last, kind))


def hf_copies(config: Config) -> dict[str, str]:
    """{name on disk: path of the parameter that it repeats}: the head is the embedding of the decoder."""
    return {"proj_out.weight": "decoder.embed_tokens"} if config.stack == "both" else {}


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer: "full" of the encoder, "causal" of the decoder."""
    own = ("causal" if config.stack == "decoder" else "full",) * config.num_hidden_layers
    return own + ("causal",) * config.num_decoder_layers


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask} of one stack; positions and segment_ids [B, S]."""
    rules = {kind: Causal() if kind == "causal" else Everything() for kind in kinds(config)}
    return masks_of(rules, positions, segment_ids, create=create)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 [B, S, 0, 2]}: no rotary embedding, since `embed` adds the positions."""
    return dict.fromkeys(sorted(set(kinds(config))), no_rotation(positions))


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D] with positions: of the encoder both convolutions of frames [B, S, 5 bins], each for its token."""
    if not isinstance(inputs, Mapping):
        raise ValueError(
            "Whisper has a vector for each position, so it needs the dict of inputs that `prepare` makes, with tokens "
            "and positions; bare tokens do not say where they stand."
        )
    positions = inputs["positions"]
    placed = look_up(params["embed_positions"], positions, "positions")
    if config.stack == "decoder":
        return embed_tokens(params["embed_tokens"], inputs) + placed
    frames, width = inputs["tokens"], REACH * config.num_mel_bins
    if not frames.is_floating_point() or frames.shape[-1] != width:
        raise ValueError(
            f"The tokens of Whisper's encoder are frames [B, S, {width}] as fnmodels.inputs.frame_rows makes them, not "
            f"{frames.dtype} {list(frames.shape)}."
        )
    first, second = (params[f"conv{i}_proj"] for i in (1, 2))
    windows = frames.to(first.dtype).unflatten(-1, (REACH, -1)).unfold(-2, 3, 1)  # [B, S, 3 outputs, bins, 3 taps]
    x = F.gelu(linear(windows.flatten(-2), first.flatten(1), params["conv1_bias"]))
    # Before its clip the second convolution reads zeros, not what the first one makes of zeros.
    before = (positions == 0)[..., None] & (torch.arange(3, device=x.device) == 0)
    x = x.masked_fill(before[..., None], 0).mT.flatten(-2)  # [B, S, D 3]
    return F.gelu(linear(x, second.flatten(1), params["conv2_bias"])) + placed


def example_inputs(config: Config, positions: Tensor, /) -> dict[str, Tensor]:
    """Inputs of rows [B, S] of one stack; see `family.function_of`."""
    if config.stack == "decoder":
        return {"tokens": torch.zeros_like(positions), "positions": positions}
    frames = torch.zeros(*positions.shape, REACH * config.num_mel_bins, device=positions.device)
    return {"tokens": frames, "positions": positions}


def shared(params: Tree, inputs: Mapping[str, Any], /, *, config: Config) -> Tree:
    """Tensors that every layer reads: in a decoder {"memory", "memory_mask"}, which `inputs` must hold."""
    return memory_of(inputs) if config.stack == "decoder" else {}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, scale = layer["attention"], config.head_dim**-0.5

    def normed(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, layer[name], layer[f"{name}_bias"], eps=_EPS)

    q, k, v = project_qkv(weights, normed(x, "input_layernorm"), head_dim=config.head_dim)
    x = x + ctx.tap("attention", project_out(weights, ctx.attend(q, k, v, mask, scale=scale)))
    if kind == "causal":
        given = normed(x, "cross_attention_layernorm")
        found = attend_to_memory(layer["cross_attention"], given, ctx, head_dim=config.head_dim, scale=scale)
        x = x + ctx.tap("cross_attention", found)
    x = ctx.tap("middle", x)
    fed = plain_mlp(layer["mlp"], normed(x, "post_attention_layernorm"), activation=config.hidden_act, tap=ctx.tap)
    return x + ctx.tap("mlp", fed)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The final norm, and of a decoder the tied head: logits [B, S, V]; of an encoder the hidden states [B, S, D]."""
    x = layer_norm(x, params["norm"], params["norm_bias"], eps=_EPS)
    return x if config.stack == "encoder" else linear(x, params["embed_tokens"])


def _preset(width: int, layers: int, below: int, **more: int) -> dict[str, Any]:
    heads, inner = width // 64, 4 * width
    values: dict[str, Any] = {"architectures": [_CLASS], "model_type": "whisper", "d_model": width}
    for side, count in (("encoder", layers), ("decoder", below)):
        values |= {f"{side}_layers": count, f"{side}_attention_heads": heads, f"{side}_ffn_dim": inner}
    return values | {"decoder_start_token_id": 50258, "eos_token_id": 50257, "pad_token_id": 50257} | more


_V3 = {"vocab_size": 51866, "num_mel_bins": 128}
_ENGLISH = {"vocab_size": 51864, "decoder_start_token_id": 50257, "eos_token_id": 50256, "pad_token_id": 50256}
_SHAPES = {"tiny": (384, 4, 4), "base": (512, 6, 6), "small": (768, 12, 12), "medium": (1024, 24, 24)}
PRESETS = {f"whisper-{name}": _preset(*shape) for name, shape in _SHAPES.items()}
PRESETS |= {f"whisper-{name}.en": _preset(*shape, **_ENGLISH) for name, shape in _SHAPES.items()}
PRESETS |= {name: _preset(1280, 32, 32) for name in ("whisper-large", "whisper-large-v2")}
PRESETS["whisper-large-v3"] = _preset(1280, 32, 32, **_V3)
PRESETS["whisper-large-v3-turbo"] = _preset(1280, 32, 4, **_V3)
