"""OLMo 1 (Ai2; arXiv 2402.00838): Llama's block with LayerNorms that have neither weight nor bias.

Queries, keys and values may be clipped.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, hf_names, kinds  # noqa: F401
from fnmodels.models.common.spec import decoder_leaves, usual_attention, usual_mlp
from fnmodels.ops import apply_rotary, gated_mlp, layer_norm, project_out, project_qkv
from fnmodels.tree import Tree

MODEL_TYPES = ("olmo",)
_EPS = 1e-5


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. clip_qkv: the largest magnitude of queries, keys and values."""

    attention_bias: bool = False
    clip_qkv: float | None = None
    max_position_embeddings: int = 2048

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        clip = None if fields.take("clip_qkv", None) is None else fields.number("clip_qkv")
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=1e4, max_positions=2048)
        return decoder.finished(Config(**usual, **fields.plain(attention_bias=False), clip_qkv=clip), fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return decoder.decoder_to_hf(self, "OlmoForCausalLM", "attention_bias", "clip_qkv", "hidden_act")


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    on = config.attention_bias
    layer = {"attention": usual_attention(config, qkv_bias=on, o_bias=on), "mlp": usual_mlp(config)}
    tree = decoder_leaves(config, [layer for _ in config.layer_kinds])
    return {name: leaf for name, leaf in tree.items() if name != "norm"}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, clip = layer["attention"], config.clip_qkv
    q, k, v = project_qkv(weights, layer_norm(x, None, None, eps=_EPS), head_dim=config.head_dim)
    q, k, v = (q, k, v) if clip is None else (t.clamp(-clip, clip) for t in (q, k, v))
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = layer_norm(x, None, None, eps=_EPS)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]."""
    return decoder.project(params, layer_norm(x, None, None, eps=_EPS), config)


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
PRESETS: dict[str, ConfigJson] = {
    name: {"model_type": "olmo", "vocab_size": 50304, **dict(zip(_SIZES, sizes, strict=True)), **rest}
    for name, *sizes, rest in (
        ("olmo-1b", 2048, 8192, 16, 16, {"tie_word_embeddings": True}),
        ("olmo-7b", 4096, 11008, 32, 32, {}),
    )
}
