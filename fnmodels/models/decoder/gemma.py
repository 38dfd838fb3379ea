"""Gemma 1, 2 and 3 (text models; arXiv 2403.08295, 2408.00118, 2503.19786) and EmbeddingGemma.

RMSNorms multiply by 1 + weight, and the embedding is scaled by sqrt(D). Gemma 2 has norms before and after each
sublayer, soft-capped scores and logits, and a sliding window in every second layer. Gemma 3 has query and key norms
instead of soft-caps, five sliding layers per full one, and a rotary table for each kind. EmbeddingGemma is
bidirectional. VaultGemma (arXiv 2510.15001) is Gemma 2 without the norms after the sublayers.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import BidirectionalWindow, Everything
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed_by_width as embed  # noqa: F401
from fnmodels.models.common.decoder import kinds  # noqa: F401
from fnmodels.models.common.decoder import unembed_zero_centered as unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf, ropes_by_layer_type
from fnmodels.models.common.spec import decoder_leaves, head_norms, norm, usual_attention, usual_mlp
from fnmodels.ops import ACTIVATIONS, Rope, apply_rotary, gated_mlp, project_out, project_qkv
from fnmodels.ops.norm import rms_norm_zero_centered
from fnmodels.tree import Tree

MODEL_TYPES = ("gemma", "gemma2", "gemma3_text", "vaultgemma")
TRAITS = Traits(kinds=("full", "sliding"))

_GELU = "gelu_pytorch_tanh"
_ARCHITECTURES = {"gemma": "Gemma", "gemma2": "Gemma2", "gemma3_text": "Gemma3", "vaultgemma": "VaultGemma"}


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    local_rope: Rope = Rope()  # noqa: RUF009 - of sliding layers
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    sandwich: bool = False  # norms after the sublayers as well
    qk_norm: bool = False
    query_scalar: float = 0.0  # scores are divided by its square root; 0: head_dim
    attention_softcap: float | None = None
    final_softcap: float | None = None
    hidden_act: str = "gelu_pytorch_tanh"
    sliding_window: int | None = None
    bidirectional: bool = False
    max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.query_scalar:
            object.__setattr__(self, "query_scalar", float(self.head_dim))

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        first, third = model_type == "gemma", model_type == "gemma3_text"
        positions = 131072 if third else 8192
        sizes = decoder.decoder_sizes(
            fields, max_positions=positions, tied=True, kv_heads=16 if first else 4, head_dim=256
        )
        layers, head_dim = sizes["num_hidden_layers"], sizes["head_dim"]
        how = {"head_dim": head_dim, "max_positions": sizes["max_position_embeddings"]}
        if third:
            slides = decoder.patterned_layers(fields, decoder.sliding_pattern(fields, 6), layers)
            thetas = {"full_attention": 1e6, "sliding_attention": fields.number("rope_local_base_freq", 1e4)}
            ropes = ropes_by_layer_type(fields, thetas, scaled="full_attention", **how)
            rope, local = ropes["full_attention"], ropes["sliding_attention"]
        else:
            slides = [False] * layers if first else decoder.sliding_layers(fields, [i % 2 == 0 for i in range(layers)])
            rope = local = rope_from_hf(fields, theta=1e4, **how)
        activation = fields.choice("hidden_act" if first else "hidden_activation", tuple(ACTIVATIONS), _GELU)
        if first:
            fields.expect("hidden_activation", None, _GELU)
            activation = _GELU if activation == "gelu" else activation  # the first files say gelu but mean this
        else:  # duplicate fields, which transformers does not read
            fields.expect("hidden_act", activation)
            fields.expect("sliding_window_size", fields.integer("sliding_window", 4096))
        if third:
            fields.take("attn_logit_softcapping", None)  # without effect in transformers, whatever its value
        else:
            fields.expect("use_bidirectional_attention", None, False)
        config = Config(
            **sizes,
            rope=rope,
            local_rope=local,
            **fields.plain(rms_norm_eps=1e-6, attention_bias=False),
            sandwich=model_type in ("gemma2", "gemma3_text"),
            qk_norm=third,
            query_scalar=float(head_dim) if first else fields.number("query_pre_attn_scalar", 256),
            attention_softcap=decoder.softcap(fields, "attn_logit_softcapping", 50.0)
            if model_type in ("gemma2", "vaultgemma")
            else None,
            final_softcap=None
            if first
            else decoder.softcap(fields, "final_logit_softcapping", None if third else 30.0),
            hidden_act=activation,
            sliding_window=None if first else fields.integer("sliding_window", 4096),
            bidirectional=third and fields.boolean("use_bidirectional_attention", False),
            layer_kinds=tuple("sliding" if s else "full" for s in slides),
            model_type=model_type,
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        ropes = {"sliding_attention": rope_to_hf(self.local_rope), "full_attention": rope_to_hf(self.rope)}
        own: ConfigJson = {"rms_norm_eps": self.rms_norm_eps, "attention_bias": self.attention_bias}
        own["rope_parameters"] = ropes if self.model_type == "gemma3_text" else ropes["full_attention"]
        own["hidden_act" if self.model_type == "gemma" else "hidden_activation"] = self.hidden_act
        if self.model_type != "gemma":
            whole = int(self.query_scalar) if self.query_scalar.is_integer() else self.query_scalar  # HF wants an int
            own |= {"query_pre_attn_scalar": whole, "sliding_window": self.sliding_window}
            own["layer_types"] = decoder.layer_types([kind == "sliding" for kind in self.layer_kinds])
            own |= {"final_logit_softcapping": self.final_softcap, "attn_logit_softcapping": self.attention_softcap}
        if self.model_type == "gemma3_text":
            own["use_bidirectional_attention"] = self.bidirectional
        return decoder.decoder_to_hf(self, f"{_ARCHITECTURES[self.model_type]}ForCausalLM", **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]; norms are initialized to 0, since 1 is added to them."""
    D, biased = config.hidden_size, config.attention_bias
    attention = usual_attention(config, qkv_bias=biased, o_bias=biased)
    attention |= head_norms(config, 0.0) if config.qk_norm else {}
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if config.sandwich else []
    layer = {name: norm(D, "embed", 0.0) for name in norms} | {"attention": attention, "mlp": usual_mlp(config)}
    return decoder_leaves(config, [layer for _ in config.layer_kinds], norm_value=0.0)


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = decoder.hf_names(config)
    if config.model_type != "vaultgemma":
        return names
    return {path: n.replace("post_attention_layernorm", "pre_feedforward_layernorm") for path, n in names.items()}


freqs_cis = decoder.freqs_cis_by_window


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}: causal, or bidirectional for EmbeddingGemma; positions and segment_ids [B, S]."""
    if not config.bidirectional:
        return decoder.attention_masks(config, positions, segment_ids, create=create)
    rules = {"full": Everything(), "sliding": BidirectionalWindow((config.sliding_window or 0) // 2)}
    return masks_of({kind: rules[kind] for kind in config.layer_kinds}, positions, segment_ids, create=create)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, eps = layer["attention"], config.rms_norm_eps
    normed = rms_norm_zero_centered(x, layer["input_layernorm"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    if config.qk_norm:
        q = rms_norm_zero_centered(q, weights["q_norm"], eps=eps)
        k = rms_norm_zero_centered(k, weights["k_norm"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.query_scalar**-0.5, softcap=config.attention_softcap)
    attended, before_mlp = project_out(weights, mixed), "post_attention_layernorm"
    if config.sandwich:
        attended = rms_norm_zero_centered(attended, layer["post_attention_layernorm"], eps=eps)
        before_mlp = "pre_feedforward_layernorm"
    x = ctx.tap("middle", x + ctx.tap("attention", attended))
    normed = rms_norm_zero_centered(x, layer[before_mlp], eps=eps)
    fed = gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap)
    if config.sandwich:
        fed = rms_norm_zero_centered(fed, layer["post_feedforward_layernorm"], eps=eps)
    return x + ctx.tap("mlp", fed)
