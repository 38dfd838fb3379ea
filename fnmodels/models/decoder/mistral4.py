"""Mistral Small 4 (Mistral AI, 119B-A6B), text part: latent attention as in DeepSeek V3, with a query temperature.

A pre-norm decoder with multi-head latent attention; the first layers may be dense, the others are mixtures of experts
with softmax scores and a shared expert. Queries are scaled by the logarithm of their position as in Ministral 3.

Conflict of references: transformers 5.23, which this file follows, multiplies the scale of the scores by the square of
YaRN's temperature for `mscale_all_dim` (2.2058 for the published config). Mistral's own file sets apply_scale to false,
and other engines report better results of the published weights with the plain scale. Rope parameters without
`mscale_all_dim`, and with "attention_factor": 1.0, give the plain scale here and there.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder, mla
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, kinds, unembed  # noqa: F401
from fnmodels.models.common.decoder import freqs_cis_with_temperature as freqs_cis  # noqa: F401
from fnmodels.models.common.family import Traits, parsed
from fnmodels.models.common.rope_config import parse_rope, rope_to_hf, rope_values
from fnmodels.models.common.spec import decoder_leaves, latent_attention_leaves, layer_leaves
from fnmodels.models.common.storage import Stored
from fnmodels.ops import Rope, apply_rotary, apply_rotary_interleaved, gated_mlp, latent_scale, project_out, rms_norm
from fnmodels.ops.mla import latent_queries
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("mistral4",)
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(kinds=("full_moe", "full"), routed=True, router=ROUTER)


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of dense layers."""

    num_key_value_heads: int = field(init=False)  # as many as query heads
    head_dim: int = field(init=False)  # of queries and keys: qk_nope_head_dim + qk_rope_head_dim
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1  # width of the shared expert, in routed experts
    q_lora_rank: int | None = None  # None: queries without a latent
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rope: Rope = field()  # of kind yarn; rotates qk_rope_head_dim of head_dim
    temperature_beta: float = 0.1  # queries are multiplied by 1 + beta ln(1 + floor(position / temperature_length))
    rope_interleave: bool = True
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False  # of the projections that read x, and of o
    max_position_embeddings: int = 1048576
    n_group: ClassVar[int] = 1  # choices limited to groups are not supported
    topk_group: ClassVar[int] = 1

    @property
    def temperature_length(self) -> int:
        return self.rope.original_max_position_embeddings

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        object.__setattr__(self, "head_dim", self.qk_nope_head_dim + self.qk_rope_head_dim)
        super().__post_init__()
        mixture.check_groups(self)
        if self.rope.kind != "yarn" or self.rope.dim(self.head_dim) != self.qk_rope_head_dim:
            wanted = f"yarn on {self.qk_rope_head_dim} of {self.head_dim} dimensions per head"
            raise ConfigError(f"rope must be {wanted}; it is {self.rope}.")

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        fields.choice("model_type", MODEL_TYPES)
        sizes = mla.latent_from_hf(
            fields, max_positions=1048576, kv_heads=32, q_rank=1024, nope_dim=64, rope_head=False
        )
        positions, head_dim = sizes["max_position_embeddings"], sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
        inner = Fields(rope_values(fields), f"{fields.where}, rope")
        beta = inner.number("llama_4_scaling_beta", above=-1e-9)
        inner.expect("max_position_embeddings", positions)  # duplicated in the rope object
        share = sizes["qk_rope_head_dim"] / head_dim
        rope = parse_rope(inner, head_dim=head_dim, max_positions=positions, theta=1e4, partial=share)
        for name in ("n_group", "topk_group"):
            fields.expect(name, 1)
        experts = mixture.shared_from_hf(fields, sizes["num_hidden_layers"], dense=0, scale=1.0)
        experts["norm_topk_prob"] = fields.boolean("norm_topk_prob", True)
        config = Config(**sizes, **experts, rope=rope, temperature_beta=beta)
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        rope = rope_to_hf(self.rope) | {"llama_4_scaling_beta": self.temperature_beta}
        own = mixture.grouped_to_hf(self) | {"rope_parameters": rope}
        return decoder.decoder_to_hf(self, "Mistral4ForCausalLM", *mla.NAMES, "rope_interleave", **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = latent_attention_leaves(config)
    mlps = (mixture.grouped_leaves(config, kind, selection_bias=False) for kind in parsed(config.layer_kinds))
    return decoder_leaves(config, [layer_leaves(config.hidden_size, attention, mlp) for mlp in mlps])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}; experts are stacked."""
    names = mla.latent_names(mixture.grouped_names(config, flatten(spec(config))))
    for i, kind in enumerate(config.layer_kinds):
        if kind == "full_moe":
            names |= mixture.stacked_experts(f"layers.{i}.mlp.experts", config.moe_intermediate_size)
    return names


@with_context
def block(
    layer: Tree, x: Tensor, mask: Any, freqs: dict[str, Tensor], /, *, config: Config, kind: str, ctx: Context
) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    rotate = apply_rotary_interleaved if config.rope_interleave else apply_rotary
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    widths = mla.latent_widths(config)
    how: Any = {"widths": widths, "rotate": rotate}
    q = latent_queries(weights, normed, freqs["table"], **how)
    q = q * freqs["temperature"][..., None, None].to(q.dtype)
    scale = latent_scale(config.rope, widths.nope + widths.rope)
    mixed = ctx.attend_latent(weights, normed, freqs["table"], mask, **how, scale=scale, queries=q)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    if kind == "full":
        return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))
    route = functools.partial(softmax_top_k, **mixture.grouped_choice(config))
    return x + ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER))
