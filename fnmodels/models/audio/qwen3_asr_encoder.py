"""The encoder of Qwen3-ASR: convolutions over seconds of log-mel frames, and pre-norm layers that see 8 seconds.

A token is what the three convolutions, each of stride 2 over time and frequency, read for one of the 13 outputs of a
second of 100 frames: tokens may stand in any order, and neither seconds nor clips see each other there.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.audio import CHUNK, CHUNK_REACH, CHUNK_TOKENS
from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import Chunk
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import Leaf, Normal, bias, layer_norm_leaves, weight
from fnmodels.models.common.vision import freqs_cis, kinds, weight_and_bias  # noqa: F401
from fnmodels.models.encoder_decoder import transformer
from fnmodels.models.encoder_decoder.transformer import block  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree, flatten

TRAITS = Traits(heads=("none",), causal=False)
_SIZES = {  # {ours: (name in files, default)}
    "hidden_size": ("d_model", 1024),
    "num_hidden_layers": ("encoder_layers", 24),
    "num_attention_heads": ("encoder_attention_heads", 16),
    "intermediate_size": ("encoder_ffn_dim", 4096),
    "num_mel_bins": ("num_mel_bins", 128),
    "channels": ("downsample_hidden_size", 480),
    "output_dim": ("output_dim", 3584),
}


@dataclass(frozen=True, kw_only=True)
class Config(transformer.PairConfig):
    """Sizes. channels: of the convolutions; seconds: that a token sees; output_dim: of the features made of it."""

    vocab_size: int = 1
    max_position_embeddings: int = 2**31 - 1
    stack: str = "encoder"
    num_mel_bins: int = 128
    channels: int = 480
    seconds: int = 8
    output_dim: int = 3584

    def __post_init__(self) -> None:
        super().__post_init__()
        decoder.check_sizes(self, "num_mel_bins", "channels", "seconds", "output_dim")
        if self.hidden_size % 2 or self.hidden_size < 4:
            raise ConfigError(f"d_model is {self.hidden_size}; it must be even and 4 or more, for sines and cosines.")

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From an `audio_config`; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values, "config.json, audio_config")
        fields.choice("model_type", ("qwen3_asr_encoder",), "qwen3_asr_encoder")
        fields.expect("is_encoder_decoder", False)
        for name, only in (
            ("scale_embedding", False),
            ("n_window", CHUNK // 2),
            ("max_position_embeddings", CHUNK_TOKENS),
        ):
            fields.expect(name, only)
        sizes: dict[str, Any] = {}
        for ours, (name, default) in _SIZES.items():
            deep = {"high": LAYERS_LIMIT} if ours == "num_hidden_layers" else {}
            sizes[ours] = fields.integer(name, default, **deep)
        frames = fields.integer("n_window_infer", 800)
        if frames % CHUNK:
            raise ConfigError(f"{fields.where}: 'n_window_infer' is {frames}; it must be a multiple of {CHUNK}.")
        act = fields.choice("activation_function", ("gelu",), "gelu")
        std = fields.number("initializer_range", 0.02, above=-1e-9)
        config = Config(**sizes, seconds=frames // CHUNK, hidden_act=act, initializer_range=std)
        fields.finish(("activation_dropout", "dropout", "num_hidden_layers"))
        return config

    def to_hf(self) -> ConfigJson:
        """An `audio_config`."""
        out: ConfigJson = {name: getattr(self, ours) for ours, (name, _) in _SIZES.items()}
        out |= {"model_type": "qwen3_asr_encoder", "activation_function": self.hidden_act}
        return out | {"n_window_infer": self.seconds * CHUNK, "initializer_range": self.initializer_range}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of convolutions [out, in, bins, frames]."""
    D, C, std, bins = config.hidden_size, config.channels, config.initializer_range, config.num_mel_bins
    tree: Tree = {"layers": [transformer.layer_leaves(config)] * config.num_hidden_layers}
    for i, (inner, axis) in enumerate(((1, "one"), (C, "inner_channel"), (C, "inner_channel")), 1):
        axes, bins = ("channel", axis, "kernel", "kernel"), (bins - 1) // 2 + 1
        tree[f"conv{i}_proj"] = Leaf((C, inner, 3, 3), torch.float32, axes, Normal(std))
        tree[f"conv{i}_bias"] = bias(C, "channel")
    tree["conv_out"] = weight((D, C * bins), ("embed", "channel"), std)
    return tree | layer_norm_leaves("norm", D, "embed")


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}, without the prefix of the model that it is part of."""
    names = {
        path: transformer.stack_name(path, config).removeprefix("model.encoder.") for path in flatten(spec(config))
    }
    for i in (1, 2, 3):
        names |= weight_and_bias(f"conv{i}_proj", f"conv2d{i}")
    return names | {"conv_out": "conv_out.weight"} | weight_and_bias("norm", "ln_post")


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{"full": mask}: tokens of the same `config.seconds` of a clip see each other; both arguments [B, S]."""
    return masks_of({"full": Chunk(config.seconds * CHUNK_TOKENS)}, positions, segment_ids, create=create)


def example_inputs(config: Config, positions: Tensor, /) -> dict[str, Tensor]:
    """Inputs of rows [B, S]; see `family.function_of`."""
    frames = torch.zeros(*positions.shape, CHUNK_REACH * config.num_mel_bins, device=positions.device)
    return {"tokens": frames, "positions": positions}


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: frames [B, S, 15 bins] through the convolutions, and the place of a token in its second."""
    if not isinstance(inputs, Mapping):
        raise ValueError(
            "This encoder needs the dict of inputs that fnmodels.prepare makes, with frames and positions."
        )
    frames, bins = inputs["tokens"], config.num_mel_bins
    if not frames.is_floating_point() or frames.shape[-1] != CHUNK_REACH * bins:
        raise ValueError(
            f"The tokens of this encoder are frames [B, S, {CHUNK_REACH * bins}] as fnmodels.inputs.chunk_rows makes "
            f"them, not {frames.dtype} {list(frames.shape)}."
        )
    place = inputs["positions"] % CHUNK_TOKENS
    x = frames.unflatten(-1, (CHUNK_REACH, bins)).mT.flatten(0, 1)[:, None].to(params["conv1_proj"].dtype)
    for i, before in ((1, None), (2, 3), (3, 1)):
        if (
            before is not None
        ):  # what the convolution before gives outside of the second is 0, not what it makes of zeros
            x = _inside(x, place.flatten(), before)
        x = F.gelu(F.conv2d(x, params[f"conv{i}_proj"], params[f"conv{i}_bias"], stride=2, padding=(1, 0)))
    x = linear(x.flatten(1).unflatten(0, place.shape), params["conv_out"])
    return x + _sinusoids(config.hidden_size, x.device)[place].to(x.dtype)


def _inside(x: Tensor, place: Tensor, before: int) -> Tensor:
    """x [N, C, bins, n], outputs for tokens at `place` [N] in their second, with 0 for those outside of it.

    The n outputs are those from (before + 1) place - before on.
    """
    at = (before + 1) * place[:, None] - before + torch.arange(x.shape[-1], device=x.device)
    count = -(-CHUNK * (before + 1) // 8)
    return x.where(((at >= 0) & (at < count))[:, None, None], 0)


def _sinusoids(width: int, device: torch.device) -> Tensor:
    """fp32 [13, D]: sines, then cosines."""
    half = width // 2
    rates = torch.exp(torch.arange(half, device=device).float() * (-math.log(10000) / (half - 1)))
    angles = torch.arange(CHUNK_TOKENS, device=device)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), 1)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The hidden states after the last LayerNorm, [B, S, D]."""
    return transformer.final_norm(params, x)
