"""K-EXAONE (LG, 236B-A23B) and Hy3 (Tencent): pre-norm decoders with per-head query and key norms, and experts.

Experts are chosen by sigmoid scores and a selection bias without a gradient, beside a shared expert, as in DeepSeek V3.
K-EXAONE has sliding-window layers; where it has any, full layers have no rotary embedding. Both have MTP heads:
`fnmodels.mtp`; that of K-EXAONE is a full layer with an MLP.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.config_json import renamed as renamed_fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.spec import decoder_leaves, head_norms, layer_leaves, usual_attention
from fnmodels.models.common.storage import Stored, renamed
from fnmodels.ops import rms_norm
from fnmodels.ops.moe.router import RouterDtypes
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("exaone_moe", "hy_v3")
ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("full_moe", "full", "sliding_moe", "sliding", "full_nope_moe", "full_nope"),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    classes={"exaone_moe": "ExaoneMoEForCausalLM"},
    in_memory={
        r"\.mlp\.e_score_correction_bias$": ".mlp.gate.e_score_correction_bias",
        r"\.mlp\.expert_bias$": ".mlp.e_score_correction_bias",  # from here on Hy3's
        r"\.router\.gate\.": ".gate.",
        r"\.shared_mlp\.": ".shared_experts.",
    },
)

_NAMES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
_HY = _NAMES | {"router_scaling_factor": "routed_scaling_factor"}


@dataclass(frozen=True, kw_only=True)
class Config(mixture.GroupedConfig):
    """Sizes and switches."""

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        mtp.check_kinds(self, mtp_kinds(self), most=1)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        hy = Fields(values).choice("model_type", MODEL_TYPES) == "hy_v3"
        fields = renamed_fields(Fields(({"initializer_range": 0.006} if hy else {}) | values), _HY if hy else _NAMES)
        sizes: dict[str, Any] = {"max_positions": 2048, "kv_heads": 32, "theta": 1e4}
        if hy:
            sizes = {"max_positions": 131072, "kv_heads": 8, "head_dim": 128, "theta": 11158840.0}
        usual = decoder.base_fields(fields, MODEL_TYPES, **sizes)
        layers = usual["num_hidden_layers"]
        usual |= mixture.shared_from_hf(fields, layers, dense=1, scale=2.826 if hy else 2.5)
        routed = mixture.routed_layers(fields, layers)
        window, attends = (None, ["full"] * layers) if hy else _attention(fields, layers)
        # the published files of K-EXAONE have one, whether their config.json counts it or not
        absent = int(not hy and "full_nope" in attends)
        heads = fields.integer("num_nextn_predict_layers", absent, low=0, high=mixture.HEADS_LIMIT if hy else 1)
        config = Config(
            **usual | {"layer_kinds": tuple(a + "_moe" * r for a, r in zip(attends, routed, strict=True))},
            **fields.plain(rms_norm_eps=1e-5, attention_bias=False, n_group=1, topk_group=1, norm_topk_prob=True),
            sliding_window=window,
            num_nextn_predict_layers=heads,
        )
        fields.expect("mlp_bias", False)
        if hy:
            for name, value in (("n_group", 1), ("topk_group", 1), ("norm_topk_prob", True)):
                fields.expect(name, value)
        else:
            fields.expect("attention_bias", False)
            fields.expect("mtp_layer_types", None, ["full_attention"])
        # a sum in fp32 that is rounded has the bits of the sum in a lower precision
        return decoder.finished(config, fields, ("enable_moe_fp32_combine", "sliding_window_pattern"))

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        hy, found = self.model_type == "hy_v3", parsed(self.layer_kinds)
        own = {name: getattr(self, name) for name in mixture.GROUPED} | {"mlp_layer_types": mixture.mlp_types(found)}
        own["num_nextn_predict_layers"] = self.num_nextn_predict_layers
        if not hy:
            own |= {
                "sliding_window": self.sliding_window,
                "layer_types": decoder.layer_types([k.slides for k in found]),
            }
        architecture = "HYV3ForCausalLM" if hy else "ExaoneMoeForCausalLM"
        out = decoder.decoder_to_hf(self, architecture, "rms_norm_eps", "attention_bias", "hidden_act", **own)
        published = {name: theirs for theirs, name in (_HY if hy else _NAMES).items()}
        return {published.get(name, name): value for name, value in out.items()}


def _attention(fields: Fields, layers: int) -> tuple[int, list[str]]:
    """(window, what the attention of each layer is): from `layer_types`, or one full layer in a pattern of n."""
    rule = [False] * layers
    if fields.take("layer_types", None) is None:
        every = fields.integer("sliding_window_pattern", 4)
        rule = [(i + 1) % every != 0 for i in range(layers)]
    slides = decoder.sliding_layers(fields, rule)
    return fields.integer("sliding_window", 4096), ["sliding" if one else "full_nope" for one in slides]


def leftovers(config: Config) -> tuple[str, ...]:
    """Patterns of the tensors after the last layer: MTP heads that config.json does not count, or copies of others."""
    first = config.num_hidden_layers
    if config.model_type != "hy_v3":
        return () if config.num_nextn_predict_layers else (r"mtp\..*",)
    if not config.num_nextn_predict_layers:
        return (rf"model\.layers\.{first}\..*",)
    heads = "|".join(str(first + k) for k in range(config.num_nextn_predict_layers))
    return (rf"model\.layers\.({heads})\.(embed_tokens|shared_head\.head)\.weight",)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    biased = config.attention_bias
    attention = usual_attention(config, qkv_bias=biased, o_bias=biased) | head_norms(config)
    flags = {"selection_bias": True, "wide_router": True}

    def layer(kind: LayerKind) -> Tree:
        return layer_leaves(config.hidden_size, attention, mixture.grouped_leaves(config, kind, **flags))

    (block,) = parsed(mtp_kinds(config))
    return decoder_leaves(config, [layer(kind) for kind in parsed(config.layer_kinds)]) | mtp.heads(
        config, layer(block)
    )


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is an MTP head's block: that of Hy3's last layer; K-EXAONE's is full and dense.

    TensorRT-LLM, tensorrt_llm/_torch/models/modeling_exaone_moe.py, says so of K-EXAONE; so does vLLM of the MLP.
    """
    return config.layer_kinds[-1:] if config.model_type == "hy_v3" else ("full_nope",)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    changes = [(r"\.gate\.e_score_correction_bias$", ".e_score_correction_bias")]
    if config.model_type == "hy_v3":
        changes = [(r"\.gate\.e_score_correction_bias$", ".expert_bias"), (r"\.gate\.weight$", ".router.gate.weight")]
        changes += [(r"\.shared_experts\.", ".shared_mlp."), (r"\.shared_head\.norm\.", ".final_layernorm.")]
    names = mixture.grouped_names(config, flatten(spec(config)))
    for pattern, new in changes:
        names = {path: renamed(name, pattern, new) for path, name in names.items()}
    if config.model_type == "hy_v3" or not config.num_nextn_predict_layers:
        return names
    # vLLM, vllm/model_executor/models/exaone_moe_mtp.py at d0ac57910c16: these names, and the maths around the block
    return names | mtp.names_apart(hf_names(mtp.blocks(config)[0]), 1)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    normed = rms_norm(x, layer["input_layernorm"], eps=config.rms_norm_eps)
    attended = mixture.attend(layer["attention"], normed, mask, freqs, config, ctx)
    route = mixture.grouped_route(layer["mlp"], config)
    return mixture.add_feed(layer, x, attended, config, ctx, route=route, dtypes=ROUTER)


PRESETS: dict[str, ConfigJson] = {
    "k-exaone-236b-a23b": {"model_type": "exaone_moe", "vocab_size": 153600, "hidden_size": 6144}
    | {"intermediate_size": 18432, "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8}
    | {"head_dim": 128, "moe_intermediate_size": 2048, "num_experts": 128, "num_experts_per_tok": 8}
    | {"num_shared_experts": 1, "sliding_window": 128, "rope_theta": 1000000, "max_position_embeddings": 262144},
    "hy3-preview": {"model_type": "hy_v3", "vocab_size": 120832, "hidden_size": 4096, "intermediate_size": 13312}
    | {"num_hidden_layers": 80, "num_attention_heads": 64, "moe_intermediate_size": 1536, "num_experts": 192}
    | {"num_experts_per_tok": 8, "num_shared_experts": 1},
}
