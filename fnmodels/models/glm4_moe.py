"""GLM-4.5 to 4.7 with experts (arXiv 2508.06471): GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7.

A pre-norm decoder with grouped queries, half-layout rotary embedding of the first half of each head, a few dense layers
and then sparse ones, which route as DeepSeek V3 does. Its heads that predict further tokens: `fnmodels.mtp`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.rope_config import rope_to_hf
from fnmodels.models.common.spec import decoder_leaves, head_norms, layer_leaves, usual_attention
from fnmodels.models.common.storage import Stored
from fnmodels.ops.mlp import gated_mlp
from fnmodels.ops.moe.layer import MOE_TAPS
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k
from fnmodels.ops.norm import rms_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import Rope, apply_rotary
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("glm4_moe",)
KINDS = ("full", "full_moe")
ROUTED = True
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
TAPS = ("attention", "middle", "mlp", *MOE_TAPS)
OPTIONAL = {"mtp": "num_nextn_predict_layers"}  # what files may hold or not, and the field that counts it

_PARTIAL = 0.5  # the share of a head that rotates, where config.json does not say


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of dense layers."""

    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1  # the shared expert is as wide as so many
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rope: Rope = Rope(partial=_PARTIAL)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False  # of q, k and v
    use_qk_norm: bool = False
    num_nextn_predict_layers: int = 0  # heads in params["mtp"], which the forward pass does not use

    def __post_init__(self) -> None:
        super().__post_init__()
        mixture.check_groups(self)

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, partial=_PARTIAL, max_positions=131072, kv_heads=8)
        usual |= mixture.grouped_from_hf(fields, usual["num_hidden_layers"], dense=1, scale=1.0)
        config = Config(
            **usual,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
            attention_bias=fields.boolean("attention_bias", False),
            use_qk_norm=fields.boolean("use_qk_norm", False),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect."""
        names = ("rms_norm_eps", "attention_bias", "use_qk_norm", "hidden_act", "num_nextn_predict_layers")
        own = mixture.grouped_to_hf(self)
        own["rope_parameters"] = rope_to_hf(self.rope) | {
            "partial_rotary_factor": self.rope.partial
        }  # even where it is 1
        return decoder.decoder_to_hf(self, "Glm4MoeForCausalLM", *names, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = usual_attention(config, qkv_bias=config.attention_bias)
    attention |= head_norms(config) if config.use_qk_norm else {}

    def layer(kind: str) -> Tree:
        return layer_leaves(config.hidden_size, attention, mixture.grouped_leaves(config, kind, selection_bias=True))

    layers = [layer(kind) for kind in config.layer_kinds]
    return decoder_leaves(config, layers) | mtp.heads(config, layers[-1])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}; experts are a tensor each."""
    return mixture.grouped_names(config, flatten(spec(config)))


hf_copies = mtp.copies
kinds = decoder.kinds
attention_masks = decoder.attention_masks
freqs_cis = decoder.freqs_cis
embed = decoder.embed
unembed = decoder.unembed


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    if config.use_qk_norm:
        q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    if kind == "full":
        return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act))
    how = mixture.grouped_choice(config, ROUTER.output_dtype(x.dtype))
    route = functools.partial(sigmoid_top_k, bias=layer["mlp"]["selection_bias"], **how)
    fed = ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, wide_router=ROUTER.wide_projection)
    return x + ctx.tap("mlp", fed)
