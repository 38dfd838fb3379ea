"""Command R7B and its successors (Cohere 2).

Attention and MLP read one normalized input side by side. Three sliding layers with interleaved rotary embedding come to
each full layer without position; the norm is a LayerNorm without bias; logits are scaled.
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
    patterned_layers,
    sliding_pattern,
)
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import attention_leaves, decoder_leaves, gated_mlp_leaves, norm
from fnmodels.ops.attention.select import attention
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, gated_mlp
from fnmodels.ops.norm import layer_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import Rope, apply_rotary_interleaved, no_rotation, rotary_table
from fnmodels.options import Kernel
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("cohere2",)
TAPS = ("attention", "mlp")


@dataclass(frozen=True)
class Config:
    """Sizes and switches. `layer_kinds` names "full" (no position) or "sliding" per layer; empty: all "full"."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope: Rope = Rope()  # noqa: RUF009 - frozen
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    hidden_act: str = "silu"
    logit_scale: float = 0.0625
    sliding_window: int | None = None
    layer_kinds: tuple[str, ...] = ()
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    # kept for saving only
    model_type: str = field(default="cohere2", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_decoder(self, ("full", "sliding"))

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder_sizes(fields, max_positions=8192, tied=True)
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        pattern = sliding_pattern(fields, 4)
        # Of the first release: they say once more, or of the training code, what this family does anyway.
        fields.expect("layer_switch", pattern)
        fields.expect("order_of_interleaved_layers", "local_attn_first")
        fields.expect("position_embedding_type", "rope_gptj")
        fields.expect("rotary_pct", 1.0, 1)
        fields.expect("use_embedding_sharing", sizes["tie_word_embeddings"])
        fields.expect("use_gated_activation", True)
        fields.expect("use_parallel_block", True)
        fields.expect("use_parallel_embedding", False)
        fields.expect("use_qk_norm", False)
        slides = patterned_layers(fields, pattern, sizes["num_hidden_layers"])
        config = Config(
            **sizes,
            rope=rope_from_hf(fields, theta=1e4, **where),
            layer_norm_eps=fields.number("layer_norm_eps", 1e-5),
            attention_bias=fields.boolean("attention_bias", False),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            logit_scale=fields.number("logit_scale", 0.0625),
            sliding_window=fields.integer("sliding_window", 4096),
            layer_kinds=tuple("sliding" if s else "full" for s in slides),
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect."""
        own = ("layer_norm_eps", "attention_bias", "hidden_act", "logit_scale", "sliding_window")
        types = layer_types([kind == "sliding" for kind in self.layer_kinds])
        rest = {name: getattr(self, name) for name in own} | {"layer_types": types}
        return decoder_to_hf(self, "Cohere2ForCausalLM", rope_parameters=rope_to_hf(self.rope), **rest)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias

    def layer() -> Tree:
        return {
            "input_layernorm": norm(D, "embed"),
            "attention": attention_leaves(D, heads, kv_heads, H, std=std, qkv_bias=bias, o_bias=bias),
            "mlp": gated_mlp_leaves(D, config.intermediate_size, std=std),
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
    """{kind: fp32 table [B, S, R/2, 2]}; R is 0 for full layers."""
    table = rotary_table(config.rope, config.head_dim, positions, length)
    used = sorted(set(config.layer_kinds))
    return {kind: table if kind == "sliding" else no_rotation(positions) for kind in used}


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
    weights = layer["attention"]
    normed = layer_norm(x, layer["input_layernorm"], None, eps=config.layer_norm_eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = apply_rotary_interleaved(q, freqs), apply_rotary_interleaved(k, freqs)
    mixed = attention(q, k, v, mask, kernel=kernel, scale=config.head_dim**-0.5, layout=layout)
    attended = project_out(weights, mixed)
    fed = gated_mlp(layer["mlp"], normed, activation=config.hidden_act)
    named = {"attention": attended, "mlp": fed}
    return x + attended + fed, {name: named[name] for name in taps}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and scaled head: logits [B, S, V]."""
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return linear(layer_norm(x, params["norm"], None, eps=config.layer_norm_eps), head) * config.logit_scale
