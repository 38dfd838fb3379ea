"""EXAONE 4.0 (LG, arXiv 2507.11407): a post-norm decoder with per-head query and key norms.

The norm is applied to the output of each sublayer instead of its input. In models with sliding-window layers, the full
layers have no rotary embedding. The text of EXAONE 4.5 is the same; its MTP head, whose block is a layer like the first
one, stands under mtp.* as vLLM's vllm/model_executor/models/exaone4_5_mtp.py at e99248cd1fcf reads it.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder, mtp
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import decoder_leaves, head_norms, norm, usual_attention, usual_mlp
from fnmodels.models.common.storage import Stored
from fnmodels.ops import apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("exaone4",)
TRAITS = Traits(
    kinds=("full", "sliding", "full_nope"),
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
)


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. Full layers have rotary embedding only in models without a sliding window."""

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    num_nextn_predict_layers: int = 0  # MTP heads, params["mtp"], which `forward` does not use: 0 or 1

    def __post_init__(self) -> None:
        super().__post_init__()
        mtp.check_kinds(self, mtp_kinds(self), most=1)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, max_positions=2048, kv_heads=32)
        # an absent window means 4096, an explicit null no window
        window = None if values.get("sliding_window", 0) is None else fields.integer("sliding_window", 4096)
        slides = _sliding_layers(fields, window, usual["num_hidden_layers"])
        config = Config(
            **usual,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
            sliding_window=window,
            layer_kinds=tuple("sliding" if s else "full" if window is None else "full_nope" for s in slides),
            num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 0, low=0, high=1),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where the model type has no word for this model."""
        types = decoder.layer_types([kind == "sliding" for kind in self.layer_kinds])
        names = ("rms_norm_eps", "hidden_act", "sliding_window")
        heads = {"num_nextn_predict_layers": 1} if self.num_nextn_predict_layers else {}
        return decoder.decoder_to_hf(self, "Exaone4ForCausalLM", *names, layer_types=types, **heads)


def _sliding_layers(fields: Fields, window: int | None, layers: int) -> list[bool]:
    """Whether each layer has a sliding window: by `layer_types`, or all but every nth by `sliding_window_pattern`.

    The pattern is not compared with the list: transformers writes its default 4 beside any list and ignores it.
    """
    pattern, rule = fields.take("sliding_window_pattern", 4), [False] * layers
    if fields.take("layer_types", None) is None:
        if window is None or isinstance(pattern, str) or fields.values.get("sliding_window_pattern", 4) is None:
            raise ConfigError(
                f"{fields.where} has no 'layer_types', which is needed where 'sliding_window' is null or "
                "'sliding_window_pattern' is not an integer."
            )
        every = fields.integer("sliding_window_pattern", 4)
        rule = [(i + 1) % every != 0 for i in range(layers)]
    slides = decoder.sliding_layers(fields, rule)
    if any(slides) and window is None:
        raise ConfigError(f"{fields.where}: 'layer_types' has sliding layers, but 'sliding_window' is null.")
    return slides


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    layer = {
        "attention": usual_attention(config) | head_norms(config),
        "post_attention_layernorm": norm(config.hidden_size, "embed"),
        "mlp": usual_mlp(config),
        "post_feedforward_layernorm": norm(config.hidden_size, "embed"),
    }
    return decoder_leaves(config, [layer for _ in config.layer_kinds]) | mtp.heads(config, layer)


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is the block of the MTP head."""
    return config.layer_kinds[:1]


def leftovers(config: Config) -> tuple[str, ...]:
    """Patterns of the tensors of an MTP head that the config does not count."""
    return () if config.num_nextn_predict_layers else (r"mtp\..*",)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}."""
    if not config.num_nextn_predict_layers:
        return decoder.hf_names(config)
    names = decoder.hf_names(replace(config, num_nextn_predict_layers=0))
    return names | mtp.names_apart(decoder.hf_names(mtp.blocks(config)[0]), 1)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, x, head_dim=config.head_dim)
    q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    attended = rms_norm(project_out(weights, mixed), layer["post_attention_layernorm"], eps=eps)
    x = ctx.tap("middle", x + ctx.tap("attention", attended))
    fed = gated_mlp(layer["mlp"], x, activation=config.hidden_act, tap=ctx.tap)
    return x + ctx.tap("mlp", rms_norm(fed, layer["post_feedforward_layernorm"], eps=eps))


_EXAONE4 = {"model_type": "exaone4", "vocab_size": 102400, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
_ROPE = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_EXAONE4 |= {"rope_theta": 1e6, "rope_scaling": _ROPE | {"original_max_position_embeddings": 8192}}
PRESETS: dict[str, ConfigJson] = {
    "exaone-4.0-1.2b": _EXAONE4
    | {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 30, "num_attention_heads": 32}
    | {"max_position_embeddings": 65536, "sliding_window": None, "layer_types": ["full_attention"] * 30}
    | {"head_dim": 64, "tie_word_embeddings": True},
    "exaone-4.0-32b": _EXAONE4
    | {"hidden_size": 5120, "intermediate_size": 27392, "num_hidden_layers": 64, "num_attention_heads": 40}
    | {"max_position_embeddings": 131072, "sliding_window": 4096, "sliding_window_pattern": 4, "head_dim": 128},
}
