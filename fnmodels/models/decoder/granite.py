"""Granite 3 (IBM): the Llama block with multipliers of embeddings, residual branches, attention scores and logits.

HyperCLOVA X SEED Think (Naver, arXiv 2506.22403) has norms after the sublayers as well (arXiv 2502.02732).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.layers.granite import (  # noqa: F401
    MultipliedConfig,
    attend,
    embed,
    granite_fields,
    granite_to_hf,
    unembed,
)
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, norm, usual_attention, usual_mlp
from fnmodels.ops import gated_mlp, rms_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("granite", "hyperclovax")


@dataclass(frozen=True)
class Config(MultipliedConfig):
    """Sizes and multipliers."""

    mlp_bias: bool = False
    sandwich: bool = False  # norms after the sublayers as well

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = granite_fields(fields, MODEL_TYPES) | {"mlp_bias": fields.boolean("mlp_bias", False)}
        if usual["model_type"] == "hyperclovax":  # multiplies logits, and an absent multiplier is the usual scale
            usual["logits_scaling"] = 1 / usual["logits_scaling"]
            usual["sandwich"] = fields.boolean("use_post_norm", True)
            if values.get("attention_multiplier") is None:
                usual["attention_multiplier"] = usual["head_dim"] ** -0.5
        return decoder.finished(Config(**usual), fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        if self.model_type == "granite":
            return granite_to_hf(self, "GraniteForCausalLM", "mlp_bias")
        own = {"use_post_norm": self.sandwich, "logits_scaling": 1 / self.logits_scaling}
        return granite_to_hf(self, "HyperCLOVAXForCausalLM", "mlp_bias", **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = usual_attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
    layer = layer_leaves(config.hidden_size, attention, usual_mlp(config, biases=config.mlp_bias))
    if config.sandwich:
        layer |= {name: norm(config.hidden_size, "embed") for name in ("post_attention_norm", "post_mlp_norm")}
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = decoder.hf_names(config)
    renamed = {".post_attention_norm.": ".post_norm1.", ".post_mlp_norm.": ".post_norm2."}
    for ours, theirs in renamed.items():
        names = {path: name.replace(ours, theirs) for path, name in names.items()}
    return names


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, share = config.rms_norm_eps, config.residual_multiplier
    mixed = attend(layer["attention"], rms_norm(x, layer["input_layernorm"], eps=eps), mask, freqs, config, ctx)
    mixed = rms_norm(mixed, layer["post_attention_norm"], eps=eps) if config.sandwich else mixed
    x = ctx.tap("middle", x + ctx.tap("attention", mixed * share))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    fed = gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap)
    fed = rms_norm(fed, layer["post_mlp_norm"], eps=eps) if config.sandwich else fed
    return x + ctx.tap("mlp", fed * share)


PRESETS = {
    "hyperclovax-seed-think-14b": {"model_type": "hyperclovax", "vocab_size": 110592, "hidden_size": 6144}
    | {"intermediate_size": 14336, "num_hidden_layers": 38, "num_attention_heads": 48, "num_key_value_heads": 8}
    | {"embedding_multiplier": 10.0, "logits_scaling": 0.125, "residual_multiplier": 1.0, "rope_theta": 1e8}
    | {"attention_multiplier": 0.0078125, "head_dim": 128, "max_position_embeddings": 131072}
}
