"""Command R7B and its successors (Cohere 2): parallel attention and MLP, which share one LayerNorm without bias.

Three sliding-window layers with interleaved rotary embedding alternate with one full layer without position embedding.
Logits are scaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.spec import decoder_leaves, norm, usual_attention, usual_mlp
from fnmodels.ops.mlp import gated_mlp
from fnmodels.ops.norm import layer_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import apply_rotary_interleaved, no_rotation
from fnmodels.tree import Tree

MODEL_TYPES = ("cohere2",)
KINDS = ("full", "sliding")
TAPS = ("attention", "mlp")


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. `layer_kinds`: "full" (no rotary embedding) or "sliding" per layer."""

    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    logit_scale: float = 0.0625
    sliding_window: int | None = None
    max_position_embeddings: int = 8192

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, max_positions=8192, tied=True)
        pattern = decoder.sliding_pattern(fields, 4)
        # Fields of the first release that duplicate others or describe what this family always does.
        fields.expect("layer_switch", pattern)
        fields.expect("order_of_interleaved_layers", "local_attn_first")
        fields.expect("position_embedding_type", "rope_gptj")
        fields.expect("rotary_pct", 1.0, 1)
        fields.expect("use_embedding_sharing", usual["tie_word_embeddings"])
        fields.expect("use_gated_activation", True)
        fields.expect("use_parallel_block", True)
        fields.expect("use_parallel_embedding", False)
        fields.expect("use_qk_norm", False)
        slides = decoder.patterned_layers(fields, pattern, usual["num_hidden_layers"])
        config = Config(
            **usual,
            layer_norm_eps=fields.number("layer_norm_eps", 1e-5),
            attention_bias=fields.boolean("attention_bias", False),
            logit_scale=fields.number("logit_scale", 0.0625),
            sliding_window=fields.integer("sliding_window", 4096),
            layer_kinds=tuple("sliding" if s else "full" for s in slides),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect."""
        names = ("layer_norm_eps", "attention_bias", "hidden_act", "logit_scale", "sliding_window")
        types = decoder.layer_types([kind == "sliding" for kind in self.layer_kinds])
        return decoder.decoder_to_hf(self, "Cohere2ForCausalLM", *names, layer_types=types)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    biased = config.attention_bias
    layer = {
        "input_layernorm": norm(config.hidden_size, "embed"),
        "attention": usual_attention(config, qkv_bias=biased, o_bias=biased),
        "mlp": usual_mlp(config),
    }
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


hf_names = decoder.hf_names
kinds = decoder.kinds
attention_masks = decoder.attention_masks
embed = decoder.embed


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}, with R = 0 for full layers."""
    tables = decoder.freqs_cis(config, positions, length=length)
    return {kind: table if kind == "sliding" else no_rotation(positions) for kind, table in tables.items()}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights = layer["attention"]
    normed = layer_norm(x, layer["input_layernorm"], None, eps=config.layer_norm_eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = apply_rotary_interleaved(q, freqs), apply_rotary_interleaved(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = x + ctx.tap("attention", project_out(weights, mixed))
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final LayerNorm, output head and logit scale: logits [B, S, V]."""
    return decoder.unembed_layer_norm(params, x, config=config) * config.logit_scale
