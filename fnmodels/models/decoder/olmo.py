"""OLMo 2 and 3 (Ai2; arXiv 2501.00656, 2512.13961): post-norm decoders with query and key norms.

The norm is applied to the output of each sublayer instead of its input; query and key norms span all heads. OLMo 3 has
three sliding-window layers per full one, and scales the rotary table of the full ones only.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, hf_names, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.layers.post_norm import post_norm_layer, post_norm_leaves
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf, ropes_by_layer_type
from fnmodels.models.common.spec import decoder_leaves
from fnmodels.ops import ACTIVATIONS, Rope
from fnmodels.tree import Tree

MODEL_TYPES = ("olmo2", "olmo3")
TRAITS = Traits(kinds=("full", "sliding"))


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    local_rope: Rope = Rope()  # noqa: RUF009 - of sliding layers
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    sliding_window: int | None = None
    max_position_embeddings: int = 4096

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder.decoder_sizes(fields, max_positions=2048, tied=False)
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        layers = sizes["num_hidden_layers"]
        if model_type == "olmo2":
            slides, window = [False] * layers, None
            rope = local = rope_from_hf(fields, theta=1e4, **where)
        else:
            slides = decoder.sliding_layers(fields, [(i + 1) % 4 != 0 for i in range(layers)])
            window = fields.integer("sliding_window", 4096)
            theta = fields.number("rope_theta", 5e5)  # older files: one theta, scaled on full layers only
            thetas = {"full_attention": theta, "sliding_attention": theta}
            ropes = ropes_by_layer_type(fields, thetas, scaled="full_attention", **where)
            rope, local = ropes["full_attention"], ropes["sliding_attention"]
        config = Config(
            **sizes,
            rope=rope,
            local_rope=local,
            **fields.plain(rms_norm_eps=1e-5, attention_bias=False),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            sliding_window=window,
            layer_kinds=tuple("sliding" if s else "full" for s in slides),
            model_type=model_type,
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        names, own = ("rms_norm_eps", "hidden_act", "attention_bias"), dict[str, Any]()
        if self.model_type == "olmo3":
            ropes = {"sliding_attention": rope_to_hf(self.local_rope), "full_attention": rope_to_hf(self.rope)}
            own = {"rope_parameters": ropes, "sliding_window": self.sliding_window}
            own["layer_types"] = decoder.layer_types([kind == "sliding" for kind in self.layer_kinds])
        return decoder.decoder_to_hf(self, f"Olmo{self.model_type[-1]}ForCausalLM", *names, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    return decoder_leaves(config, [post_norm_leaves(config) for _ in config.layer_kinds])


freqs_cis = decoder.freqs_cis_by_window
unembed = decoder.unembed_fp32_weight


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    return post_norm_layer(layer, x, mask, freqs, config, ctx)
