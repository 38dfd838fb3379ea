"""Ministral 3 (Mistral AI): the Llama block with yarn and a query temperature.

Queries grow with the logarithm of their position, so that attention stays sharp past the trained length (the scaling of
Llama 4, arXiv 2501.19399). The temperature depends on positions, so it travels with the rotary table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Create, MaskLike, causal_masks
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.decoder import check_decoder, decoder_name, decoder_sizes, decoder_to_hf
from fnmodels.models.common.rope_config import parse_rope, rope_to_hf, rope_values
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

MODEL_TYPES = ("ministral3",)
TAPS = ("attention", "middle", "mlp")


@dataclass(frozen=True)
class Config:
    """Sizes and switches. `layer_kinds` is all "full", or all "sliding" where there is a window; left empty, "full"."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope: Rope = Rope()  # noqa: RUF009 - frozen
    temperature_beta: float = 0.1  # queries are multiplied by 1 + beta ln(1 + floor(position / temperature_length))
    temperature_length: int = 16384
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    layer_kinds: tuple[str, ...] = ()
    max_position_embeddings: int = 262144
    initializer_range: float = 0.02
    # kept for saving only
    model_type: str = field(default="ministral3", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_decoder(self, ("full", "sliding"))

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder_sizes(fields, max_positions=262144, tied=False, kv_heads=8, head_dim=128)
        positions = sizes["max_position_embeddings"]
        inner = Fields(rope_values(fields), f"{fields.where}, rope")
        beta = inner.number("llama_4_scaling_beta", above=-1e-9)
        inner.expect("max_position_embeddings", positions)  # written twice
        window = fields.integer("sliding_window", 0, low=0) or None
        config = Config(
            **sizes,
            rope=parse_rope(inner, head_dim=sizes["head_dim"], max_positions=positions, theta=1e6),
            temperature_beta=beta,
            temperature_length=inner.integer("original_max_position_embeddings", positions),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            sliding_window=window,
            layer_kinds=("sliding" if window else "full",) * sizes["num_hidden_layers"],
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect."""
        temperature = {"llama_4_scaling_beta": self.temperature_beta}
        temperature |= {"original_max_position_embeddings": self.temperature_length}
        own = {name: getattr(self, name) for name in ("rms_norm_eps", "hidden_act", "sliding_window")}
        rope = rope_to_hf(self.rope) | temperature
        return decoder_to_hf(self, "Ministral3ForCausalLM", rope_parameters=rope, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def layer() -> Tree:
        mlp = gated_mlp_leaves(D, config.intermediate_size, std=std)
        return layer_leaves(D, attention_leaves(D, heads, kv_heads, H, std=std), mlp)

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


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, dict[str, Tensor]]:
    """{kind: {"table": fp32 [B, S, R/2, 2], "temperature": fp32 [B, S]}}."""
    table = rotary_table(config.rope, config.head_dim, positions, length)
    grown = torch.log1p(torch.floor(positions.double() / config.temperature_length))
    temperature = (1 + config.temperature_beta * grown).float()
    return {kind: {"table": table, "temperature": temperature} for kind in sorted(set(config.layer_kinds))}


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]."""
    return embed_tokens(params["embed_tokens"], inputs)


def block(
    layer: Tree,
    x: Tensor,
    mask: MaskLike,
    freqs: dict[str, Tensor],
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
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs["table"]), apply_rotary(k, freqs["table"])
    q = q * freqs["temperature"][..., None, None].to(q.dtype)
    mixed = attention(q, k, v, mask, kernel=kernel, scale=config.head_dim**-0.5, layout=layout)
    attended = project_out(weights, mixed)
    middle = x + attended
    normed = rms_norm(middle, layer["post_attention_layernorm"], eps=eps)
    fed = gated_mlp(layer["mlp"], normed, activation=config.hidden_act)
    named = {"attention": attended, "middle": middle, "mlp": fed}
    return middle + fed, {name: named[name] for name in taps}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]."""
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return linear(rms_norm(x, params["norm"], eps=config.rms_norm_eps), head)
