"""FlexOlmo (Ai2, arXiv 2507.07024): OLMo 2's layer with a mixture of experts, each trained on data of its own."""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.layers.post_norm import post_norm_layer, post_norm_leaves
from fnmodels.models.common.moe import check_experts, experts_from_hf, moe_name
from fnmodels.models.common.spec import decoder_leaves, moe_leaves
from fnmodels.models.common.storage import Stored
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("flex_olmo",)
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(kinds=("full_moe",), routed=True, router=ROUTER)


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of one expert."""

    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = False
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_position_embeddings: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=5e5, max_positions=4096)
        experts, chosen = experts_from_hf(fields, 7, 5, usual["num_hidden_layers"])
        switches = fields.plain(rms_norm_eps=1e-6, attention_bias=False, norm_topk_prob=False)
        return decoder.finished(Config(**usual, **switches, num_experts=experts, num_experts_per_tok=chosen), fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("rms_norm_eps", "attention_bias", "norm_topk_prob", "hidden_act", "num_experts", "num_experts_per_tok")
        return decoder.decoder_to_hf(self, "FlexOlmoForCausalLM", *names)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    std = config.initializer_range
    mlp = moe_leaves(config.hidden_size, config.num_experts, config.intermediate_size, std=std)
    return decoder_leaves(config, [post_norm_leaves(config, mlp) for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    return {path: moe_name(path, config.num_experts) for path in flatten(spec(config))}


unembed = decoder.unembed_fp32_weight


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    route = functools.partial(softmax_top_k, k=config.num_experts_per_tok, renormalize=config.norm_topk_prob)
    experts = functools.partial(ctx.moe, layer["mlp"], route=route, act=config.hidden_act, dtypes=ROUTER)
    return post_norm_layer(layer, x, mask, freqs, config, ctx, experts)


PRESETS: dict[str, ConfigJson] = {
    "flex-olmo-7x7b": {"model_type": "flex_olmo", "vocab_size": 100352, "hidden_size": 4096}
    | {"intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
}
