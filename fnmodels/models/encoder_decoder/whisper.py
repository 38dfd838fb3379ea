"""Whisper (arXiv 2212.04356): convolutions over log-mel frames, a pre-norm encoder, a decoder that attends to it.

One file has both stacks, as `t5.py`: `config.stack` is "both", or "encoder" or "decoder" for `config.encoder` and
`config.decoder`. The encoder's tokens are those of `fnmodels.inputs.frame_rows`, [B, S, 5 bins].
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.audio import REACH
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.dropout import with_dropout
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import Leaf, Normal, Sinusoids, bias, embedding, layer_norm_leaves
from fnmodels.models.encoder_decoder import transformer
from fnmodels.models.encoder_decoder.classes import declared_class, headless
from fnmodels.models.encoder_decoder.cross_attention import memory_of
from fnmodels.models.encoder_decoder.stacks import attention_masks, freqs_cis, kinds, stacks  # noqa: F401
from fnmodels.models.encoder_decoder.transformer import block  # noqa: F401
from fnmodels.ops import embed_tokens
from fnmodels.ops.embedding import look_up
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("whisper",)
TRAITS = Traits(kinds=("full", "causal"), heads=("lm", "none"), causal=False, dropout=transformer.DROPOUT)
_CLASS = "WhisperForConditionalGeneration"
# Fields of SpecAugment in training, of other classes, and of timestamps: no forward pass of these reads them.
_IGNORED: tuple[str, ...] = (
    "apply_spec_augment",
    "classifier_proj_size",
    "mask_feature_length",
    "mask_feature_min_masks",
)
_IGNORED += ("mask_feature_prob", "mask_time_length", "mask_time_min_masks", "mask_time_prob", "median_filter_width")
_IGNORED += ("alignment_heads", *transformer.IGNORED)
_SIZES = {"num_mel_bins": "num_mel_bins"}
_SIZES |= {"max_source_positions": "max_position_embeddings", "max_target_positions": "decoder_positions"}
_DEFAULTS: dict[str, Any] = {"vocab_size": 51865, "d_model": 384, "num_mel_bins": 80, "activation_function": "gelu"}
_DEFAULTS |= {"encoder_layers": 4, "decoder_layers": 4, "decoder_start_token_id": 50257}
_DEFAULTS |= {"encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 1536}
_DEFAULTS |= {"decoder_ffn_dim": 1536, "max_source_positions": 1500, "max_target_positions": 448}


@dataclass(frozen=True, kw_only=True)
class Config(transformer.PairConfig):
    """Sizes and switches. max_position_embeddings: tokens of a clip at most, 20 ms each; in `decoder`, of a text."""

    max_position_embeddings: int = 1500
    num_mel_bins: int = 80
    decoder_positions: int = 0
    decoder_start_token_id: int = 50257
    model_type: str = "whisper"

    def __post_init__(self) -> None:
        super().__post_init__()
        decoder.check_sizes(self, "num_mel_bins", *(("decoder_positions",) if self.stack == "both" else ()))
        if self.hidden_size % 2:
            raise ConfigError(f"hidden_size is {self.hidden_size}; it must be even: positions are sines and cosines.")

    @property
    def encoder(self) -> "Config":
        """The encoder of both stacks, for its own `prepare` and `forward`."""
        return replace(super().encoder, decoder_positions=0)

    @property
    def decoder(self) -> "Config":
        """The decoder of both stacks."""
        return replace(super().decoder, max_position_embeddings=self.decoder_positions, decoder_positions=0)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        fields.choice("model_type", MODEL_TYPES)
        head = "lm" if declared_class(fields, _CLASS) == _CLASS else "none"
        for name, only in (("is_encoder_decoder", True), ("scale_embedding", False), ("tie_word_embeddings", True)):
            fields.expect(name, only)
        fields.expect("use_weighted_layer_sum", False)
        sizes: dict[str, Any] = {ours: fields.integer(name, _DEFAULTS[name]) for name, ours in _SIZES.items()}
        config = with_dropout(Config(**transformer.pair_fields(fields, _DEFAULTS), **sizes, head=head), fields)
        more = ("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids")  # of generation
        kept = tuple((n, json.dumps(values[n])) for n in more if values.get(n) is not None)
        object.__setattr__(config, "extra", fields.finish((*_IGNORED, *more)) + kept)
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json under Whisper's own names; ConfigError for one of the stacks, which no class reads."""
        out = {name: json.loads(value) for name, value in self.extra} | transformer.pair_to_hf(self)
        out |= {name: getattr(self, ours) for name, ours in _SIZES.items()}
        architecture = _CLASS if self.head == "lm" else headless(_CLASS)
        return decoder.expressible(self, out | {"architectures": [architecture], "model_type": "whisper"})


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
    layer = transformer.layer_leaves(config)
    for name in ("attention", "cross_attention") if config.stack == "decoder" else ("attention",):
        layer[name] = {leaf: value for leaf, value in layer[name].items() if leaf != "k_bias"}  # Whisper has none
    return layer


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    return {path: transformer.stack_name(path, config) for path in flatten(spec(config))}


def hf_copies(config: Config) -> dict[str, str]:
    """{name on disk: path of the parameter that it repeats}: the head is the embedding of the decoder."""
    return {"proj_out.weight": "decoder.embed_tokens"} if config.stack == "both" and config.head == "lm" else {}


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
    return convolved(params, inputs, config.num_mel_bins) + placed


def convolved(params: Tree, inputs: Mapping[str, Tensor], bins: int, rows: str = "frame_rows") -> Tensor:
    """[B, S, D]: both convolutions of frames inputs["tokens"] [B, S, 5 bins], each for its token.

    rows: the function of `fnmodels.inputs.audio` that makes the frames.
    """
    frames, width = inputs["tokens"], REACH * bins
    if not frames.is_floating_point() or frames.shape[-1] != width:
        raise ValueError(
            f"The tokens of this encoder are frames [B, S, {width}] as fnmodels.inputs.{rows} makes them, not "
            f"{frames.dtype} {list(frames.shape)}."
        )
    positions = inputs["positions"]
    first, second = (params[f"conv{i}_proj"] for i in (1, 2))
    windows = frames.to(first.dtype).unflatten(-1, (REACH, -1)).unfold(-2, 3, 1)  # [B, S, 3 outputs, bins, 3 taps]
    x = F.gelu(linear(windows.flatten(-2), first.flatten(1), params["conv1_bias"]))
    # Before its clip the second convolution reads zeros, not what the first one makes of zeros.
    before = (positions == 0)[..., None] & (torch.arange(3, device=x.device) == 0)
    x = x.masked_fill(before[..., None], 0).mT.flatten(-2)  # [B, S, D 3]
    return F.gelu(linear(x, second.flatten(1), params["conv2_bias"]))


def example_inputs(config: Config, positions: Tensor, /) -> dict[str, Tensor]:
    """Inputs of rows [B, S] of one stack; see `family.function_of`."""
    if config.stack == "decoder":
        return {"tokens": torch.zeros_like(positions), "positions": positions}
    frames = torch.zeros(*positions.shape, REACH * config.num_mel_bins, device=positions.device)
    return {"tokens": frames, "positions": positions}


def shared(params: Tree, inputs: Mapping[str, Any], /, *, config: Config) -> Tree:
    """Tensors that every layer reads: in a decoder {"memory", "memory_mask"}, which `inputs` must hold."""
    return memory_of(inputs) if config.stack == "decoder" else {}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The final norm, and of a decoder the tied head: logits [B, S, V]; without a head the hidden states [B, S, D]."""
    x = transformer.final_norm(params, x)
    return x if config.head == "none" else linear(x, params["embed_tokens"])


def _preset(width: int, layers: int, below: int, **more: int) -> dict[str, Any]:
    heads, inner = width // 64, 4 * width
    values: ConfigJson = {"architectures": [_CLASS], "model_type": "whisper", "d_model": width}
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
