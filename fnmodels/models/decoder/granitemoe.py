"""Granite 3 MoE (IBM): Granite's multipliers with experts in each layer; granitemoeshared has a shared expert too.

granitemoe_swa has sliding-window layers, sinks in all layers, and a theta per layer, 0 for no rotation.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.layers.granite import (  # noqa: F401
    IN_MEMORY,
    WINDOWED_KINDS,
    WindowedConfig,
    attend,
    embed,
    expert_names,
    granite_fields,
    granite_to_hf,
    shared_names,
    sinks_leaves,
    unembed,
    windowed_fields,
    windowed_to_hf,
)
from fnmodels.models.common.moe import check_experts, experts_from_hf
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, moe_leaves, usual_attention
from fnmodels.models.common.storage import Stored, renamed
from fnmodels.ops import rms_norm
from fnmodels.ops.moe.router import RouterDtypes, top_k_softmax
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("granitemoe", "granitemoeshared", "granitemoe_swa")
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(
    kinds=tuple(f"{kind}_moe" for kind in WINDOWED_KINDS), routed=True, router=ROUTER, sinks=True, in_memory=IN_MEMORY
)
_ARCHITECTURES = {"granitemoe": "GraniteMoe", "granitemoeshared": "GraniteMoeShared", "granitemoe_swa": "GraniteMoeSWA"}


@dataclass(frozen=True, kw_only=True)
class Config(WindowedConfig):
    """Sizes and multipliers; intermediate_size is that of one expert."""

    num_local_experts: int
    num_experts_per_tok: int
    shared_intermediate_size: int = 0  # of the shared expert; 0: none
    max_position_embeddings: int = 2048
    model_type: str = field(default="granitemoeshared", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_local_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = granite_fields(fields, MODEL_TYPES)
        experts, chosen = experts_from_hf(fields, 8, 2, usual["num_hidden_layers"])
        if usual["model_type"] == "granitemoe":
            fields.expect("shared_intermediate_size", 0)
        fields.expect("position_embedding_type", "rope")  # of transformers 4, whose other positions nobody publishes
        shared = fields.integer("shared_intermediate_size", 0, low=0)
        windowed = usual["model_type"] == "granitemoe_swa"
        usual |= windowed_fields(fields, usual, "_moe") if windowed else {"local_rope": usual["rope"]}
        config = Config(**usual, num_local_experts=experts, num_experts_per_tok=chosen, shared_intermediate_size=shared)
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        names: tuple[str, ...] = ("num_local_experts", "num_experts_per_tok")
        names += ("shared_intermediate_size",) if self.model_type != "granitemoe" else ()
        architecture = f"{_ARCHITECTURES[self.model_type]}ForCausalLM"
        return granite_to_hf(self, architecture, *names, **windowed_to_hf(self))


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, shared = config.hidden_size, config.initializer_range, config.shared_intermediate_size
    attention = usual_attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
    attention |= sinks_leaves(config)
    mlp = moe_leaves(D, config.num_local_experts, config.intermediate_size, std=std, shared=shared)
    return decoder_leaves(config, [layer_leaves(D, attention, mlp) for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with gate and up fused, and one tensor for all experts."""
    flat = flatten(spec(config))
    names: dict[str, Stored] = {path: decoder.decoder_name(path).replace(".sinks.weight", ".sinks") for path in flat}
    for index in range(config.num_hidden_layers):
        names |= expert_names(index, config.intermediate_size)
        names |= shared_names(index, f"layers.{index}.mlp.shared_expert", config.shared_intermediate_size or 1)
    if config.model_type == "granitemoe_swa":  # whose files have the names of transformers' modules
        for pattern, new in IN_MEMORY.items():
            names = {path: renamed(name, pattern, new) for path, name in names.items()}
    return {path: names[path] for path in flat}


freqs_cis = decoder.freqs_cis_by_window


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, share = config.rms_norm_eps, config.residual_multiplier
    mixed = attend(layer["attention"], rms_norm(x, layer["input_layernorm"], eps=eps), mask, freqs, config, ctx)
    x = ctx.tap("middle", x + ctx.tap("attention", mixed * share))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    route = functools.partial(top_k_softmax, k=config.num_experts_per_tok)
    return x + ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER) * share)


_GRANITE3: ConfigJson = {"model_type": "granitemoe", "intermediate_size": 512, "num_key_value_heads": 8}
_GRANITE3 |= {"vocab_size": 49155, "num_experts_per_tok": 8, "tie_word_embeddings": True, "embedding_multiplier": 12.0}
_GRANITE3 |= {"residual_multiplier": 0.22, "attention_multiplier": 0.015625, "logits_scaling": 6.0}
PRESETS: dict[str, ConfigJson] = {
    "granite-3.0-1b-a400m": _GRANITE3
    | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "num_local_experts": 32},
    "granite-3.0-3b-a800m": _GRANITE3
    | {"hidden_size": 1536, "num_hidden_layers": 32, "num_attention_heads": 24, "num_local_experts": 40},
}
