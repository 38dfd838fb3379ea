"""OLMo 2 and 3 (arXiv 2501.00656, 2512.13961).

A decoder that normalizes what a sublayer gives rather than what it gets, and queries and keys over their whole width.
OLMo 3 adds three sliding layers to each full one, and scales the rotary table of the full ones only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Create, MaskLike, causal_masks
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.decoder import (
    check_decoder,
    decoder_name,
    decoder_sizes,
    decoder_to_hf,
    layer_types,
    sliding_layers,
)
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf, ropes_by_layer_type
from fnmodels.models.common.spec import attention_leaves, decoder_leaves, gated_mlp_leaves, norm
from fnmodels.ops.attention.select import attention
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, gated_mlp
from fnmodels.ops.norm import rms_norm_fp32_weight
from fnmodels.ops.qkv import project_out, split_heads
from fnmodels.ops.rotary import Rope, apply_rotary, rotary_table
from fnmodels.options import Kernel
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("olmo2", "olmo3")
TAPS = ("attention", "middle", "mlp")


@dataclass(frozen=True)
class Config:
    """Sizes and switches. `layer_kinds` names "full" or "sliding" per layer; left empty, every layer is "full"."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope: Rope = Rope()  # noqa: RUF009 - frozen
    local_rope: Rope = Rope()  # noqa: RUF009 - of sliding layers
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    layer_kinds: tuple[str, ...] = ()
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    # kept for saving only
    model_type: str = field(default="olmo2", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_decoder(self, ("full", "sliding"))

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder_sizes(fields, max_positions=2048, tied=False)
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        layers = sizes["num_hidden_layers"]
        if model_type == "olmo2":
            slides, window = [False] * layers, None
            rope = local = rope_from_hf(fields, theta=1e4, **where)
        else:
            slides = sliding_layers(fields, [(i + 1) % 4 != 0 for i in range(layers)])
            window = fields.integer("sliding_window", 4096)
            theta = fields.number("rope_theta", 5e5)  # in older files one theta serves both, scaled on full layers only
            thetas = {"full_attention": theta, "sliding_attention": theta}
            ropes = ropes_by_layer_type(fields, thetas, scaled="full_attention", **where)
            rope, local = ropes["full_attention"], ropes["sliding_attention"]
        config = Config(
            **sizes,
            rope=rope,
            local_rope=local,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
            attention_bias=fields.boolean("attention_bias", False),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            sliding_window=window,
            layer_kinds=tuple("sliding" if s else "full" for s in slides),
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        own: dict[str, Any] = {"rms_norm_eps": self.rms_norm_eps, "hidden_act": self.hidden_act}
        own |= {"attention_bias": self.attention_bias, "rope_parameters": rope_to_hf(self.rope)}
        if self.model_type == "olmo3":
            ropes = {"sliding_attention": rope_to_hf(self.local_rope), "full_attention": rope_to_hf(self.rope)}
            own |= {"rope_parameters": ropes, "sliding_window": self.sliding_window}
            own |= {"layer_types": layer_types([kind == "sliding" for kind in self.layer_kinds])}
        return decoder_to_hf(self, f"Olmo{self.model_type[-1]}ForCausalLM", **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias

    def layer() -> Tree:
        attention = attention_leaves(D, heads, kv_heads, H, std=std, qkv_bias=bias, o_bias=bias)
        norms = {"q_norm": norm(heads * H, "heads", unit=H), "k_norm": norm(kv_heads * H, "kv_heads", unit=H)}
        return {
            "attention": attention | norms,
            "post_attention_layernorm": norm(D, "embed"),
            "mlp": gated_mlp_leaves(D, config.intermediate_size, std=std),
            "post_feedforward_layernorm": norm(D, "embed"),
        }

    return decoder_leaves(config, [layer() for _ in range(config.num_hidden_layers)])


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    return {path: decoder_name(path) for path in flatten(spec(config))}


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer, the keys of masks and freqs_cis."""
    return config.layer_kinds


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}; positions and segment_ids [B, S]. create: see `fnmodels.inputs.mask.build_mask`."""
    return causal_masks(config.layer_kinds, config.sliding_window, positions, segment_ids, create=create)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}."""
    ropes = {"full": config.rope, "sliding": config.local_rope}
    used = sorted(set(config.layer_kinds))
    return {kind: rotary_table(ropes[kind], config.head_dim, positions, length) for kind in used}


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]."""
    return embed_tokens(params["embed_tokens"], inputs)


def block(
    layer: Tree,
    x: Tensor,
    mask: MaskLike,
    freqs: Tensor,
    /,
    *,
    config: Config,
    kind: str,
    kernel: Kernel = "auto",
    layout: Layout | None = None,
    taps: tuple[str, ...] = (),
) -> tuple[Tensor, dict[str, Tensor]]:
    """One layer: x [B, S, D] -> (x, {tap: tensor})."""
    weights, eps = layer["attention"], config.rms_norm_eps
    q, k, v = (linear(x, weights[f"{name}_proj"], weights.get(f"{name}_bias")) for name in "qkv")
    q = rms_norm_fp32_weight(q, weights["q_norm"], eps=eps)  # over all heads together
    k = rms_norm_fp32_weight(k, weights["k_norm"], eps=eps)
    q, k, v = (split_heads(t, config.head_dim) for t in (q, k, v))
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = attention(q, k, v, mask, kernel=kernel, scale=config.head_dim**-0.5, layout=layout)
    attended = rms_norm_fp32_weight(project_out(weights, mixed), layer["post_attention_layernorm"], eps=eps)
    middle = x + attended
    fed = gated_mlp(layer["mlp"], middle, activation=config.hidden_act)
    fed = rms_norm_fp32_weight(fed, layer["post_feedforward_layernorm"], eps=eps)
    named = {"attention": attended, "middle": middle, "mlp": fed}
    return middle + fed, {name: named[name] for name in taps}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]."""
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return linear(rms_norm_fp32_weight(x, params["norm"], eps=config.rms_norm_eps), head)
