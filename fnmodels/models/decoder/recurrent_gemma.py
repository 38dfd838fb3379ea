"""RecurrentGemma, which is Griffin (arXiv 2402.19427): two layers of a gated linear recurrence to one of attention.

A recurrent layer convolves a projection of its input, lets each channel decay at a rate that the token chooses
(RG-LRU), and multiplies by a second projection. Attention has a sliding window, one key head and a rotary embedding of
half of a head. Norms, embedding and head are Gemma's.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.order import Segments, last_segment
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, kinds  # noqa: F401
from fnmodels.models.common.decoder import unembed_zero_centered as unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.rope_config import rope_from_hf
from fnmodels.models.common.spec import (
    Leaf,
    LogUniform,
    bias,
    decoder_leaves,
    norm,
    usual_attention,
    usual_mlp,
    weight,
)
from fnmodels.models.common.storage import Stored, TensorSlice
from fnmodels.ops import (
    ACTIVATIONS,
    Rope,
    apply_rotary,
    embed_tokens,
    gated_mlp,
    project_out,
    project_qkv,
    rotary_table,
    upcast,
)
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm_zero_centered
from fnmodels.ops.recurrent.conv import short_conv
from fnmodels.ops.recurrent.selective_scan import selective_scan
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("recurrent_gemma",)
TRAITS = Traits(kinds=("linear", "sliding"))
_TYPES = {"recurrent": "linear", "attention": "sliding"}
_RATE = 8.0  # of the decay of a channel whose gate is open
# Of initialization alone, or always on.
_IGNORED = ("final_w_init_variance_scale", "w_init_variance_scale", "block_types", "layer_types")


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. lru_width: channels of the recurrence, in as many blocks as there are query heads."""

    rope: Rope = Rope(partial=0.5)  # noqa: RUF009 - frozen
    lru_width: int
    conv_kernel: int = 4
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    final_softcap: float = 30.0
    sliding_window: int | None = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lru_width < 1 or self.lru_width % self.num_attention_heads:
            raise ConfigError(f"lru_width {self.lru_width} is not a multiple of {self.num_attention_heads} heads.")
        if self.conv_kernel < 2:
            raise ConfigError(f"conv_kernel is {self.conv_kernel}; it must be at least 2.")

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        sizes = decoder.decoder_sizes(fields, max_positions=8192, tied=True, kv_heads=0)
        inner, layers = sizes["intermediate_size"], sizes["num_hidden_layers"]
        if inner % 2:
            raise ConfigError(f"{fields.where}: 'intermediate_size' is {inner}; it must be even.")
        fields.expect("embeddings_scale_by_sqrt_dim", True)
        pattern = decoder.listed_kinds(fields, ("block_types",), _TYPES) or ("linear", "linear", "sliding")
        how = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        config = Config(
            **sizes | {"intermediate_size": inner // 2},
            rope=rope_from_hf(fields, partial=0.5, **how),
            lru_width=fields.integer("lru_width", sizes["hidden_size"]),
            conv_kernel=fields.integer("conv1d_width", 4, low=2, high=1 << 16),
            **fields.plain(rms_norm_eps=1e-6, attention_bias=False),
            final_softcap=fields.number("logits_soft_cap", 30.0),
            hidden_act=fields.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh"),
            sliding_window=fields.integer("attention_window_size", 2048),
            layer_kinds=(pattern * layers)[:layers],
            model_type=fields.choice("model_type", MODEL_TYPES),
        )
        return decoder.finished(config, fields, ignored=_IGNORED)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        blocks = {kind: name for name, kind in _TYPES.items()}
        own: ConfigJson = {
            "block_types": [blocks[kind] for kind in self.layer_kinds],
            "intermediate_size": 2 * self.intermediate_size,
            "conv1d_width": self.conv_kernel,
            "logits_soft_cap": self.final_softcap,
            "hidden_activation": self.hidden_act,
            "attention_window_size": self.sliding_window,
        }
        names = ("lru_width", "rms_norm_eps", "attention_bias")
        return decoder.decoder_to_hf(self, "RecurrentGemmaForCausalLM", *names, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]; norms are initialized to 0, since 1 is added to them."""
    D = config.hidden_size
    attention = usual_attention(config, qkv_bias=config.attention_bias, o_bias=True)
    around: Tree = {name: norm(D, "embed", 0.0) for name in ("input_layernorm", "post_attention_layernorm")}
    around["mlp"] = usual_mlp(config, biases=True)
    recurrent = _recurrent_leaves(config)
    layers = [around | {"attention": recurrent if kind.ordered else attention} for kind in parsed(config.layer_kinds)]
    return decoder_leaves(config, layers, norm_value=0.0)


def _recurrent_leaves(config: Config) -> dict[str, Leaf]:
    """The branch y beside the recurrence, its input x with a convolution, and gates [heads, out, in] of blocks."""
    D, W, heads, std = config.hidden_size, config.lru_width, config.num_attention_heads, config.initializer_range
    d, axis = W // heads, "linear_heads"
    leaves = {f"{name}_proj": weight((W, D), (axis, "embed"), std, unit=d) for name in "yx"}
    leaves |= {f"{name}_bias": bias(W, axis, unit=d) for name in ("y", "x", "conv")}
    leaves["conv"] = weight((W, 1, config.conv_kernel), (axis, "one", "kernel"), std, unit=d)
    for name in ("input_gate", "decay_gate"):
        leaves[name] = weight((heads, d, d), (axis, "linear_head_dim", "linear_latent"), std)
        leaves[f"{name}_bias"] = Leaf(
            (heads, d), torch.float32, (axis, "linear_head_dim"), bias(1, axis).init, decay=False
        )
    leaves["rate"] = Leaf((W,), torch.float32, (axis,), LogUniform(1e-3, 0.1), decay=False, unit=d)
    return leaves | {"o_proj": weight((D, W), ("embed", axis), std, unit=d), "o_bias": bias(D, "embed")}


_ON_DISK = {
    ".input_layernorm.": ".temporal_pre_norm.",
    ".post_attention_layernorm.": ".channel_pre_norm.",
    ".self_attn.": ".temporal_block.",
    ".mlp.": ".mlp_block.",
    "model.norm.": "model.final_norm.",
}
_RECURRENT = {"y_proj": "linear_y.weight", "x_proj": "linear_x.weight", "o_proj": "linear_out.weight"}
_RECURRENT |= {"y_bias": "linear_y.bias", "x_bias": "linear_x.bias", "o_bias": "linear_out.bias"}
_RECURRENT |= {"conv": "conv_1d.weight", "conv_bias": "conv_1d.bias", "rate": "rg_lru.recurrent_param"}
_GATES = {"input_gate": "rg_lru.input_gate", "decay_gate": "rg_lru.recurrent_gate"}


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, where gates are [heads, in, out]."""
    names: dict[str, Stored] = {}
    for path, name in decoder.hf_names(config).items():
        for ours, theirs in _ON_DISK.items():
            name = name.replace(ours, theirs)
        names[path] = name
    d = config.lru_width // config.num_attention_heads
    for index, kind in enumerate(parsed(config.layer_kinds)):
        if kind.ordered:
            ours, theirs = f"layers.{index}.attention", f"model.layers.{index}.temporal_block"
            names |= {f"{ours}.{leaf}": f"{theirs}.{name}" for leaf, name in _RECURRENT.items()}
            for leaf, name in _GATES.items():
                gate = TensorSlice(f"{theirs}.{name}_weight", 0, d, d, transposed=True, batched=True)
                names |= {f"{ours}.{leaf}": gate, f"{ours}.{leaf}_bias": f"{theirs}.{name}_bias"}
    return {path: names[path] for path in flatten(spec(config))}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}; of recurrent layers [B, S, 1], 1 at the first token of a document."""
    table = rotary_table(config.rope, config.head_dim, positions, length)
    tables = {"sliding": table, "linear": (positions == 0).to(torch.float32)[..., None]}
    return {kind: tables[kind] for kind in sorted(set(config.layer_kinds))}


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: token (or given) embeddings times sqrt(D) rounded to bfloat16, in wider models too."""
    return embed_tokens(params["embed_tokens"], inputs) * torch.tensor(config.hidden_size**0.5, dtype=torch.bfloat16)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, eps = layer["attention"], config.rms_norm_eps
    normed = rms_norm_zero_centered(x, layer["input_layernorm"], eps=eps)
    if LayerKind.parse(kind).ordered:
        mixed = recurrent(weights, normed, mask, freqs, ctx, activation=config.hidden_act)
    else:
        q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
        q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
        mixed = project_out(weights, ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5))
    x = ctx.tap("middle", x + ctx.tap("attention", mixed))
    normed = rms_norm_zero_centered(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


def recurrent(weights: Tree, x: Tensor, mask: Segments, begins: Tensor, ctx: Context, *, activation: str) -> Tensor:
    """Griffin's recurrent block of x [B, S, D]: [B, S, D]. begins [B, S, 1]: 1 at the first token of a document."""
    state, ids, kernel = ctx.state() or {}, mask.segment_ids, ctx.options.kernel
    last = state.get("segment")
    beside, inner = (linear(x, weights[f"{name}_proj"], weights[f"{name}_bias"]) for name in "yx")
    inner, tail = short_conv(
        inner, weights["conv"][:, 0], weights["conv_bias"], ids, state.get("conv"), last, kernel=kernel
    )
    h, S = rg_lru(weights, inner, begins, ids, state.get("state"), last, kernel=kernel)
    ctx.keep(conv=tail, state=S, segment=last_segment(ids, last).expand(x.shape[0]))
    mixed = h.to(x.dtype) * elementwise(ACTIVATIONS[activation], beside)
    return linear(mixed, weights["o_proj"], weights["o_bias"])


def rg_lru(
    weights: Tree,
    x: Tensor,
    begins: Tensor,
    ids: Tensor,
    state: Tensor | None,
    last: Tensor | None,
    *,
    kernel: Any,
) -> tuple[Tensor, Tensor]:
    """The real-gated linear recurrent unit, h <- a h + sqrt(1 - a^2) i x: (h [B, S, W], the last one [B, W, 1]).

    a = exp(-8 r softplus(rate)); r and i are sigmoids of x, by blocks of channels. The first token of a document is
    taken in whole. It is a selective scan whose steps are -log a.
    """
    admitted, r = (elementwise(torch.sigmoid, _by_block(weights, x, name)) for name in ("input_gate", "decay_gate"))
    steps = _RATE * upcast(r) * elementwise(F.softplus, upcast(weights["rate"]))
    steps = steps.clamp(min=1e-30)  # so that the scan's product with the step can be undone
    # Above 0, so that the square root has a gradient.
    taken = (1 - elementwise(torch.exp, -2 * steps)).clamp(min=1e-12).sqrt()
    scale = torch.lerp(taken, torch.ones_like(steps), begins.to(steps.dtype))
    ones = torch.ones_like(steps[..., :1])
    A, D = -torch.ones_like(weights["rate"])[:, None], torch.zeros_like(weights["rate"])
    return selective_scan(
        upcast(admitted * x) * scale / steps, steps, ones, ones, A, D, ids, state, last, kernel=kernel
    )


def _by_block(weights: Tree, x: Tensor, name: str) -> Tensor:
    """x [B, S, W] through the gate's projection of each block of channels: [B, S, W]."""
    matrices, biases = weights[name], weights[f"{name}_bias"]
    parts = x.unflatten(-1, matrices.shape[:2]).unbind(-2)
    return torch.cat([linear(part, matrices[i], biases[i]) for i, part in enumerate(parts)], -1)


PRESETS = {
    "recurrentgemma-2b": {"model_type": "recurrent_gemma", "vocab_size": 256000, "hidden_size": 2560}
    | {"intermediate_size": 15360, "num_hidden_layers": 26, "num_attention_heads": 10, "num_key_value_heads": 1}
    | {"lru_width": 2560},
    "recurrentgemma-9b": {"model_type": "recurrent_gemma", "vocab_size": 256000, "hidden_size": 4096}
    | {"intermediate_size": 24576, "num_hidden_layers": 38, "num_attention_heads": 16, "num_key_value_heads": 1}
    | {"lru_width": 4096},
}
