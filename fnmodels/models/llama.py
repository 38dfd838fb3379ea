"""The Llama lineage: Llama 2 to 3.3 (arXiv 2407.21783), Mistral, Qwen 2 and 3, SmolLM 3.

A pre-norm decoder with grouped queries, half-layout rotary embedding and a gated MLP. The members differ in biases,
normalized queries and keys (Qwen 3), layers that look back a window only, and layers without position (SmolLM 3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Create, MaskLike, causal_masks
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.decoder import (
    check_decoder,
    decoder_name,
    decoder_sizes,
    decoder_to_hf,
    layer_types,
    rotating_layers,
    sliding_layers,
)
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import attention_leaves, decoder_leaves, gated_mlp_leaves, layer_leaves, norm
from fnmodels.ops.attention.select import attention
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, gated_mlp
from fnmodels.ops.norm import rms_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import Rope, apply_rotary, no_rotation, rotary_table
from fnmodels.options import Kernel
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3")
KINDS = ("full", "sliding", "full_nope", "sliding_nope")
TAPS = ("attention", "middle", "mlp")  # what the sublayers add to the residual stream, and the stream between them
LEFTOVERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)  # a buffer that older files hold

# Where the key is left out; null means as many as there are query heads.
_KV_HEADS = {"mistral": 8, "ministral": 8, "qwen2": 32, "qwen3": 32, "smollm3": 4}
_ARCHITECTURES = dict(zip(MODEL_TYPES, ("Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "SmolLM3"), strict=True))


@dataclass(frozen=True)
class Config:
    """Sizes and switches. `layer_kinds` names one of KINDS per layer; left empty, every layer is "full"."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope: Rope = Rope()  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    layer_kinds: tuple[str, ...] = ()
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    # kept for saving only
    model_type: str = field(default="llama", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_decoder(self, KINDS)
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {self.hidden_act!r} is unknown; known are {', '.join(ACTIVATIONS)}.")

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder_sizes(
            fields,
            max_positions={"llama": 2048, "mistral": 131072, "ministral": 131072}.get(model_type, 32768),
            tied=model_type == "smollm3",
            kv_heads=_KV_HEADS.get(model_type, 0),
            head_dim=128 if model_type == "qwen3" else 0,
        )
        fields.expect("activation", "swiglu")  # in Falcon 3's files, beside hidden_act
        has_bias = model_type in ("llama", "qwen3", "smollm3") and fields.boolean("attention_bias", False)
        if model_type in ("mistral", "ministral"):
            fields.expect("attention_bias", False)
        if model_type not in ("llama", "smollm3"):
            fields.expect("mlp_bias", False)
        window, kinds = _layer_kinds(fields, model_type, sizes["num_hidden_layers"])
        config = Config(
            **sizes,
            rope=rope_from_hf(
                fields,
                head_dim=sizes["head_dim"],
                max_positions=sizes["max_position_embeddings"],
                theta=2e6 if model_type == "smollm3" else 1e4,
            ),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            qkv_bias=has_bias or model_type == "qwen2",
            o_bias=has_bias,
            mlp_bias=model_type in ("llama", "smollm3") and fields.boolean("mlp_bias", False),
            qk_norm=model_type == "qwen3",
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            sliding_window=window,
            layer_kinds=kinds,
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        own: dict[str, Any] = {"rope_parameters": rope_to_hf(self.rope)}
        own |= {"rms_norm_eps": self.rms_norm_eps, "hidden_act": self.hidden_act}
        if self.model_type in ("llama", "qwen3", "smollm3"):
            own["attention_bias"] = self.qkv_bias
        if self.model_type in ("llama", "smollm3"):
            own["mlp_bias"] = self.mlp_bias
        if self.model_type != "llama":
            own["sliding_window"] = self.sliding_window
        if self.model_type in ("ministral", "qwen2", "qwen3", "smollm3"):
            slides = [kind.startswith("sliding") for kind in self.layer_kinds]
            own["layer_types"] = layer_types(slides)
        if self.model_type in ("qwen2", "qwen3", "smollm3"):
            own["use_sliding_window"] = any(slides)
        if self.model_type == "smollm3":
            own["no_rope_layers"] = [int(not kind.endswith("nope")) for kind in self.layer_kinds]
        return decoder_to_hf(self, f"{_ARCHITECTURES[self.model_type]}ForCausalLM", **own)


def _layer_kinds(fields: Fields, model_type: str, layers: int) -> tuple[int | None, tuple[str, ...]]:
    """The window and the kind of each layer, from explicit lists or each member's own rule."""
    if model_type == "llama":
        return None, ("full",) * layers
    window = fields.integer("sliding_window", 0, low=0) or None
    if model_type in ("mistral", "ministral"):  # an absent window is the first release's 4096, an explicit null is none
        window = 4096 if "sliding_window" not in fields.values else window
        slides = [window is not None] * layers
        slides = slides if model_type == "mistral" else sliding_layers(fields, slides)
        return window if any(slides) else None, tuple("sliding" if s else "full" for s in slides)
    on = fields.boolean("use_sliding_window", False)
    rope = [1] * layers
    if model_type == "smollm3":
        fields.take("max_window_layers", None)  # a leftover in its files: which layers slide follows from the others
        rope = rotating_layers(fields, fields.take("no_rope_layers", None), layers)
        slides = [on and not r for r in rope]
    else:
        # not compared with `layer_types`, which alone is read: transformers writes its default 28 beside any
        first = fields.integer("max_window_layers", 28, low=0)
        slides = [on and i >= first for i in range(layers)]
    window = window if on else None
    slides = sliding_layers(fields, slides)
    if any(slides) and window is None:
        raise ConfigError("config.json: 'layer_types' has sliding layers, but 'sliding_window' is off.")
    kinds = [("sliding" if s else "full") + ("" if r else "_nope") for s, r in zip(slides, rope, strict=True)]
    return window if any(slides) else None, tuple(kinds)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range

    def layer() -> Tree:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        attention = attention_leaves(D, heads, kv_heads, H, std=std, qkv_bias=config.qkv_bias, o_bias=config.o_bias)
        if config.qk_norm:
            attention |= {"q_norm": norm(H, "head_dim"), "k_norm": norm(H, "head_dim")}
        mlp = gated_mlp_leaves(D, config.intermediate_size, std=std, biases=config.mlp_bias)
        return layer_leaves(D, attention, mlp)

    return decoder_leaves(config, [layer() for _ in range(config.num_hidden_layers)])


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    return {path: decoder_name(path) for path in flatten(spec(config))}


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer, the keys of masks and freqs_cis."""
    return config.layer_kinds


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}; positions and segment_ids [B, S]. create: see `fnmodels.inputs.mask.build_mask`."""
    return causal_masks(config.layer_kinds, config.sliding_window, positions, segment_ids, create=create)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}; R is 0 for layers without position."""
    table, none = rotary_table(config.rope, config.head_dim, positions, length), no_rotation(positions)
    return {kind: none if kind.endswith("nope") else table for kind in sorted(set(config.layer_kinds))}


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]."""
    return embed_tokens(params["embed_tokens"], inputs)


def block(
    layer: Tree,
    x: Tensor,
    mask: MaskLike,
    freqs: Tensor,
    /,
    *,
    config: Config,
    kind: str,
    kernel: Kernel = "auto",
    layout: Layout | None = None,
    taps: tuple[str, ...] = (),
) -> tuple[Tensor, dict[str, Tensor]]:
    """One layer: x [B, S, D] -> (x, {tap: tensor})."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    if config.qk_norm:
        q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = attention(q, k, v, mask, kernel=kernel, scale=config.head_dim**-0.5, layout=layout)
    attended = project_out(weights, mixed)
    middle = x + attended
    fed = gated_mlp(
        layer["mlp"], rms_norm(middle, layer["post_attention_layernorm"], eps=eps), activation=config.hidden_act
    )
    named = {"attention": attended, "middle": middle, "mlp": fed}
    return middle + fed, {name: named[name] for name in taps}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]. A tied head reads the embedding's one leaf."""
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return linear(rms_norm(x, params["norm"], eps=config.rms_norm_eps), head)
