"""GLM-4.5 to 4.7 (mixtures of experts, arXiv 2508.06471), dots.llm1 (arXiv 2506.05767), Sarvam 30B and Solar Open.

A pre-norm decoder with grouped-query attention, half-layout rotary embedding of the first half of each head (others
than GLM: of the full head), and a few dense layers before MoE layers, which route as in DeepSeek V3. Solar Open has no
dense layers. GLM has MTP heads: `fnmodels.mtp`.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.models.common import decoder, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits, parsed
from fnmodels.models.common.rope_config import rope_to_hf, sections_to_hf, split_sections
from fnmodels.models.common.spec import decoder_leaves, head_norms, layer_leaves, usual_attention
from fnmodels.models.common.storage import Stored
from fnmodels.ops import Rope, rms_norm
from fnmodels.ops.moe.router import RouterDtypes
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("glm4_moe", "dots1", "sarvam_moe", "solar_open")
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("full", "full_moe"),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    in_memory=mixture.LING_IN_MEMORY,  # of Sarvam
)

_PARTIAL = 0.5  # GLM's default of partial_rotary_factor
# Values of fields that are absent or null in config.json.
_ABSENT: dict[str, dict[str, Any]] = {
    "dots1": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "num_nextn_predict_layers": 0},
    "sarvam_moe": {"use_qk_norm": True, "initializer_range": 0.006, "num_nextn_predict_layers": 0},
    "solar_open": {"first_k_dense_replace": 0, "intermediate_size": 0, "num_nextn_predict_layers": 0}
    | {"n_group": 1, "topk_group": 1},
}
# Defaults of absent fields: the fraction that rotates, positions, key/value heads, width of a head (0: an equal share
# of the width), theta, eps of norms, dense layers, scale of routed experts.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "glm4_moe": (_PARTIAL, 131072, 8, 0, 1e4, 1e-5, 1, 1.0),
    "dots1": (None, 2048, 32, 0, 1e4, 1e-6, 0, 1.0),
    "sarvam_moe": (1.0, 131072, 4, 64, 8e6, 1e-6, 1, 2.5),
    "solar_open": (None, 131072, 8, 128, 1e6, 1e-5, 0, 1.0),
}
_ARCHITECTURES = {"dots1": "Dots1", "solar_open": "SolarOpen"}
_SARVAM = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
_SARVAM |= {"use_qkv_bias": "attention_bias", "num_mtp_layers": "num_nextn_predict_layers"}


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
        model_type = Fields(values).choice("model_type", MODEL_TYPES)
        dots, absent = model_type == "dots1", _ABSENT.get(model_type, {})
        fields = Fields(values | {name: absent[name] for name in absent if values.get(name) is None})
        fields = renamed(fields, _SARVAM) if model_type == "sarvam_moe" else fields
        fields, sections, interleaved = split_sections(fields, interleaved=False)
        partial, positions, kv_heads, head_dim, theta, eps, dense, scale = _DEFAULTS[model_type]
        sizes = {"max_positions": positions, "kv_heads": kv_heads, "head_dim": head_dim}
        usual = decoder.base_fields(fields, MODEL_TYPES, partial=partial, theta=theta, **sizes)
        if model_type in ("dots1", "solar_open"):
            fields.expect("num_nextn_predict_layers", 0)
            fields.expect("use_qk_norm", dots)
        scoring = ("sigmoid", "noaux_tc") if dots else ("sigmoid",)
        layers = usual["num_hidden_layers"]
        usual |= mixture.grouped_from_hf(fields, layers, scale=scale, dense=dense, scoring=scoring)
        if dots:
            _refuse_windows(fields, layers)
        bias = fields.boolean("attention_bias", False)
        config = Config(
            **usual,
            rms_norm_eps=fields.number("rms_norm_eps", eps),
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
        own = mixture.grouped_to_hf(self) | {"rope_parameters": rope_to_hf(self.rope)}
        if self.model_type == "dots1":
            own |= {"sliding_window": None}
        elif self.model_type != "solar_open":
            names += ("use_qk_norm", "num_nextn_predict_layers")
        if self.model_type not in ("dots1", "solar_open"):
            own["rope_parameters"]["partial_rotary_factor"] = self.rope.partial  # written even if it is 1
        own |= {"rope_parameters": sections_to_hf(self)} if self.mrope_section else {}
        architecture = _ARCHITECTURES.get(self.model_type, "Glm4Moe")
        return decoder.decoder_to_hf(self, f"{architecture}ForCausalLM", *names, **own)


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
    flat = flatten(spec(config))
    names = mixture.grouped_names(config, flat)
    return mixture.names_of_ling(names, flat) if config.model_type == "sarvam_moe" else names


hf_copies = mtp.copies


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    normed = rms_norm(x, layer["input_layernorm"], eps=config.rms_norm_eps)
    attended = mixture.attend(layer["attention"], normed, mask, freqs, config, ctx)
    route = mixture.grouped_route(layer["mlp"], config)
    return mixture.add_feed(layer, x, attended, config, ctx, route=route, dtypes=ROUTER)


_ORIGINAL = "original_max_position_embeddings"
PRESETS: dict[str, ConfigJson] = {
    "dots.llm1": {"model_type": "dots1", "vocab_size": 152064, "hidden_size": 4096, "intermediate_size": 10944}
    | {"num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32, "moe_intermediate_size": 1408}
    | {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1}
    | {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_theta": 1e7, "max_position_embeddings": 32768}
    | {"rms_norm_eps": 1e-5},
    "solar-open-100b": {"model_type": "solar_open", "vocab_size": 196608, "hidden_size": 4096}
    | {"num_hidden_layers": 48, "num_attention_heads": 64, "moe_intermediate_size": 1280, "n_routed_experts": 128}
    | {"n_shared_experts": 1, "num_experts_per_tok": 8, "intermediate_size": 10240}
    | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0} | {_ORIGINAL: 65536}},
    "sarvam-30b": {"model_type": "sarvam_moe", "vocab_size": 262144, "hidden_size": 4096, "intermediate_size": 8192}
    | {"num_hidden_layers": 19, "num_attention_heads": 64, "moe_intermediate_size": 1024, "n_routed_experts": 128}
    | {"n_shared_experts": 1, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
}
