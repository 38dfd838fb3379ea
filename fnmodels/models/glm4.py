"""GLM-4 of April 2025 (0414): GLM-4-9B, GLM-4-32B and GLM-Z1.

A decoder with a norm on both sides of each sublayer, interleaved rotary embedding of the first half of each head, and
gate and up fused on disk. Its names are its own: `post_attention_layernorm` stands before the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Create, MaskLike, causal_masks
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.decoder import check_decoder, decoder_name, decoder_sizes, decoder_to_hf, fused
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import attention_leaves, decoder_leaves, gated_mlp_leaves, norm
from fnmodels.models.common.storage import Stored
from fnmodels.ops.attention.select import attention
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, gated_mlp
from fnmodels.ops.norm import rms_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import Rope, apply_rotary_interleaved, rotary_table
from fnmodels.options import Kernel
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("glm4",)
TAPS = ("attention", "middle", "mlp")

_PARTIAL = 0.5  # the share of a head that rotates, where config.json does not say


@dataclass(frozen=True)
class Config:
    """Sizes and switches."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope: Rope = Rope(partial=_PARTIAL)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of q, k and v
    hidden_act: str = "silu"
    layer_kinds: tuple[str, ...] = ()
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    # kept for saving only
    model_type: str = field(default="glm4", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_decoder(self, ("full",))

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder_sizes(fields, max_positions=131072, tied=False, kv_heads=2, head_dim=128)
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        config = Config(
            **sizes,
            rope=rope_from_hf(fields, theta=1e4, partial=_PARTIAL, **where),
            rms_norm_eps=fields.number("rms_norm_eps", 1.5625e-7),
            attention_bias=fields.boolean("attention_bias", True),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect."""
        own = {name: getattr(self, name) for name in ("rms_norm_eps", "attention_bias", "hidden_act")}
        rope = rope_to_hf(self.rope) | {"partial_rotary_factor": self.rope.partial}  # said even where it is all
        return decoder_to_hf(self, "Glm4ForCausalLM", rope_parameters=rope, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias

    def layer() -> Tree:
        return {
            "input_layernorm": norm(D, "embed"),
            "attention": attention_leaves(D, heads, kv_heads, H, std=std, qkv_bias=bias),
            "post_self_attn_layernorm": norm(D, "embed"),
            "post_attention_layernorm": norm(D, "embed"),
            "mlp": gated_mlp_leaves(D, config.intermediate_size, std=std),
            "post_mlp_layernorm": norm(D, "embed"),
        }

    return decoder_leaves(config, [layer() for _ in range(config.num_hidden_layers)])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its rows of a fused tensor}."""
    flat = flatten(spec(config))
    names: dict[str, Stored] = {path: decoder_name(path) for path in flat}
    for i in range(config.num_hidden_layers):
        names |= fused(flat, f"layers.{i}.mlp", "gate_up_proj", ("gate_proj", "up_proj"))
    return names


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer, the keys of masks and freqs_cis."""
    return config.layer_kinds


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}; positions and segment_ids [B, S]. create: see `fnmodels.inputs.mask.build_mask`."""
    return causal_masks(config.layer_kinds, None, positions, segment_ids, create=create)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}."""
    return {"full": rotary_table(config.rope, config.head_dim, positions, length)}


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
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = apply_rotary_interleaved(q, freqs), apply_rotary_interleaved(k, freqs)
    mixed = attention(q, k, v, mask, kernel=kernel, scale=config.head_dim**-0.5, layout=layout)
    attended = rms_norm(project_out(weights, mixed), layer["post_self_attn_layernorm"], eps=eps)
    middle = x + attended
    fed = gated_mlp(
        layer["mlp"], rms_norm(middle, layer["post_attention_layernorm"], eps=eps), activation=config.hidden_act
    )
    fed = rms_norm(fed, layer["post_mlp_layernorm"], eps=eps)
    named = {"attention": attended, "middle": middle, "mlp": fed}
    return middle + fed, {name: named[name] for name in taps}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]. A tied head reads the embedding's one leaf."""
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return linear(rms_norm(x, params["norm"], eps=config.rms_norm_eps), head)
