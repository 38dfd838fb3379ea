"""Mixtral (Mistral AI, arXiv 2401.04088): the Llama block with a mixture of experts instead of each MLP."""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.moe import block_sparse_names, check_experts, experts_from_hf
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, moe_leaves, usual_attention
from fnmodels.models.common.storage import Stored
from fnmodels.ops import Rope, apply_rotary, project_out, project_qkv, rms_norm
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("mixtral",)
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")
TRAITS = Traits(
    kinds=("full_moe", "sliding_moe"), routed=True, router=ROUTER, in_memory={r"\.block_sparse_moe\.": ".mlp."}
)


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of one expert."""

    num_local_experts: int
    num_experts_per_tok: int
    rope: Rope = Rope(1e6)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_local_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=1e6, max_positions=131072, kv_heads=8)
        fields.expect("router_jitter_noise", 0, 0.0)
        experts, chosen = experts_from_hf(fields, 8, 2, usual["num_hidden_layers"])
        config = Config(
            **usual,
            num_local_experts=experts,
            num_experts_per_tok=chosen,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
            **decoder.one_window(fields, usual["num_hidden_layers"], "_moe"),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("rms_norm_eps", "hidden_act", "sliding_window", "num_local_experts", "num_experts_per_tok")
        return decoder.decoder_to_hf(self, "MixtralForCausalLM", *names)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std = config.hidden_size, config.initializer_range
    mlp = moe_leaves(D, config.num_local_experts, config.intermediate_size, std=std)
    layer = layer_leaves(D, usual_attention(config), mlp)
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    return block_sparse_names(flatten(spec(config)), config.num_local_experts)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    route = functools.partial(softmax_top_k, k=config.num_experts_per_tok, renormalize=True)
    return x + ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER))
