"""Both stacks of Voxtral Realtime (Mistral AI, 2026): a causal encoder of sound, and a text that knows its delay.

Layers as Mistral's with a window. The encoder has two causal convolutions of log-mel frames and some biases; the text
multiplies what an MLP reads by a function of `delay`, how many tokens it is behind the sound. Both have caches: the
encoder hears a stream in chunks of frames, by `prepare_step` and `prefill`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import (
    Leaf,
    Normal,
    bias,
    decoder_leaves,
    layer_leaves,
    norm,
    usual_attention,
    usual_mlp,
    weight,
)
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.encoder_decoder.whisper import convolved
from fnmodels.ops import apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

MODEL_TYPES = ("voxtral_realtime_text",)
_ENCODER = "voxtral_realtime_encoder"
TRAITS = Traits(kinds=("full", "sliding"), heads=("lm", "none"))
DELAY = "default_num_delay_tokens"
_RATES, _WIDTH = 10000.0, 32  # of the embedding of the delay, and of what it goes through
_NORMS = {".input_layernorm.": ".self_attn_layer_norm.", ".post_attention_layernorm.": ".final_layer_norm."}


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes. num_mel_bins: of the encoder's frames, 0 for a text. delay: tokens that a text is behind the sound."""

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_mel_bins: int = 0
    delay: int = 6

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        hears = values.get("model_type") == _ENCODER
        fields = Fields({**values, "vocab_size": 1, "tie_word_embeddings": False} if hears else values)
        usual = decoder.base_fields(
            fields,
            (*MODEL_TYPES, _ENCODER),
            theta=1e4,
            max_positions=1500 if hears else 131072,
            kv_heads=0 if hears else 8,
        )
        if hears:
            fields.expect("activation_function", "gelu")  # of the convolutions
            if "head_dim" not in values:
                usual["head_dim"] = 64
        window = fields.integer("sliding_window", 750 if hears else 4096, low=0) or None
        kind = "sliding" if window else "full"
        config = (EncoderConfig if hears else Config)(
            **usual,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5 if hears else 1e-6),
            sliding_window=window,
            num_mel_bins=fields.integer("num_mel_bins", 128) if hears else 0,
            delay=6 if hears else fields.integer(DELAY, 6, low=0),
            layer_kinds=(kind,) * usual["num_hidden_layers"],
        )
        config = decoder.finished(config, fields, ("layerdrop",))
        if hears:
            object.__setattr__(config, "head", "none")
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("rms_norm_eps", "hidden_act", "sliding_window")
        if not self.num_mel_bins:
            own = {DELAY: self.delay}  # which the file of the whole model has elsewhere
            return decoder.decoder_to_hf(self, "VoxtralRealtimeForConditionalGeneration", *names, **own)
        out = decoder.decoder_to_hf(self, "VoxtralRealtimeEncoder", *names, num_mel_bins=self.num_mel_bins)
        return {name: value for name, value in out.items() if name not in ("vocab_size", "tie_word_embeddings")}


class EncoderConfig(Config):
    """That of the encoder: towers whose leaves have different roles over a mesh have different classes."""


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of convolutions [out, in, taps]."""
    D, std, bins = config.hidden_size, config.initializer_range, config.num_mel_bins
    attention, mlp = usual_attention(config, qkv_bias=True, o_bias=True), usual_mlp(config)
    if not bins:
        time = {"up": weight((_WIDTH, D), ("time", "embed"), std), "out": weight((D, _WIDTH), ("embed", "time"), std)}
        layer = layer_leaves(D, usual_attention(config), mlp) | {"time": time}
        return decoder_leaves(config, [layer] * config.num_hidden_layers)
    del attention["k_bias"]
    tree: Tree = {
        "layers": [layer_leaves(D, attention, mlp | {"down_bias": bias(D, "embed")})] * config.num_hidden_layers
    }
    for name, width, axis in (("conv1", bins, "channel"), ("conv2", D, "inner_channel")):
        tree[f"{name}_proj"] = Leaf((D, width, 3), torch.float32, ("embed", axis, "kernel"), Normal(std))
        tree[f"{name}_bias"] = bias(D, "embed")
    return tree | {"norm": norm(D, "embed")}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; of the encoder without the prefix of the model."""
    names = {path: str(name) for path, name in decoder.hf_names(config).items()}
    if not config.num_mel_bins:
        for path in [path for path in names if ".time." in path]:
            layer, _, name = path.partition(".time.")
            names[path] = f"model.{layer}.ada_rms_norm.linear{1 if name == 'up' else 2}.weight"
        return names
    names = {path: name.removeprefix("model.") for path, name in names.items()}
    for ours, theirs in _NORMS.items():
        names = {path: name.replace(ours, theirs) for path, name in names.items()}
    for i in (1, 2):
        names |= weight_and_bias(f"conv{i}_proj", f"embedder.conv{i}")
    return names


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: embeddings of tokens, or both convolutions of frames [B, S, 5 bins], each for its token."""
    if not config.num_mel_bins:
        return embed_tokens(params["embed_tokens"], inputs)
    return convolved(params, inputs, config.num_mel_bins, "causal_rows")


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    mixed = ctx.attend(apply_rotary(q, freqs), apply_rotary(k, freqs), v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    if "time" in layer:
        time = F.gelu(linear(_time(config, x), layer["time"]["up"]))
        normed = normed * (1 + linear(time, layer["time"]["out"]))
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


def _time(config: Config, x: Tensor) -> Tensor:
    """[1, 1, D]: cosines and sines of the delay at rates from 1 down, in the dtype of x."""
    half = config.hidden_size // 2
    rates = torch.exp(torch.arange(half, device=x.device) * (-torch.log(torch.tensor(_RATES)) / half))
    angles = config.delay * rates
    return torch.cat((angles.cos(), angles.sin()))[None, None].to(x.dtype)
