"""Qwen3-Next and the text models of Qwen3.5: three layers of Gated DeltaNet (arXiv 2412.06464) to one of attention.

A linear layer has short convolutions before the delta rule and a gated norm after it. A full layer has gated attention,
per-head query and key norms, and rotates a quarter of each head. Qwen3-Next and the mixtures of Qwen3.5 have experts
with a gated shared expert. Files may have an MTP head, whose block is a full layer: `fnmodels.mtp`.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.decoder import unembed_zero_centered as unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.layers import delta, gated_attention
from fnmodels.models.common.rope_config import rope_to_hf, split_sections
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, moe_leaves, usual_mlp, weight
from fnmodels.models.common.storage import Stored, renamed
from fnmodels.ops.mlp import gated_mlp
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.ops.norm import rms_norm_zero_centered
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
# Defaults of absent fields: key/value heads, experts, top-k.
_DEFAULTS = {"qwen3_next": (2, 512, 10), "qwen3_5_text": (4, 0, 0), "qwen3_5_moe_text": (2, 256, 8)}
# Fields of the other towers of qwen3_5 and qwen3_5_moe, without effect on text.
_VISION = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_ARCHITECTURES = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(
    kinds=("linear_moe", "full_moe", "linear", "full"),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    unread={"vision": r"model\.visual\..*"},
)

PRESETS = {
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000,
    }
}


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of dense layers. Defaults are those of Qwen3-Next."""

    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    num_experts: int = 0  # 0: no layer has experts
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # of one expert
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mrope_section: tuple[int, ...] = ()  # rotary frequencies of time, height and width, which are one for text
    num_nextn_predict_layers: int = 0  # MTP heads, params["mtp"], which `forward` does not use: 0 or 1
    model_type: str = field(default="qwen3_next", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(kind.routed for kind in parsed(self.layer_kinds)):
            mixture.check_experts(self.num_experts, self.num_experts_per_tok)
        delta.check_heads(self)
        if self.num_nextn_predict_layers not in (0, 1) or (
            self.num_nextn_predict_layers and _is_linear(self.layer_kinds[-1])
        ):
            raise ConfigError(
                f"num_nextn_predict_layers is {self.num_nextn_predict_layers}; it must be 0, or 1 where the last layer "
                "has full attention, as the block of the MTP head does."
            )

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        text_type = model_type if model_type in _DEFAULTS else f"{model_type}_text"
        if text_type != model_type:
            fields = decoder.text_part(fields, text_type, ignored=_VISION)
        kv_heads, experts, chosen = _DEFAULTS[text_type]
        fields, sections, _ = split_sections(fields) if text_type != "qwen3_next" else (fields, (), True)
        if text_type == "qwen3_5_moe_text":  # no layer is dense
            fields = Fields({"intermediate_size": 1, **fields.values}, fields.where)
        usual = decoder.base_fields(
            fields, (text_type,), theta=1e4, partial=0.25, max_positions=32768, kv_heads=kv_heads, head_dim=256
        )
        layers = usual["num_hidden_layers"]
        if experts:
            experts, chosen = mixture.experts_from_hf(fields, experts, chosen, layers)
        sparse = [experts > 0] * layers
        if text_type == "qwen3_next":
            sparse = mixture.sparse_layers(fields, layers)
        else:  # of Qwen3.5 all layers are of one kind
            fields.expect("mlp_only_layers", [])
            fields.expect("decoder_sparse_step", 1)
            fields.expect("norm_topk_prob", True)
            fields.expect("output_gate_type", "swish", "silu")
        wide = ("moe_intermediate_size", "shared_expert_intermediate_size") if experts else ()
        fields.expect("use_sliding_window", False)
        fields.expect("attn_output_gate", True)
        fields.expect("mamba_ssm_dtype", "float32")
        sizes = delta.sizes_from_hf(fields, 16, 32, 128, 128, 4)
        sizes |= {name: fields.integer(name, 512) for name in wide}
        linear = _linear_layers(fields, layers)
        fields.expect("mtp_use_dedicated_embeddings", False)
        config = Config(
            **usual | {"model_type": model_type},
            **sizes,
            num_experts=experts,
            num_experts_per_tok=chosen,
            norm_topk_prob=fields.boolean("norm_topk_prob", True) if text_type == "qwen3_next" else True,
            **fields.plain(rms_norm_eps=1e-6, attention_bias=False),
            mrope_section=sections,
            layer_kinds=tuple(
                ("linear" if near else "full") + ("_moe" if e else "") for near, e in zip(linear, sparse, strict=True)
            ),
            # files of Qwen3-Next have the head and no field that says so
            num_nextn_predict_layers=fields.integer("mtp_num_hidden_layers", 0 if linear[-1] else 1, low=0),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect; for model types with `text_config`, without a vision tower.

        Raises ConfigError where `model_type` has no word for this model.
        """
        if self.model_type not in _DEFAULTS:
            text = replace(self, model_type=f"{self.model_type}_text")
            object.__setattr__(text, "extra", self.extra)
            outer: ConfigJson = {"architectures": [_ARCHITECTURES[self.model_type]], "model_type": self.model_type}
            outer |= {"tie_word_embeddings": self.tie_word_embeddings, "text_config": text.to_hf()}
            return decoder.expressible(self, outer)
        names = ["rms_norm_eps", "hidden_act", "attention_bias", *delta.SIZES]
        if self.model_type != "qwen3_5_text":
            names += ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"]
        linear_ones = [kind.ordered for kind in parsed(self.layer_kinds)]
        own: ConfigJson = {"layer_types": decoder.layer_types(linear_ones, "linear_attention")}
        own["mtp_num_hidden_layers"] = self.num_nextn_predict_layers
        if self.model_type == "qwen3_next":
            names.append("norm_topk_prob")
            own |= {"mlp_only_layers": [i for i, kind in enumerate(parsed(self.layer_kinds)) if not kind.routed]}
            own |= {"decoder_sparse_step": 1}
        elif self.mrope_section:
            sections = {"mrope_section": list(self.mrope_section), "mrope_interleaved": True}
            own["rope_parameters"] = rope_to_hf(self.rope) | sections
        return decoder.decoder_to_hf(self, _ARCHITECTURES[self.model_type], *names, **own)


def _linear_layers(fields: Fields, layers: int) -> list[bool]:
    """Whether each layer is linear: from `layer_types`, or all but every `full_attention_interval`th."""
    every = fields.integer("full_attention_interval", 4)
    return decoder.sliding_layers(fields, [(i + 1) % every != 0 for i in range(layers)], "linear_attention")


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]; norms of the residual stream and heads start at 0, and 1 is added to them."""
    D, std = config.hidden_size, config.initializer_range
    shared = config.shared_expert_intermediate_size

    def mlp(kind: str) -> Tree:
        if not LayerKind.parse(kind).routed:
            return usual_mlp(config)
        leaves = moe_leaves(D, config.num_experts, config.moe_intermediate_size, std=std, shared=shared)
        return leaves | {"shared_expert_gate": weight((1, D), ("one", "embed"), std)}

    def layer(kind: str) -> Tree:
        attention = delta.gated_delta_leaves(config) if _is_linear(kind) else gated_attention.leaves(config)
        return layer_leaves(D, attention, mlp(kind), norm_value=0.0)

    layers = [layer(kind) for kind in config.layer_kinds]
    return decoder_leaves(config, layers, norm_value=0.0) | mtp.heads(config, layers[-1], norm_value=0.0)


def _is_linear(kind: str) -> bool:
    return LayerKind.parse(kind).ordered


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert; slices of fused projections."""
    flat = {path: leaf for path, leaf in flatten(spec(config)).items() if not path.startswith("mtp.")}
    names: dict[str, Stored] = {path: mixture.moe_name(path, config.num_experts or 1) for path in flat}
    model = "model" if config.model_type in _DEFAULTS else "model.language_model"
    if model != "model":
        names = {path: renamed(name, r"^model\.", f"{model}.") for path, name in names.items()}
    for index, kind in enumerate(config.layer_kinds):
        where = f"layers.{index}.attention"
        own = {path.rpartition(".")[2]: path for path in flat if path.startswith(f"{where}.")}
        if _is_linear(kind):
            first = config.model_type == "qwen3_next"  # whose rows are those of one key head after the other
            how = (("qkvz", "ba"), config.linear_num_key_heads) if first else (("qkv", "z", "b", "a"), 1)
            names |= delta.gated_delta_names(f"{model}.layers.{index}.linear_attn", own, flat, *how)
        else:
            names |= gated_attention.names(config, f"{model}.layers.{index}.self_attn", own)
    return names | mtp.names_apart(names, len(config.layer_kinds)) if config.num_nextn_predict_layers else names


stream_norm = rms_norm_zero_centered


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps = config.rms_norm_eps
    normed = rms_norm_zero_centered(x, layer["input_layernorm"], eps=eps)
    if _is_linear(kind):
        mixed = delta.gated_delta_net(layer["attention"], normed, mask, config, ctx, eps=eps)
    else:
        mixed = gated_attention.attend(layer["attention"], normed, mask, freqs, config, ctx)
    x = ctx.tap("middle", x + ctx.tap("attention", mixed))
    normed = rms_norm_zero_centered(x, layer["post_attention_layernorm"], eps=eps)
    if not LayerKind.parse(kind).routed:
        return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))
    route = functools.partial(softmax_top_k, k=config.num_experts_per_tok, renormalize=config.norm_topk_prob)
    return x + ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER))
