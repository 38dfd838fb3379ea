"""Granite with sliding windows (IBM): Granite 3's multipliers, sinks in all layers, and a theta for each layer."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.layers.granite import (  # noqa: F401
    WINDOWED_KINDS,
    WindowedConfig,
    attend,
    embed,
    granite_fields,
    granite_to_hf,
    sinks_leaves,
    unembed,
    windowed_fields,
    windowed_to_hf,
)
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, usual_attention, usual_mlp
from fnmodels.ops import gated_mlp, rms_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("granite_swa",)
TRAITS = Traits(kinds=WINDOWED_KINDS, sinks=True)

_ABSENT = {"tie_word_embeddings": True, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}


@dataclass(frozen=True)
class Config(WindowedConfig):
    """Sizes and multipliers."""

    mlp_bias: bool = False

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        absent = _ABSENT | ({} if "num_key_value_heads" in values else {"num_key_value_heads": 4})
        fields = Fields({**values, **{name: absent[name] for name in absent if values.get(name) is None}})
        usual = granite_fields(fields, MODEL_TYPES)
        config = Config(**usual | windowed_fields(fields, usual), mlp_bias=fields.boolean("mlp_bias", False))
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return granite_to_hf(self, "GraniteSWAForCausalLM", "mlp_bias", **windowed_to_hf(self))


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = usual_attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
    mlp = usual_mlp(config, biases=config.mlp_bias)
    layer = layer_leaves(config.hidden_size, attention | sinks_leaves(config), mlp)
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    return {path: name.replace(".sinks.weight", ".sinks") for path, name in decoder.hf_names(config).items()}


freqs_cis = decoder.freqs_cis_by_window


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, share = config.rms_norm_eps, config.residual_multiplier
    mixed = attend(layer["attention"], rms_norm(x, layer["input_layernorm"], eps=eps), mask, freqs, config, ctx)
    x = ctx.tap("middle", x + ctx.tap("attention", mixed * share))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap) * share)
