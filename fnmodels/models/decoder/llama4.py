"""Llama 4 Scout and Maverick, the text models (Meta, 2025): mixtures of experts with chunked attention.

Three of four layers have rotary embedding and attend within chunks of positions; every fourth one has no rotary
embedding, full attention, and queries scaled by the logarithm of their position (arXiv 2501.19399). Queries and keys
may be normalized after the rotation, without a weight. MoE layers (all, or every second one) multiply the experts'
input by the router's sigmoid and have a shared expert. The vision tower of a llama4 checkpoint is not read.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import Causal, Chunk
from fnmodels.models.common import decoder
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.spec import decoder_leaves, gated_mlp_leaves, layer_leaves, moe_leaves, usual_attention
from fnmodels.models.common.storage import Stored
from fnmodels.ops import gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.ops.moe.router import RouterDtypes, top_k_sigmoid
from fnmodels.ops.rotary import Rope, apply_rotary_interleaved, no_rotation, query_temperature, rotary_table
from fnmodels.tree import Tree

MODEL_TYPES = ("llama4", "llama4_text")
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
TRAITS = Traits(
    kinds=tuple(see + nope + moe for see in ("chunked", "full") for nope in ("", "_nope") for moe in ("_moe", "")),
    routed=True,
    router=ROUTER,
    unread={"vision": r"(vision_model|multi_modal_projector)\..*"},
)
# the settings of the vision tower and the image placeholder tokens
_VISION = ("vision_config", "image_token_index", "boi_token_index", "eoi_token_index")


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of one expert and of the shared expert.

    layer_kinds: "chunked" (attention within chunks) or "full", then "_nope" (no rotary embedding), then "_moe".
    """

    intermediate_size_mlp: int  # of dense layers
    num_local_experts: int
    num_experts_per_tok: int
    rope: Rope = Rope(500000.0)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = True
    # queries of NoPE layers are multiplied by 1 + attn_scale ln(1 + floor((position + 1) / floor_scale))
    attn_temperature_tuning: bool = True
    attn_scale: float = 0.1
    floor_scale: int = 8192
    attention_chunk_size: int = 8192
    model_type: str = field(default="llama4_text", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        mixture.check_experts(self.num_local_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name.

        For model type llama4 only `text_config` is used.
        """
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        if model_type == "llama4":
            fields = decoder.text_part(fields, "llama4_text", ignored=_VISION)
        usual = decoder.base_fields(fields, ("llama4_text",), theta=5e5, max_positions=131072, kv_heads=8, head_dim=128)
        experts, chosen = mixture.experts_from_hf(fields, 16, 1, usual["num_hidden_layers"])
        fields.expect("router_jitter_noise", 0.0, 0)
        fields.expect("for_llm_compressor", False)
        fields.expect("attn_temperature_tuning", True, False, 4)  # the first files have 4 for true
        config = Config(
            **usual | {"model_type": model_type},
            **fields.plain(
                intermediate_size_mlp=16384,
                rms_norm_eps=1e-5,
                attention_bias=False,
                use_qk_norm=True,
                attn_scale=0.1,
                floor_scale=8192,
                attention_chunk_size=8192,
            ),
            num_local_experts=experts,
            num_experts_per_tok=chosen,
            attn_temperature_tuning=bool(fields.take("attn_temperature_tuning", True)),
            layer_kinds=_layer_kinds(fields, usual["num_hidden_layers"]),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect; for model type llama4 with `text_config` but no vision tower."""
        names = ["intermediate_size_mlp", "rms_norm_eps", "attention_bias", "use_qk_norm", "attn_temperature_tuning"]
        names += ["attn_scale", "floor_scale", "attention_chunk_size", "hidden_act", "num_local_experts"]
        names += ["num_experts_per_tok"]
        chunked = [kind.attends == "chunked" for kind in parsed(self.layer_kinds)]
        own: ConfigJson = {"layer_types": decoder.layer_types(chunked, near="chunked_attention")}
        own["no_rope_layers"] = [int(kind.rotates) for kind in parsed(self.layer_kinds)]  # 1: rotary embedding
        own["moe_layers"] = [i for i, kind in enumerate(parsed(self.layer_kinds)) if kind.routed]
        text = replace(self, model_type="llama4_text")
        inner = decoder.decoder_to_hf(text, "Llama4ForCausalLM", *names, **own)
        if self.model_type == "llama4_text":
            return inner
        outer: ConfigJson = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}
        outer |= {"text_config": inner, "tie_word_embeddings": self.tie_word_embeddings}
        return decoder.expressible(self, outer)


def _layer_kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """The kind of each layer: attention, rotary embedding and experts, from lists or from their default rules."""
    rotates = decoder.rotating_layers(fields, fields.take("no_rope_layers", None) or None, layers)  # []: absent
    chunked = decoder.sliding_layers(fields, [bool(one) for one in rotates], near="chunked_attention")
    step = fields.integer("interleave_moe_layer_step", 1)
    named = fields.take("moe_layers", list(range(step - 1, layers, step)))
    sparse = mixture.numbers_of_layers(fields, "moe_layers", named, layers)
    return tuple(
        ("chunked" if near else "full") + ("" if rotate else "_nope") + ("_moe" if i in sparse else "")
        for i, (near, rotate) in enumerate(zip(chunked, rotates, strict=True))
    )


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, on = config.hidden_size, config.initializer_range, config.attention_bias
    attention = usual_attention(config, qkv_bias=on, o_bias=on)
    inner = config.intermediate_size
    sparse = moe_leaves(D, config.num_local_experts, inner, std=std, shared=inner)
    dense: Tree = gated_mlp_leaves(D, config.intermediate_size_mlp, std=std)
    mlps = [sparse if kind.routed else dense for kind in parsed(config.layer_kinds)]
    return decoder_leaves(config, [layer_leaves(D, attention, mlp) for mlp in mlps])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its slice of the tensor of all experts}."""
    D, inner = config.hidden_size, config.intermediate_size
    prefix = "language_model." if config.model_type == "llama4" else ""
    names: dict[str, Stored] = {
        path: prefix + name.replace(".mlp.", ".feed_forward.") for path, name in decoder.hf_names(config).items()
    }
    for i, kind in enumerate(parsed(config.layer_kinds)):
        if kind.routed:
            ours, theirs = f"layers.{i}.mlp.experts", f"{prefix}model.layers.{i}.feed_forward.experts"
            names |= mixture.transposed_experts(ours, theirs, D, inner, in_turn=False)
    return names


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}; positions and segment_ids [B, S]. Chunks are ranges of positions, independent of padding."""
    chunks = Causal() & Chunk(config.attention_chunk_size)
    rules = {kind: chunks if LayerKind.parse(kind).attends == "chunked" else Causal() for kind in config.layer_kinds}
    return masks_of(rules, positions, segment_ids, create=create)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, dict[str, Tensor]]:
    """{kind: {"table": fp32 [B, S, R/2, 2]}}; NoPE kinds have R = 0 and "temperature", fp32 [B, S]."""
    rotates = {"table": rotary_table(config.rope, config.head_dim, positions, length)}
    still = {"table": no_rotation(positions)}
    if config.attn_temperature_tuning:
        still["temperature"] = query_temperature(positions + 1, beta=config.attn_scale, period=config.floor_scale)
    return {k: rotates if LayerKind.parse(k).rotates else still for k in sorted(set(config.layer_kinds))}


@with_context
def block(
    layer: Tree, x: Tensor, mask: Any, freqs: dict[str, Tensor], /, *, config: Config, kind: str, ctx: Context
) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, eps = layer["attention"], config.rms_norm_eps
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = (apply_rotary_interleaved(t, freqs["table"]) for t in (q, k))
    if config.use_qk_norm and "nope" not in kind:
        q, k = rms_norm(q, None, eps=eps), rms_norm(k, None, eps=eps)
    if "temperature" in freqs:
        q = (q * freqs["temperature"][..., None, None]).to(q.dtype)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    if not LayerKind.parse(kind).routed:
        return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))
    route = functools.partial(top_k_sigmoid, k=config.num_experts_per_tok)
    fed = ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER, input_weighted=True)
    return x + ctx.tap("mlp", fed)
