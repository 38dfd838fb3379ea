"""Jamba (AI21, arXiv 2403.19887): Mamba 1 in most layers, attention without positions in others, experts in some."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.mamba import Selective, rank_of, selective, selective_leaves, selective_names
from fnmodels.models.common.moe import check_experts, expert_names, experts_limit, feed
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, moe_leaves, usual_attention, usual_mlp
from fnmodels.models.common.storage import Stored, renamed_parts
from fnmodels.ops import ACTIVATIONS, Rope, no_rotation, project_out, project_qkv, rms_norm
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("jamba",)
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(kinds=("linear", "linear_moe", "full_nope", "full_nope_moe"), routed=True, router=ROUTER)

_PARTS = {"mlp": "feed_forward", "post_attention_layernorm": "pre_ff_layernorm"}


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of dense layers and of one expert."""

    mixer: Selective
    rope: Rope = field(default=Rope(), compare=False)  # nothing rotates
    num_experts: int = 0
    num_experts_per_tok: int = 0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(kind.routed for kind in parsed(self.layer_kinds)):
            check_experts(self.num_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        sizes = decoder.decoder_sizes(fields, max_positions=262144, tied=False, kv_heads=8)
        layers, width, eps = sizes["num_hidden_layers"], sizes["hidden_size"], fields.number("rms_norm_eps", 1e-6)
        attends = _pattern(fields, "attn_layer", 8, 4, layers)
        high = experts_limit(layers)
        experts = fields.integer("num_experts", 16, high=high)
        routed = [every and experts > 1 for every in _pattern(fields, "expert_layer", 2, 1, layers)]
        rank = fields.take("mamba_dt_rank", "auto")
        fields.expect("mamba_inner_layernorms", True)  # of files before the ones for transformers' own class
        mixer = Selective(
            inner=fields.integer("mamba_expand", 2) * width,
            state=fields.integer("mamba_d_state", 16),
            rank=rank_of(rank, width) if rank == "auto" else fields.integer("mamba_dt_rank"),
            kernel=fields.integer("mamba_d_conv", 4),
            norm="weighted",
            norm_eps=eps,
            conv_bias=fields.boolean("mamba_conv_bias", True),
            proj_bias=fields.boolean("mamba_proj_bias", False),
        )
        config = Config(
            **sizes,
            mixer=mixer,
            num_experts=experts,
            num_experts_per_tok=fields.integer("num_experts_per_tok", 2, high=high),
            rms_norm_eps=eps,
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            layer_kinds=tuple(
                ("full_nope" if one else "linear") + "_moe" * moe for one, moe in zip(attends, routed, strict=True)
            ),
            model_type=fields.choice("model_type", MODEL_TYPES),
        )
        ways = ("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep")
        return decoder.finished(config, fields, ways)

    def to_hf(self) -> ConfigJson:
        """A config.json; raises ConfigError for layers that are not every nth one."""
        found, mixer = parsed(self.layer_kinds), self.mixer
        own: dict[str, Any] = _period("attn_layer", [not kind.ordered for kind in found])
        own |= _period("expert_layer", [kind.routed for kind in found])
        own |= {"mamba_expand": mixer.inner // self.hidden_size, "mamba_d_state": mixer.state}
        own |= {"mamba_dt_rank": mixer.rank, "mamba_d_conv": mixer.kernel}
        own |= {"mamba_conv_bias": mixer.conv_bias, "mamba_proj_bias": mixer.proj_bias}
        names = ("num_experts", "num_experts_per_tok", "rms_norm_eps", "hidden_act")
        return decoder.decoder_to_hf(self, "JambaForCausalLM", *names, **own, rope_parameters=None)


def _pattern(fields: Fields, name: str, period: int, offset: int, layers: int) -> list[bool]:
    """Whether each layer is the `offset`th of its period, by the fields of `name`; period, offset: their defaults."""
    period = fields.integer(f"{name}_period", period)
    offset = fields.integer(f"{name}_offset", offset, low=0, high=period - 1)
    return [i % period == offset for i in range(layers)]


def _period(name: str, chosen: Sequence[bool]) -> dict[str, int]:
    """The fields that `_pattern` reads back; where there are none, those of a layer that the model does not have."""
    layers = len(chosen)
    choices = [(period, offset) for period in range(1, layers + 2) for offset in range(period)]
    fitting = [one for one in choices if [i % one[0] == one[1] for i in range(layers)] == list(chosen)]
    period, offset = (*fitting, (1, 0))[0]
    return {f"{name}_period": period, f"{name}_offset": offset}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range

    def layer(kind: LayerKind) -> Tree:
        mixer = selective_leaves(D, config.mixer, std=std) if kind.ordered else usual_attention(config)
        mlp = moe_leaves(D, config.num_experts, inner, std=std) if kind.routed else usual_mlp(config)
        return layer_leaves(D, mixer, mlp)

    return decoder_leaves(config, [layer(kind) for kind in parsed(config.layer_kinds)])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    names: dict[str, Stored] = {}
    for path in flatten(spec(config)):
        head, _, last = path.rpartition(".")
        routed = head.endswith("mlp.experts")
        name = (
            expert_names(f"model.{head}", config.num_experts, f"{last}.weight")
            if routed
            else decoder.decoder_name(path)
        )
        names[path] = renamed_parts(name, _PARTS)
    for i, kind in enumerate(parsed(config.layer_kinds)):
        if kind.ordered:
            names |= selective_names(config.mixer, f"layers.{i}.attention", f"model.layers.{i}.mamba")
    return names | {"norm": "model.final_layernorm.weight"}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """Nothing rotates."""
    return dict.fromkeys(sorted(set(config.layer_kinds)), no_rotation(positions))


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights, act = config.rms_norm_eps, layer["attention"], config.hidden_act
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    if LayerKind.parse(kind).ordered:
        mixed = selective(weights, normed, mask, config.mixer, ctx, activation=act)
    else:
        q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
        mixed = project_out(weights, ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5))
    x = ctx.tap("middle", x + ctx.tap("attention", mixed))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    route = functools.partial(softmax_top_k, k=config.num_experts_per_tok)
    return x + ctx.tap("mlp", feed(layer["mlp"], normed, config, ctx, route=route, dtypes=ROUTER))


PRESETS: dict[str, ConfigJson] = {
    "jamba-v0.1": {"model_type": "jamba", "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336}
    | {"num_hidden_layers": 32, "num_attention_heads": 32}
}
