"""AFMoE (Arcee AI: Trinity Nano, Mini, Large): gated attention and experts between two norms each.

Each sublayer has a norm before and one after it. Attention normalizes queries and keys per head and is multiplied by
the sigmoid of a gate per element; sliding-window layers have rotary embedding, full ones none. Experts are chosen by
sigmoid scores and a selection bias without a gradient, beside shared experts, after a few dense layers. Embeddings may
be scaled by the square root of the width.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.spec import decoder_leaves, head_norms, norm, usual_attention, weight
from fnmodels.models.common.storage import Stored, renamed_parts
from fnmodels.ops import embed_tokens, rms_norm_fp32_weight, split_heads
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("afmoe",)
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")
TRAITS = Traits(kinds=("sliding_moe", "sliding", "full_nope_moe", "full_nope"), routed=True, router=ROUTER)

_NAMES = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "num_dense_layers": "first_k_dense_replace",
    "route_scale": "routed_scaling_factor",
}
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, kw_only=True)
class Config(mixture.SharedConfig):
    """Sizes and switches."""

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mup_enabled: bool = False  # embeddings times sqrt(hidden_size)
    sliding_window: int | None = None

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = renamed(Fields(values), _NAMES)
        usual = decoder.base_fields(fields, MODEL_TYPES, max_positions=16384, head_dim=128)
        layers = usual["num_hidden_layers"]
        usual |= mixture.shared_from_hf(fields, layers, dense=1, scale=1.0)
        # in the published files, which have one group and normalized weights of sigmoid scores
        for name in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
            fields.expect(name, 1)
        fields.expect("score_func", "sigmoid")
        fields.expect("route_norm", True)
        every = fields.integer("global_attn_every_n_layers", 4)
        slides = decoder.sliding_layers(fields, [(i + 1) % every != 0 for i in range(layers)])
        routed = [kind.routed for kind in parsed(usual["layer_kinds"])]
        usual["layer_kinds"] = tuple(
            ("sliding" if near else "full_nope") + "_moe" * moe for near, moe in zip(slides, routed, strict=True)
        )
        config = Config(
            **usual,
            **fields.plain(rms_norm_eps=1e-5, attention_bias=False, mup_enabled=False),
            sliding_window=fields.integer("sliding_window", 1024),
        )
        return decoder.finished(config, fields, ("load_balance_coeff", "use_grouped_mm"))

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        found = parsed(self.layer_kinds)
        own = {name: getattr(self, name) for name in (*mixture.SHARED, "routed_scaling_factor")}
        own["first_k_dense_replace"] = sum(not kind.routed for kind in found)
        own["layer_types"] = decoder.layer_types([kind.slides for kind in found])
        names = ("rms_norm_eps", "attention_bias", "hidden_act", "mup_enabled", "sliding_window")
        out = decoder.decoder_to_hf(self, "AfmoeForCausalLM", *names, **own)
        published = {name: theirs for theirs, name in _NAMES.items()}
        return {published.get(name, name): value for name, value in out.items()}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, std, biased = config.hidden_size, config.head_dim, config.initializer_range, config.attention_bias
    attention = usual_attention(config, qkv_bias=biased, o_bias=biased) | head_norms(config)
    attention["gate_proj"] = weight((config.num_attention_heads * H, D), ("heads", "embed"), std, unit=H)

    def layer(kind: LayerKind) -> Tree:
        mlp = mixture.grouped_leaves(config, kind, selection_bias=True)
        return {name: norm(D, "embed") for name in _NORMS} | {"attention": attention, "mlp": mlp}

    return decoder_leaves(config, [layer(kind) for kind in parsed(config.layer_kinds)])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    names = mixture.grouped_names(config, flatten(spec(config)))
    for path in names:
        where = path.removesuffix(".selection_bias").removesuffix(".router")
        if path.endswith(".selection_bias"):
            names[path] = f"model.{where}.expert_bias"
        elif path.endswith(".router"):
            names[path] = f"model.{where}.router.gate.weight"
    parts = {f"{place}_feedforward_layernorm": f"{place}_mlp_layernorm" for place in ("pre", "post")}
    return {path: renamed_parts(name, parts) for path, name in names.items()}


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: token or given embeddings, times the square root of the width where `mup_enabled`."""
    x = embed_tokens(params["embed_tokens"], inputs)
    return x * config.hidden_size**0.5 if config.mup_enabled else x


unembed = decoder.unembed_fp32_weight


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights, mlp, norm = config.rms_norm_eps, layer["attention"], layer["mlp"], rms_norm_fp32_weight
    normed = norm(x, layer["input_layernorm"], eps=eps)
    gate = split_heads(elementwise(torch.sigmoid, linear(normed, weights["gate_proj"])), config.head_dim)
    attended = mixture.attend(weights, normed, mask, freqs, config, ctx, gate, norm)
    x = ctx.tap("middle", x + ctx.tap("attention", norm(attended, layer["post_attention_layernorm"], eps=eps)))
    how: dict[str, Any] = {"k": config.num_experts_per_tok, "renormalize": True, "scale": config.routed_scaling_factor}
    route = functools.partial(sigmoid_top_k, bias=mlp.get("selection_bias"), **how)
    normed = norm(x, layer["pre_feedforward_layernorm"], eps=eps)
    fed = mixture.feed(mlp, normed, config, ctx, route=route, dtypes=ROUTER)
    return x + ctx.tap("mlp", norm(fed, layer["post_feedforward_layernorm"], eps=eps))


PRESETS: dict[str, ConfigJson] = {
    "trinity-mini": {"model_type": "afmoe", "vocab_size": 200192, "hidden_size": 2048, "intermediate_size": 6144}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 1024}
    | {"num_dense_layers": 2, "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1}
    | {"route_scale": 2.826, "sliding_window": 2048, "mup_enabled": True, "max_position_embeddings": 131072}
}
