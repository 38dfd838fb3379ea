"""Muse Glimmer's text (Meta, 2026, 30B): Gemma 2's layer with a gate per element and scaleless norms of heads.

Norms around sublayers multiply by 1 + weight, those after them with an eps of their own. The rest is what the texts of
Muse share: `fnmodels.models.common.layers.muse`.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, freqs_cis, hf_names, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.layers import muse
from fnmodels.models.common.layers.muse import embed, unembed  # noqa: F401
from fnmodels.models.common.spec import decoder_leaves, norm, usual_mlp
from fnmodels.ops import gated_mlp
from fnmodels.ops.norm import rms_norm_zero_centered
from fnmodels.tree import Tree

MODEL_TYPES = ("muse_glimmer_text",)
TRAITS = Traits(kinds=("sliding", "full_nope", "full", "sliding_nope"))


@dataclass(frozen=True, kw_only=True)
class Config(muse.MuseConfig):
    """Sizes and switches."""

    query_scale: float = 3.87
    logit_scale: float = 0.19611613513818404
    max_position_embeddings: int = 131072

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields({("hidden_act" if n == "hidden_activation" else n): value for n, value in values.items()})
        usual = decoder.base_fields(
            fields, MODEL_TYPES, theta=1e4, max_positions=131072, head_dim=128, kv_heads=2, activation="silu"
        )
        scales = {"query_scale": 3.87, "logit_scale": 0.19611613513818404}
        return decoder.finished(Config(**muse.fields_from_hf(fields, usual, **scales)), fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own = muse.fields_to_hf(self) | {"hidden_activation": self.hidden_act}
        return decoder.decoder_to_hf(self, "MuseGlimmerForCausalLM", *muse.SAVED, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]; norms around sublayers are initialized to 0, since 1 is added to them."""
    layer: Tree = {name: norm(config.hidden_size, "embed", 0.0) for name in muse.NORMS}
    layer |= {"attention": muse.attention_leaves(config), "mlp": usual_mlp(config)}
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, after = config.rms_norm_eps, config.post_norm_eps
    normed = rms_norm_zero_centered(x, layer["input_layernorm"], eps=eps)
    mixed = muse.attend(layer["attention"], normed, mask, freqs, config, ctx)
    mixed = rms_norm_zero_centered(mixed, layer["post_attention_layernorm"], eps=after)
    x = ctx.tap("middle", x + ctx.tap("attention", mixed))
    normed = rms_norm_zero_centered(x, layer["pre_feedforward_layernorm"], eps=eps)
    fed = gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap)
    return x + ctx.tap("mlp", rms_norm_zero_centered(fed, layer["post_feedforward_layernorm"], eps=after))
