"""MiMo-V2-Flash (Xiaomi, 309B-A15B): sliding-window layers with sinks, and values narrower than queries and keys.

A pre-norm decoder whose sliding layers have twice the key/value heads of full ones, sink logits and a rotary table of
their own; the first part of each head rotates. Values are scaled. Experts are chosen by sigmoid scores and a selection
bias without a gradient, without a shared expert. MTP heads are sliding layers with an MLP: `fnmodels.mtp`.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields, merged
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.rope_config import rope_to_hf, ropes_by_layer_type
from fnmodels.models.common.spec import Leaf, Normal, bias, decoder_leaves, layer_leaves, weight
from fnmodels.models.common.storage import Stored, renamed
from fnmodels.ops import ACTIVATIONS, Rope, apply_rotary, project_out, rms_norm, split_heads
from fnmodels.ops.linear import linears
from fnmodels.ops.moe.router import RouterDtypes
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("mimo_v2_flash",)
ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("full_moe", "full", "sliding_moe", "sliding"),
    routed=True,
    router=ROUTER,
    sinks=True,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    mtp_reads="shared",
    in_memory={r"\.attention_sink_bias$": ".sinks"},
)

_HEAD = ("sliding",)  # the layer that is an MTP head's block
_HEADS = 3  # of the published files, whose config.json does not count them (arXiv 2601.02780)
_FULL, _NEAR, _PARTIAL = "full_attention", "sliding_attention", 0.334


@dataclass(frozen=True, kw_only=True)
class Config(mixture.GroupedConfig):
    """Sizes and switches; num_key_value_heads is that of full layers."""

    n_shared_experts: int = field(default=0, init=False, compare=False)
    v_head_dim: int = 128
    attention_value_scale: float = 0.707
    local_rope: Rope = Rope(partial=_PARTIAL)  # noqa: RUF009 - of sliding layers
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False  # of q, k and v
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        mtp.check_kinds(self, _HEAD)

    @property
    def sliding_key_value_heads(self) -> int:
        """Key and value heads of sliding layers."""
        return 2 * self.num_key_value_heads

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = _published(Fields(values))
        sizes = decoder.decoder_sizes(fields, max_positions=131072, tied=False, kv_heads=4, head_dim=192)
        layers = sizes["num_hidden_layers"]
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        partials = {_FULL: _PARTIAL, _NEAR: _PARTIAL}
        ropes = ropes_by_layer_type(fields, {_FULL: 5e6, _NEAR: 1e4}, scaled=_FULL, partials=partials, **where)
        slides = decoder.sliding_layers(fields, [bool(i and (i + 1) % 6) for i in range(layers)])
        routed = mixture.routed_layers(fields, layers)
        experts, chosen = mixture.experts_from_hf(fields, 256, 8, layers)
        groups = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
        fields.expect("scoring_func", "sigmoid")
        fields.expect("topk_method", "noaux_tc")
        fields.expect("n_shared_experts", 0)
        config = Config(
            **sizes,
            n_routed_experts=experts,
            num_experts_per_tok=chosen,
            **fields.plain(**groups, moe_intermediate_size=2048, v_head_dim=128, attention_value_scale=0.707),
            **fields.plain(rms_norm_eps=1e-5, attention_bias=False),
            rope=ropes[_FULL],
            local_rope=ropes[_NEAR],
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            sliding_window=fields.integer("sliding_window", 129),
            num_nextn_predict_layers=fields.integer(
                "num_nextn_predict_layers", _HEADS if any(slides) else 0, low=0, high=mixture.HEADS_LIMIT
            ),
            layer_kinds=tuple(
                ("sliding" if near else "full") + "_moe" * moe for near, moe in zip(slides, routed, strict=True)
            ),
            model_type=fields.choice("model_type", MODEL_TYPES),
        )
        return decoder.finished(config, fields, ("attention_chunk_size",))

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect of transformers."""
        found = parsed(self.layer_kinds)
        own = {name: getattr(self, name) for name in mixture.GROUPED if name != "n_shared_experts"}
        own |= {
            "layer_types": decoder.layer_types([k.slides for k in found]),
            "mlp_layer_types": mixture.mlp_types(found),
        }
        ropes = {_FULL: self.rope, _NEAR: self.local_rope}
        own["rope_parameters"] = {n: rope_to_hf(r) | {"partial_rotary_factor": r.partial} for n, r in ropes.items()}
        names = (
            "v_head_dim",
            "attention_value_scale",
            "rms_norm_eps",
            "attention_bias",
            "hidden_act",
            "sliding_window",
            "num_nextn_predict_layers",
        )
        return decoder.decoder_to_hf(self, "MiMoV2FlashForCausalLM", *names, **own)


def _published(fields: Fields) -> Fields:
    """The fields of the publisher's file under the names of transformers, which ignores most of them.

    `sliding_window_size` w is a window of w + 1 keys: the query's own token and w before it.
    """
    values, layers = dict(fields.values), fields.integer("num_hidden_layers")
    for name, new, words in (
        ("hybrid_layer_pattern", "layer_types", (_FULL, _NEAR)),
        ("moe_layer_freq", "mlp_layer_types", ("dense", "sparse")),
    ):
        listed = values.pop(name, None)
        if listed is not None:
            if not isinstance(listed, list) or len(listed) != layers or any(one not in (0, 1) for one in listed):
                raise ConfigError(f"{fields.where}: {name!r} must be a list of {layers} zeros and ones.")
            values[new] = [words[one] for one in listed]
    size = values.pop("sliding_window_size", None)
    if size is not None:
        values["sliding_window"] = fields.integer("sliding_window_size") + 1
    if values.get("rope_theta") is not None:
        theta, near, partial = values.pop("rope_theta"), values.pop("swa_rope_theta", 1e4), values.pop(_SHARE, _PARTIAL)
        thetas = {_FULL: theta, _NEAR: near}
        values["rope_parameters"] = {name: {"rope_theta": theta, _SHARE: partial} for name, theta in thetas.items()}
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads", 4)
    inner = merged(
        Fields(values, fields.where), [("layernorm_epsilon", "rms_norm_eps", values.pop("layernorm_epsilon", None))]
    )
    for name, value in (
        ("swa_num_attention_heads", heads),
        ("swa_num_key_value_heads", 2 * kv_heads),
        ("swa_head_dim", values.get("head_dim", 192)),
        ("swa_v_head_dim", values.get("v_head_dim", 128)),
        ("add_full_attention_sink_bias", False),
        ("add_swa_attention_sink_bias", True),
    ):
        inner.expect(name, value)
    kept = {name: value for name, value in inner.values.items() if not name.startswith(("swa_", "add_"))}
    return Fields(kept, fields.where)


_SHARE = "partial_rotary_factor"


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, H, Hv = config.hidden_size, config.initializer_range, config.head_dim, config.v_head_dim
    heads = config.num_attention_heads

    def layer(kind: LayerKind) -> Tree:
        kv_heads = config.sliding_key_value_heads if kind.slides else config.num_key_value_heads
        rows = {"q": (heads * H, "heads", H), "k": (kv_heads * H, "kv_heads", H), "v": (kv_heads * Hv, "kv_heads", Hv)}
        attention = {f"{n}_proj": weight((r, D), (axis, "embed"), std, unit=u) for n, (r, axis, u) in rows.items()}
        attention["o_proj"] = weight((D, heads * Hv), ("embed", "heads"), std, unit=Hv)
        if config.attention_bias:
            attention |= {f"{n}_bias": bias(r, axis, unit=u) for n, (r, axis, u) in rows.items()}
        if kind.slides:
            attention["sinks"] = Leaf((heads,), attention["q_proj"].dtype, ("heads",), Normal(std), decay=False)
        mlp = mixture.grouped_leaves(config, kind, selection_bias=True, wide_router=True)
        return layer_leaves(D, attention, mlp)

    (head,) = parsed(_HEAD)
    return decoder_leaves(config, [layer(kind) for kind in parsed(config.layer_kinds)]) | mtp.heads(config, layer(head))


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is an MTP head's block."""
    return _HEAD


def leftovers(config: Config) -> tuple[str, ...]:
    """Patterns of the tensors of MTP heads that the config does not count."""
    return () if config.num_nextn_predict_layers else (r"model\.mtp\..*",)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    names = mixture.grouped_names(config, flatten(spec(config)))
    sinks = {path: f"model.{path.replace('.attention.sinks', '.self_attn.attention_sink_bias')}" for path in names}
    names = {path: sinks[path] if path.endswith(".sinks") else name for path, name in names.items()}
    if not config.num_nextn_predict_layers:
        return names
    # vLLM, vllm/model_executor/models/mimo_v2_mtp.py at 037951aa733b: these names, and the maths. There and in SGLang,
    # python/sglang/srt/models/mimo_v2_flash_nextn.py at 951c765957f1, every head reads the states of the model.
    heads = mtp.names_of(config, hf_names(mtp.blocks(config)[0]), "model.mtp.layers.{}.")
    norms = {
        path: renamed(name, r"\.post_attention_layernorm\.", ".pre_mlp_layernorm.") for path, name in heads.items()
    }
    return names | norms


freqs_cis = decoder.freqs_cis_by_window


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, H = layer["attention"], config.head_dim
    q, k, v = linears(rms_norm(x, layer["input_layernorm"], eps=config.rms_norm_eps), weights, "qkv")
    q, k = apply_rotary(split_heads(q, H), freqs), apply_rotary(split_heads(k, H), freqs)
    v = split_heads(v, config.v_head_dim) * config.attention_value_scale
    attended = project_out(weights, ctx.attend(q, k, v, mask, scale=H**-0.5, sinks=weights.get("sinks")))
    route = mixture.grouped_route(layer["mlp"], config)
    return mixture.add_feed(layer, x, attended, config, ctx, route=route, dtypes=ROUTER)


PRESETS: dict[str, ConfigJson] = {
    "mimo-v2-flash": {"model_type": "mimo_v2_flash", "vocab_size": 152576, "hidden_size": 4096}
    | {"intermediate_size": 16384, "num_hidden_layers": 48, "num_attention_heads": 64, "sliding_window_size": 128}
}
