"""Ling and Ring (arXiv 2503.05139 and 2510.22115), mixtures of experts with a shared expert.

Ling 2 routes as DeepSeek V3 does, and has query and key norms and a rotary embedding of half of each head. Ling 1
chooses by softmax, without groups and without a bias of the choice. Both are "bailing_moe" in published files, which
name their class; Ling 2.5 and 3 have layers of other kinds, see `bailing_hybrid.py`. Files may have MTP heads, whose
block has experts: `fnmodels.mtp`.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.spec import decoder_leaves, head_norms, layer_leaves, usual_attention
from fnmodels.models.common.storage import Stored
from fnmodels.ops import Rope, rms_norm
from fnmodels.ops.moe.layer import Route
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("bailing_moe", "bailing_moe_v2")
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("full", "full_moe"),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
)
_HEAD = ("full_moe",)  # the layer that is an MTP head's block
_NAMES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
_NAMES |= {"use_qkv_bias": "attention_bias", "use_bias": "o_bias"}
_OURS = {ours: theirs for theirs, ours in _NAMES.items()}
_SCORES = ("sigmoid", "softmax")
_DEFAULTS: ConfigJson = {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}


@dataclass(frozen=True, kw_only=True)
class Config(mixture.GroupedConfig):
    """Sizes and switches. softmax_scores: experts are chosen by softmax without a bias (Ling 1), else by sigmoid."""

    rope: Rope = Rope(partial=0.5)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False  # of q, k and v
    o_bias: bool = False
    use_qk_norm: bool = False
    softmax_scores: bool = False
    num_nextn_predict_layers: int = 0  # MTP heads, params["mtp"], which `forward` does not use

    def __post_init__(self) -> None:
        super().__post_init__()
        mtp.check_kinds(self, _HEAD)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        first = values.get("architectures") == ["BailingMoeForCausalLM"]
        fields = renamed(Fields(_DEFAULTS | values), _NAMES)
        score = fields.choice("score_function", _SCORES, _SCORES[first])
        theta, partial = (1e4, 1.0) if first else (6e5, 0.5)
        usual = decoder.base_fields(fields, MODEL_TYPES, max_positions=32768, theta=theta, partial=partial)
        fields.expect("rotary_dim", None, usual["rope"].dim(usual["head_dim"]))  # the same, in dimensions
        layers = usual["num_hidden_layers"]
        usual |= mixture.grouped_from_hf(fields, layers, scale=1.0, dense=0)
        fields.expect("moe_router_enable_expert_bias", score == "sigmoid")
        shared = usual["n_shared_experts"] * usual["moe_intermediate_size"]
        fields.expect("moe_shared_expert_intermediate_size", usual["moe_intermediate_size"], shared)
        for name, only in (("norm_head", False), ("use_sliding_window", False), ("use_rmsnorm", True)):
            fields.expect(name, only)
        switches = fields.plain(attention_bias=False, o_bias=False, use_qk_norm=False, rms_norm_eps=1e-6)
        config = Config(**usual, **switches, softmax_scores=score == "softmax")
        ignored = ("router_dtype", "sliding_window", "max_window_layers", "mtp_loss_scaling_factor", "multi_gate")
        return decoder.finished(config, fields, ignored=(*ignored, "using_split_qkv_in_self_attention"))

    def to_hf(self) -> ConfigJson:
        """A config.json under the published names."""
        own = mixture.grouped_to_hf(self) | {"attention_bias": self.attention_bias, "o_bias": self.o_bias}
        own = {_OURS.get(name, name): value for name, value in own.items()}
        own |= {"num_nextn_predict_layers": self.num_nextn_predict_layers}
        own |= {"score_function": _SCORES[self.softmax_scores]}
        version = "" if self.softmax_scores else "V2"
        return decoder.decoder_to_hf(
            self, f"BailingMoe{version}ForCausalLM", "rms_norm_eps", "use_qk_norm", "hidden_act", **own
        )


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = usual_attention(config, qkv_bias=config.attention_bias, o_bias=config.o_bias)
    attention |= head_norms(config) if config.use_qk_norm else {}

    def layer(kind: LayerKind) -> Tree:
        mlp = mixture.grouped_leaves(config, kind, selection_bias=not config.softmax_scores)
        return layer_leaves(config.hidden_size, attention, mlp)

    (head,) = parsed(_HEAD)
    return decoder_leaves(config, [layer(kind) for kind in parsed(config.layer_kinds)]) | mtp.heads(config, layer(head))


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is an MTP head's block."""
    return _HEAD


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert; q, k and v are one tensor."""
    flat = {path: leaf for path, leaf in flatten(spec(config)).items() if not path.startswith("mtp.")}
    names = mixture.names_of_ling(mixture.grouped_names(config, flat), flat)
    if not config.num_nextn_predict_layers:
        return names
    # SGLang, python/sglang/srt/models/bailing_moe_nextn.py at 05319dc0ce10: these names, and the maths. The publisher's
    # modeling_bailing_moe_v2.py has it with experts in each head, which reads what the norm of the one before returns.
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
    normed = rms_norm(x, layer["input_layernorm"], eps=config.rms_norm_eps)
    attended = mixture.attend(layer["attention"], normed, mask, freqs, config, ctx)
    return mixture.add_feed(layer, x, attended, config, ctx, route=_route(layer["mlp"], config), dtypes=ROUTER)


def _route(mlp: Tree, config: Config) -> Route:
    if config.softmax_scores:
        return functools.partial(softmax_top_k, **mixture.grouped_choice(config))
    return mixture.grouped_route(mlp, config)


_LING2: ConfigJson = {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "vocab_size": 157184}
_LING2 |= {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 256, "num_shared_experts": 1}
_LING2 |= {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "use_qk_norm": True}
_LING2 |= {"first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "rope_theta": 600000, "score_function": "sigmoid"}
PRESETS: dict[str, ConfigJson] = {
    "ling-mini-2.0": _LING2
    | {"hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20, "num_attention_heads": 16}
    | {"moe_intermediate_size": 512},
    "ling-flash-2.0": _LING2
    | {"hidden_size": 4096, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"moe_intermediate_size": 1024},
}
