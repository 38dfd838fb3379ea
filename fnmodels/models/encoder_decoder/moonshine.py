"""Moonshine (arXiv 2410.15608): convolutions over raw samples, a pre-norm encoder, a decoder that attends to it.

Both stacks have an interleaved rotary embedding of part of each head, LayerNorms without biases, and one width. One
file has both, as `whisper.py`. The encoder's tokens are those of `fnmodels.inputs.sample_rows`, 24 ms each; what the
first convolution makes of a clip is normalized over the whole clip.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.inputs.documents import numbers_in_rows, sums_of_documents
from fnmodels.inputs.waves import outputs_of, reach
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.dropout import with_dropout
from fnmodels.models.common.family import Traits
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import (
    Leaf,
    Normal,
    attention_leaves,
    bias,
    embedding,
    gated_mlp_leaves,
    layer_norm_leaves,
    norm,
    plain_mlp_leaves,
)
from fnmodels.models.common.storage import StoredNames, fuse
from fnmodels.models.encoder_decoder import transformer
from fnmodels.models.encoder_decoder.classes import declared_class, headless
from fnmodels.models.encoder_decoder.cross_attention import attend_to_memory, memory_of
from fnmodels.models.encoder_decoder.stacks import attention_masks, kinds, stacks  # noqa: F401
from fnmodels.ops import (
    ACTIVATIONS,
    apply_rotary_interleaved,
    embed_tokens,
    gated_mlp,
    layer_norm,
    plain_mlp,
    project_out,
    project_qkv,
)
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.rotary import Rope, rotary_table
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("moonshine",)
TRAITS = Traits(kinds=("full", "causal"), heads=("lm", "none"), causal=False)
_CLASS = "MoonshineForConditionalGeneration"
_EPS = 1e-5  # of all norms; no field of the file
_CONVS = {"conv1": (127, 64), "conv2": (7, 3), "conv3": (3, 2)}  # (samples or outputs, stride); no fields of the file
_ANY = 2**31 - 1
_SIZES = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size"}
_SIZES |= {"encoder_num_hidden_layers": "num_hidden_layers", "decoder_num_hidden_layers": "num_decoder_layers"}
_SIZES |= {"encoder_num_attention_heads": "num_attention_heads"}
_SIZES |= {"decoder_num_attention_heads": "decoder_attention_heads"}
_SIZES |= {"max_position_embeddings": "max_position_embeddings"}
_DEFAULTS = {"vocab_size": 32768, "hidden_size": 288, "intermediate_size": 1152, "max_position_embeddings": 512}
_DEFAULTS |= dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), 6)
_DEFAULTS |= dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 8)
_NAMES = {"attention": "self_attn", "cross_attention": "encoder_attn", "up": "fc1", "gate": "fc1", "down": "fc2"}
_NAMES |= {"conv_norm": "groupnorm"}
# Of each stack alone: the norms before what it does.
_NORMS = {
    "encoder": {"norm": "layer_norm"},
    "decoder": {
        "cross_attention_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "final_layernorm",
    },
}


@dataclass(frozen=True, kw_only=True)
class Config(transformer.PairConfig):
    """Sizes and switches. max_position_embeddings: tokens of a text at most; clips may have any length.

    hidden_act: of the encoder; decoder_act: of the gated MLPs of the decoder.
    """

    rope: Rope = Rope(partial=0.9)  # noqa: RUF009 - frozen
    decoder_act: str = "silu"
    attention_bias: bool = False
    decoder_start_token_id: int = 1
    model_type: str = "moonshine"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decoder_act not in ACTIVATIONS:
            raise ConfigError(f"decoder_act {self.decoder_act!r} is unknown; known are {', '.join(ACTIVATIONS)}.")

    @property
    def conv_kernel(self) -> tuple[int, ...]:
        """What each convolution reads for an output."""
        return tuple(kernel for kernel, _ in _CONVS.values())

    @property
    def conv_stride(self) -> tuple[int, ...]:
        """What lies between two of its outputs."""
        return tuple(stride for _, stride in _CONVS.values())

    @property
    def encoder(self) -> "Config":
        """The encoder of both stacks, for its own `prepare` and `forward`."""
        return replace(super().encoder, max_position_embeddings=_ANY)

    @property
    def decoder(self) -> "Config":
        """The decoder of both stacks."""
        return replace(super().decoder, hidden_act=self.decoder_act)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        fields.choice("model_type", MODEL_TYPES)
        head = "lm" if declared_class(fields, _CLASS) == _CLASS else "none"
        for name in ("is_encoder_decoder", "tie_word_embeddings"):
            fields.expect(name, True)
        sizes: dict[str, Any] = {}
        for name, ours in _SIZES.items():
            deep = {"high": LAYERS_LIMIT} if name.endswith("_layers") else {}
            sizes[ours] = fields.integer(name, _DEFAULTS[name], **deep)
        heads = sizes["num_attention_heads"]
        # transformers splits queries by the heads of keys, and builds the decoder with the heads of the encoder.
        for name in ("encoder_num_key_value_heads", "decoder_num_attention_heads", "decoder_num_key_value_heads"):
            fields.expect(name, heads)
        where = {"head_dim": sizes["hidden_size"] // heads, "max_positions": sizes["max_position_embeddings"]}
        rope = rope_from_hf(fields, theta=1e4, partial=0.9, **where)
        if rope.kind != "default":
            raise UnsupportedError(f"{fields.where}: the rope is {rope.kind!r}; supported is default.")
        config = Config(
            **sizes,
            decoder_intermediate_size=sizes["intermediate_size"],
            rope=rope,
            hidden_act=fields.choice("encoder_hidden_act", tuple(ACTIVATIONS), "gelu"),
            decoder_act=fields.choice("decoder_hidden_act", tuple(ACTIVATIONS), "silu"),
            attention_bias=fields.boolean("attention_bias", False),
            decoder_start_token_id=fields.integer("decoder_start_token_id", 1, low=0),
            initializer_range=fields.number("initializer_range", 0.02, above=-1e-9),
            head=head,
        )
        config = with_dropout(config, fields)
        pad = "pad_head_dim_to_multiple_of"  # zeros behind each head, which some kernels want and no result depends on
        kept = ((pad, json.dumps(values[pad])),) if values.get(pad) is not None else ()
        object.__setattr__(config, "extra", fields.finish((pad,)) + kept)
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json under Moonshine's names; ConfigError for one of the stacks, which no class reads."""
        if self.stack != "both":
            raise ConfigError(f"The {self.stack} is saved with its other stack: save the params of the config of both.")
        out: ConfigJson = {name: json.loads(value) for name, value in self.extra}
        out |= {name: getattr(self, ours) for name, ours in _SIZES.items()}
        out |= {f"{stack}_num_key_value_heads": self.num_attention_heads for stack in ("encoder", "decoder")}
        out |= {"encoder_hidden_act": self.hidden_act, "decoder_hidden_act": self.decoder_act}
        out |= {"attention_bias": self.attention_bias, "initializer_range": self.initializer_range}
        out |= {"decoder_start_token_id": self.decoder_start_token_id, "is_encoder_decoder": True}
        out["rope_parameters"] = rope_to_hf(self.rope) | {"partial_rotary_factor": self.rope.partial}
        architecture = _CLASS if self.head == "lm" else headless(_CLASS)
        return decoder.expressible(self, out | {"architectures": [architecture], "model_type": "moonshine"})


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of convolutions [out, in, taps]. {"encoder", "decoder"} for both stacks."""
    if config.stack == "both":
        return {name: spec(inner) for name, inner in stacks(config).items()}
    D, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
    heads = config.num_attention_heads
    attention = attention_leaves(D, heads, heads, config.head_dim, std=std, qkv_bias=config.attention_bias)
    layer: Tree = {"input_layernorm": norm(D, "embed"), "attention": attention}
    if config.stack == "decoder":
        layer |= {"cross_attention_layernorm": norm(D, "embed"), "cross_attention": attention}
        layer["mlp"], tree = gated_mlp_leaves(D, inner, std=std, biases=True), _embedding(config)
    else:
        layer["mlp"], tree = plain_mlp_leaves(D, inner, std=std), _front(config)
    layer["post_attention_layernorm"] = norm(D, "embed")
    return tree | {"layers": [layer] * config.num_hidden_layers, "norm": norm(D, "embed")}


def _embedding(config: Config) -> Tree:
    return {"embed_tokens": embedding(config.vocab_size, config.hidden_size, config.initializer_range)}


def _front(config: Config) -> Tree:
    """The convolutions, the first without a bias and with a norm behind it."""
    D, std = config.hidden_size, config.initializer_range
    tree: Tree = {**layer_norm_leaves("conv_norm", D, "embed")}
    sizes = {"conv1": (D, 1), "conv2": (2 * D, D), "conv3": (D, 2 * D)}
    for name, (width, inner) in sizes.items():
        axes = ("channel" if width > D else "embed", "one" if inner == 1 else "inner_channel", "kernel")
        tree[f"{name}_proj"] = Leaf((width, inner, _CONVS[name][0]), torch.float32, axes, Normal(std))
        if inner > 1:
            tree[f"{name}_bias"] = bias(width, axes[0])
    return tree


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}; of the decoder's MLPs `up` and then `gate` are one tensor's rows."""
    rows: dict[str, dict[str, int]] = {}
    for path, leaf in flatten(spec(config)).items():
        stack, _, inner = path.partition(".") if config.stack == "both" else (config.stack, "", path)
        *above, last = inner.removesuffix("_bias").removesuffix("_proj").split(".")
        last = f"{last}_proj" if above and above[-1].endswith("attention") else _NAMES.get(last, last)
        parts = ("model", stack, *(_NAMES.get(part, part) for part in above), _NORMS[stack].get(last, last))
        name = f"{'.'.join(parts)}.{'bias' if inner.endswith('_bias') else 'weight'}"
        rows[name] = {path: leaf.shape[0]} | rows.get(name, {})  # the spec has `gate` first
    names: StoredNames = {}
    for name, parts_of in rows.items():
        names |= fuse(name, parts_of) if len(parts_of) > 1 else dict.fromkeys(parts_of, name)
    return names


def hf_copies(config: Config) -> dict[str, str]:
    """{name on disk: path of the parameter that it repeats}: the head is the embedding of the decoder."""
    return {"proj_out.weight": "decoder.embed_tokens"} if config.stack == "both" and config.head == "lm" else {}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]} of one stack."""
    return dict.fromkeys(set(kinds(config)), rotary_table(config.rope, config.head_dim, positions, length))


def token_inputs(config: Config, tokens: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
    """{"clip" [B, S]} of an encoder: the number of each token's clip in its row, -1 at padding."""
    return {} if config.stack == "decoder" else {"clip": numbers_in_rows(segment_ids).where(segment_ids > 0, -1)}


def example_inputs(config: Config, positions: Tensor, /) -> dict[str, Tensor]:
    """Inputs of rows [B, S] of one stack, a clip each; see `family.function_of`."""
    if config.stack == "decoder":
        return {"tokens": torch.zeros_like(positions), "positions": positions}
    waves = torch.zeros(*positions.shape, _width(config), device=positions.device)
    return {"tokens": waves, "positions": positions, "clip": torch.zeros_like(positions)}


def _width(config: Config) -> int:
    """Elements of an encoder's token: samples, and how many outputs of the first convolution count."""
    return config.conv_kernel[0] + (outputs_of(config) - 1) * config.conv_stride[0] + 1


def shared(params: Tree, inputs: Mapping[str, Any], /, *, config: Config) -> Tree:
    """Tensors that every layer reads: in a decoder {"memory", "memory_mask"}, which `inputs` must hold."""
    return memory_of(inputs) if config.stack == "decoder" else {}


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: embeddings of text, or the three convolutions of samples, each for its token."""
    if config.stack == "decoder":
        return embed_tokens(params["embed_tokens"], inputs)
    if not isinstance(inputs, Mapping) or "clip" not in inputs:
        raise ValueError(
            "An encoder of waves needs the dict of inputs that fnmodels.prepare makes, which says where clips are."
        )
    tokens, clip = inputs["tokens"], inputs["clip"]
    if not tokens.is_floating_point() or tokens.shape[-1] != _width(config):
        raise ValueError(
            f"The tokens of this encoder are samples [B, S, {_width(config)}] as fnmodels.inputs.sample_rows makes "
            f"them, not {tokens.dtype} {list(tokens.shape)}."
        )
    tokens = tokens.where((clip >= 0)[..., None], 0)
    x = _convolved(params, "conv1", tokens[..., :-1, None].to(params["conv1_proj"].dtype))
    x = _over_clip(elementwise(torch.tanh, x), tokens[..., -1:], clip.clamp(min=0), reach(config, 1)[0])
    x = (x * upcast(params["conv_norm"]) + upcast(params["conv_norm_bias"])).to(params["conv1_proj"].dtype)
    for name in ("conv2", "conv3"):
        x = elementwise(F.gelu, _convolved(params, name, x))
    return x.squeeze(-2)


def _convolved(params: Tree, name: str, x: Tensor) -> Tensor:
    """[B, S, outputs, channels] of x [B, S, n, inner channels], each token for itself."""
    windows = x.unfold(-2, *_CONVS[name]).flatten(-2)
    return linear(windows, params[f"{name}_proj"].flatten(1), params.get(f"{name}_bias"))


def _over_clip(y: Tensor, counts: Tensor, clip: Tensor, read: int) -> Tensor:
    """The first `read` of y [B, S, n, D] with mean 0 and variance 1 over the clip, in fp32 at least.

    counts [B, S, 1]: how many of a token's n outputs count for it, so that those of a clip count once.
    """
    wide = upcast(y)
    counted = (torch.arange(y.shape[-2], device=y.device) < counts)[..., None]

    def total(values: Tensor) -> Tensor:
        return sums_of_documents(values.where(counted, 0).flatten(2).sum(-1), clip)[..., None, None]

    size = total(torch.ones_like(wide)).clamp(min=1)
    wide = wide - total(wide) / size
    return wide[..., :read, :] * (total(wide.square()) / size + _EPS).rsqrt()


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, head = layer["attention"], {"head_dim": config.head_dim, "scale": config.head_dim**-0.5}
    q, k, v = project_qkv(weights, _norm(layer, x, "input_layernorm"), head_dim=config.head_dim)
    q, k = apply_rotary_interleaved(q, freqs), apply_rotary_interleaved(k, freqs)
    x = x + ctx.tap("attention", project_out(weights, ctx.attend(q, k, v, mask, scale=head["scale"])))
    if kind == "causal":
        query = _norm(layer, x, "cross_attention_layernorm")
        x = x + ctx.tap("cross_attention", attend_to_memory(layer["cross_attention"], query, ctx, **head))
    x, mlp = ctx.tap("middle", x), gated_mlp if kind == "causal" else plain_mlp
    read = _norm(layer, x, "post_attention_layernorm")
    return x + ctx.tap("mlp", mlp(layer["mlp"], read, activation=config.hidden_act, tap=ctx.tap))


def _norm(params: Tree, x: Tensor, name: str) -> Tensor:
    return layer_norm(x, params[name], None, eps=_EPS)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The final norm, and of a decoder the tied head: logits [B, S, V]; without a head the hidden states [B, S, D]."""
    x = _norm(params, x, "norm")
    return x if config.head == "none" else linear(x, params["embed_tokens"])


_TINY: ConfigJson = {"architectures": [_CLASS], "model_type": "moonshine", "max_position_embeddings": 194}
_TINY |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "decoder_start_token_id": 1}
_BASE: ConfigJson = {"hidden_size": 416, "intermediate_size": 1664, "partial_rotary_factor": 0.62}
_BASE |= dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), 8)
PRESETS = {
    "moonshine-tiny": _TINY | {"partial_rotary_factor": 0.9, "pad_head_dim_to_multiple_of": 8},
    "moonshine-base": _TINY | _BASE | {"pad_head_dim_to_multiple_of": 8},
}
