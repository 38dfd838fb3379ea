"""Granite 3 (IBM): the Llama block with four constants, of embeddings, residual branches, scores and logits.

The multipliers come from maximal update parametrization (arXiv 2203.03466).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Create, MaskLike, causal_masks
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.decoder import check_decoder, decoder_name, decoder_sizes, decoder_to_hf
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import attention_leaves, decoder_leaves, gated_mlp_leaves, layer_leaves
from fnmodels.ops.attention.select import attention
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, gated_mlp
from fnmodels.ops.norm import rms_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import Rope, apply_rotary, rotary_table
from fnmodels.options import Kernel
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("granite",)
TAPS = ("attention", "middle", "mlp")  # before the residual multiplier


@dataclass(frozen=True)
class Config:
    """Sizes and constants."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope: Rope = Rope()  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0  # the scale of scores, in place of 1 / sqrt(head_dim)
    logits_scaling: float = 1.0  # logits are divided by it
    layer_kinds: tuple[str, ...] = ()
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    # kept for saving only
    model_type: str = field(default="granite", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_decoder(self, ("full",))

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder_sizes(fields, max_positions=2048, tied=False)
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        config = Config(
            **sizes,
            rope=rope_from_hf(fields, theta=1e4, **where),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            attention_bias=fields.boolean("attention_bias", False),
            mlp_bias=fields.boolean("mlp_bias", False),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            embedding_multiplier=fields.number("embedding_multiplier", 1.0),
            residual_multiplier=fields.number("residual_multiplier", 1.0),
            attention_multiplier=fields.number("attention_multiplier", 1.0),
            logits_scaling=fields.number("logits_scaling", 1.0),
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect."""
        own = (
            *("rms_norm_eps", "attention_bias", "mlp_bias", "hidden_act"),
            *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
        )
        rope = rope_to_hf(self.rope)
        return decoder_to_hf(
            self, "GraniteForCausalLM", rope_parameters=rope, **{name: getattr(self, name) for name in own}
        )


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias

    def layer() -> Tree:
        mlp = gated_mlp_leaves(D, config.intermediate_size, std=std, biases=config.mlp_bias)
        return layer_leaves(D, attention_leaves(D, heads, kv_heads, H, std=std, qkv_bias=bias, o_bias=bias), mlp)

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
    return causal_masks(config.layer_kinds, None, positions, segment_ids, create=create)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}."""
    return {"full": rotary_table(config.rope, config.head_dim, positions, length)}


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]; token embeddings are multiplied, vectors pass through (the reference multiplies those too)."""
    tokens = inputs["tokens"] if isinstance(inputs, dict) else inputs
    x = embed_tokens(params["embed_tokens"], tokens)
    return x if tokens.is_floating_point() else x * config.embedding_multiplier


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
    weights, eps, share = layer["attention"], config.rms_norm_eps, config.residual_multiplier
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = attention(q, k, v, mask, kernel=kernel, scale=config.attention_multiplier, layout=layout)
    attended = project_out(weights, mixed)
    middle = x + attended * share
    normed = rms_norm(middle, layer["post_attention_layernorm"], eps=eps)
    fed = gated_mlp(layer["mlp"], normed, activation=config.hidden_act)
    named = {"attention": attended, "middle": middle, "mlp": fed}
    return middle + fed * share, {name: named[name] for name in taps}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]."""
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return linear(rms_norm(x, params["norm"], eps=config.rms_norm_eps), head) / config.logits_scaling
