"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini (arXiv 2404.14219, 2412.08905, 2503.01743).

The Llama block whose q, k, v and gate, up lie fused on disk. The long-context members have LongRoPE (arXiv 2402.13753):
one set of frequencies for sequences within the original context, another for longer ones. Which of them a table is made
of follows from `length` alone, never from an earlier call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Create, MaskLike, causal_masks
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.decoder import check_decoder, decoder_name, decoder_sizes, decoder_to_hf, fused
from fnmodels.models.common.rope_config import parse_rope, rope_to_hf, rope_values
from fnmodels.models.common.spec import attention_leaves, decoder_leaves, gated_mlp_leaves, layer_leaves
from fnmodels.models.common.storage import Stored
from fnmodels.ops.attention.select import attention
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, gated_mlp
from fnmodels.ops.norm import rms_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import Rope, apply_rotary, rotary_table
from fnmodels.options import Kernel
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("phi3",)
TAPS = ("attention", "middle", "mlp")


@dataclass(frozen=True)
class Config:
    """Sizes and switches. `layer_kinds` is all "full", or all "sliding" where there is a window; left empty, "full"."""

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
    hidden_act: str = "silu"
    sliding_window: int | None = None
    layer_kinds: tuple[str, ...] = ()
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    # kept for saving only
    model_type: str = field(default="phi3", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_decoder(self, ("full", "sliding"))

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder_sizes(fields, max_positions=4096, tied=False)
        for name in ("attention_bias", "mlp_bias", "lm_head_bias"):  # published files say that there are none
            fields.expect(name, False)
        for name in ("full_attn_mod", "interpolate_factor"):  # of Phi-4-mini's first code; no other value means a thing
            fields.expect(name, 1)
        window = fields.integer("sliding_window", 0, low=0) or None
        config = Config(
            **sizes,
            rope=_rope(fields, sizes["head_dim"], sizes["max_position_embeddings"]),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            sliding_window=window,
            layer_kinds=("sliding" if window else "full",) * sizes["num_hidden_layers"],
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect. Raises ConfigError where the model type has no word for this model."""
        own = {name: getattr(self, name) for name in ("rms_norm_eps", "hidden_act", "sliding_window")}
        # transformers reads the original context here, and where nothing is scaled it has no other
        own["original_max_position_embeddings"] = (
            self.rope.original_max_position_embeddings or self.max_position_embeddings
        )
        return decoder_to_hf(self, "Phi3ForCausalLM", rope_parameters=rope_to_hf(self.rope), **own)


def _rope(fields: Fields, head_dim: int, max_positions: int) -> Rope:
    """Plain or longrope, which older files call "su" or "yarn". The original context is the field at the top."""
    name = "original_max_position_embeddings"
    original = fields.integer(name, 4096)
    values = {
        key: "longrope" if key in ("rope_type", "type") and value in ("su", "yarn") else value
        for key, value in rope_values(fields).items()
    }
    inside = values.get(name)
    if fields.values.get(name) is None and inside not in (None, original):
        # transformers goes by the default of the field at the top, not by this one
        raise ConfigError(f"{fields.where}: {name!r} is {inside} in the rope alone; it must stand at the top.")
    inner = Fields(values | {name: original}, f"{fields.where}, rope")
    rope = parse_rope(inner, head_dim=head_dim, max_positions=max_positions, theta=1e4, partial=1.0)
    if rope.kind not in ("default", "longrope"):
        raise UnsupportedError(f"{inner.where}: 'rope_type' is {rope.kind!r}; phi3 has default and longrope.")
    return rope


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def layer() -> Tree:
        mlp = gated_mlp_leaves(D, config.intermediate_size, std=std)
        return layer_leaves(D, attention_leaves(D, heads, kv_heads, H, std=std), mlp)

    return decoder_leaves(config, [layer() for _ in range(config.num_hidden_layers)])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its rows of a fused tensor}."""
    flat = flatten(spec(config))
    names: dict[str, Stored] = {path: decoder_name(path) for path in flat}
    for i in range(config.num_hidden_layers):
        names |= fused(flat, f"layers.{i}.attention", "qkv_proj", ("q_proj", "k_proj", "v_proj"))
        names |= fused(flat, f"layers.{i}.mlp", "gate_up_proj", ("gate_proj", "up_proj"))
    return names


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer, the keys of masks and freqs_cis."""
    return config.layer_kinds


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}; positions and segment_ids [B, S]. create: see `fnmodels.inputs.mask.build_mask`."""
    return causal_masks(config.layer_kinds, config.sliding_window, positions, segment_ids, create=create)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}.

    length: an int or [B], which chooses the factors of longrope; None means the longest position of this call + 1, for
    all rows, so pass it where a sequence comes in pieces or a row must not depend on its neighbors.
    """
    table = rotary_table(config.rope, config.head_dim, positions, length)
    return dict.fromkeys(config.layer_kinds, table)


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
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = attention(q, k, v, mask, kernel=kernel, scale=config.head_dim**-0.5, layout=layout)
    attended = project_out(weights, mixed)
    middle = x + attended
    normed = rms_norm(middle, layer["post_attention_layernorm"], eps=eps)
    fed = gated_mlp(layer["mlp"], normed, activation=config.hidden_act)
    named = {"attention": attended, "middle": middle, "mlp": fed}
    return middle + fed, {name: named[name] for name in taps}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]. A tied head reads the embedding's one leaf."""
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return linear(rms_norm(x, params["norm"], eps=config.rms_norm_eps), head)
