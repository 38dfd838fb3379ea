"""OLMo Hybrid (Ai2): three layers of Gated DeltaNet (arXiv 2412.06464) to one of attention.

Linear layers normalize the input of each sublayer, and their beta reaches 2, so that states can rotate. Full layers are
those of OLMo 3, which normalize the output; published models have no rotary embedding.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.layers import delta
from fnmodels.models.common.layers.post_norm import post_norm_layer, post_norm_leaves
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf, rope_values
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, usual_mlp
from fnmodels.models.common.storage import Stored
from fnmodels.ops import ACTIVATIONS, Rope, gated_mlp, rms_norm_fp32_weight
from fnmodels.tree import Tree

MODEL_TYPES = ("olmo_hybrid",)
_GATED_NORM_EPS = 1e-5  # whatever eps the config sets for the others
TRAITS = Traits(
    kinds=("linear", "full", "full_nope"),
    # transformers 5.23 saves full layers' first norm under the name of linear layers' second.
    resaved={r"(model\.layers\.\d+)\.feedforward_layer_norm\.weight": r"\1.post_attention_layernorm.weight"},
    equal_parts=(("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"),),  # as transformers 5.23 saves them
    in_memory={
        r"\.attention_layer_norm\.": ".input_layernorm.",
        r"\.feedforward_layer_norm\.": ".post_attention_layernorm.",
    },
)

PRESETS = {
    "olmo-hybrid-7b": {
        "model_type": "olmo_hybrid",
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "rope_parameters": {"rope_theta": None},
    }
}


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    linear_allow_neg_eigval: bool = True  # beta reaches 2, not 1
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        delta.check_heads(self)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        fields.choice("model_type", MODEL_TYPES)
        sizes = decoder.decoder_sizes(fields, max_positions=65536, tied=False)
        layers, heads, hidden = (sizes[n] for n in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
        rope = _rope_from_hf(fields, sizes)
        key_heads = fields.integer("linear_num_key_heads", heads)
        dk = fields.integer("linear_key_head_dim", 3 * hidden // (4 * key_heads))
        # three layers of four; the last one has attention where no other has
        linear = [i % 4 != 3 and (layers > 3 or i < layers - 1) for i in range(layers)]
        config = Config(
            **sizes,
            **delta.sizes_from_hf(fields, heads, heads, dk, 2 * dk, 4),
            rope=rope or Rope(),
            **fields.plain(linear_allow_neg_eigval=True, rms_norm_eps=1e-6, attention_bias=False),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            layer_kinds=tuple(
                "linear" if one else "full" if rope else "full_nope"
                for one in decoder.sliding_layers(fields, linear, "linear_attention")
            ),
        )
        starts = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
        return decoder.finished(config, fields, ignored=starts)  # of fresh parameters

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        linear = [kind == "linear" for kind in self.layer_kinds]
        own: ConfigJson = {"layer_types": decoder.layer_types(linear, "linear_attention")}
        own["rope_parameters"] = {"rope_theta": None} if "full_nope" in self.layer_kinds else rope_to_hf(self.rope)
        names = ("rms_norm_eps", "attention_bias", "hidden_act", "linear_allow_neg_eigval", *delta.SIZES)
        return decoder.decoder_to_hf(self, "OlmoHybridForCausalLM", *names, **own)


def _rope_from_hf(fields: Fields, sizes: dict[str, Any]) -> Rope | None:
    """The rotary table; None where the file's base is null, as published."""
    values = rope_values(fields)
    if values.get("rope_theta") is not None or "rope_theta" not in values.keys() | fields.values.keys():
        return rope_from_hf(fields, head_dim=sizes["head_dim"], max_positions=sizes["max_position_embeddings"])
    rest = {name: value for name, value in values.items() if value not in (None, "default")}
    if rest:
        raise UnsupportedError(f"{fields.where}: 'rope_theta' is null, for no rope, but the rope has {shown(rest)}.")
    return None


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = delta.gated_delta_leaves(config)
    attention["dt_bias"] = replace(attention["dt_bias"], init=delta.STEPS)
    linear, full = layer_leaves(config.hidden_size, attention, usual_mlp(config)), post_norm_leaves(config)
    return decoder_leaves(config, [linear if kind == "linear" else full for kind in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}."""
    names: dict[str, Stored] = decoder.hf_names(config)
    for index, kind in enumerate(config.layer_kinds):
        if kind == "linear":
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            leaves = delta.gated_delta_leaves(config)
            names |= delta.separate_names(f"{ours}.attention", f"{theirs}.linear_attn", leaves)
            names[f"{ours}.input_layernorm"] = f"{theirs}.attention_layer_norm.weight"
            names[f"{ours}.post_attention_layernorm"] = f"{theirs}.feedforward_layer_norm.weight"
    return names


unembed = decoder.unembed_fp32_weight


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    if kind != "linear":
        return post_norm_layer(layer, x, mask, freqs, config, ctx)
    eps, strength = config.rms_norm_eps, 2.0 if config.linear_allow_neg_eigval else 1.0
    normed = rms_norm_fp32_weight(x, layer["input_layernorm"], eps=eps)
    mixed = delta.gated_delta_net(layer["attention"], normed, mask, config, ctx, eps=_GATED_NORM_EPS, strength=strength)
    x = ctx.tap("middle", x + ctx.tap("attention", mixed))
    normed = rms_norm_fp32_weight(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))
