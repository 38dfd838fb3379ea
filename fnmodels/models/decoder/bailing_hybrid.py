"""Ling 3 (inclusionAI): five layers of Kimi Delta Attention to one of latent attention, and a mixture of experts.

Both are those of `kimi_linear.py` with other projections: the decay and the output gate of a delta layer come from the
residual stream without a narrow width, the decay is bounded, and latent attention rotates and has a gate for each head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.order import Segments
from fnmodels.models.common import decoder, mla, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.layers import delta
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import (
    Leaf,
    decoder_leaves,
    latent_attention_leaves,
    layer_leaves,
    weight,
)
from fnmodels.models.common.storage import Stored
from fnmodels.ops import apply_rotary_interleaved, latent_scale, project_out, rms_norm, split_heads, upcast
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.moe.router import RouterDtypes
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("bailing_hybrid",)
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("linear_moe", "full_moe", "linear", "full"),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    in_memory={
        r"^model\.word_embeddings\.": "model.embed_tokens.",
        r"\.attention\.": ".self_attn.",
        r"\.self_attn\.dense\.": ".self_attn.o_proj.",
        r"\.self_attn\.(f_proj\.|dt_bias|A_log)": r".self_attn.forget_gate.\1",
        r"\.gate\.expert_bias$": ".gate.e_score_correction_bias",
    },
)
_HEAD = ("full_moe",)  # the layer that is an MTP head's block
_DEFAULTS: dict[str, Any] = {"vocab_size": 157184, "hidden_size": 2560, "intermediate_size": 6144}
_DEFAULTS |= {"num_hidden_layers": 42, "num_attention_heads": 32, "moe_intermediate_size": 768}
_DEFAULTS |= {"n_routed_experts": 512, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8, "topk_group": 4}
_DEFAULTS |= {"kv_lora_rank": 512, "v_head_dim": 128, "num_nextn_predict_layers": 1}


@dataclass(frozen=True, kw_only=True)
class Config(mla.LatentMixtureConfig):
    """Sizes and switches. linear_head_dim: of delta layers, `head_dim` in files.
    kda_lower_bound: of the logarithm of a bounded decay; None: it has no bound.
    """

    linear_head_dim: int
    linear_conv_kernel_dim: int = 4
    kda_lower_bound: float | None = -5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        mtp.check_kinds(self, _HEAD)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = renamed(Fields(values), mla.ALIASES | {"num_local_experts": "n_routed_experts"})
        fields = renamed(fields, {"num_mtp_layers": "num_nextn_predict_layers"})
        # transformers saves the rotary width as head_dim, and that of delta layers beside it
        width = Fields(fields.values, fields.where).integer("head_dim", 128, high=1 << 16)
        rest = {name: value for name, value in fields.values.items() if name != "head_dim"}
        if rest.get("rope_parameters"):  # transformers saves its default of rope_theta beside them
            rest.pop("rope_theta", None)
        fields = Fields(_DEFAULTS | rest, fields.where)
        fields.choice("model_type", MODEL_TYPES)
        sizes = mla.latent_from_hf(fields, max_positions=262144, kv_heads=32, q_rank=0, nope_dim=128, rope_head=True)
        fields.expect("tie_word_embeddings", False)  # transformers has a head of its own in any case
        fields.expect("rope_interleave", True)
        del sizes["rope_interleave"]
        layers, positions = sizes["num_hidden_layers"], sizes["max_position_embeddings"]
        experts = mixture.grouped_from_hf(fields, layers, dense=2, scale=2.5)
        group = fields.integer("layer_group_size", 6)
        linear = decoder.sliding_layers(fields, [(i + 1) % group != 0 for i in range(layers)], "linear_attention")
        experts["layer_kinds"] = tuple(
            ("linear" if near else "full") + ("_moe" if routed else "")
            for near, routed in zip(linear, mixture.routed_layers(fields, layers, 2), strict=True)
        )
        if all(linear) and "num_nextn_predict_layers" not in rest:
            experts["num_nextn_predict_layers"] = 0  # whose block is one of attention
        fields.expect("linear_num_heads", sizes["num_attention_heads"])
        kernel = fields.integer("short_conv_kernel_size", 4, high=1 << 16)
        fields.expect("linear_conv_kernel_dim", kernel)
        bound = fields.number("kda_lower_bound", -5.0, above=-1e9, high=0.0)
        config = Config(
            **sizes | experts,
            rope=rope_from_hf(fields, head_dim=sizes["qk_rope_head_dim"], max_positions=positions, theta=6e6),
            linear_head_dim=fields.integer("linear_head_dim", width, high=1 << 16),
            linear_conv_kernel_dim=kernel,
            kda_lower_bound=bound if fields.boolean("kda_safe_gate", True) else None,
        )
        return decoder.finished(config, fields, ignored=("mtp_loss_scaling_factor",))

    def to_hf(self) -> ConfigJson:
        """A config.json under the published names."""
        layers = parsed(self.layer_kinds)
        own: ConfigJson = {name: getattr(self, name) for name in mixture.GROUPED}
        own |= {"head_dim": self.linear_head_dim, "num_nextn_predict_layers": self.num_nextn_predict_layers}
        own["rope_parameters"] = rope_to_hf(self.rope)
        own["layer_types"] = decoder.layer_types([kind.ordered for kind in layers], "linear_attention")
        own |= {"mlp_layer_types": mixture.mlp_types(layers), "short_conv_kernel_size": self.linear_conv_kernel_dim}
        own["kda_safe_gate"] = self.kda_lower_bound is not None
        if self.kda_lower_bound is not None:
            own["kda_lower_bound"] = self.kda_lower_bound
        return mla.under_aliases(decoder.decoder_to_hf(self, "BailingHybridForCausalLM", *mla.NAMES, **own))


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, N, std = config.hidden_size, config.num_attention_heads, config.initializer_range
    gate = {"gate_proj": weight((N, D), ("heads", "embed"), std)}

    def layer(kind: LayerKind) -> Tree:
        attention = _delta_leaves(config) if kind.ordered else latent_attention_leaves(config) | gate
        return layer_leaves(D, attention, mixture.grouped_leaves(config, kind, selection_bias=True))

    (head,) = parsed(_HEAD)
    return decoder_leaves(config, [layer(kind) for kind in parsed(config.layer_kinds)]) | mtp.heads(config, layer(head))


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is an MTP head's block."""
    return _HEAD


def _delta_leaves(config: Config) -> dict[str, Leaf]:
    """Projections to q, k, v, decay f, output gate z and strength b of the heads."""
    D, std, heads, d = config.hidden_size, config.initializer_range, config.num_attention_heads, config.linear_head_dim
    leaves = delta.conv_leaves(
        D, config.linear_conv_kernel_dim, dict.fromkeys("qkvfz", (heads, d)) | {"b": (heads, 1)}, std
    )
    return leaves | delta.channel_decay_leaves(D, heads, d, std)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    names = mla.latent_names(mixture.grouped_names(config, flatten(spec(config))))
    for index, kind in enumerate(parsed(config.layer_kinds)):
        at = f"layers.{index}.attention"
        if kind.ordered:
            names |= delta.separate_names(at, f"model.layers.{index}.self_attn", _delta_leaves(config))
        else:
            names[f"{at}.gate_proj"] = f"model.{at}.g_proj.weight"
    for path, name in names.items():
        if isinstance(name, str):
            name = name.replace(".self_attn.o_proj.", ".attention.dense.").replace(".self_attn.", ".attention.")
            names[path] = name.replace(".gate.e_score_correction_bias", ".gate.expert_bias")
    names |= {"embed_tokens": "model.word_embeddings.weight"}
    if not config.num_nextn_predict_layers:
        return names
    # SGLang, python/sglang/srt/models/bailing_moe_nextn.py at d1575d178d74: these names, and the maths
    heads = hf_names(mtp.blocks(config)[0])
    return names | mtp.names_of(config, heads, "model.layers.{}.", first=config.num_hidden_layers)


def leftovers(config: Config) -> tuple[str, ...]:
    """Patterns of MTP layers that the config does not count, which stand after the last one in files."""
    if config.num_nextn_predict_layers:
        return ()
    first = config.num_hidden_layers
    return (rf"model\.layers\.({'|'.join(map(str, range(first, first + 8)))})\..*",)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, normed = layer["attention"], rms_norm(x, layer["input_layernorm"], eps=config.rms_norm_eps)
    if LayerKind.parse(kind).ordered:
        mixed = bounded_delta_attention(weights, normed, mask, config, ctx)
    else:
        widths = mla.latent_widths(config)
        scale = latent_scale(config.rope, widths.nope + widths.rope)
        mixed = ctx.attend_latent(
            weights, normed, freqs, mask, widths=widths, rotate=apply_rotary_interleaved, scale=scale
        )
        gate = elementwise(torch.sigmoid, upcast(linear(normed, weights["gate_proj"]))).to(x.dtype)
        mixed = mixed * gate[..., None]
    route = mixture.grouped_route(layer["mlp"], config)
    return mixture.add_feed(layer, x, project_out(weights, mixed), config, ctx, route=route, dtypes=ROUTER)


def bounded_delta_attention(weights: Tree, x: Tensor, mask: Segments, config: Config, ctx: Context) -> Tensor:
    """The heads [B, S, H, d] of x [B, S, D], each times the sigmoid of its gate."""
    d = config.linear_head_dim
    g = delta.channel_decay(weights, linear(x, weights["f_proj"]), d, config.kda_lower_bound)
    return delta.kimi_delta(weights, x, mask, g, split_heads(linear(x, weights["z_proj"]), d), config, ctx)


PRESETS = {"ling-3.0-flash": {"model_type": "bailing_hybrid"}}
