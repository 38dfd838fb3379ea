"""MiniCPM 3 4B (OpenBMB, 2024) and Youtu-LLM 2B (Tencent, 2025): dense decoders with multi-head latent attention.

MiniCPM 3 rotates by halves and has multipliers of the embedding, of what each sublayer adds, and of the head's input
(arXiv 2404.06395).
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder, mla
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.rope_config import rope_from_hf
from fnmodels.models.common.spec import decoder_leaves, latent_attention_leaves, layer_leaves, usual_mlp
from fnmodels.models.common.storage import Stored
from fnmodels.ops import (
    apply_rotary,
    apply_rotary_interleaved,
    embed_tokens,
    gated_mlp,
    latent_scale,
    project_out,
    rms_norm,
)
from fnmodels.tree import Tree

MODEL_TYPES = ("minicpm3", "youtu")
_ARCHITECTURES = {"minicpm3": "MiniCPM3ForCausalLM", "youtu": "YoutuForCausalLM"}


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. logits_scaling: the head's input is divided by it."""

    num_key_value_heads: int = field(init=False)  # as many as query heads
    head_dim: int = field(init=False)  # the rotary dimensions of a head
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None  # None: queries without a latent
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False  # of the projections that read x, and of o
    mlp_bias: bool = False
    rope_interleave: bool = True
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        object.__setattr__(self, "head_dim", self.qk_rope_head_dim)
        super().__post_init__()

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        first = model_type == "minicpm3"
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        usual: dict[str, Any] = {"kv_lora_rank": 512, "v_head_dim": 128, "tie_word_embeddings": True}
        usual["initializer_range"] = 2.0 / (5.0 * hidden) ** 0.5
        if first:
            usual = {"qk_rope_head_dim": 32, "v_head_dim": hidden // heads, "kv_lora_rank": 256}
            usual |= {"rms_norm_eps": 1e-5, "initializer_range": 0.1, "tie_word_embeddings": True}
            fields.expect("rope_interleave", False)
        absent = {name: value for name, value in usual.items() if values.get(name) is None}
        fields = Fields({**values, **absent}, fields.where)
        ranks: dict[str, Any] = {"q_rank": 1536, "nope_dim": 128, "kv_heads": 16}
        ranks = {"q_rank": 768, "nope_dim": 64, "kv_heads": 40} if first else ranks
        positions = 32768 if first else 131072
        sizes = mla.latent_from_hf(fields, max_positions=positions, rope_head=True, **ranks)
        if first:
            layers = sizes["num_hidden_layers"]
            sizes |= {"rope_interleave": False, "mlp_bias": fields.boolean("mlp_bias", False)}
            depth = _or_null(fields, "scale_depth", 1.4, layers**0.5)
            sizes["embedding_multiplier"] = fields.number("scale_emb", 12)
            sizes["residual_multiplier"] = depth / layers**0.5
            base = _or_null(fields, "dim_model_base", 256, hidden)
            sizes["logits_scaling"] = hidden / base
        positions = sizes["max_position_embeddings"]
        rope = rope_from_hf(fields, head_dim=sizes["qk_rope_head_dim"], max_positions=positions, theta=1e4)
        return decoder.finished(Config(**sizes, rope=rope, model_type=model_type), fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        own: ConfigJson = {"rope_interleave": self.rope_interleave}
        if self.model_type == "minicpm3":
            own = {"mlp_bias": self.mlp_bias, "scale_emb": self.embedding_multiplier}
            own["scale_depth"] = self.residual_multiplier * self.num_hidden_layers**0.5
            own["dim_model_base"] = round(self.hidden_size / self.logits_scaling)
        return decoder.decoder_to_hf(self, _ARCHITECTURES[self.model_type], *mla.NAMES, **own)


def _or_null(fields: Fields, name: str, absent: float, null: float) -> float:
    """The field, `absent` where the file leaves it out, and `null` where it has a null."""
    return fields.number(name, null if name in fields.values else absent)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    mlp = usual_mlp(config, biases=config.mlp_bias)
    layer = layer_leaves(config.hidden_size, latent_attention_leaves(config), mlp)
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}."""
    return mla.latent_names(decoder.hf_names(config))


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: token embeddings times the multiplier; given embeddings are not scaled."""
    tokens = inputs["tokens"] if isinstance(inputs, dict) else inputs
    x = embed_tokens(params["embed_tokens"], tokens)
    return x if tokens.is_floating_point() else x * config.embedding_multiplier


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights, by = config.rms_norm_eps, layer["attention"], config.residual_multiplier
    rotate = apply_rotary_interleaved if config.rope_interleave else apply_rotary
    widths = mla.latent_widths(config)
    scale = latent_scale(config.rope, widths.nope + widths.rope)
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    mixed = ctx.attend_latent(weights, normed, freqs, mask, widths=widths, rotate=rotate, scale=scale)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed) * by))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap) * by)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]."""
    normed = rms_norm(x, params["norm"], eps=config.rms_norm_eps)
    return decoder.project(params, normed / config.logits_scaling if decoder.is_lm(config) else normed, config)


_LATENT = {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
PRESETS = {
    "minicpm3-4b": {"model_type": "minicpm3", "vocab_size": 73448, "hidden_size": 2560, "intermediate_size": 6400}
    | {"num_hidden_layers": 62, "num_attention_heads": 40, "num_key_value_heads": 40, **_LATENT},
    "youtu-llm-2b": {"model_type": "youtu", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 6144}
    | {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 1536}
    | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 1.6e6},
}
