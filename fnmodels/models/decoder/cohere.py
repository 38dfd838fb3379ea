"""Command R (Cohere) and Command R7B (Cohere 2): parallel attention and MLP, which share one LayerNorm without bias.

Rotary embedding is interleaved and logits are scaled. All layers of Cohere have full attention, and some members
normalize queries and keys. In Cohere 2 three sliding-window layers alternate with a full one without rotary embedding.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, hf_names, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import Constant, Leaf, decoder_leaves, norm, usual_attention, usual_mlp
from fnmodels.ops import apply_rotary_interleaved, gated_mlp, layer_norm, project_out, project_qkv, upcast
from fnmodels.tree import Tree

MODEL_TYPES = ("cohere2", "cohere")
TRAITS = Traits(kinds=("full_nope", "sliding", "full"))


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. `layer_kinds`: "full", or in cohere2 "full_nope" (no rotary embedding) or "sliding"."""

    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_qk_norm: bool = False
    logit_scale: float = 0.0625
    sliding_window: int | None = None
    max_position_embeddings: int = 8192

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        is_first = fields.choice("model_type", MODEL_TYPES) == "cohere"
        theta = 5e5 if is_first else 1e4  # 1e4 for both before transformers 5, and all published files have it
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=theta, max_positions=8192, tied=True)
        config = Config(
            **usual,
            **(_cohere_fields if is_first else _cohere2_fields)(fields, usual),
            **fields.plain(layer_norm_eps=1e-5, attention_bias=False, logit_scale=0.0625),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("layer_norm_eps", "attention_bias", "hidden_act", "logit_scale")
        if self.model_type == "cohere":
            return decoder.decoder_to_hf(self, "CohereForCausalLM", *names, "use_qk_norm")
        types = decoder.layer_types([kind == "sliding" for kind in self.layer_kinds])
        return decoder.decoder_to_hf(self, "Cohere2ForCausalLM", *names, "sliding_window", layer_types=types)


def _cohere_fields(fields: Fields, usual: dict[str, Any]) -> dict[str, Any]:
    layer_kinds = ("full",) * usual["num_hidden_layers"]
    return {"use_qk_norm": fields.boolean("use_qk_norm", False), "layer_kinds": layer_kinds}


def _cohere2_fields(fields: Fields, usual: dict[str, Any]) -> dict[str, Any]:
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
    layer_kinds = tuple("sliding" if s else "full_nope" for s in slides)
    return {"sliding_window": fields.integer("sliding_window", 4096), "layer_kinds": layer_kinds}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. Norms of queries and keys have a weight per head, [N, H] and [G, H]."""
    attention = usual_attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
    if config.use_qk_norm:
        attention["q_norm"] = _head_norm(config.num_attention_heads, config.head_dim, "heads")
        attention["k_norm"] = _head_norm(config.num_key_value_heads, config.head_dim, "kv_heads")
    layer = {"input_layernorm": norm(config.hidden_size, "embed"), "attention": attention, "mlp": usual_mlp(config)}
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def _head_norm(heads: int, head_dim: int, axis: str) -> Leaf:
    return Leaf((heads, head_dim), torch.float32, (axis, "head_dim"), Constant(1.0), decay=False)


def _norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """LayerNorm of each head of x [B, S, N, H] by its row of `weight` [N, H]."""
    return (layer_norm(upcast(x), None, None, eps=eps) * upcast(weight)).to(x.dtype)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights = layer["attention"]
    normed = layer_norm(x, layer["input_layernorm"], None, eps=config.layer_norm_eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    if config.use_qk_norm:
        eps = config.layer_norm_eps
        q, k = _norm_heads(q, weights["q_norm"], eps), _norm_heads(k, weights["k_norm"], eps)
    q, k = apply_rotary_interleaved(q, freqs), apply_rotary_interleaved(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = x + ctx.tap("attention", project_out(weights, mixed))
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final LayerNorm, output head and logit scale: logits [B, S, V]."""
    logits = decoder.unembed_layer_norm(params, x, config=config)
    return logits * config.logit_scale if decoder.is_lm(config) else logits
