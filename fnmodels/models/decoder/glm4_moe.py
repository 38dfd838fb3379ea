"""GLM-4.5 to 4.7 (mixtures of experts, arXiv 2508.06471) and dots.llm1 (arXiv 2506.05767).

A pre-norm decoder with grouped-query attention, half-layout rotary embedding of the first half of each head (dots.llm1:
of the full head), and a few dense layers before MoE layers, which route as in DeepSeek V3. GLM has MTP heads:
`fnmodels.mtp`.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.models.common import decoder, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits, parsed
from fnmodels.models.common.rope_config import rope_to_hf, sections_to_hf, split_sections
from fnmodels.models.common.spec import decoder_leaves, head_norms, layer_leaves, usual_attention
from fnmodels.models.common.storage import Stored
from fnmodels.ops import Rope, apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("glm4_moe", "dots1")
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("full", "full_moe"),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
)

_PARTIAL = 0.5  # GLM's default of partial_rotary_factor
# Values of fields that are absent or null in config.json of dots.llm1.
_DOTS = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "num_nextn_predict_layers": 0}


@dataclass(frozen=True, kw_only=True)
class Config(mixture.GroupedConfig):
    """Sizes and switches."""

    rope: Rope = Rope(partial=_PARTIAL)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False  # of q, k and v
    o_bias: bool = False
    use_qk_norm: bool = False
    # rotary frequencies of time, height and width, which are one for text: of GLM-4.5V's text models
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        dots = values.get("model_type") == "dots1"
        fields = Fields(values | {name: _DOTS[name] for name in _DOTS if values.get(name) is None} if dots else values)
        fields, sections, interleaved = split_sections(fields, interleaved=False)
        if dots:
            fields.expect("num_nextn_predict_layers", 0)
            fields.expect("use_qk_norm", True)
        partial, positions, kv_heads = (None, 2048, 32) if dots else (_PARTIAL, 131072, 8)
        usual = decoder.base_fields(fields, MODEL_TYPES, partial=partial, max_positions=positions, kv_heads=kv_heads)
        how = {"dense": 0, "scoring": ("sigmoid", "noaux_tc")} if dots else {"dense": 1}
        usual |= mixture.grouped_from_hf(fields, usual["num_hidden_layers"], scale=1.0, **how)
        if dots:
            _refuse_windows(fields, usual["num_hidden_layers"])
        bias = fields.boolean("attention_bias", False)
        config = Config(
            **usual,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6 if dots else 1e-5),
            attention_bias=bias,
            o_bias=dots and bias,
            use_qk_norm=dots or fields.boolean("use_qk_norm", False),
            mrope_section=sections,
            mrope_interleaved=interleaved and bool(sections),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        names: tuple[str, ...] = ("rms_norm_eps", "attention_bias", "hidden_act")
        own = mixture.grouped_to_hf(self)
        if self.model_type == "dots1":
            own |= {"sliding_window": None, "rope_parameters": rope_to_hf(self.rope)}
            return decoder.decoder_to_hf(self, "Dots1ForCausalLM", *names, **own)
        own |= {"rope_parameters": sections_to_hf(self)} if self.mrope_section else {}
        names += ("use_qk_norm", "num_nextn_predict_layers")
        return decoder.decoder_to_hf(self, "Glm4MoeForCausalLM", *names, **own)


def _refuse_windows(fields: Fields, layers: int) -> None:
    """UnsupportedError if a layer of dots.llm1 has a sliding window, which no published model has."""
    has_window = fields.values.get("sliding_window", 4096) is not None
    first = fields.integer("max_window_layers", 62, low=0)
    if any(decoder.sliding_layers(fields, [has_window and i >= first for i in range(layers)])):
        raise UnsupportedError(
            f"{fields.where}: 'layer_types', or 'sliding_window' with 'max_window_layers' {first}, has sliding layers; "
            "no published dots1 has, and they are not supported."
        )
    fields.take("sliding_window", None)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = usual_attention(config, qkv_bias=config.attention_bias, o_bias=config.o_bias)
    attention |= head_norms(config) if config.use_qk_norm else {}
    mlps = [mixture.grouped_leaves(config, kind, selection_bias=True) for kind in parsed(config.layer_kinds)]
    layers = [layer_leaves(config.hidden_size, attention, mlp) for mlp in mlps]
    return decoder_leaves(config, layers) | mtp.heads(config, layers[-1])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    return mixture.grouped_names(config, flatten(spec(config)))


hf_copies = mtp.copies


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    if config.use_qk_norm:
        q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    if kind == "full":
        return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))
    route = functools.partial(sigmoid_top_k, bias=layer["mlp"]["selection_bias"], **mixture.grouped_choice(config))
    return x + ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER))


PRESETS: dict[str, ConfigJson] = {
    "dots.llm1": {"model_type": "dots1", "vocab_size": 152064, "hidden_size": 4096, "intermediate_size": 10944}
    | {"num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32, "moe_intermediate_size": 1408}
    | {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1}
    | {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_theta": 1e7, "max_position_embeddings": 32768}
    | {"rms_norm_eps": 1e-5}
}
