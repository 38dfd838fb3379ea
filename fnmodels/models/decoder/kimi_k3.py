"""Kimi K3 (Moonshot, 2026, arXiv 2607.24653), the text model: attention over depth in place of one residual stream.

Each sublayer reads a mixture of the states that blocks of layers began with and of that of its own block
(`fnmodels.ops.streams.depth`); those of blocks travel from layer to layer beside x, by `Context.leave`. Layers are
Kimi Linear's, three of Kimi Delta Attention to one of latent attention without rotary embedding, with output gates of
full width and a bounded decay. Experts work on a narrower projection of the residual stream, whose norm is projected
back. Gates and values of every MLP and expert are capped ("SiTU").
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.models.common import decoder, mla
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.kimi import fields as kimi
from fnmodels.models.common.kimi.leaves import hf_names, leaves_of  # noqa: F401
from fnmodels.models.common.layers import delta
from fnmodels.models.common.spec import decoder_leaves
from fnmodels.ops import Rope, no_rotation, project_out, rms_norm, split_heads, upcast
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import acting_mlp, softcapped_swiglu
from fnmodels.ops.moe.router import RouterDtypes
from fnmodels.ops.streams.depth import mix_depth
from fnmodels.tree import Tree

MODEL_TYPES = ("kimi_k3",)
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("linear_moe", "full_moe", "linear", "full"),
    routed=True,
    router=ROUTER,
    unread={"vision": r"(vision_tower|mm_projector)\..*"},
)
_INNER = "kimi_linear"  # what `text_config` says
_LINEAR = kimi.LINEAR | {"gate_lower_bound": "linear_lower_bound"}
_OUTER = ("vision_config", "ignore_index", "image_placeholder", "media_placeholder_token_id")
_SIZES = {"routed_expert_hidden_size": "latent_size", "attn_res_block_size": "layers_per_block"}
_CAPS = {"activation_situ_beta": "gate_softcap", "activation_situ_linear_beta": "up_softcap"}
# What the published file says and other code can do without.
_FIXED = {"hidden_act": "situ", "mla_use_output_gate": True, "latent_moe_use_norm": True, "attention_bias": False}
_FIXED |= {"topk_method": "noaux_tc"}


@dataclass(frozen=True, kw_only=True)
class Config(mla.LatentMixtureConfig):
    """Sizes and switches. linear_lower_bound: of the logarithm of a delta layer's decay. latent_size: the width that
    experts read. layers_per_block: of the states that sublayers read. No layer rotates, and there are no MTP heads.
    """

    linear_num_heads: int
    linear_head_dim: int
    linear_conv_kernel_dim: int = 4
    linear_lower_bound: float = -5.0
    latent_size: int
    layers_per_block: int
    gate_softcap: float = 4.0
    up_softcap: float = 25.0
    rms_norm_eps: float = 1e-5
    # what the maths has no use for, or is the same in all files
    rope: Rope = field(default=Rope(), init=False, compare=False)
    num_nextn_predict_layers: int = field(default=0, init=False, compare=False)
    hidden_act: str = field(default="silu", init=False, compare=False)  # of the convolutions
    attention_bias: bool = field(default=False, init=False, compare=False)
    tie_word_embeddings: bool = field(default=False, init=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        decoder.check_sizes(self, "latent_size", "layers_per_block")

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name.

        Only `text_config` is used, or the fields beside it where there is none.
        """
        text = Fields(values)
        model_type = text.choice("model_type", MODEL_TYPES)
        if values.get("text_config") is not None:
            text = decoder.text_part(text, _INNER, ignored=_OUTER)
        fields = kimi.flat(renamed(text, kimi.ALIASES), _LINEAR, use_full_rank_gate=True)
        for name, value in _FIXED.items():
            fields.expect(name, value)
        fields = Fields({name: value for name, value in fields.values.items() if name not in _FIXED}, fields.where)
        fields.choice("model_type", (_INNER, *MODEL_TYPES))
        sizes = mla.latent_from_hf(
            fields, max_positions=1048576, kv_heads=96, q_rank=1536, nope_dim=128, rope_head=True
        )
        for name in ("rope_interleave", "attention_bias", "hidden_act", "tie_word_embeddings"):
            del sizes[name]
        fields.expect("tie_word_embeddings", False)
        kimi.expect_usual(fields)
        layers = sizes["num_hidden_layers"]
        experts = mixture.shared_from_hf(fields, layers, dense=1, scale=1.0)
        linear = [i % 4 != 3 and i != layers - 1 for i in range(layers)]
        experts["layer_kinds"] = kimi.layer_kinds(fields, linear, experts["layer_kinds"])
        own: dict[str, Any] = {ours: fields.integer(name, high=1 << 16) for name, ours in _SIZES.items()}
        own |= {ours: fields.number(name) for name, ours in _CAPS.items()}
        config = Config(
            **sizes | experts | own | {"rms_norm_eps": fields.number("rms_norm_eps", 1e-5)},
            linear_num_heads=fields.integer("linear_num_heads", 96, high=1 << 16),
            linear_head_dim=fields.integer("linear_head_dim", 128, high=1 << 16),
            linear_conv_kernel_dim=fields.integer("linear_conv_kernel_dim", 4, high=1 << 16),
            linear_lower_bound=fields.number("linear_lower_bound", above=-1e9, high=0.0),
            model_type=model_type,
            **fields.plain(n_group=1, topk_group=1, norm_topk_prob=True),
        )
        return decoder.finished(config, fields, ignored=("rope_theta", "rope_scaling", "rope_parameters"))

    def to_hf(self) -> ConfigJson:
        """A config.json under the published names, with `text_config` but no tower; without it for another head."""
        own: ConfigJson = {name: getattr(self, name) for name in mixture.GROUPED} | _FIXED
        own |= {name: getattr(self, ours) for name, ours in (_SIZES | _CAPS).items()}
        linear = kimi.linear_to_hf(self, _LINEAR) | {"use_full_rank_gate": True}
        own |= kimi.dense_to_hf(self) | {"linear_attn_config": linear}
        names = (name for name in mla.NAMES if name not in _FIXED)
        text = mla.under_aliases(decoder.decoder_to_hf(self, "KimiK3ForCausalLM", *names, **own))
        text["max_position_embeddings"] = text.pop("model_max_length")
        del text["rope_parameters"]
        if not decoder.is_lm(self):
            return text
        text |= {"architectures": ["KimiLinearForCausalLM"], "model_type": _INNER}
        outer: ConfigJson = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": self.model_type}
        return decoder.expressible(self, outer | {"tie_word_embeddings": False, "text_config": text})


def kinds(config: Config) -> tuple[str, ...]:
    """One per layer: "begins" a block of layers; "opens" and "folds", the first and the last; "joins", all others."""
    size, last = config.layers_per_block, config.num_hidden_layers - 1
    return tuple(
        kind + "_joins" * (i > 0) + "_begins" * (i % size == 0) + "_opens" * (i == 0) + "_folds" * (i == last)
        for i, kind in enumerate(config.layer_kinds)
    )


def left_shape(config: Config, index: int) -> tuple[int, int]:
    """(n, D): the states of blocks that the layer before `index` leaves."""
    return -(-index // config.layers_per_block), config.hidden_size


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    layers = enumerate(parsed(config.layer_kinds))
    return decoder_leaves(config, [leaves_of(config, kind, index) for index, kind in layers])


def attention_masks(config: Config, positions: Tensor, segment_ids: Tensor, **options: Any) -> dict[str, Any]:
    """{kind: mask}: causal; of linear layers `fnmodels.inputs.Segments`."""
    made = decoder.attention_masks(config, positions, segment_ids, **options)
    return {kind: made[plain] for kind, plain in zip(kinds(config), config.layer_kinds, strict=True)}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """Nothing rotates."""
    return dict.fromkeys(kinds(config), no_rotation(positions))


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D], the state of its block -> x. It reads and leaves those of other blocks."""
    words, eps = kind.split("_"), config.rms_norm_eps
    blocks = ctx.left() if "joins" in words else x.unsqueeze(-2)[..., :0, :]

    def read(name: str, blocks: Tensor, x: Tensor) -> Tensor:
        return mix_depth(upcast(layer[name]["proj"]) * upcast(layer[name]["norm"]), blocks, x, eps=eps)

    normed = rms_norm(read("attention_read", blocks, x), layer["input_layernorm"], eps=eps)
    attend = _delta_attention if LayerKind.parse(kind).ordered else _latent_attention
    mixed = attend(layer["attention"], normed, mask, freqs, config, ctx)
    attended = ctx.tap("attention", project_out(layer["attention"], mixed))
    begins = "begins" in words
    blocks = torch.cat((blocks, x.unsqueeze(-2)), -2) if begins else blocks
    middle = ctx.tap("middle", attended if begins else x + attended)
    normed = rms_norm(read("mlp_read", blocks, middle), layer["post_attention_layernorm"], eps=eps)
    x = middle + ctx.tap("mlp", _feed(layer["mlp"], normed, config, ctx))
    if "folds" in words:
        return read("fold", blocks, x)
    # a view, since remat does not allow a block to return what it was given
    ctx.leave(blocks.view_as(blocks))
    return x


def _delta_attention(weights: Tree, x: Tensor, mask: Any, freqs: Tensor, config: Config, ctx: Context) -> Tensor:
    """Kimi Delta Attention on the normed x [B, S, D]: gated heads [B, S, H, d]."""
    d = config.linear_head_dim
    f = linear(linear(x, weights["f_a_proj"]), weights["f_b_proj"])
    decay = delta.channel_decay(weights, f, d, config.linear_lower_bound)
    return delta.kimi_delta(weights, x, mask, decay, split_heads(linear(x, weights["z_proj"]), d), config, ctx)


def _latent_attention(weights: Tree, x: Tensor, mask: Any, freqs: Tensor, config: Config, ctx: Context) -> Tensor:
    """Latent attention on the normed x [B, S, D]: gated heads [B, S, N, Hv]."""
    widths = mla.latent_widths(config)
    scale = (widths.nope + widths.rope) ** -0.5
    mixed = ctx.attend_latent(weights, x, freqs, mask, widths=widths, rotate=_unrotated, scale=scale)
    return mixed * elementwise(torch.sigmoid, split_heads(linear(x, weights["gate_proj"]), widths.value))


def _unrotated(x: Tensor, freqs: Tensor) -> Tensor:
    return x


def _feed(mlp: Tree, x: Tensor, config: Config, ctx: Context) -> Tensor:
    act = functools.partial(softcapped_swiglu, gate_cap=config.gate_softcap, up_cap=config.up_softcap)
    if "router" not in mlp:
        return acting_mlp(mlp, x, act=act, tap=ctx.tap)
    route = mixture.grouped_route(mlp, config)
    return ctx.moe(mlp, x, route, act=act, dtypes=ROUTER, latent_eps=config.rms_norm_eps)


_FULL = [*range(4, 93, 4), 93]
_DELTA = {
    "full_attn_layers": _FULL,
    "kda_layers": [i for i in range(1, 93) if i not in _FULL],
    "gate_lower_bound": -5.0,
}
_DELTA |= {"head_dim": 128, "num_heads": 96, "short_conv_kernel_size": 4, "use_full_rank_gate": True}
_TEXT: ConfigJson = {"model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 93}
_TEXT |= {"num_attention_heads": 96, "kv_lora_rank": 512, "v_head_dim": 128, "linear_attn_config": _DELTA}
_TEXT |= {"intermediate_size": 33792, "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584}
_TEXT |= {"num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "attn_res_block_size": 12}
_TEXT |= {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "hidden_act": "situ"}
PRESETS: dict[str, ConfigJson] = {"kimi-k3": {"model_type": "kimi_k3", "text_config": _TEXT}}
