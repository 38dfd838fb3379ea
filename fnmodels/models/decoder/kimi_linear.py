"""Kimi Linear (Moonshot, arXiv 2510.26692): three layers of Kimi Delta Attention to one of latent attention.

Kimi Delta Attention is Gated DeltaNet with a decay for each key channel, from a narrow projection, and a sigmoid gate
after its norm. Latent attention is DeepSeek V3's without rotary embedding. All layers but the first have experts.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder, mla
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.kimi import fields as kimi
from fnmodels.models.common.layers import delta
from fnmodels.models.common.spec import (
    decoder_leaves,
    latent_attention_leaves,
    layer_leaves,
)
from fnmodels.models.common.storage import Stored, TensorSlice
from fnmodels.ops import Rope, gated_mlp, no_rotation, project_out, rms_norm
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("kimi_linear",)
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("linear_moe", "full_moe", "linear", "full"),
    routed=True,
    router=ROUTER,
    # transformers 5.23 saves dense layers under the name of mixtures.
    resaved={r"(model\.layers\.\d+)\.block_sparse_moe\.(gate|up|down)_proj\.weight": r"\1.mlp.\2_proj.weight"},
    in_memory={
        r"\.block_sparse_moe\.": ".mlp.",
        r"\.self_attn\.(f_a_proj\.|f_b_proj\.|dt_bias|A_log)": r".self_attn.forget_gate.\1",
    },
)

_DELTA = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4, "full_attn_layers": [*range(4, 27, 4), 27]}
PRESETS = {
    "kimi-linear-48b-a3b": {"model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304}
    | {"num_hidden_layers": 27, "num_attention_heads": 32, "kv_lora_rank": 512, "v_head_dim": 128}
    | {"intermediate_size": 9216, "moe_intermediate_size": 1024}
    | {"num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1}
    | {"linear_attn_config": _DELTA | {"kda_layers": [i for i in range(1, 27) if i % 4]}}
}


@dataclass(frozen=True, kw_only=True)
class Config(mla.LatentMixtureConfig):
    """Sizes and switches. attention_bias is that of latent attention; no layer rotates, and there are no MTP heads."""

    linear_num_heads: int
    linear_head_dim: int
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-5
    rope: Rope = field(default=Rope(), init=False, compare=False)
    num_nextn_predict_layers: int = field(default=0, init=False, compare=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = kimi.flat(renamed(Fields(values), kimi.ALIASES))
        fields.choice("model_type", MODEL_TYPES)
        sizes = mla.latent_from_hf(fields, max_positions=1048576, kv_heads=32, q_rank=0, nope_dim=128, rope_head=True)
        del sizes["rope_interleave"]
        layers = sizes["num_hidden_layers"]
        experts = mixture.shared_from_hf(fields, layers, dense=1, scale=2.446)
        fields.expect("tie_word_embeddings", False)  # transformers has a head of its own in any case
        kimi.expect_usual(fields)
        by_default = [i % 4 != 0 or i == 0 for i in range(layers)]
        experts["layer_kinds"] = kimi.layer_kinds(fields, by_default, experts["layer_kinds"])
        config = Config(
            **sizes | experts | {"rms_norm_eps": fields.number("rms_norm_eps", 1e-5)},
            linear_num_heads=fields.integer("linear_num_heads", 32, high=1 << 16),
            linear_head_dim=fields.integer("linear_head_dim", 128, high=1 << 16),
            linear_conv_kernel_dim=fields.integer("linear_conv_kernel_dim", 4, high=1 << 16),
            **fields.plain(n_group=1, topk_group=1, norm_topk_prob=True),
        )
        return decoder.finished(config, fields, ignored=("rope_theta", "rope_scaling", "rope_parameters"))

    def to_hf(self) -> ConfigJson:
        """A config.json under the published names."""
        own: ConfigJson = {name: getattr(self, name) for name in mixture.GROUPED}
        own |= kimi.dense_to_hf(self) | {"linear_attn_config": kimi.linear_to_hf(self)}
        out = decoder.decoder_to_hf(self, "KimiLinearForCausalLM", *mla.NAMES, **own)
        return mla.under_aliases({name: value for name, value in out.items() if name != "rope_parameters"})


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""

    def layer(kind: LayerKind) -> Tree:
        attention = delta.narrow_leaves(config) if kind.ordered else latent_attention_leaves(config)
        mlp = mixture.grouped_leaves(config, kind, selection_bias=True)
        return layer_leaves(config.hidden_size, attention, mlp)

    return decoder_leaves(config, [layer(kind) for kind in parsed(config.layer_kinds)])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    flat, heads = flatten(spec(config)), config.linear_num_heads
    names = mla.latent_names(mixture.block_sparse_names(flat, config.n_routed_experts))
    for index, kind in enumerate(parsed(config.layer_kinds)):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        if kind.ordered:
            names |= delta.separate_names(f"{ours}.attention", f"{theirs}.self_attn", delta.narrow_leaves(config))
            A_log = TensorSlice(f"{theirs}.self_attn.A_log", 0, heads, heads, ones=(2, 1))
            names[f"{ours}.attention.A_log"] = A_log
        if kind.routed:
            there = f"{theirs}.block_sparse_moe"
            names[f"{ours}.mlp.selection_bias"] = f"{there}.gate.e_score_correction_bias"
            for leaf in ("gate_proj", "up_proj", "down_proj"):
                names[f"{ours}.mlp.shared_expert.{leaf}"] = f"{there}.shared_experts.{leaf}.weight"
    return names


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """Nothing rotates."""
    return dict.fromkeys(sorted(set(config.layer_kinds)), no_rotation(positions))


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    if LayerKind.parse(kind).ordered:
        mixed = delta.narrow_kimi_delta(weights, normed, mask, config, ctx)
    else:
        widths = mla.latent_widths(config)
        scale = (widths.nope + widths.rope) ** -0.5
        mixed = ctx.attend_latent(weights, normed, freqs, mask, widths=widths, rotate=_unrotated, scale=scale)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    if not LayerKind.parse(kind).routed:
        return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))
    route = functools.partial(sigmoid_top_k, bias=layer["mlp"]["selection_bias"], **mixture.grouped_choice(config))
    return x + ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER))


def _unrotated(x: Tensor, freqs: Tensor) -> Tensor:
    return x
