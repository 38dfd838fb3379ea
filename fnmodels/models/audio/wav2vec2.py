"""wav2vec 2.0 (arXiv 2006.11477), HuBERT (2106.07447), WavLM (2110.13900), UniSpeech (2101.07597) and UniSpeech-SAT
(2110.05752): raw waves, maybe with a CTC head.

Strided convolutions make a token of 20 ms of 400 samples, a wide convolution adds where a token stands, and layers with
LayerNorms before or after each sublayer follow. WavLM's scores have a bias by distance, which each query gates.
`forward` returns hidden states [B, S, D], or with the head "lm" logits [B, S, V] of characters and the blank.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike, build_mask
from fnmodels.inputs.rules import Everything
from fnmodels.models.audio.common import wave_convs
from fnmodels.models.audio.common.wave_config import IGNORED, head_of
from fnmodels.models.audio.common.wave_convs import batch_inputs, example_inputs  # noqa: F401
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import (
    Constant,
    Leaf,
    Normal,
    attention_leaves,
    bias,
    embedding,
    layer_leaves,
    layer_norm_leaves,
    plain_mlp_leaves,
    weight,
)
from fnmodels.models.common.vision import freqs_cis, kinds, of_spec, weight_and_bias  # noqa: F401
from fnmodels.ops import ACTIVATIONS, layer_norm, plain_mlp, project_out, project_qkv
from fnmodels.ops.attention.relative_bias import GatedBias, RelativeBias, by_distance
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

_CLASSES = {"wav2vec2": "Wav2Vec2", "hubert": "Hubert", "wavlm": "WavLM"}
_CLASSES |= {"unispeech": "UniSpeech", "unispeech-sat": "UniSpeechSat"}
MODEL_TYPES = tuple(_CLASSES)
_PARAMETRIZED = r"(.*\.conv)\.parametrizations\.weight\.original"
TRAITS = Traits(
    heads=("none", "lm"),
    causal=False,
    biased=True,
    optional={"mask_token": "mask_token"},
    classes={"wav2vec2": "Wav2Vec2ForPreTraining"},
    leftovers=(r"(quantizer|project_hid|project_q)\..*",),  # of pre-training
    resaved={f"{_PARAMETRIZED}0": r"\1.weight_g", f"{_PARAMETRIZED}1": r"\1.weight_v"},
    in_memory={
        r"\.weight_g$": ".parametrizations.weight.original0",
        r"\.weight_v$": ".parametrizations.weight.original1",
    },
)
_SIZES = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_BUCKETS = {"num_buckets": 320, "max_bucket_distance": 800}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches. clip_norm: the first convolution is normalized over its clip, and no other is.

    mask_token: 1 with a vector in place of tokens that inputs["masked"] names. num_buckets: of distances, 0: no bias.
    """

    vocab_size: int = 32
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    conv_dim: tuple[int, ...] = wave_convs.SIZES["conv_dim"]
    conv_stride: tuple[int, ...] = wave_convs.SIZES["conv_stride"]
    conv_kernel: tuple[int, ...] = wave_convs.SIZES["conv_kernel"]
    conv_bias: bool = False
    conv_act: str = "gelu"
    clip_norm: bool = True
    projection_norm: bool = True
    num_conv_pos_embeddings: int = 128
    num_conv_pos_embedding_groups: int = 16
    norm_first: bool = False
    num_buckets: int = 0
    max_bucket_distance: int = 800
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    head: str = "none"
    blank: int = 0  # the label between characters
    mask_token: int = 1
    # kept for saving only
    model_type: str = field(default="wav2vec2", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        decoder.check_sizes(self, "vocab_size", *_SIZES, *wave_convs.PLACES)
        wave_convs.check_convs(self)
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}."
            )
        if self.num_buckets % 4:
            raise ConfigError(f"num_buckets is {self.num_buckets}; it must be a multiple of 4.")

    @property
    def head_dim(self) -> int:
        """The width of a head of queries, keys and values."""
        return self.hidden_size // self.num_attention_heads

    @property
    def max_position_embeddings(self) -> int:
        """Clips may have any length."""
        return 2**31 - 1

    @property
    def tie_word_embeddings(self) -> bool:
        """There is no embedding."""
        return False

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        for name, only in (
            ("is_encoder_decoder", False),
            ("add_adapter", False),
            ("use_weighted_layer_sum", False),
            ("conv_pos_batch_norm", False),
        ):
            fields.expect(name, only)
        fields.expect("adapter_attn_dim", None)
        masked = [fields.number(f"mask_{what}_prob", n, above=-1e-9) for what, n in (("time", 0.05), ("feature", 0.0))]
        limits: dict[str, Any] = {"num_hidden_layers": {"high": LAYERS_LIMIT}}
        usual: dict[str, Any] = {name: fields.integer(name, n, **limits.get(name, {})) for name, n in _SIZES.items()}
        usual |= wave_convs.conv_fields(fields)
        if model_type == "wavlm":
            usual |= {name: fields.integer(name, n) for name, n in _BUCKETS.items()}
        config = Config(
            **usual,
            vocab_size=fields.integer("vocab_size", 32),
            projection_norm=fields.boolean("feat_proj_layer_norm", True) if model_type == "hubert" else True,
            norm_first=fields.boolean("do_stable_layer_norm", False),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "gelu"),
            layer_norm_eps=fields.number("layer_norm_eps", 1e-5),
            initializer_range=fields.number("initializer_range", 0.02, above=-1e-9),
            head=head_of(fields, _CLASSES[model_type]),
            blank=fields.integer("pad_token_id", 0, low=0),
            mask_token=int(max(masked) > 0 or model_type == "unispeech-sat"),
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish(tuple(IGNORED)))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("vocab_size", *_SIZES, "hidden_act", "layer_norm_eps", "initializer_range")
        out: ConfigJson = {name: json.loads(value) for name, value in self.extra} | wave_convs.conv_to_hf(self)
        out |= {name: getattr(self, name) for name in names}
        out |= {"pad_token_id": self.blank, "do_stable_layer_norm": self.norm_first}
        out |= {"mask_time_prob": 0.05 if self.mask_token else 0.0, "mask_feature_prob": 0.0}
        if self.model_type == "wavlm":
            out |= {name: getattr(self, name) for name in _BUCKETS}
        if self.model_type == "hubert":
            out["feat_proj_layer_norm"] = self.projection_norm
        name = _CLASSES[self.model_type] + ("ForCTC" if self.head == "lm" else "Model")
        return decoder.expressible(self, out | {"model_type": self.model_type, "architectures": [name]})


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of convolutions [out, in, taps]."""
    D, std, layer = config.hidden_size, config.initializer_range, _layer(config)
    tree: Tree = {"layers": [layer] * config.num_hidden_layers, **wave_convs.strided_leaves(config)}
    if config.projection_norm:
        tree |= layer_norm_leaves("projection_norm", config.conv_dim[-1], "channel")
    tree |= {"projection_proj": weight((D, config.conv_dim[-1]), ("embed", "channel"), std)}
    tree |= {"projection_bias": bias(D, "embed")}
    if config.mask_token:
        tree["mask_token"] = Leaf((D,), torch.float32, ("embed",), Normal(std), decay=False)
    tree |= wave_convs.wide_leaves(config)
    tree |= layer_norm_leaves("norm" if config.norm_first else "embed_norm", D, "embed")
    if config.num_buckets:
        shape = (config.num_buckets, config.num_attention_heads)
        tree["relative_embeddings"] = embedding(*shape, std, axis="bucket", size_axis="heads")
    if config.head == "lm":
        head = weight((config.vocab_size, D), ("vocab", "embed"), std)
        tree |= {"lm_head": head, "lm_head_bias": bias(config.vocab_size, "vocab")}
    return tree


def _layer(config: Config) -> Tree:
    D, N, std = config.hidden_size, config.num_attention_heads, config.initializer_range
    attention: Tree = attention_leaves(D, N, N, config.head_dim, std=std, qkv_bias=True, o_bias=True)
    if config.num_buckets:
        gates = {"gate_proj": weight((8, config.head_dim), ("gate", "head_dim"), std), "gate_bias": bias(8, "gate")}
        scale = Leaf((1, N, 1, 1), torch.float32, ("one", "gated_heads", "one", "one"), Constant(1.0), decay=False)
        attention |= gates | {"gate_scale": scale}
    return layer_leaves(D, attention, plain_mlp_leaves(D, config.intermediate_size, std=std), norm_bias=True)


_LAYER = {f"attention.{name}_proj": f"attention.{name}_proj" for name in "qkv"} | {
    "attention.o_proj": "attention.out_proj",
    "attention.gate_proj": "attention.gru_rel_pos_linear",
    "input_layernorm": "layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "mlp.up_proj": "feed_forward.intermediate_dense",
    "mlp.down_proj": "feed_forward.output_dense",
}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; files of a model without a head may have no prefix."""
    at = config.model_type.replace("-", "_") + "."
    where = dict.fromkeys(("norm", "embed_norm"), "encoder.layer_norm")
    for i in range(config.num_hidden_layers):
        where |= {f"layers.{i}.{path}": f"encoder.layers.{i}.{name}" for path, name in _LAYER.items()}
    names = wave_convs.conv_names(config, at) | {"mask_token": f"{at}masked_spec_embed"}
    for path, name in where.items():
        names |= weight_and_bias(path, f"{at}{name}")
    names["relative_embeddings"] = f"{at}encoder.layers.0.attention.rel_attn_embed.weight"
    for i in range(config.num_hidden_layers):
        names[f"layers.{i}.attention.gate_scale"] = f"{at}encoder.layers.{i}.attention.gru_rel_pos_const"
    return of_spec(spec(config), names | weight_and_bias("lm_head", "lm_head"))


def attention_masks(
    config: Any, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{"full": mask}: every token sees all tokens of its clip. positions [B, S, 2] or [B, S]; segment_ids [B, S]."""
    at = positions[..., 0] if positions.ndim == 3 else positions
    return {"full": build_mask(Everything(), at, segment_ids, create=create)}


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: tokens of waves through the convolutions and a projection, and where they stand.

    inputs: those of `prepare`; "masked", bool [B, S], if given, says where `mask_token` replaces tokens.
    """
    if not isinstance(inputs, Mapping) or "line" not in inputs:
        raise ValueError(
            "An encoder of waves needs the dict of inputs that fnmodels.prepare makes, with waves and positions."
        )
    valid = inputs["positions"][..., 1:] > 0
    x = wave_convs.convolved(params, inputs["tokens"].where(valid, 0), config)
    if config.projection_norm:
        x = layer_norm(x, params["projection_norm"], params["projection_norm_bias"], eps=config.layer_norm_eps)
    x = linear(x, params["projection_proj"], params["projection_bias"])
    if "mask_token" in params:  # read without "masked" too: every parameter has a gradient
        masked = inputs["masked"][..., None] if "masked" in inputs else torch.zeros_like(valid)
        x = torch.where(masked, params["mask_token"], x)
    x = x.where(valid, 0)
    x = x + wave_convs.placed(params, x, inputs, config)
    return x if config.norm_first else _norm(params, x, "embed_norm", config)


def shared(params: Tree, inputs: Mapping[str, Any], /, *, config: Config) -> Tree:
    """Tensors that every layer reads: {"bias"} by distance of WavLM, else none."""
    if not config.num_buckets:
        return {}
    values = by_distance(params["relative_embeddings"], config.max_bucket_distance, bidirectional=True)
    at = inputs["positions"][..., 0]
    return {"bias": RelativeBias(values, at, at)}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""

    def before(x: Tensor, name: str) -> Tensor:
        return _norm(layer, x, name, config) if config.norm_first else x

    def after(x: Tensor, name: str) -> Tensor:
        return x if config.norm_first else _norm(layer, x, name, config)

    weights, name, bias = layer["attention"], "input_layernorm", None
    read = before(x, name)
    q, k, v = project_qkv(weights, read, head_dim=config.head_dim)
    if config.num_buckets:
        bias = GatedBias(ctx.shared("bias"), _gates(weights, read.unflatten(-1, (-1, config.head_dim))))
    mixed = project_out(weights, ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5, bias=bias))
    x = ctx.tap("middle", after(x + ctx.tap("attention", mixed), name))
    name = "post_attention_layernorm"
    fed = plain_mlp(layer["mlp"], before(x, name), activation=config.hidden_act, tap=ctx.tap)
    return after(x + ctx.tap("mlp", fed), name)


def _gates(weights: Tree, x: Tensor) -> Tensor:
    """[B, S, N]: what each head of each query makes of the bias, from its slice of x [B, S, N, H]."""
    read = linear(x, weights["gate_proj"], weights["gate_bias"]).unflatten(-1, (2, 4)).sum(-1)
    first, second = elementwise(torch.sigmoid, read).unbind(-1)
    return first * (second * weights["gate_scale"].flatten() - 1) + 2


def _norm(params: Tree, x: Tensor, name: str, config: Config) -> Tensor:
    return layer_norm(x, params[name], params[f"{name}_bias"], eps=config.layer_norm_eps)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Hidden states [B, S, D], after the last norm where there is one, or logits [B, S, V]."""
    x = _norm(params, x, "norm", config) if config.norm_first else x
    return linear(x, params["lm_head"], params["lm_head_bias"]) if config.head == "lm" else x


_LARGE: ConfigJson = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
_LARGE |= {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True}


def _preset(kind: str, head: str, **more: Any) -> ConfigJson:
    return {"model_type": kind, "architectures": [_CLASSES[kind] + head]} | more


PRESETS = {
    "wav2vec2-base": _preset("wav2vec2", "ForPreTraining"),
    "wav2vec2-base-960h": _preset("wav2vec2", "ForCTC"),
    "wav2vec2-large-xlsr-53": _preset("wav2vec2", "ForPreTraining", **_LARGE),
    "hubert-base-ls960": _preset("hubert", "Model"),
    "hubert-large-ls960-ft": _preset("hubert", "ForCTC", **_LARGE),
    "wavlm-base": _preset("wavlm", "Model"),
    "wavlm-large": _preset("wavlm", "Model", **_LARGE | {"conv_bias": False}),
}
