"""MiniMax M2 to M2.7 (MiniMax AI, 230B-A10B): a mixture of experts in each layer.

The Llama block with query and key norms over all heads, and rotary embedding of the first part of each head. Experts
are chosen by sigmoid scores and a selection bias without a gradient; there is no shared expert. The MTP modules that
config.json counts are not in the published files (MiniMax-AI/MiniMax-M2, issue 47).
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.rope_config import rope_to_hf, with_rotary_dim
from fnmodels.models.common.spec import decoder_leaves, joint_head_norms, layer_leaves, moe_leaves, usual_attention
from fnmodels.models.common.storage import Stored
from fnmodels.ops import Rope, apply_rotary, project_out, rms_norm, split_heads
from fnmodels.ops.linear import linears
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("minimax_m2",)
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")
TRAITS = Traits(kinds=("full_moe",), routed=True, router=ROUTER, in_memory={r"\.block_sparse_moe\.": ".mlp."})

# Fields of the published files that transformers ignores, with the values that mean this model.
_EXPECTED = {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "scoring_func": "sigmoid"}
_EXPECTED |= {"shared_intermediate_size": 0, "router_jitter_noise": 0.0, "postnorm": False}
# Those of MiniMax-Text-01, which multiply the residual stream (alpha) and what a layer adds to it (beta).
_EXPECTED |= {
    f"layernorm_{part}_{factor}": 1.0
    for part in ("full_attention", "linear_attention", "mlp")
    for factor in ("alpha", "beta")
}
# Of modules that are not in the files, and of a dense MLP and a shared expert that no layer has.
_UNUSED = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size", "shared_moe_mode")


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of one expert."""

    num_local_experts: int
    num_experts_per_tok: int
    rope: Rope = Rope(5e6)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 196608

    def __post_init__(self) -> None:
        super().__post_init__()
        mixture.check_experts(self.num_local_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = with_rotary_dim(Fields(values), 128)
        sizes: dict[str, Any] = {"max_positions": 196608, "kv_heads": 8, "head_dim": 128}
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=5e6, partial=1.0, **sizes)
        layers = usual["num_hidden_layers"]
        for name, value in _EXPECTED.items():
            fields.expect(name, value)
        fields.expect("attn_type_list", [1] * layers)  # 0 would be linear attention, as in MiniMax-Text-01
        experts, chosen = mixture.experts_from_hf(fields, 256, 8, layers)
        eps = fields.number("rms_norm_eps", 1e-6)
        config = Config(**usual, num_local_experts=experts, num_experts_per_tok=chosen, rms_norm_eps=eps)
        return decoder.finished(config, fields, _UNUSED)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("rms_norm_eps", "hidden_act", "num_local_experts", "num_experts_per_tok")
        rope = rope_to_hf(self.rope) | {"partial_rotary_factor": self.rope.partial}  # written even if it is 1
        return decoder.decoder_to_hf(self, "MiniMaxM2ForCausalLM", *names, rope_parameters=rope)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std = config.hidden_size, config.initializer_range
    mlp = moe_leaves(D, config.num_local_experts, config.intermediate_size, std=std, selection_bias=True)
    layer = layer_leaves(D, usual_attention(config) | joint_head_norms(config), mlp)
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    return mixture.block_sparse_names(flatten(spec(config)), config.num_local_experts)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights, mlp = config.rms_norm_eps, layer["attention"], layer["mlp"]
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    q, k, v = linears(normed, weights, "qkv")
    q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)  # over all heads together
    q, k, v = (split_heads(t, config.head_dim) for t in (q, k, v))
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    chosen = config.num_experts_per_tok
    route = functools.partial(sigmoid_top_k, k=chosen, bias=mlp["selection_bias"], renormalize=True)
    return x + ctx.tap("mlp", ctx.moe(mlp, normed, route, act=config.hidden_act, dtypes=ROUTER))


PRESETS: dict[str, ConfigJson] = {
    "minimax-m2": {"model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536}
    | {"num_hidden_layers": 62, "num_attention_heads": 48, "rotary_dim": 64}
}
